"""Functions on lists of tensors: ``_foreach_*``, fused optimizer steps, GradScaler's unscale.

torch.optim, clip_grad_norm_ and GradScaler call these.  An update of one element depends on that
element alone, so where the lists have equal layouts torch's own kernel runs on all blocks at once.
Norms take one collective for all tensors of a mesh.  Otherwise the operator runs for each tensor.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import amp_unscale, foreach_ops, fused_steps
from shardlib.collectives import storage
from shardlib.collectives.types import blocks, played, spans_processes, unwrap, wrap
from shardlib.collectives.verbs import pmax, psum
from shardlib.errors import PlainTensor, ShardError
from shardlib.layouts import Layout
from shardlib.mesh import Mesh, bind
from shardlib.opspec import Args, Func, Kwargs
from shardlib.tensor.gradients import real_axes
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import ShardedTensor, call_error, implements

__all__ = ["unscale"]

_OPERATOR = {"norm": torch.linalg.vector_norm}  # operators that have another name in torch
_REDUCES = frozenset("norm max mm powsum".split())


def _tensors(x: object) -> bool:
    return isinstance(x, tuple | list) and bool(x) and all(isinstance(t, Tensor) for t in x)


def _block(x: Tensor, first: ShardedTensor) -> Tensor | None:
    """Return the block of ``x`` with the positions of ``first``'s; None if layouts differ."""
    if isinstance(x, ShardedTensor):
        alike = (x.sharding, x.padded_shape, x.shape) == (
            first.sharding,
            first.padded_shape,
            first.shape,
        ) and x.mesh is first.mesh
        if alike and not x.sharding.partial:
            return x.raw
        whole = x.ndim == 0 and x.mesh is first.mesh and not x.sharding.partial
        return blocks(x.raw, x.mesh)[0] if whole else None
    return x if x.ndim == 0 else None


def _blocks(args: Sequence[Any]) -> list[Any] | None:
    """Replace sharded tensors by blocks, if every list has the first one's layouts; else None."""
    head = args[0]
    out: list[Any] = []
    for a in args:
        if _tensors(a):
            if len(a) != len(head):
                return None
            given = [_block(t, x) for t, x in zip(a, head, strict=True)]
            if any(g is None for g in given):
                return None
            out.append(given)
        elif isinstance(a, ShardedTensor):
            raw = _block(a, head[0]) if a.ndim == 0 else None
            if raw is None:
                return None
            out.append(raw)
        else:
            out.append(a)
    return out


def _tracked(args: Sequence[Any]) -> bool:
    leaves = [t for a in args for t in (a if _tensors(a) else [a]) if isinstance(t, Tensor)]
    return torch.is_grad_enabled() and any(t.requires_grad for t in leaves)


def _on_lists(name: str, func: Func, args: Args, kwargs: Kwargs) -> object:
    """Run a foreach function such as ``_foreach_add_(xs, ys, alpha=2)``."""
    given, named = [*args, *kwargs.values()], list(kwargs)
    sharded = _tensors(args[0]) and all(isinstance(x, ShardedTensor) for x in args[0])
    raws = (
        _blocks(given)
        if sharded and name.strip("_") not in _REDUCES and not _tracked(given)
        else None
    )
    if raws is None:
        return _one_by_one(name, args, kwargs)
    more: dict[str, Any] = dict(zip(named, raws[len(args) :], strict=True))
    found = func(*raws[: len(args)], **more)
    if name.endswith("_"):
        return list(args[0])
    return tuple(x.becomes(raw) for x, raw in zip(args[0], found, strict=True))


def _one_by_one(name: str, args: Args, kwargs: Kwargs) -> object:
    """Run the operator of the same name on each tensor, with its entry of every list."""
    operator = _OPERATOR.get(name) or getattr(torch if name == "pow" else Tensor, name)
    count = next(len(a) for a in args if _tensors(a))

    def nth(a: object, i: int) -> object:
        return a[i] if isinstance(a, tuple | list) else a

    # clamp and lerp take a list of numbers, the others one number for all
    def shared(a: object) -> bool:
        return isinstance(a, tuple | list) and len(a) != count

    if any(map(shared, (*args, *kwargs.values()))):
        raise ShardError(f"the lists differ in length: {count}", op=f"_foreach_{name}")
    found = []
    for i in range(count):
        more = {"value" if k == "scalars" else str(k): nth(v, i) for k, v in kwargs.items()}
        rest = [nth(a, i) for a in args]
        if name.startswith("addc") and len(rest) > 3:  # addcmul and addcdiv take value by keyword
            more["value"] = rest.pop()
        found.append(operator(*rest, **more))
    return list(args[0]) if name.endswith("_") else tuple(found)


# ---------------------------------------------------------------- norms


