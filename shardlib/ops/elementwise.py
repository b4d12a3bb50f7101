"""Elementwise functions, which run on the local blocks.

Operands broadcast as in torch.  Where one operand is split and another is whole along the same
dimension, the whole one is sliced (nothing moves; its gradient is gathered).  Where they are
split in different ways the function is refused with the reshard to write, unless inside
``sl.implicit()``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.collectives import block_shape, holds_values, unwrap, wrap
from shardlib.dtypes import is_half
from shardlib.errors import BadArgument, ImplicitCommunication, lettered
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Axes, Mesh, bind
from shardlib.ops.declare import Bound, declare, of_kind, rows
from shardlib.ops.dims import Labels
from shardlib.ops.each_rank import FlatCall, each
from shardlib.ops.padding import by_position
from shardlib.ops.registry import may_move, unasked
from shardlib.opspec import Args, Func, Kwargs, functions_of, names_of
from shardlib.placing import reshard
from shardlib.tensor import (
    Place,
    ShardedTensor,
    Unfit,
    blockwise,
    call_error,
    implements,
    lift,
    local_call,
    mapped,
    of_pending,
    partial_escape,
    real_axes,
    refuse_arrays,
    refuse_sums,
    settle,
    to_pending,
    total,
    vary,
)

_NAMES = names_of(kind="pointwise")
_LINEAR = {name: how for how in ("alone", "sum", "scale") for name in names_of(linear=how)}


_FIRST = ("condition", "input", "self", "x", "x1")
_NUMBERS = ("alpha", "value")


def _placed(func: Func, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Return the call with its first operand by position, and numbers where torch takes no others."""
    if func.__name__.startswith("__") and kwargs.keys() - {"other"}:
        raise Unfit("Python's operators know no other names")
    masked = "masked_fill" in func.__name__
    given = {}
    for name, v in kwargs.items():
        number = name in _NUMBERS and isinstance(v, Tensor) and not masked
        given[name] = v.item() if number else v
    if not args:
        args = (given.pop(next(name for name in _FIRST if name in given)),)
    return args, given


