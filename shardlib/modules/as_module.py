"""nn.Module with sharded parameters, for code written for plain modules.

``as_module(apply, params)`` is a shallow copy of the module: the same classes, the same names, but
its parameters are ``nn.Parameter`` of ShardedTensors.  Code without any support for sharding may
use it: ``generate``, a Trainer, ``torch.optim``, ``state_dict``, hooks.  Plain tensors go in and
come out.

A batch that does not divide over the ranks is filled up with copies of its last row, and the
results of these rows are dropped.  ``generate`` shards its batches by the recipe given to
``parallelize``, also for arguments that ``inputs=`` does not list.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardlib.collectives import verify
from shardlib.errors import UnevenSplit, Unsupported
from shardlib.layouts import Dim, Layout
from shardlib.mesh import scope, within
from shardlib.modules.apply import (
    Apply,
    Arguments,
    Calls,
    arguments,
    giving,
    of_batch,
    positional,
)
from shardlib.modules.weightless_copy import Around, copied
from shardlib.placing import placed_like, shard, whole_of
from shardlib.tensor import ShardedTensor, no_trace


def as_module(apply: Apply, params: Mapping[str, Tensor], *, whole: bool = True) -> nn.Module:
    """Make a module of ``apply`` with these parameters: called, trained and saved like any other.

    ``params``  as ``parallelize`` returned them; the module's parameters share their memory.
    ``whole``   results are plain tensors, as without sharding.  False: they stay sharded.
    The module given to ``parallelize`` is not changed, and buffers are the copy's own.
    Raises: UnknownParameter; Unsupported for a module in stages.

    >>> import torch, shardlib as sl; from torch import nn
    >>> with sl.simulate(x=2):
    ...     apply, params = sl.parallelize(nn.Linear(4, 6), [("weight", "x ."), ("bias", "x")])
    ...     model = sl.as_module(apply, params)
    ...     model(torch.ones(3, 4)).square().mean().backward()
    >>> type(model).__name__, sl.typeof(model.weight), sl.typeof(model.weight.grad)
    ('Linear', 'f32[6@x, 4]', 'f32[6@x, 4]')
    """
    if apply.stages is not None:
        why = "a module in stages has no forward of its own: each rank holds a part of it"
        fix = "forward = torch.no_grad()(lambda *inputs: apply(params, *inputs))"
        raise Unsupported(why, op="as_module", mesh=apply.mesh, fix=fix)
    apply.check(params)
    leaves = {
        n: nn.Parameter(p.detach(), requires_grad=p.requires_grad)
        for n, p in giving(params, apply.out_layouts).items()
    }
    swap: dict[int, Tensor] = {id(p): leaves[n] for n, p in apply.module.named_parameters()}
    buffers = apply.module.named_buffers()
    swap |= {id(b): apply.buffers[n].clone() for n, b in buffers if n in apply.buffers}
    copies = copied(apply.module, swap)
    top = copies[id(apply.module)]
    calls = Calls(apply.inputs, apply.mesh, apply.arguments, apply.suggested)
    names = {id(m): n for n, m in apply.module.named_modules()}
    for at, m in copies.items():
        m.register_load_state_dict_pre_hook(_laid_out)
        vars(m)["__prepare_scriptable__"] = _unscripted
        Around(m, "forward", _entered, calls, names[at], arguments(m.forward), whole)
    if hasattr(top, "generate"):
        Around(top, "generate", _generated, calls)
    if hasattr(top, "save_pretrained"):
        Around(top, "save_pretrained", _saved)
    return top


def _entered(
    module: nn.Module,
    forward: Callable[..., Any],
    calls: Calls,
    name: str,
    takes: Arguments,
    whole: bool,
    /,
    *args: object,
    **kwargs: object,
) -> object:
    """Run forward for outside callers: inputs are sharded, and results are plain."""
    if scope().call.placed:
        return forward(*args, **kwargs)
    names = positional(takes, len(args)) if name else calls.named(len(args), kwargs)
    if not name:
        kwargs = calls.added(args, kwargs)
    named = [*zip(names, args, strict=True), *kwargs.items()]
    rows = _rows(calls, named)
    given = [_placed(calls, n, v, rows) for n, v in named]
    params = {n: p for n, p in module.named_parameters() if isinstance(p, ShardedTensor)}
    with calls.calling(params, name), within(placed=True, again=None):
        out = forward(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))
    return _mapped(lambda t: _plain(t, rows), out) if whole else out


def _unscripted(*_: object) -> NoReturn:
    """Refuse torch.jit.script, which would compile forward without its wrapper."""
    raise no_trace("torch.jit.script")


def _mapped(f: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to every tensor in tuples, lists, dicts and a model's outputs."""
    if isinstance(value, Tensor):
        return f(value)
    if isinstance(value, Mapping):
        items = {k: _mapped(f, v) for k, v in value.items()}
        return items if type(value) is dict else type(value)(**items)  # type: ignore[call-arg]
    if type(value) in (tuple, list):
        return type(value)(_mapped(f, v) for v in value)
    return value