def _norms(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Run ``_foreach_norm``: norms of each rank's blocks, and one collective for them all."""
    names = ("self", "ord", "dtype")
    given = dict(zip(names, args, strict=False)) | kwargs
    xs, order, dtype = given["self"], float(given.get("ord", 2)), given.get("dtype")
    plain = any(
        type(x) is not ShardedTensor
        or x.is_padded
        or x.mesh is not xs[0].mesh
        or not x.is_floating_point()
        for x in xs
    )
    if plain or _tracked([xs]) or not (order > 0) or any(x.raw.numel() == 0 for x in xs):
        return tuple(torch.linalg.vector_norm(x, order, dtype=dtype) for x in xs)
    mesh: Mesh = xs[0].mesh
    ranks = len(played(mesh))
    local = [
        torch.linalg.vector_norm(x.raw.detach().reshape(ranks, -1), order, 1, dtype=dtype)
        for x in xs
    ]
    out: list[Any] = [None] * len(xs)
    groups: dict[tuple[str, ...], list[int]] = {}
    for i, x in enumerate(xs):
        groups.setdefault(real_axes(mesh, x.sharding.axes), []).append(i)
    for axes, members in groups.items():
        # a vector for each rank; in fp64, where squares of fp32 norms cannot overflow
        ranks = torch.stack([local[i].double() for i in members], -1)
        parts = storage(ranks.unbind(), mesh)
        if axes:
            with bind(mesh):
                parts = _over(parts, mesh, axes, order)
        for k, i in enumerate(members):
            raw = parts[..., k].to(local[i].dtype)
            out[i] = ShardedTensor(raw, Place(_SCALAR, torch.Size(()), mesh))
    return tuple(out)


def _over(parts: Tensor, mesh: Mesh, axes: tuple[str, ...], order: float) -> Tensor:
    if order == float("inf"):
        return unwrap(pmax(wrap(parts, mesh), axes))
    return unwrap(psum(wrap(parts.pow(order), mesh), axes)).pow(1 / order)


# ---------------------------------------------------------------- fused steps and the gradient
# scaler


def _fused(func: Func, args: Args, kwargs: Kwargs) -> None:
    """Run ``_fused_adamw_(params, grads, moments, ..., steps, lr=...)`` on the blocks."""
    for x in args[0]:
        if not isinstance(x, ShardedTensor):
            why = "sharded and plain parameters are stepped together"
            fix = "torch.optim.AdamW([p for p in params if isinstance(p, sl.ShardedTensor)])"
            raise call_error(PlainTensor, why, func, fix, plain=x)
    for mine in args[1:]:
        for x, y in zip(args[0], mine, strict=False):
            if y.ndim > 0 and _block(y, x) is None:
                why = "a gradient or a moment lies otherwise than its parameter"
                fix = (
                    "sl.reshard(y, sl.layout_of(x))"
                    if isinstance(y, ShardedTensor)
                    else "sl.shard(y, sl.layout_of(x))"
                )
                raise call_error(ShardError, why, func, fix, x=x, y=y)
    named = {
        k: (_block(v, args[0][0]) if isinstance(v, ShardedTensor) else v) for k, v in kwargs.items()
    }
    lists = [[_block(y, x) for x, y in zip(args[0], mine, strict=False)] for mine in args]
    func(*lists, **named)


def unscale(func: Func, args: Args, kwargs: Kwargs) -> None:
    """Multiply gradients by 1/scale, in place; every rank gets the flag of a non-finite value."""
    grads, found, inverse = args
    per_mesh: dict[Mesh, list[Tensor]] = {}
    for g in grads:
        if isinstance(g, ShardedTensor):
            per_mesh.setdefault(g.mesh, []).append(g.raw)
    plain = [g for g in grads if not isinstance(g, ShardedTensor)]
    bare = [x.raw.reshape(-1)[0] if isinstance(x, ShardedTensor) else x for x in (found, inverse)]
    if plain:
        func(plain, *bare)
    for mesh, raws in per_mesh.items():
        func(raws, *bare)
        if spans_processes(mesh):  # the overflow may be on another process
            with bind(mesh):
                bare[0].copy_(unwrap(pmax(wrap(bare[0].clone(), mesh), mesh.names)))
    if isinstance(found, ShardedTensor):
        found.raw.copy_(bare[0].expand_as(found.raw))


_SCALAR = Layout.parse("...").resolve(0)

for _name, _func in foreach_ops().items():
    if _name == "norm":
        implements(_func, padded=True, pending=False)(_norms)
    elif _name != "powsum":
        implements(_func, padded=_name not in _REDUCES)(partial(_on_lists, _name))
implements(*fused_steps(), padded=True, pending=False)(_fused)
if amp_unscale is not None:
    implements(amp_unscale)(unscale)
