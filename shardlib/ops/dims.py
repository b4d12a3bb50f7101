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

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardlib.collectives import block_shape, lead
from shardlib.dtypes import is_half
from shardlib.errors import BadArgument, ImplicitCommunication, PartialEscape, UnevenSplit
from shardlib.layouts import Dim, Layout
from shardlib.memory_sharing import WRITERS, link_views, written
from shardlib.mesh import Mesh
from shardlib.ops.each_rank import FlatCall, each, run
from shardlib.ops.fallback import is_whole, on_whole, written_to
from shardlib.ops.fix_line import fix_line
from shardlib.ops.padding import check_alike, of_true_sizes
from shardlib.ops.registry import may_move
from shardlib.ops.signatures import ArgumentSlot
from shardlib.opspec import Args, Func, Kwargs
from shardlib.placing import reshard
from shardlib.tensor.gradients import real_axes, total, vary, widened
from shardlib.tensor.lifting import lift
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import ShardedTensor, Unfit, blockwise, call_error, has_padding

# operand -> label of each dimension, None where it must be whole
Labels = dict[int, tuple[Any, ...]]


class _DimPlan(NamedTuple):
    """Layouts of a call's operands and results.

    ``targets``  the layout to which each operand is resharded; None: its own.
    ``moved``    bytes of those that are resharded.
    ``overs``    axes over which each operand's gradient is summed.
    ``results``  layout and sizes of each result.
    ``used``     axes that split a label, and ``summed`` those that split a contracted one.
    ``fits``     whether the labels hold for the call; if not, it has no plan.
    """

    targets: tuple[Layout | None, ...] = ()
    moved: tuple[float, ...] = ()
    overs: tuple[frozenset[str], ...] = ()
    results: tuple[tuple[Layout, torch.Size], ...] = ()
    used: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    fits: bool = True


def rows_call(
    func: Func, args: Args, kwargs: Kwargs, labels: Callable[[Any, Any], Labels],
    sums: bool = False, free: bool = False, unsummed: bool = False,
) -> Any:  # fmt: skip
    """Run a call whose operands have the labels that ``labels(args, kwargs)`` returns.

    Tensors are Slots there.
    ``sums``   the function is linear in every operand, so a label that no result has is contracted.
    ``free``   return None if something would have to move, or the labels do not cover the call.
    ``unsummed`` keep a contracted result as the ranks' parts of a sum.
    """
    if has_padding(args) or (kwargs and has_padding(kwargs.values())):
        return _beside_padding(func, args, kwargs, labels, sums)
    call = FlatCall.of(func, *args, **kwargs)
    mesh: Mesh = next(x.mesh for x in call.tensors if isinstance(x, ShardedTensor))
    values = [lift(x, mesh, func.__name__) for x in call.tensors]
    if all(map(is_whole, values)):
        return on_whole(func, args, kwargs, Unfit("rows"))
    plan = mesh.memo("dims", _key(call, values, sums), partial(_made, call, values, labels, sums))
    if free and (plan.moved or not plan.fits):
        return None
    if not plan.fits:
        return on_whole(func, args, kwargs, Unfit("rows"))
    if plan.moved and not may_move(max(plan.moved)):
        raise _refused(call, values, plan)
    values = written_to(func, args, kwargs, values)
    if not lead(mesh) and _repeats(call, args, values, plan):
        place = Place(*plan.results[0], mesh)
        return blockwise(func, args, kwargs, place, partial(_of_blocks, func, mesh, plan))
    return _on_blocks(call, values, plan, sums, unsummed)


def _on_blocks(
    call: FlatCall, values: list[ShardedTensor], plan: _DimPlan, sums: bool, unsummed: bool
) -> Any:
    """Run a planned call on the blocks; a label that is contracted is summed over the ranks."""
    mesh = values[0].mesh
    raws, dtype = _operands(call, values, plan, sums)
    deferred = frozenset().union(*(v.deferred for v in values)) - set(plan.used)
    found, shape = optree.tree_flatten(each(call, mesh, raws), none_is_leaf=True)
    moved = [
        (raw, v.raw) for raw, v, t in zip(raws, values, plan.targets, strict=True) if t is not None
    ]
    link_views(zip(found, found, strict=True), moved)
    if call.func in WRITERS:
        if plan.targets[0] is not None:
            result = ShardedTensor(found[0], Place(*plan.results[0], mesh, deferred=deferred))
            values[0].raw.copy_(reshard(result, values[0].sharding).raw)
        return values[0]
    for k, (raw, (layout, size)) in enumerate(zip(found, plan.results, strict=True)):
        if plan.summed and not unsummed:
            raw = _summed(raw, mesh, plan, dtype, len(values))
        elif dtype is not None and raw.dtype == torch.float32:
            raw = raw.to(dtype)
        if plan.summed and unsummed:
            layout = Layout(layout.dims, plan.summed)
        found[k] = ShardedTensor(raw, Place(layout, size, mesh, deferred=deferred))
    return optree.tree_unflatten(shape, found)


