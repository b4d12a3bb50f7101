"""A module whose parameters are sharded, with the methods it always had.

``as_module(apply, params)`` is a shallow copy of the module: the same classes, the same names, but
its parameters are ``nn.Parameter`` of ShardedTensors.  Code that knows nothing of shards may use
it: ``generate``, a Trainer, ``torch.optim``, ``state_dict``, hooks.  Plain tensors go in and come
out.

A batch that does not divide over the ranks is filled up with copies of its last row,
and these are dropped from what comes out.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardlib.errors import UnevenSplit
from shardlib.layouts import Dim, Layout
from shardlib.mesh import scope, within
from shardlib.modules.experts import forward_of
from shardlib.modules.parallelize import Apply, arguments, giving, positional
from shardlib.modules.skeleton import copied
from shardlib.placing import shard, unshard
from shardlib.tensor import ShardedTensor

__all__ = ["as_module"]


def as_module(apply: Apply, params: Mapping[str, Tensor], *, whole: bool = True) -> nn.Module:
    """Make a module of ``apply`` with these parameters: called, trained and saved like any other.

    ``params``  as ``parallelize`` gave them; the module's parameters share their memory.
    ``whole``   tensors come out plain, as without shards.  False: they come out as they lie.

    The module that ``parallelize`` was given is not changed, and buffers are the copy's own.
    Raises: UnknownParameter.

    >>> import torch, shardlib as sl; from torch import nn
    >>> with sl.simulate(x=2):
    ...     apply, params = sl.parallelize(nn.Linear(4, 6), [("weight", "x ."), ("bias", "x")])
    ...     model = sl.as_module(apply, params)
    ...     model(torch.ones(3, 4)).square().mean().backward()
    >>> type(model).__name__, sl.typeof(model.weight), sl.typeof(model.weight.grad)
    ('Linear', 'f32[6@x, 4]', 'f32[6@x, 4]')
    """
    apply.check(params)
    leaves = {n: _parameter(p, apply.out_layouts.get(n)) for n, p in params.items()}
    swap: dict[int, Tensor] = {id(p): leaves[n] for n, p in apply.module.named_parameters()}
    swap |= {
        id(b): apply.buffers[n].clone()
        for n, b in apply.module.named_buffers()
        if n in apply.buffers
    }
    copies = copied(apply.module, swap)
    top = copies[id(apply.module)]
    split = {id(m) for m in apply.stacks}
    for at, copy in copies.items():
        forward = forward_of(copy) if at in split else copy.forward
        copy.forward = _entered(apply, forward, copy, top, whole)
    if hasattr(top, "generate"):
        top.generate = _filled(apply, top.generate)
    if hasattr(top, "save_pretrained"):
        top.save_pretrained = _saved(top, top.save_pretrained)
    return top


def _parameter(p: Tensor, out_layout: Any) -> nn.Parameter:
    value = p if out_layout is None else giving(p, out_layout)
    return nn.Parameter(value.detach(), requires_grad=p.requires_grad)


def _entered(apply: Apply, forward: Any, copy: nn.Module, top: nn.Module, whole: bool) -> Any:
    """Make a forward for callers outside: inputs are placed, and what comes out is plain."""
    takes = arguments(forward)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if scope().placed:
            return forward(*args, **kwargs)
        names = apply.named(len(args), kwargs) if copy is top else positional(takes, len(args))
        named = [*zip(names, args, strict=True), *kwargs.items()]
        rows = _rows(apply, named)
        given = [_placed(apply, n, v, rows) for n, v in named]
        params = {n: p for n, p in top.named_parameters() if isinstance(p, ShardedTensor)}
        with apply.calling(params), within(placed=True, again=None):
            out = forward(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
        return _mapped(lambda t: _plain(t, rows), out) if whole else out

    return run


def _mapped(f: Any, value: Any) -> Any:
    """Apply a function to every tensor in tuples, lists, dicts and a model's outputs."""
    if isinstance(value, Tensor):
        return f(value)
    if isinstance(value, Mapping):
        items = {k: _mapped(f, v) for k, v in value.items()}
        return items if type(value) is dict else type(value)(**items)  # type: ignore[call-arg]
    if type(value) in (tuple, list):
        return type(value)(_mapped(f, v) for v in value)
    return value


