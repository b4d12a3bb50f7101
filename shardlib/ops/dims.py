"""Execution of operators from labels of their operands' dimensions.

A declaration gives every dimension of every operand a *label* or None.  A labelled dimension is a
row: the operator treats its positions independently, so blocks of it can be computed locally.
Operands that share a label share its split; a dimension without a label must be whole.  A label
that is in no result is contracted: the blocks' results are summed over the axes that split it, if
the declaration allows that.

Results need no declaration.  Their layouts and shapes are found by running the operator on meta
tensors: once with global sizes, once for each split label with that dimension at block size; the
result's dimension that shrank with it is split likewise.  A last run with all dimensions at block
size must give the blocks of the first run's shapes, or the declaration does not hold for this call,
which then runs on whole tensors.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.collectives import lead
from shardlib.errors import (
    BadArgument,
    ImplicitCommunication,
    PartialEscape,
    UnevenSplit,
    lettered,
)
from shardlib.layouts import Dim, Layout
from shardlib.memory_sharing import WRITERS, alike, link, written
from shardlib.mesh import Mesh
from shardlib.ops.each_rank import each, flat, run
from shardlib.ops.fallback import is_whole, on_whole, written_to
from shardlib.ops.fix_line import fix_line
from shardlib.ops.padding import filled, padded_to
from shardlib.ops.registry import implicit_budget
from shardlib.ops.signatures import ArgumentSlot
from shardlib.opspec import Args, Func, Kwargs
from shardlib.placing import reshard
from shardlib.tensor import (
    Place,
    ShardedTensor,
    Unfit,
    has_padding,
    is_half,
    lift,
    real_axes,
    total,
    typeof,
    vary,
    widened,
)  # fmt: skip

__all__ = ["Labels", "rows_call"]

# operand -> label of each dimension, None where it must be whole
Labels = dict[int, tuple[Any, ...]]


@dataclass
class _DimPlan:
    targets: list[Layout | None]
    overs: list[frozenset[str]]
    moved: list[float]
    out: Any = None
    layouts: list[tuple[Layout, torch.Size]] = field(default_factory=list)
    used: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    why: str = ""


def rows_call(
    func: Func, args: Any, kwargs: Any, labels: Callable[[Any, Any], Labels], sums: bool = False,
    quiet: bool = False, free: bool = False, pending: bool = False,
) -> Any:  # fmt: skip
    """Run a call whose operands have the labels that ``labels(args, kwargs)`` returns.

    Tensors are Slots there.
    ``sums``   the function is linear in every operand, so a label that no result has is contracted.
    ``quiet``  nothing may move, not even within ``implicit``.
    ``free``   return None if something would have to move, or the labels do not cover the call.
    ``pending``  keep a contracted result as a pending sum.
    """
    if has_padding(args) or (kwargs and has_padding(kwargs.values())):
        return _on_padded(func, args, kwargs, labels, sums)
    known = _shallow(func, args, kwargs, sums)
    if known is not None and (plan := args[0].mesh.memo["rows"].get(known)) is not None:
        return _as_planned(func, args, kwargs, plan)
    leaves, tree = flat(args, kwargs)
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    mesh: Mesh = next(leaves[i].mesh for i in at if isinstance(leaves[i], ShardedTensor))
    values = [lift(leaves[i], mesh, func.__name__) for i in at]
    if all(is_whole(v) for v in values):
        return on_whole(func, args, kwargs, opens=False)
    fixed = tuple(x if not isinstance(x, Tensor) else None for x in leaves)
    kinds = tuple(map(type, fixed))  # 1, True and 1.0 are equal keys, but different arguments
    key = (
        func,
        tree,
        tuple((v.sharding, v.padded_shape, v.dtype) for v in values),
        fixed,
        kinds,
        sums,
    )
    make = partial(_made, func, leaves, tree, at, values, mesh, labels, sums)
    plan = mesh.memo("dims", key, make)
    if free and (plan.why or plan.moved):
        return None
    if plan.why:
        return on_whole(func, args, kwargs, opens=False)
    budget = -1.0 if quiet else implicit_budget()
    if plan.moved and (budget is None or max(plan.moved) > budget):
        raise _refused(func, leaves, tree, at, values, plan)
    values = written_to(func, args, kwargs, values)
    deferred = frozenset().union(*(v.deferred for v in values)) - set(plan.used)
    given = list(leaves)
    brought: list[ShardedTensor] = []
    for v, target in zip(values, plan.targets, strict=True):
        if target is not None:
            v = reshard(v, target)
            v = v if v.raw.is_contiguous() else v.becomes(v.raw.contiguous())
        brought.append(v)
    overs = [(over | deferred) - v.deferred for v, over in zip(brought, plan.overs, strict=True)]
    linear = sums and func is not torch.einsum  # torch.linear and the like have no fp32 form
    dtype = None if linear or func in WRITERS else _rounded_to(brought, overs, plan)
    if dtype is not None:
        raws: Any = widened([v.raw for v in brought], mesh, overs, matrices=func is torch.einsum)
    else:
        raws = [
            vary(v.raw, mesh, over) if over else v.raw
            for v, over in zip(brought, overs, strict=True)
        ]
    for i, raw in zip(at, raws, strict=True):
        given[i] = raw
    out = each(func, mesh, given, at, tree)
    found, shape = optree.tree_flatten(out, none_is_leaf=True)
    for i, v, target in zip(at, values, plan.targets, strict=True):
        for raw in found if target is not None else ():
            if alike(raw, given[i]):
                link(raw, v.raw)
    for k, (raw, (layout, size)) in enumerate(zip(found, plan.layouts, strict=True)):
        if plan.summed and not pending:
            raw = _summed(raw, mesh, plan, dtype, len(values))
        elif dtype is not None and raw.dtype == torch.float32:
            raw = raw.to(dtype)
        if plan.summed and pending:
            layout = Layout(layout.dims, plan.summed)
        found[k] = ShardedTensor(raw, Place(layout, size, mesh, deferred=deferred))
    if func in WRITERS:
        if plan.targets[0] is not None:
            values[0].raw.copy_(reshard(found[0], values[0].sharding).raw)
        return values[0]
    parts = is_half(values[0].raw) and any(plan.overs)  # which are kept in fp32, above
    if known is not None and not any(plan.targets) and not parts:
        mesh.memo.keep("rows", known, plan)
    return optree.tree_unflatten(shape, found)


def _on_padded(func: Func, args: Args, kwargs: Kwargs, labels: Any, sums: bool) -> Any:
    """Run a call whose padding is in rows only, so that its results there are padding too.

    Rows of padding are filled with ones (zeros where rows are summed), so that they give finite
    values and no gradient.
    """
    leaves, tree = flat(args, kwargs)
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    slots, inner, true = list(leaves), list(leaves), list(leaves)
    for k, i in enumerate(at):
        x = leaves[i]
        slots[i] = ArgumentSlot(
            k, tuple(x.padded_shape if isinstance(x, ShardedTensor) else x.shape)
        )
        true[i] = torch.empty(x.shape, dtype=x.dtype, device="meta")
        if isinstance(x, ShardedTensor) and x.is_padded:
            inner[i] = filled(x, 0 if sums else 1)
    a, k_ = optree.tree_unflatten(tree, slots)
    named = labels(a, k_)
    for k, i in enumerate(at):
        x = leaves[i]
        if not isinstance(x, ShardedTensor) or not x.is_padded:
            continue
        mine = named.get(k, (None,) * x.ndim)
        if any(
            n != t and lb is None for n, t, lb in zip(x.padded_shape, x.shape, mine, strict=True)
        ):
            raise Unfit("the padding is read")
    sizes: dict[Any, set[tuple[int, int]]] = {}  # label -> its (true, padded) sizes
    for k, i in enumerate(at):
        x = leaves[i]
        stored = x.padded_shape if isinstance(x, ShardedTensor) else x.shape
        for label, size, full in zip(named.get(k, ()), x.shape, stored, strict=False):
            if label is not None and (size, full) != (1, 1):
                sizes.setdefault(label, set()).add((size, full))
    if any(len(s) > 1 and any(n != m for n, m in s) for s in sizes.values()):
        raise Unfit("a size that is padded broadcasts")
    if written(func, args, kwargs):
        raise Unfit("written in place")
    a, k_ = optree.tree_unflatten(tree, true)
    try:
        with torch.no_grad():
            shapes = [t.shape for t in optree.tree_leaves(func(*a, **k_), none_is_leaf=True)]
    except Exception as e:  # torch refuses wrong shapes with errors of any class
        raise Unfit(f"{type(e).__name__}: {e}") from None
    a, k_ = optree.tree_unflatten(tree, inner)
    try:
        out = rows_call(func, a, k_, labels, sums, free=True)
    except RuntimeError as e:
        raise Unfit(f"torch refuses rows of ones: {e}") from None
    if out is None:
        raise Unfit("the operands lie apart")
    found, shape = optree.tree_flatten(out, none_is_leaf=True)
    for j, (y, size) in enumerate(zip(found, shapes, strict=True)):
        if len(size) != y.ndim:
            raise Unfit("the result's dimensions hang on its sizes")
        made, y = y.raw, padded_to(y, tuple(size))
        found[j] = y = (
            padded_to(filled(y, 0), tuple(size)) if y.is_padded and y.raw.requires_grad else y
        )
        for i in at:  # a view of a filled copy counts as a view of the operand, as in torch
            if isinstance(inner[i], ShardedTensor) and alike(made, inner[i].raw):
                link(y.raw, leaves[i].raw)
    return optree.tree_unflatten(shape, found)


def _rounded_to(
    values: list[ShardedTensor], overs: list[frozenset[str]], plan: _DimPlan
) -> torch.dtype | None:
    """Return the half precision to which a result of fp32 operands is rounded, or None.

    It is rounded where each rank has a part: of the result, or of an operand's gradient.
    """
    real = [v for v in values if v.dtype.is_floating_point or v.dtype.is_complex]
    if not real or not is_half(real[0]) or len({v.dtype for v in real}) > 1:
        return None
    parts = torch.is_grad_enabled() and any(
        over and v.raw.requires_grad for v, over in zip(values, overs, strict=True)
    )
    return real[0].dtype if plan.summed or parts else None


def _summed(
    raw: Tensor, mesh: Mesh, plan: _DimPlan, dtype: torch.dtype | None, operands: int
) -> Tensor:
    """Sum the ranks' parts; a product of matrices in half precision is sent in half precision."""
    matrix = operands > 1 and raw.ndim - lead(mesh) > 1
    return total(raw, mesh, plan.summed, dtype, dtype if matrix else None)


_ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype})


def _shallow(func: Func, args: Args, kwargs: Kwargs, sums: bool) -> Any:
    """Return a cache key for a call of tensors, then numbers, on real ranks; None for others."""
    first = args[0] if args else None
    if type(first) is not ShardedTensor or lead(first.mesh):
        return None
    operands: list[Any] = []
    for x in args:
        if type(x) is not ShardedTensor:
            break
        if x.deferred or x.mesh is not first.mesh:
            return None
        operands += (x.sharding, x.padded_shape, x.raw.dtype)
    rest = (*args[len(operands) // 3 :], *kwargs.values())
    kinds = tuple(map(type, rest))
    if not _ATOMS.issuperset(kinds):
        return None
    return func, sums, tuple(operands), rest, kinds, tuple(kwargs)


def _as_planned(func: Func, args: Args, kwargs: Kwargs, plan: _DimPlan) -> Any:
    """Run a call with a cached plan that moves no operand."""
    mesh, count = args[0].mesh, len(plan.targets)
    raws = [
        vary(x.raw, mesh, over) if over else x.raw
        for x, over in zip(args[:count], plan.overs, strict=True)
    ]
    out = run(func, mesh, (*raws, *args[count:]), kwargs)
    if type(out) is Tensor:
        (place,) = plan.layouts
        return _laid(out, plan, *place, mesh)
    found, shape = optree.tree_flatten(out, none_is_leaf=True)
    laid = [_laid(raw, plan, *place, mesh) for raw, place in zip(found, plan.layouts, strict=True)]
    return optree.tree_unflatten(shape, laid)


def _laid(
    raw: Tensor, plan: _DimPlan, layout: Layout, size: torch.Size, mesh: Mesh
) -> ShardedTensor:
    return ShardedTensor(
        total(raw, mesh, plan.summed) if plan.summed else raw, Place(layout, size, mesh)
    )


def _made(
    func: Any, leaves: list[Any], tree: Any, at: list[int], values: list[ShardedTensor],
    mesh: Mesh, labels: Any, sums: bool,
) -> _DimPlan:  # fmt: skip
    try:
        slots = list(leaves)
        for k, i in enumerate(at):
            slots[i] = ArgumentSlot(k, tuple(values[k].padded_shape))
        a, k_ = optree.tree_unflatten(tree, slots)
        named = labels(a, k_)
        return _planned(func, leaves, tree, at, values, mesh, named, sums)
    except (Unfit, BadArgument, UnevenSplit) as e:
        return _DimPlan([], [], [], why=str(e))


def _planned(
    func: Any, leaves: list[Any], tree: Any, at: list[int], values: list[ShardedTensor],
    mesh: Mesh, named: Labels, sums: bool,
) -> _DimPlan:  # fmt: skip
    sizes: dict[Any, int] = {}
    tokens: dict[Any, Dim] = {}
    for k in sorted(range(len(values)), key=lambda k: -values[k].padded_shape.numel()):
        v, mine = values[k], named.get(k, (None,) * len(values[k].padded_shape))
        if len(mine) != len(v.padded_shape):
            raise Unfit(f"operand {k} has {len(v.padded_shape)} dimensions")
        if v.sharding.skew:
            raise Unfit("skewed")
        for label, n, token in zip(mine, v.padded_shape, v.dims, strict=True):
            if label is None or n == 1:
                continue
            if sizes.setdefault(label, n) != n:
                raise Unfit(f"label {label} has sizes {sizes[label]} and {n}")
            if label not in tokens or (token.is_split and not tokens[label].is_split):
                tokens[label] = token
    taken: set[str] = set()
    for label, token in tokens.items():
        if taken & set(token.axes):
            tokens[label] = Dim()
        taken |= set(tokens[label].axes)
    targets: list[Layout | None] = []
    moved: list[float] = []
    for k, v in enumerate(values):
        mine = named.get(k, (None,) * len(v.padded_shape))
        want = Layout(
            tuple(
                Dim() if label is None or n == 1 else tokens[label]
                for label, n in zip(mine, v.padded_shape, strict=True)
            )
        )
        if want == v.sharding:
            targets.append(None)
            continue
        cost = float((v.sharding >> want).bytes(tuple(v.padded_shape), mesh, v.raw.element_size()))
        if cost:
            moved.append(cost)
        targets.append(want)
    split = {lb: t for lb, t in tokens.items() if real_axes(mesh, t.axes)}
    used = real_axes(mesh, {a for t in split.values() for a in t.axes})
    laid = [t or v.sharding for t, v in zip(targets, values, strict=True)]
    overs = [frozenset(used) - set(lay.axes) for lay in laid]
    plan = _DimPlan(targets, overs, moved, used=used)

    def shaped(small: set[Any]) -> list[Any]:
        given = list(leaves)
        for k, i in enumerate(at):
            v, mine = values[k], named.get(k, (None,) * len(values[k].padded_shape))
            size = [
                n // mesh.axis_size(tokens[lb].axes) if lb in small and n != 1 else n
                for lb, n in zip(mine, v.padded_shape, strict=True)
            ]
            given[i] = torch.empty(size, dtype=v.dtype, device="meta")
        a, k_ = optree.tree_unflatten(tree, given)
        try:
            got = optree.tree_leaves(func(*a, **k_), none_is_leaf=True)
        except Exception as e:  # torch refuses wrong shapes with errors of any class
            raise Unfit(f"{type(e).__name__}: {e}") from None
        if not got or not all(type(g) is Tensor for g in got):
            raise Unfit("the result is no tensor")
        return [g.shape for g in got]

    with torch.no_grad():
        shapes = shaped(set())
        dims = [[Dim()] * len(s) for s in shapes]
        summed: list[str] = []
        for label, token in split.items():
            p = mesh.axis_size(token.axes)
            contracted = []
            found = shaped({label})
            if len(found) != len(shapes):
                raise Unfit(f"the number of results hangs on the size of {label}")
            for s, small, mine in zip(shapes, found, dims, strict=True):
                if len(s) != len(small):
                    raise Unfit(f"the result's dimensions hang on the size of {label}")
                changed = [d for d, (n, m) in enumerate(zip(s, small, strict=True)) if n != m]
                contracted.append(not changed)
                if len(changed) > 1 or (changed and small[changed[0]] * p != s[changed[0]]):
                    raise Unfit(f"the result does not shrink with {label}")
                if changed:
                    if mine[changed[0]].is_split:
                        raise Unfit("two labels in one dimension")
                    mine[changed[0]] = token
            if any(contracted):
                if not (sums and all(contracted)):
                    raise Unfit(f"{label} is in no result")
                summed += token.axes
        for s, small, mine in zip(shapes, shaped(set(split)), dims, strict=True):
            layout = Layout(tuple(mine))
            if tuple(layout.local_shape(tuple(s), mesh)) != tuple(small):
                raise Unfit("blocks of another shape")
            plan.layouts.append((layout, torch.Size(s)))
    plan.summed = tuple(summed)
    return plan


def _refused(
    func: Any, leaves: Any, tree: Any, at: list[int], values: list[ShardedTensor], plan: _DimPlan
) -> Exception:
    to = {i: str(t) for i, t in zip(at, plan.targets, strict=True) if t is not None}
    pending = next((v for v in values if v.sharding.partial), None)
    kind = PartialEscape if pending is not None else ImplicitCommunication
    return kind(
        f"{func.__name__} needs dimensions whole that are split, or a sum that is pending, and "
        f"{sum(plan.moved):.0f} bytes per rank would move unasked",
        op=func.__name__,
        operands=lettered(map(typeof, values)),
        mesh=values[0].mesh,
        fix=fix_line(func, leaves, tree, at, to, math.ceil(max(plan.moved))),
    )