def _key(call: FlatCall, values: list[ShardedTensor], sums: bool) -> tuple[Any, ...]:
    fixed = tuple(None if isinstance(x, Tensor) else x for x in call.leaves)
    # 1, True and 1.0 are equal keys, but different arguments
    kinds = tuple(map(type, fixed))
    places = tuple((v.sharding, v.padded_shape, v.dtype) for v in values)
    return call.func, call.tree, places, fixed, kinds, sums


def _operands(
    call: FlatCall, values: list[ShardedTensor], plan: _DimPlan, sums: bool
) -> tuple[list[Any], torch.dtype | None]:
    """Return the blocks of the operands, resharded and marked for their gradients' sums.

    Half precision blocks are widened where each rank has a part of a sum; their dtype is returned
    too, None where it is not the results'.
    """
    func, mesh = call.func, values[0].mesh
    brought = [
        v if t is None else _dense(reshard(v, t)) for v, t in zip(values, plan.targets, strict=True)
    ]
    deferred = frozenset().union(*(v.deferred for v in values)) - set(plan.used)
    overs = [(over | deferred) - v.deferred for v, over in zip(brought, plan.overs, strict=True)]
    # torch.linear and the like have no fp32 form
    linear = sums and func is not torch.einsum
    dtype = None if linear or func in WRITERS else _rounded_to(brought, overs, plan)
    raws = [v.raw for v in brought]
    if dtype is not None:
        return widened(raws, mesh, overs, matrices=func is torch.einsum), dtype
    marked = [vary(raw, mesh, over) if over else raw for raw, over in zip(raws, overs, strict=True)]
    return marked, None


def _dense(x: ShardedTensor) -> ShardedTensor:
    return x if x.raw.is_contiguous() else x.becomes(x.raw.contiguous())


def _beside_padding(
    func: Func, args: Args, kwargs: Kwargs, labels: Callable[[Any, Any], Labels], sums: bool
) -> object:
    """Run a call whose padding is in rows only, so that its results there are padding too.

    Rows of padding are filled with ones (zeros where rows are summed), so that they give finite
    values and no gradient.
    """
    if written(func, args, kwargs):
        raise Unfit("written in place")
    call = FlatCall.of(func, *args, **kwargs)
    check_alike(func, call.tensors, _labels_of(call, labels))

    def run(func: Func, args: Args, kwargs: Kwargs) -> Any:
        try:
            out = rows_call(func, args, kwargs, labels, sums, free=True)
        except RuntimeError as e:
            raise Unfit(f"torch refuses rows of ones: {e}") from None
        if out is None:
            raise Unfit("the operands lie apart")
        return out

    return of_true_sizes(run, func, args, kwargs, 0 if sums else 1, zeros=True)


def _labels_of(call: FlatCall, labels: Callable[[Any, Any], Labels]) -> list[tuple[Any, ...]]:
    """Return the labels of each operand's dimensions, by the sizes that are stored.  Raises: Unfit."""
    stored = [x.padded_shape if isinstance(x, ShardedTensor) else x.shape for x in call.tensors]
    named = labels(*call.replaced(ArgumentSlot(k, tuple(s)) for k, s in enumerate(stored)))
    found = [named.get(k, (None,) * len(s)) for k, s in enumerate(stored)]
    if list(map(len, found)) != list(map(len, stored)):
        raise Unfit("other dimensions")
    return found


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
    matrix = operands > 1 and len(block_shape(raw, mesh)) > 1
    return total(raw, mesh, plan.summed, dtype, dtype if matrix else None)


def _repeats(call: FlatCall, args: Args, values: list[ShardedTensor], plan: _DimPlan) -> bool:
    """Check whether torch's function on the blocks is all: nothing is moved, written or summed."""
    first = args[: len(values)]
    if list(map(id, first)) != list(map(id, values)) or any(v.deferred for v in values):
        return False
    if call.func in WRITERS or plan.summed or any(plan.targets):
        return False
    # these parts are kept in fp32
    return not (is_half(values[0].raw) and any(plan.overs))


def _of_blocks(func: Func, mesh: Mesh, plan: _DimPlan, *args: Any, **kwargs: Any) -> Any:
    """Run a function of blocks, marked for their gradients' sums, and of other arguments."""
    raws = [vary(x, mesh, over) if over else x for x, over in zip(args, plan.overs, strict=False)]
    out = run(func, mesh, (*raws, *args[len(raws) :]), kwargs)
    if type(out) is Tensor:
        return out
    found, shape = optree.tree_flatten(out, none_is_leaf=True)
    laid = [
        ShardedTensor(raw, Place(*of, mesh)) for raw, of in zip(found, plan.results, strict=True)
    ]
    return optree.tree_unflatten(shape, laid)