def _layout(calls: Calls, name: str, x: Tensor) -> Layout | None:
    """Find the layout of an input; while generating, a batch has the layout of the recipe's tokens.

    Masks and positions stay whole, since both tokens and logits need them, in different layouts.
    """
    layout = calls.inputs.get(name)
    everywhere = "mask" in name or "position" in name
    if layout is None and scope().call.generating and x.ndim > 1 and not everywhere:
        layout = next((Layout(lay.dims[:1], ellipsis=1) for lay in _recipes(calls)), None)
    return None if layout is None else layout.resolve(x.ndim)


def _recipes(calls: Calls) -> list[Layout]:
    """List the layouts of tokens and of labels in the recipe."""
    texts = [getattr(calls.suggested, n, None) for n in ("tokens", "labels")]
    return [Layout.parse(text) for text in texts if text is not None]


_EVEN = (-1, -1)
"""Rows of a batch that is not filled up."""


def _rows(calls: Calls, named: list[tuple[str, Any]]) -> tuple[int, int]:
    """Count the rows of a batch that does not divide, and the rows to which it is filled up."""
    given = [(n, x) for n, x in named if isinstance(x, Tensor) and x.ndim]
    plain = [(n, x, _layout(calls, n, x)) for n, x in given if not isinstance(x, ShardedTensor)]
    split = [(x.shape[0] <= 1, n, x, layout) for n, x, layout in plain if layout is not None]
    if not split:
        return _EVEN
    _, name, value, layout = min(split, key=operator.itemgetter(0))
    count, ranks = value.shape[0], calls.mesh.axis_size(layout.dims[0].axes)
    if torch.is_grad_enabled():
        if count > 1 and count % ranks:
            raise UnevenSplit(
                f"a batch of {count} rows does not divide over {ranks} ranks, "
                "and filling it up would change what it trains",
                op="forward",
                operands={name: f"{list(value.shape)} laid out {calls.inputs.get(name)}"},
                mesh=calls.mesh,
                fix="DataLoader(data, batch_size, drop_last=True)",
            )
        return _EVEN
    # logits have the labels' layout
    split = [lay.dims[0].axes for lay in _recipes(calls)]
    ranks = math.lcm(ranks, *(calls.mesh.axis_size(axes) for axes in split))
    return (count, -(-count // ranks) * ranks) if count % ranks else _EVEN


def _placed(calls: Calls, name: str, value: object, rows: tuple[int, int]) -> Any:
    if not isinstance(value, Tensor | nn.Module | Mapping):
        _laid_with_keys(value)
        _laid_with_keys(getattr(value, "self_attention_cache", None))
        _laid_with_keys(getattr(value, "cross_attention_cache", None))
    return _mapped(lambda x: _placed_tensor(calls, name, x, rows), value)


def _placed_tensor(calls: Calls, name: str, x: Tensor, rows: tuple[int, int]) -> Tensor:
    """Shard a tensor among an argument's, its batch filled up to rows that divide."""
    if isinstance(x, ShardedTensor):
        return x
    # a vector of positions has no batch dimension, even if it is as long as the batch
    is_batch = x.ndim > 1 or name in ("labels", *calls.inputs)
    if is_batch and x.shape[:1] == rows[:1]:
        x = repeated(x, rows[1], name)
    layout = _layout(calls, name, x)
    if layout is None or name in getattr(calls.suggested, "inputs", {}):
        return calls.place(name, x)
    try:
        return shard(x, of_batch(layout, x), calls.mesh)
    except UnevenSplit as e:
        raise _by_token(calls, f"{name}: {e.message}") from None


def _by_token(calls: Calls, why: str) -> UnevenSplit:
    """Return the error for generating with a recipe that splits the sequence."""
    axis = next(
        (a for at in _recipes(calls) for a in at.dims[1].axes), next(iter(calls.mesh.names))
    )
    recipe = f"sl.recipes.megatron1d(module, axis={axis!r})"
    moved = "{n: sl.reshard(p, other.layouts[n]) for n, p in params.items()}"
    return UnevenSplit(
        f"{why}; a recipe that splits the sequence cannot take it a token at a time: generate "
        "under another, with the same weights",
        op="forward",
        mesh=calls.mesh,
        fix=f"other, _ = sl.parallelize(module, {recipe}); model = sl.as_module(other, {moved})",
    )


def repeated(x: Tensor, rows: int, name: str = "") -> Tensor:
    """Lengthen ``x`` to ``rows`` rows by copies of its last, labels by -100, which is ignored."""
    last = x[-1:].expand(rows - x.shape[0], *x.shape[1:])
    if name == "labels" and not x.is_floating_point():
        last = torch.full_like(last, -100)
    return torch.cat([x, last])


def _plain(x: Tensor, rows: tuple[int, int]) -> Tensor:
    out = whole_of(x)
    return out[: rows[0]] if out.shape[:1] == rows[1:] else out


def _laid_with_keys(cache: Any) -> None:
    """Give caches of a fixed length the layout of the first keys that they store."""
    for layer in getattr(cache, "layers", ()):
        make = getattr(layer, "lazy_initialization", None)
        ready = getattr(layer, "is_initialized", True)
        if ready or make is None or not hasattr(layer, "max_cache_len"):
            continue

        def made(
            keys: Tensor, values: Tensor, layer: Any = layer, make: Callable[..., Any] = make
        ) -> None:
            make(keys, values)
            for name, like in (("keys", keys), ("values", values)):
                memory = getattr(layer, name)
                if isinstance(like, ShardedTensor) and not isinstance(memory, ShardedTensor):
                    tokens = list(like.sharding.resolve(like.ndim).dims)
                    tokens[like.ndim - 2] = Dim()
                    setattr(layer, name, shard(memory, Layout(tuple(tokens)), like.mesh))

        layer.lazy_initialization = made


def _generated(
    module: nn.Module, generate: Callable[..., Any], calls: Calls, /, *args: Any, **kwargs: Any
) -> object:
    """Run ``generate`` on any number of rows, in the recipe's layout.

    With beams it keeps its own copies of rows, so the batch is filled up before it.
    """
    _refuse_sequence(calls)
    named = [*zip(["input_ids"], args, strict=False), *kwargs.items()]
    with torch.no_grad(), within(generating=True):
        count, full = _rows(calls, named) if _setting(module, kwargs, "num_beams") > 1 else _EVEN
        if count < 0:
            return generate(*args, **kwargs)

        def more(x: object) -> object:
            if isinstance(x, Tensor) and x.shape[:1] == (count,):
                return repeated(x, full)
            return x

        out = generate(*map(more, args), **{k: more(v) for k, v in kwargs.items()})
        kept = count * _setting(module, kwargs, "num_return_sequences")
        return _mapped(lambda t: t[:kept], out)


def _refuse_sequence(calls: Calls) -> None:
    """Refuse to generate where tokens are split along the sequence."""
    for n, at in (*calls.inputs.items(), *(("tokens", r) for r in _recipes(calls))):
        if len(at.dims) > 1 and at.dims[1].is_split:
            raise _by_token(calls, f"generate: {n} lie split along the sequence")


def _saved(
    module: nn.Module,
    save: Callable[..., object],
    /,
    *args: Any,
    state_dict: Mapping[str, Tensor] | None = None,
    **kwargs: Any,
) -> object:
    """Run ``save_pretrained`` with whole tensors; every rank calls it."""
    if state_dict is None:
        state_dict = module.state_dict()
    whole = {n: whole_of(t).detach() for n, t in state_dict.items()}
    return save(*args, state_dict=whole, **kwargs)


def _laid_out(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Reshard the tensors given to ``load_state_dict`` to the layouts of the module's own.

    Tensors of other sizes stay as they are, so that torch refuses them.  Tensors that share memory,
    such as tied parameters, are resharded once, and still share memory where their layout is equal.
    """
    found: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    found |= module.named_buffers(remove_duplicate=False)
    own = {prefix + n: t for n, t in found.items() if isinstance(t, ShardedTensor)}
    laid, plain, mesh = {}, {}, None
    once: dict[Any, ShardedTensor] = {}
    for n, t in own.items():
        given = state.get(n)
        if isinstance(given, Tensor) and given.shape == t.shape and not given.is_meta:
            raw = getattr(given, "raw", given)
            key = raw.data_ptr(), raw.shape, raw.stride(), raw.dtype, t.place
            if key not in once:
                once[key] = placed_like(given.detach(), t)
            laid[n] = once[key]
            if not isinstance(given, ShardedTensor):
                mesh, plain[n] = t.mesh, (laid[n].raw, t.sharding)
    if mesh is not None:
        same = "{n: sl.shard(t, '...', src=0) for n, t in state.items()}"
        verify("load_state_dict", mesh, plain, f"model.load_state_dict({same})")
    state.update(laid)


def _setting(model: object, kwargs: Mapping[str, Any], name: str) -> int:
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    return kwargs.get(name) or getattr(config, name, None) or 1
