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
from shardlib.collectives.types import blocks, flat_blocks, spans_processes, unwrap, wrap
from shardlib.collectives.verbs import pmax, psum
from shardlib.errors import PlainTensor, ShardError
from shardlib.layouts import Layout
from shardlib.mesh import Axes, Mesh, bind
from shardlib.ops.declare import by_signature
from shardlib.opspec import Args, Func, Kwargs
from shardlib.tensor.gradients import real_axes
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import ShardedTensor, call_error, implements

_REDUCES = frozenset("norm max mm powsum".split())
_SCALAR = Layout()


def _tensors(x: object) -> bool:
    return isinstance(x, tuple | list) and bool(x) and all(isinstance(t, Tensor) for t in x)


def _block(x: Tensor, first: ShardedTensor) -> Tensor | None:
    """Return the block of ``x`` with the positions of ``first``'s; None if layouts differ."""
    if isinstance(x, ShardedTensor):
        if x.mesh is not first.mesh or x.sharding.partial:
            return None
        own = x.sharding, x.padded_shape, x.shape
        if own == (first.sharding, first.padded_shape, first.shape):
            return x.raw
        # of a number every rank's is the same
        x = blocks(x.raw, x.mesh)[0]
    return None if x.ndim else x


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
    given = [*args, *kwargs.values()]
    raws = None
    sharded = _tensors(args[0]) and all(isinstance(x, ShardedTensor) for x in args[0])
    if sharded and name.strip("_") not in _REDUCES and not _tracked(given):
        raws = _blocks(given)
    if raws is None:
        return _one_by_one(name, args, kwargs)
    more: dict[str, Any] = dict(zip(kwargs, raws[len(args) :], strict=True))
    found = func(*raws[: len(args)], **more)
    if name.endswith("_"):
        return list(args[0])
    return tuple(x.becomes(raw) for x, raw in zip(args[0], found, strict=True))


def _one_by_one(name: str, args: Args, kwargs: Kwargs) -> object:
    """Run the operator of the same name on each tensor, with its entry of every list."""
    if name.startswith("addc") and len(args) > 3:
        # addcmul and addcdiv take value by keyword
        *rest, number = args
        args, kwargs = tuple(rest), kwargs | {"value": number}
    operator = getattr(torch if name == "pow" else Tensor, name)
    count = len(next(filter(_tensors, args)))
    # clamp and lerp take a list of numbers, the others one number for all
    lists = [a if isinstance(a, tuple | list) else [a] * count for a in (*args, *kwargs.values())]
    if {*map(len, lists)} != {count}:
        raise ShardError(f"the lists differ in length: {count}", op=f"_foreach_{name}")
    named = [{"scalars": "value"}.get(k, k) for k in kwargs]
    found = [
        operator(*row[: len(args)], **dict(zip(named, row[len(args) :], strict=True)))
        for row in zip(*lists, strict=True)
    ]
    return list(lists[0]) if name.endswith("_") else tuple(found)


# ---------------------------------------------------------------- norms


def _norms(func: Func, xs: Sequence[Any], order: float, dtype: torch.dtype | None) -> object:
    """Run ``_foreach_norm``: norms of each rank's blocks, and one collective for them all."""
    order = float(order)
    if not _takes(xs, order):
        return tuple(torch.linalg.vector_norm(x, order, dtype=dtype) for x in xs)
    mesh: Mesh = xs[0].mesh
    place = Place(_SCALAR, torch.Size(()), mesh)
    flat = [flat_blocks(x.raw.detach(), mesh) for x in xs]
    local = [torch.linalg.vector_norm(x, order, -1, dtype=dtype) for x in flat]
    out: list[Any] = [None] * len(xs)
    groups: dict[Axes, list[int]] = {}
    for i, x in enumerate(xs):
        groups.setdefault(real_axes(mesh, x.sharding.axes), []).append(i)
    for axes, members in groups.items():
        # [members] of each rank; in fp64, where squares of fp32 norms cannot overflow
        parts = torch.stack([local[i].double() for i in members], -1)
        if axes:
            parts = _over(parts, mesh, axes, order)
        for i, raw in zip(members, parts.unbind(-1), strict=True):
            out[i] = ShardedTensor(raw.to(local[i].dtype), place)
    return tuple(out)


def _takes(xs: Sequence[Any], order: float) -> bool:
    """Check whether all are untracked values of one mesh without padding, and have such norms."""
    mesh = getattr(xs[0], "mesh", None)
    for x in xs:
        if type(x) is not ShardedTensor or x.is_padded or x.mesh is not mesh:
            return False
        if not x.is_floating_point() or not x.raw.numel():
            return False
    return order > 0 and not _tracked([xs])


def _over(parts: Tensor, mesh: Mesh, axes: Axes, order: float) -> Tensor:
    """Return the norms of what all ranks along ``axes`` hold, from the norms of their parts."""
    with bind(mesh):
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

    def block(y: Tensor, x: ShardedTensor) -> Tensor | None:
        raw = _block(y, x)
        if raw is None and y.ndim:
            why = "a gradient or a moment lies otherwise than its parameter"
            verb = "reshard" if isinstance(y, ShardedTensor) else "shard"
            raise call_error(ShardError, why, func, f"sl.{verb}(y, sl.layout_of(x))", x=x, y=y)
        return raw

    lists = [[block(y, x) for x, y in zip(args[0], mine, strict=False)] for mine in args]
    named = {
        k: _block(v, args[0][0]) if isinstance(v, ShardedTensor) else v for k, v in kwargs.items()
    }
    func(*lists, **named)


def unscale(func: Func, args: Args, kwargs: Kwargs) -> None:
    """Multiply gradients by 1/scale, in place; every rank gets the flag of a non-finite value."""
    grads, found, inverse = args
    per_mesh: dict[Mesh, list[Tensor]] = {}
    for g in grads:
        if isinstance(g, ShardedTensor):
            per_mesh.setdefault(g.mesh, []).append(g.raw)
    plain = [g for g in grads if not isinstance(g, ShardedTensor)]
    bare = [_number(found), _number(inverse)]
    if plain:
        func(plain, *bare)
    for mesh, raws in per_mesh.items():
        func(raws, *bare)
        if spans_processes(mesh):
            # the overflow may be on another process
            with bind(mesh):
                bare[0].copy_(unwrap(pmax(wrap(bare[0].clone(), mesh), mesh.names)))
    if isinstance(found, ShardedTensor):
        found.raw.copy_(bare[0].expand_as(found.raw))


def _number(x: Tensor) -> Tensor:
    return x.raw.reshape(-1)[0] if isinstance(x, ShardedTensor) else x


for _name, _func in foreach_ops().items():
    if _name == "norm":
        by_signature("norm(input, ord=2, dtype=None)", _func, takes="padding skew")(_norms)
    elif _name != "powsum":
        takes = "sums" if _name in _REDUCES else "all"
        implements(_func, takes=takes)(partial(_on_lists, _name))
implements(*fused_steps(), takes="padding skew")(_fused)
implements(amp_unscale)(unscale)