@implements(*functions_of("pointwise"), padding=by_position, takes="skew sums")
def elementwise(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Run a function that acts on each element independently."""
    if kwargs:
        args, kwargs = _placed(func, args, kwargs)
        if any(isinstance(v, Tensor) for v in kwargs.values()):
            return _general(func, args, kwargs)
    x, *others = args
    if type(x) is ShardedTensor and not any(isinstance(y, Tensor) for y in others):
        if others and hasattr(others[0], "ndim"):
            # torch compares with arrays too
            refuse_arrays(args, func.__name__)
        if not x.sharding.partial:
            return blockwise(func, args, kwargs, x.place)
    elif len(args) == 2 and _same_place(*args):
        return blockwise(func, args, kwargs, x.place)
    elif len(args) == 2 and not kwargs and _settled_alike(*args):
        raws, place = aligned(func.__name__, args)
        place = _keeping(place, args)
        if raws[0] is x.raw and raws[1] is args[1].raw:
            return blockwise(func, args, kwargs, place)
        return ShardedTensor(local_call(func, x.mesh, *raws), place)
    return _general(func, args, kwargs)


def _settled_alike(x: Tensor, y: Tensor) -> bool:
    """Check whether two operands are sharded on one mesh, and neither is a pending sum."""
    if not type(x) is type(y) is ShardedTensor or x.mesh is not y.mesh:
        return False
    return not (x.sharding.partial or y.sharding.partial)


@implements(Tensor.to, Tensor.type, Tensor.type_as, takes="all")
def converted(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Change dtype or device; a tensor argument gives only its own dtype and device."""
    x, rest = args[0], [_like(a) for a in args[1:]]
    kwargs = {k: _like(v) for k, v in kwargs.items()}
    if not isinstance(x, ShardedTensor):
        # a plain tensor, converted to a sharded one's dtype
        return func(x, *rest, **kwargs)
    if any(isinstance(v, torch.memory_format) for v in (*rest, *kwargs.values())):
        # the format is a block's, but stacked blocks of simulated ranks have one more dimension
        out = each(FlatCall.of(func, x.raw, *rest, **kwargs)._replace(at=[0]), x.mesh)
    else:
        out = func(x.raw, *rest, **kwargs)
    if not isinstance(out, Tensor):
        # Tensor.type() without arguments: a string
        return out
    if out is x.raw:
        return x
    if out.is_meta and not x.raw.is_meta and holds_values(x.mesh):
        why = "a meta tensor has no values, and this mesh's ranks do"
        raise call_error(
            BadArgument, why, func, 'torch.empty(x.shape, dtype=x.dtype, device="meta")', tensor=x
        )
    if x.is_floating_point() and not (out.is_floating_point() or out.is_complex()):
        refuse_sums(func.__name__, x)
    return x.becomes(out)


def _like(x: object) -> Any:
    """Return a plain tensor that stands for a sharded argument: its dtype and device count."""
    if not isinstance(x, ShardedTensor):
        return x
    return torch.empty(0, dtype=x.dtype, device=x.raw.device)


def _same_place(x: object, y: object) -> bool:
    """Check whether the blocks of two values combine as they are."""
    if not (isinstance(x, ShardedTensor) and isinstance(y, ShardedTensor)):
        return False
    p, q = x.place, y.place
    if p is not q and (p.mesh is not q.mesh or p.layout != q.layout or p.shape != q.shape):
        return False
    return p.settled and q.settled


def _general(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    name = func.__name__
    call = FlatCall.of(func, *args, **kwargs)
    mesh = next(a.mesh for a in call.tensors if isinstance(a, ShardedTensor))
    if len(call.tensors) < len(args):
        refuse_arrays(args, name)
    values = [lift(a, mesh, name) for a in call.tensors]
    partial = _partial(name, values)
    moved, place = aligned(name, values, partial)
    scaled = partial if len(values) == 2 and _LINEAR.get(name) == "scale" else ()
    if scaled:
        pairs = zip(values, moved, strict=True)
        moved = [of_pending(raw, mesh, scaled) if v.sharding.partial else raw for v, raw in pairs]
    a, k = call.replaced(moved)
    raw = local_call(func, mesh, *a, **k)
    if len(values) == 1 and raw is values[0].raw:
        # a conversion that changes nothing returns its operand
        return values[0]
    return ShardedTensor(to_pending(raw, mesh, scaled), _keeping(place, values))


def _keeping(place: Place, values: Sequence[ShardedTensor]) -> Place:
    """Return a result's place with ``merged_from`` of an operand of its shape."""
    for v in values:
        if v.place.merged_from and v.place.shape == place.shape:
            place = place._replace(merged_from=v.place.merged_from)
    return place


def _partial(name: str, values: list[ShardedTensor]) -> Axes:
    """Return the pending axes of the result; only linear functions may keep a sum pending."""
    pending = [v for v in values if v.sharding.partial]
    if not pending:
        return ()
    axes = pending[0].sharding.partial
    linear = _LINEAR.get(name)
    stays = False
    if linear == "alone":
        stays = len(values) == 1
    elif linear == "sum" and len(values) > 1:
        # of two that pend differently, the later one is named
        pending = [v for v in pending if v.sharding.partial != axes] or pending
        stays = all(v.sharding.partial == axes for v in values)
    elif linear == "scale":
        stays = _is_scaled(name, values)
    if stays:
        return axes
    raise partial_escape(name.strip("_"), pending[0])


def _is_scaled(name: str, values: list[ShardedTensor]) -> bool:
    """Check whether one operand pends, and the other is a number or a factor on other axes."""
    if len(values) == 1:
        return True
    summed, factor = values
    if not summed.sharding.partial:
        if name in ("div", "__truediv__", "true_divide"):
            return False
        summed, factor = factor, summed
    shared = set(summed.sharding.partial).intersection(factor.sharding.axes)
    return not shared and not factor.sharding.partial


def aligned(
    op: str, values: Sequence[ShardedTensor], sums: Axes = (), into: bool = False
) -> tuple[list[Tensor], Place]:
    """Return blocks that broadcast locally, and the result's place.

    ``sums``  axes over which the result is left unsummed.
    ``into``  the result is written to the first operand, at its place.
    """
    raws, overs, place = brought(op, values, sums, into)
    same = len({v.dtype for v in values}) == 1
    zipped = zip(values, raws, overs, strict=True)
    return [_met(v, raw, over, place, same) if over else raw for v, raw, over in zipped], place


def _met(v: ShardedTensor, raw: Tensor, over: Axes, place: Place, alike: bool) -> Tensor:
    """Broadcast over axes where ``v`` is replicated; its gradient is summed over them.

    ``alike``  whether all operands have its dtype.
    """
    # a 0-dim operand of another dtype promotes differently once it has dimensions, so keep it
    if (alike or v.shape) and over and v.shape != place.shape and is_half(raw):
        return _spread(raw, v.mesh, over, place.layout.local_shape(place.shape, v.mesh))
    return vary(raw, v.mesh, over)


def onto(op: str, values: Sequence[ShardedTensor]) -> list[Tensor]:
    """Return blocks that broadcast locally with the first operand's, which stays where it is."""
    x, *others = values
    others = [v if v.deferred <= x.deferred else settle(v) for v in others]
    return aligned(op, [x, *others], x.sharding.partial, into=True)[0]


def brought(
    op: str, values: Sequence[ShardedTensor], sums: Axes = (), into: bool = False
) -> tuple[list[Tensor], list[Axes], Place]:
    """Do as ``aligned``, but return axes instead of inserting the psum.

    They are the axes over which each operand's gradient must be summed.
    """
    mesh = values[0].mesh
    known = (sums, into, *[(v.place.layout, v.place.shape, v.place.deferred) for v in values])
    plan = mesh.memo["pointwise"].get(known)
    if plan is None:
        for v in values:
            if v.sharding.partial not in ((), sums):
                raise partial_escape(op, v)
        plan = mesh.memo.keep("pointwise", known, _planned(op, values, sums, into))
    if plan.moved:
        for i, words in plan.moved:
            moved = float(words * values[i].raw.element_size())
            if not may_move(moved):
                raise _refused(op, i, moved, plan, values)
        targets = zip(values, plan.targets, strict=True)
        values = [v if t is None else reshard(v, t) for v, t in targets]
    raws = [v.raw for v in values]
    overs = [
        over if over and raw.requires_grad else ()
        for over, raw in zip(plan.overs, raws, strict=True)
    ]
    return raws, overs, plan.place


def _spread(raw: Tensor, mesh: Mesh, axes: Axes, shape: tuple[int, ...]) -> Tensor:
    """Broadcast a half precision block to ``shape``; its gradient is summed in fp32.

    The sum is also over ``axes``.
    """
    own = block_shape(raw, mesh)

    def expand(x: Tensor) -> Tensor:
        with bind(mesh):
            return unwrap(wrap(x, mesh).expand(shape))

    def back(g: Tensor) -> Tensor:
        with bind(mesh):
            part = unwrap(wrap(g, mesh).float().sum_to_size(own))
        return total(part, mesh, axes, g.dtype)

    return mapped(raw, back, expand)


class _Plan(NamedTuple):
    """Place of the result, and for each operand the layout it is resharded to (None: its own).

    ``overs``  the axes over which each operand's gradient is summed.
    ``moved``  (operand, words) of those that are resharded.
    """

    place: Place
    targets: tuple[Layout | None, ...]
    overs: tuple[Axes, ...]
    moved: tuple[tuple[int, Any], ...]


def _planned(op: str, values: Sequence[ShardedTensor], sums: Axes, into: bool) -> _Plan:
    mesh, places = values[0].mesh, [v.place for v in values]
    try:
        shape = torch.broadcast_shapes(*(p.shape for p in places))
    except RuntimeError:
        raise call_error(BadArgument, "shapes do not broadcast", op, "", *values) from None
    if into:
        first = places[0]
        out = first.layout
        deferred = first.deferred
        if shape != first.shape:
            why = "the result's shape is not that of the tensor it is written to"
            raise call_error(BadArgument, why, op, "", *values)
    else:
        out = _once([_token(d, n, places) for d, n in enumerate(shape, -len(shape))], sums)
        deferred = frozenset().union(*(p.deferred for p in places)).difference(out.axes)
    # the factor of a value that is left unsummed has a part of its gradient on each rank
    meets = {*out.named, *deferred}
    targets: list[Layout | None] = []
    moved: list[tuple[int, Any]] = []
    overs: list[Axes] = []
    for i, p in enumerate(places):
        layout, s, own = p.layout, p.shape, p.deferred
        front = len(shape) - len(s)
        pairs = zip(s, shape[front:], out.dims[front:], strict=True)
        dims = tuple(Dim() if n == 1 != m else t for n, m, t in pairs)
        if dims != out.dims and any(t.by for t in dims):
            raise Unfit("a skewed tensor, and an operand that is broadcast to it")
        target = layout.onto(dims)
        targets.append(None if target == layout else target)
        if target != layout:
            moved.append((i, (layout >> target).bytes(tuple(s), mesh, 1)))
            if not own.isdisjoint((*layout.named, *target.axes)):
                # a reshard over one of its axes ends a deferral
                own = frozenset()
        overs.append(real_axes(mesh, meets.difference(target.named, own)))
    place = Place(out, torch.Size(shape), mesh, deferred=deferred)
    return _Plan(place, tuple(targets), tuple(overs), tuple(moved))


def _token(d: int, n: int, places: list[Place]) -> Dim:
    """Return the split of a dimension: that of the largest operand that splits it.

    ``d``  counts from the last; ``n`` is the result's size.
    """
    dims = [(p.layout.aligned.dims[d], p.shape) for p in places if -d <= len(p.shape)]
    found = {token for token, s in dims if s[d] == n and token.is_split}
    largest = {t: max(s.numel() for token, s in dims if token == t) for t in sorted(found, key=str)}
    return max(largest, key=largest.__getitem__, default=Dim())


def _refused(
    op: str, i: int, moved: float, plan: _Plan, values: Sequence[ShardedTensor]
) -> ImplicitCommunication:
    name = list(lettered(values))[i]
    why = f"{name} lies otherwise than the result"
    fix = f"sl.reshard({name}, {str(plan.targets[i])!r})"
    return unasked(why, moved, op, fix, *values, result=str(plan.place.layout))


def _once(dims: list[Dim], sums: Axes) -> Layout:
    """Return a layout with no axis twice: a later dimension loses an axis to an earlier one."""
    seen: set[str] = set(sums)
    kept = []
    for d in dims:
        kept.append(Dim() if seen & set(d.axes) else d)
        seen |= set(kept[-1].axes)
    return Layout(tuple(kept), sums)


_OPERATORS = [f"__i{n[2:]}" for n in _NAMES if n.startswith("__")]
_METHODS = [f"{n}_" for n in (*_NAMES, "copy")]
_IN_PLACE = [getattr(Tensor, n) for n in (*_METHODS, *_OPERATORS) if hasattr(Tensor, n)]


@implements(*_IN_PLACE, padding=by_position, takes="skew sums")
def in_place(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Change the block in place; the result must have the tensor's own layout."""
    args, kwargs = _placed(func, args, kwargs)
    x, op = args[0], func.__name__
    call = FlatCall.of(func, *args, **kwargs)
    values = [lift(a, x.mesh, op) for a in call.tensors]
    variant = op.strip("_").removeprefix("i")
    partial = _partial(variant, values)
    if partial != x.sharding.partial:
        raise partial_escape(op, next(v for v in values if v.sharding.partial))
    scaled = partial and len(values) == 2 and _LINEAR.get(variant) == "scale"
    if scaled and torch.is_grad_enabled():
        # the gradient of a scaled pending sum needs of_pending, which elementwise inserts
        old = x.becomes(x.raw.clone())
        new = elementwise(getattr(Tensor, variant), (old, *args[1:]), kwargs)
        if not torch.can_cast(new.dtype, x.dtype):
            why = f"a result of {new.dtype} cannot be written to {x.dtype}"
            raise call_error(BadArgument, why, func, tensor=x, result=new)
        x.raw.copy_(new.raw)
        return x
    a, k = call.replaced(onto(op, values))
    local_call(func, x.mesh, *a, **k)
    return x


# ---------------------------------------------------------------- declared: any number of results,
# run for each rank

of_kind("rows", rows)
declare("view_as_real(input)")(rows)


implements(Tensor.real.__get__)(lambda func, args, kwargs: torch.real(*args))
implements(Tensor.imag.__get__)(lambda func, args, kwargs: torch.imag(*args))


@declare("prelu(input, weight)")
def _channels(b: Bound) -> Labels:
    """Label a weight that has one element, or one per channel."""
    x, w = b["input"], b["weight"]
    several = w.ndim and w.shape[0] > 1
    return {
        x.at: tuple("c" if d == 1 and several else d for d in range(x.ndim)),
        w.at: ("c",) if several else (None,) * w.ndim,
    }