def _rows(apply: Apply, named: list[tuple[str, Any]]) -> tuple[int, int] | None:
    """Count the rows of a batch that does not divide, and the rows that it is filled up to."""
    for name, value in named:
        layout = apply.inputs.get(name)
        if (
            layout is None
            or not isinstance(value, Tensor)
            or isinstance(value, ShardedTensor)
            or not value.ndim
        ):
            continue
        ranks = apply.mesh.axis_size(layout.resolve(value.ndim).dims[0].axes)
        if value.shape[0] % ranks and value.shape[0] > 1:
            if torch.is_grad_enabled():
                why = (
                    f"a batch of {value.shape[0]} rows does not divide over {ranks} ranks, "
                    "and filling it up would "
                )
                loader = "DataLoader(data, batch_size, drop_last=True)"
                raise _uneven(apply, name, value, f"{why}change what it trains", loader)
            return value.shape[0], -(-value.shape[0] // ranks) * ranks
    return None


def _placed(apply: Apply, name: str, value: Any, rows: tuple[int, int] | None) -> Any:
    if not isinstance(value, Tensor | nn.Module | Mapping):
        for cache in (
            value,
            *(getattr(value, f"{n}_attention_cache", None) for n in ("self", "cross")),
        ):
            _laid_with_keys(cache)

    def place(x: Tensor) -> Tensor:
        if isinstance(x, ShardedTensor):
            return x
        if rows is not None and x.ndim and x.shape[0] == rows[0]:
            x = filled(x, rows[1], name)
        layout = apply.inputs.get(name)
        if (
            layout is not None
            and x.ndim
            and x.shape[0] == 1
            and layout.resolve(x.ndim).dims[0].is_split
        ):
            return shard(x, Layout((Dim(), *layout.resolve(x.ndim).dims[1:])), apply.mesh)
        try:
            return apply.place(name, x)
        except UnevenSplit as e:
            why = (
                f"{name}: {e.message}; a recipe that splits the sequence cannot take it a token "
                "at a time: generate "
            )
            axis = next(iter(apply.mesh.names))
            recipe = f"sl.recipes.megatron1d(module, axis={axis!r})"
            other = f"apply, params = sl.parallelize(module, {recipe})"
            raise _uneven(
                apply, name, x, f"{why}under another, with the same weights", other
            ) from None

    return _mapped(place, value)


def _uneven(apply: Apply, name: str, x: Tensor, why: str, fix: str) -> UnevenSplit:
    """The error for an input that does not divide as ``inputs=`` lays it out."""
    laid = {name: f"{list(x.shape)} laid out {apply.inputs.get(name)}"}
    return UnevenSplit(why, op="forward", operands=laid, mesh=apply.mesh, fix=fix)


def filled(x: Tensor, rows: int, name: str = "") -> Tensor:
    """Lengthen ``x`` to ``rows`` rows by copies of its last, labels by -100, which is ignored."""
    last = x[-1:].expand(rows - x.shape[0], *x.shape[1:])
    return torch.cat(
        [x, torch.full_like(last, -100) if name == "labels" and not x.is_floating_point() else last]
    )


def _plain(x: Tensor, rows: tuple[int, int] | None) -> Tensor:
    out = unshard(x) if isinstance(x, ShardedTensor) else x
    return out[: rows[0]] if rows is not None and out.ndim and out.shape[0] == rows[1] else out


def _laid_with_keys(cache: Any) -> None:
    """Have a cache of a fixed length lie as the first keys do that it sees."""
    for layer in getattr(cache, "layers", ()):
        make = getattr(layer, "lazy_initialization", None)
        if (
            make is None
            or not hasattr(layer, "max_cache_len")
            or getattr(layer, "is_initialized", True)
        ):
            continue

        def made(keys: Tensor, values: Tensor, layer: Any = layer, make: Any = make) -> None:
            make(keys, values)
            for name, like in (("keys", keys), ("values", values)):
                memory = getattr(layer, name)
                if isinstance(like, ShardedTensor) and not isinstance(memory, ShardedTensor):
                    tokens = like.sharding.resolve(like.ndim).dims
                    kept = Layout(
                        tuple(Dim() if d == like.ndim - 2 else t for d, t in enumerate(tokens))
                    )
                    setattr(layer, name, shard(memory, kept, like.mesh))

        layer.lazy_initialization = made


def _filled(apply: Apply, generate: Any) -> Any:
    """``generate`` with beams keeps its own copies of rows, so the batch is filled up before it."""

    @functools.wraps(generate)
    def run(*args: Any, **kwargs: Any) -> Any:
        named = [*zip(["input_ids"], args, strict=False), *kwargs.items()]
        with torch.no_grad():
            rows = _rows(apply, named) if _beams(generate.__self__, kwargs) > 1 else None
            if rows is None:
                return generate(*args, **kwargs)
            count, full = rows

            def more(x: Any) -> Any:
                return (
                    filled(x, full)
                    if isinstance(x, Tensor) and x.ndim and x.shape[0] == count
                    else x
                )

            out = generate(*map(more, args), **{k: more(v) for k, v in kwargs.items()})
            each = _setting(generate.__self__, kwargs, "num_return_sequences")
            return (
                out[: count * each]
                if isinstance(out, Tensor)
                else _mapped(lambda t: t[: count * each], out)
            )

    return run


def _saved(top: nn.Module, save: Any) -> Any:
    """``save_pretrained`` of whole tensors; every rank calls it."""

    @functools.wraps(save)
    def run(*args: Any, state_dict: Mapping[str, Tensor] | None = None, **kwargs: Any) -> Any:
        found = top.state_dict() if state_dict is None else state_dict
        whole = {
            n: unshard(t).detach() if isinstance(t, ShardedTensor) else t for n, t in found.items()
        }
        return save(*args, state_dict=whole, **kwargs)

    return run


def _setting(model: Any, kwargs: Mapping[str, Any], name: str) -> int:
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    return kwargs.get(name) or getattr(config, name, None) or 1


def _beams(model: Any, kwargs: Mapping[str, Any]) -> int:
    return _setting(model, kwargs, "num_beams")