def _made(
    call: FlatCall, values: list[ShardedTensor], labels: Callable[[Any, Any], Labels], sums: bool
) -> _DimPlan:
    try:
        return _planned(call, values, _labels_of(call, labels), sums)
    except (Unfit, BadArgument, UnevenSplit):
        return _DimPlan(fits=False)


_Rows = list[tuple[Any, ...]]
"""Labels of each operand's dimensions."""


def _planned(call: FlatCall, values: list[ShardedTensor], rows: _Rows, sums: bool) -> _DimPlan:
    mesh = values[0].mesh
    tokens = _tokens(values, rows)
    targets: list[Layout | None] = []
    moved: list[float] = []
    for v, mine in zip(values, rows, strict=True):
        sizes = zip(mine, v.padded_shape, strict=True)
        want = Layout(tuple(Dim() if lb is None or n == 1 else tokens[lb] for lb, n in sizes))
        if want == v.sharding:
            targets.append(None)
            continue
        targets.append(want)
        cost = (v.sharding >> want).bytes(tuple(v.padded_shape), mesh, v.raw.element_size())
        if cost:
            moved.append(float(cost))
    split = {lb: t for lb, t in tokens.items() if real_axes(mesh, t.axes)}
    used = real_axes(mesh, {a for t in split.values() for a in t.axes})
    laid = [t or v.sharding for t, v in zip(targets, values, strict=True)]
    overs = [frozenset(used) - set(lay.axes) for lay in laid]
    results, summed = _results(call, values, rows, split, sums)
    return _DimPlan(tuple(targets), tuple(moved), tuple(overs), tuple(results), used, tuple(summed))


def _tokens(values: list[ShardedTensor], rows: _Rows) -> dict[Any, Dim]:
    """Choose the split of each label: the largest operand's that splits it; no axis twice."""
    sizes: dict[Any, int] = {}
    tokens: dict[Any, Dim] = {}
    for v, mine in sorted(zip(values, rows, strict=True), key=lambda r: -r[0].padded_shape.numel()):
        for label, n, token in zip(mine, v.padded_shape, v.sharding.aligned.dims, strict=True):
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
    return tokens


def _results(
    call: FlatCall, values: list[ShardedTensor], rows: _Rows, split: dict[Any, Dim], sums: bool
) -> tuple[list[tuple[Layout, torch.Size]], list[str]]:
    """Find the layouts and sizes of the results, and the axes over which they are summed."""
    mesh = values[0].mesh

    def shapes(small: Collection[object]) -> list[torch.Size]:
        return call.shapes(
            [
                n // mesh.axis_size(split[label].axes) if label in small and n != 1 else n
                for label, n in zip(mine, v.padded_shape, strict=True)
            ]
            for v, mine in zip(values, rows, strict=True)
        )

    whole = shapes(())
    if not whole:
        raise Unfit("no result")
    dims = [[Dim()] * len(s) for s in whole]
    summed: list[str] = []
    for label, token in split.items():
        shrunk = _shrunk(whole, shapes({label}), mesh.axis_size(token.axes))
        if None in shrunk:
            if not sums or set(shrunk) != {None}:
                raise Unfit(f"{label} is in no result")
            summed += token.axes
            continue
        for mine, d in zip(dims, shrunk, strict=True):
            if d is None or mine[d].is_split:
                raise Unfit("two labels in one dimension")
            mine[d] = token
    layouts = [Layout(tuple(mine)) for mine in dims]
    for layout, size, block in zip(layouts, whole, shapes(split), strict=True):
        if tuple(layout.local_shape(tuple(size), mesh)) != tuple(block):
            raise Unfit("blocks of another shape")
    return list(zip(layouts, whole, strict=True)), summed


def _shrunk(whole: list[torch.Size], small: list[torch.Size], ways: int) -> list[int | None]:
    """Return the dimension of each result that shrank ``ways`` times, None where none did."""
    if list(map(len, whole)) != list(map(len, small)):
        raise Unfit("the results' number or dimensions hang on a size")
    out: list[int | None] = []
    for s, t in zip(whole, small, strict=True):
        changed = [d for d, (n, m) in enumerate(zip(s, t, strict=True)) if n != m]
        if len(changed) > 1 or any(t[d] * ways != s[d] for d in changed):
            raise Unfit("the result does not shrink with the label")
        out.append(changed[0] if changed else None)
    return out


def _refused(call: FlatCall, values: list[ShardedTensor], plan: _DimPlan) -> Exception:
    to = {i: str(t) for i, t in zip(call.at, plan.targets, strict=True) if t is not None}
    kind = PartialEscape if any(v.sharding.partial for v in values) else ImplicitCommunication
    why = (
        f"{call.func.__name__} needs dimensions whole that are split, or a sum that is pending, "
        f"and {sum(plan.moved):.0f} bytes per rank would move unasked"
    )
    return call_error(kind, why, call.func, fix_line(call, to, max(plan.moved)), *values)
