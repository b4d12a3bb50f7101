"""Indexing by tensors: along an indexed dimension operands are whole, all others are rows."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import block_shape, blocks, holds_values, storage_shape
from shardlib.errors import OutOfRange, Unsupported
from shardlib.layouts import Dim, Layout
from shardlib.memory_sharing import link
from shardlib.mesh import Mesh
from shardlib.ops.declare import (
    Bound,
    by_signature,
    declare,
    labelled,
    rows,
    rows_but,
    slots,
    where,
)
from shardlib.ops.dims import Labels, rows_call
from shardlib.ops.each_rank import FlatCall, each
from shardlib.ops.elementwise import elementwise
from shardlib.ops.fallback import is_whole
from shardlib.ops.id_bounds import in_range
from shardlib.ops.padding import by_position, of_true_sizes, sizes
from shardlib.ops.signatures import ArgumentSlot, binder
from shardlib.ops.views import entries, indexed_dims, named, piece, without_ellipsis
from shardlib.opspec import Args, Func, Kwargs
from shardlib.placing import reshard, shard
from shardlib.tensor import raw_of
from shardlib.tensor.gradients import real_axes, settle, total, vary
from shardlib.tensor.lifting import lift, replicated
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import ShardedTensor, Unfit, call_error, has_padding, implements


def _dim(b: Bound) -> int:
    ndim = b["input"].ndim
    return next(iter(where(b["dim"], ndim))) if ndim else 0


@declare("""
    gather(input, dim, index, *, sparse_grad=False)
    take_along_dim(input, index, dim: int)
    scatter_add(input, dim, index, src)
    scatter(input, dim, index, src, *, reduce=None)
    scatter_reduce(input, dim, index, src, reduce, *, include_self=True)
    """)
def _at_positions(b: Bound) -> Labels:
    """Label as rows the dimensions of equal size in all operands (torch allows smaller indices)."""
    x, dim = b["input"], _dim(b)
    found = slots(b)
    if any(s.ndim != x.ndim for s in found) or b.get("sparse_grad"):
        raise Unfit("dimensions, or a sparse gradient")
    same = [d for d in range(x.ndim) if d != dim and all(s.shape[d] == x.shape[d] for s in found)]
    label = dict(zip(same, same, strict=True)).get
    return {s.at: tuple(map(label, range(s.ndim))) for s in found}


@declare("""
    index_copy(input, dim, index, source)
    index_reduce(input, dim, index, source, reduce, *, include_self=True)
    index_fill(input, dim, index, value: number)
    """)
def _slices(b: Bound) -> Labels:
    """Label operands of a 1-D index over slices: their other dimensions are rows."""
    index, dim = b["index"], _dim(b)
    out: Labels = {s.at: rows_but({dim}, s.ndim) for s in slots(b) if s is not index}
    out[index.at] = ("i",) if "source" not in b and index.ndim == 1 else (None,) * index.ndim
    return out


def _indexed(b: Bound) -> Labels:
    """Label x[...]: dimensions taken whole are rows, and so are those of the indices."""
    x, index = b["input"], b["index"]
    index = entries(index)
    if index.count(Ellipsis) > 1:
        raise Unfit("an Ellipsis twice")
    mine: list[Any] = []
    out: Labels = {}
    for i in indexed_dims(index, x.ndim):
        mine.append(len(mine) if isinstance(i, slice) and i == slice(None) else None)
        if isinstance(i, ArgumentSlot):
            out[i.at] = tuple(("i", d - i.ndim) for d in range(i.ndim))
    out[x.at] = tuple(mine)
    return out


def _text(i: object) -> str:
    """Write an index as in the user's code."""
    if isinstance(i, slice):
        ends = ("" if n is None else repr(n) for n in (i.start, i.stop, i.step))
        return ":".join(ends).removesuffix(":")
    return "..." if i is Ellipsis else repr(i)


def _padded_getitem(run: Func, func: Func, args: Args, kwargs: Kwargs) -> object:
    """Index a padded operand along the dimensions that are not padded."""
    x, index = args[0], entries(args[1])
    if has_padding(index) or any(_is_mask(i) or isinstance(i, bool) for i in index):
        raise Unfit("a padded index, or a mask, which has the true sizes")
    given = zip(indexed_dims(index, x.ndim), sizes(x), strict=True)
    if all(n == m or (isinstance(i, slice) and i == _ALL) for i, (n, m) in given):
        # a number that is a tensor takes its dimension as any other number does
        known = tuple(0 if isinstance(i, Tensor) and not i.ndim else i for i in index)
        return of_true_sizes(lambda f, a, k: run(f, (a[0], index), k), func, (x, known), {})
    fix = "sl.shard(sl.unshard(x), '...')"
    if not any(isinstance(i, Tensor) for i in index):
        fix = f"sl.unshard(x)[{', '.join(map(_text, index))}]"
    raise call_error(Unsupported, "an index into the padded dimension", "getitem", fix, tensor=x)


_ALL = slice(None)


def _is_mask(i: object) -> bool:
    return isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8)


@implements(Tensor.__getitem__, padding=_padded_getitem)
def getitem(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Index by numbers, slices, tensors of positions, or masks."""
    x, index = args
    given = entries(index)
    if not any(isinstance(i, Tensor | list) for i in given):
        return _at(x, given) if _numbered(x, given) else piece(func, args, kwargs)
    if not isinstance(x, ShardedTensor):
        raise Unfit("a plain tensor")
    listed = any(isinstance(i, list) for i in given)
    given = tuple(_everywhere(i, x) for i in given)
    if listed:
        return x[given]
    picks = [i for i in given if isinstance(i, Tensor)]
    _refuse_dtypes(x, picks)
    index = given if isinstance(index, tuple) else given[0]
    masked = any(map(_is_mask, picks))
    if masked:
        _sized(x, given)
    if len(picks) == 1 and not masked:
        found = rows_call(
            func, (x, index), {}, lambda a, k: _indexed({"input": a[0], "index": a[1]}), free=True
        )
        if found is not None:
            return found
    out = _picked(x, given)
    if out is None:
        raise Unfit("an index of another kind")
    if not masked and not any(i.ndim for i in picks):
        # torch treats 0-dim indices as numbers, so its result is a view
        link(x.raw, out.raw)
    return out


def _refuse_dtypes(x: ShardedTensor, picks: Sequence[Tensor]) -> None:
    """Refuse tensors that are neither positions nor masks."""
    for i in picks:
        if i.dtype not in (torch.int64, torch.int32) and not _is_mask(i):
            why = f"tensors used as indices are int64, int32, uint8 or bool, not {i.dtype}"
            raise call_error(OutOfRange, why, "getitem", tensor=x, index=i)


def _sized(x: ShardedTensor, given: tuple[Any, ...]) -> None:
    """Refuse masks whose sizes are not those of the dimensions they index."""
    left, d = x.ndim - sum(map(_width, given)), 0
    for i in given:
        n = left if i is Ellipsis else _width(i)
        if _is_mask(i) and i.shape != x.shape[d : d + n]:
            why = (
                f"the shape of the mask {list(i.shape)} does not match the shape of the indexed "
                f"tensor {list(x.shape)} at dimension {d}"
            )
            raise call_error(OutOfRange, why, "getitem", tensor=x, mask=i)
        d += n


def _width(i: Any) -> int:
    """Count the dimensions that an entry of an index takes; for an Ellipsis 0."""
    if _is_mask(i):
        return i.ndim
    return named([i]) if not isinstance(i, bool) else 0


def _numbered(x: ShardedTensor, given: tuple[Any, ...]) -> bool:
    """Check whether a number indexes a split dimension, and no other index cuts one."""
    if type(x) is not ShardedTensor or named(given) > x.ndim:
        return False
    found = zip(indexed_dims(given, x.ndim), x.dims, x.shape, strict=True)
    cut = [(i, n) for i, t, n in found if real_axes(x.mesh, t.axes) and i != _ALL]
    numbers = all(isinstance(i, int) and -n <= i < n for i, n in cut)
    return bool(cut) and numbers and bool not in map(type, given)


def _at(x: ShardedTensor, given: tuple[Any, ...]) -> ShardedTensor:
    """Return x[..., -1] of a split dimension: its rank sends it to the others, a copy."""
    numbers = list(given)
    for k, i in enumerate(given):
        if isinstance(i, int):
            numbers[k] = replicated(torch.full((), i, device=x.mesh.device), x.mesh)
    out = _picked(x, tuple(numbers))
    if out is None:
        return piece(Tensor.__getitem__, (x, given), {})
    link(x.raw, out.raw)
    return out


def _here(n: int, token: Dim, mesh: Mesh) -> Tensor:
    """Return a table: index in each rank's block of ``n`` positions, the block's size if absent."""

    def make() -> Tensor:
        with torch.inference_mode(False):
            # cached, so a later backward may save it
            mine = shard(torch.arange(n, device="cpu"), Layout((token,)), mesh).raw
            size = mine.shape[-1]
            table = mine.new_full((*mine.shape[:-1], n), size)
            return table.scatter_(-1, mine, torch.arange(size, device=mine.device).expand_as(mine))

    return mesh.memo("index", (n, token), make)


def _whole(i: ShardedTensor) -> ShardedTensor:
    """Gather positions to every rank."""
    i = settle(i)
    return i if is_whole(i) else reshard(i, "...")


def _in_block(ids: Tensor, n: int, token: Dim, mesh: Mesh) -> Tensor:
    """Return where positions are in each rank's block; the block's size for other ranks' ones."""
    table = _here(n, token, mesh)
    return table.gather(-1, ids.reshape(*table.shape[:-1], -1)).view(ids.shape)


def _picked(x: ShardedTensor, given: tuple[Any, ...]) -> ShardedTensor | None:
    """Return x[given]: ranks get the positions and give their elements, joined by one sum.

    Nothing is summed where the indexed dimensions are whole.  None if this does not cover the
    index.
    """
    if type(x) is not ShardedTensor or x.sharding.partial or not holds_values(x.mesh):
        return None
    whole = _whole_positions(given)
    if whole is None or named(whole) > x.ndim:
        return None
    found = _own_positions(x, without_ellipsis(whole, x.ndim))
    if found is None:
        return None
    raw, index, summed = found
    out = each(FlatCall.of(_copied, raw, index), x.mesh)
    joined = total(out.long() if out.dtype == torch.bool else out, x.mesh, summed).to(out.dtype)
    dims = _picked_dims(x, index)
    size = torch.Size(
        n * x.mesh.axis_size(t.axes) if t.is_split else n
        for n, t in zip(block_shape(joined, x.mesh), dims, strict=True)
    )
    return ShardedTensor(joined, Place(Layout(dims), size, x.mesh, deferred=x.deferred))


def _whole_positions(given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the index with its tensors gathered, masks as positions; None for other values."""
    index: list[Any] = []
    for i in given:
        if _is_mask(i):
            if type(i) is not ShardedTensor or not i.ndim:
                return None
            index += _whole(i.bool()).nonzero().unbind(1)  # type: ignore[arg-type]
        else:
            index.append(_whole(i) if isinstance(i, ShardedTensor) else i)
    return tuple(index)


def _own_positions(
    x: ShardedTensor, index: tuple[Any, ...]
) -> tuple[Tensor, tuple[Any, ...], list[str]] | None:
    """Return blocks, the index into them, and the axes to sum over; None if a slice cuts blocks.

    A block gets one more row of zeros, which stands for the positions of other ranks.
    """
    mesh, raw, summed = x.mesh, x.raw, []
    tokens = iter(enumerate(x.dims))
    local: list[Any] = []
    for i in index:
        if i is None:
            local.append(i)
            continue
        d, token = next(tokens)
        axes = real_axes(mesh, token.axes)
        if not isinstance(i, ShardedTensor):
            if axes and i != slice(None):
                return None
            local.append(i)
            continue
        ids = i.raw.long()
        if axes:
            n = x.shape[d]
            in_range(ids, n, "getitem", f"index of dimension {d}", lowest=-n)
            ids = _in_block(ids % n, n, token, mesh)
            edge = list(raw.shape)
            edge[d - x.ndim] = 1
            raw = torch.cat([raw, raw.new_zeros(edge)], d - x.ndim)
            summed += axes
        local.append(ids)
    return raw, tuple(local), summed


def _picked_dims(x: ShardedTensor, index: tuple[Any, ...]) -> tuple[Dim, ...]:
    """Return the tokens of x[index]: the indices' dimensions come first, or where they stand.

    They come first where a slice stands between them.
    """
    shapes = {k: block_shape(i, x.mesh) for k, i in enumerate(index) if isinstance(i, Tensor)}
    tokens = iter(x.dims)
    # tokens of the dimensions not indexed by tensors, in order
    kept: list[Dim] = []
    # of the indices with dimensions
    at: list[int] = []
    # the kept dimensions before each of them, counted
    before: list[int] = []
    for k, i in enumerate(index):
        token = Dim() if i is None else next(tokens)
        if i is None or isinstance(i, slice):
            kept.append(token)
        elif shapes.get(k):
            at.append(k)
            before.append(len(kept))
    block = len(torch.broadcast_shapes(*shapes.values()))
    together = at == list(range(min(at, default=0), max(at, default=-1) + 1))
    front = next(iter(before), 0) if together else 0
    return (*kept[:front], *[Dim()] * block, *kept[front:])


def _copied(raw: Tensor, index: tuple[Any, ...]) -> Tensor:
    """Copy a piece that is a view: positions from tensors may differ between ranks' blocks.

    torch would read a position without dimensions on the host, and wait for it.
    """
    rest: list[Any] = []
    for i in index:
        if isinstance(i, Tensor) and not i.ndim:
            d = sum(r is not None for r in rest)
            # index_select counts from the front alone
            at = torch.where(i < 0, i + raw.shape[d], i)
            raw = raw.index_select(d, at.reshape(1)).squeeze(d)
        else:
            rest.append(i)
    out = raw[tuple(rest)]
    return out.clone() if out._is_view() else out


@by_signature(
    "nonzero(input, *, as_tuple: bool = False)",
    torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere,
)  # fmt: skip
def nonzero(func: Func, x: ShardedTensor, as_tuple: bool) -> object:
    """Find the nonzero elements, on every rank; one byte per element is gathered."""
    if type(x) is not ShardedTensor or is_whole(x) or x.sharding.partial:
        raise Unfit("whole elements")
    return torch.nonzero(reshard(x != 0, "..."), as_tuple=as_tuple)


@implements(torch.where, Tensor.where, padding=by_position)
def choice(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Return the positions where a condition is true; with three arguments, torch.where."""
    if len(args) + len(kwargs) == 1:
        (condition,) = (*args, *kwargs.values())
        # as torch does
        condition = condition if condition.ndim else condition.unsqueeze(0)
        return condition.nonzero().unbind(1)
    return elementwise(func, args, kwargs)


@by_signature(
    "index_select(input, dim: int, index: tensor)",
    torch.index_select, Tensor.index_select, along_dim=True,
)  # fmt: skip
def index_select(func: Func, x: ShardedTensor, dim: int, index: Tensor) -> Tensor:
    """Select as x[..., index] does; the result has x's layout, where it divides.

    A plain index counts as the same on every rank.
    """
    if not isinstance(x, ShardedTensor) or not -x.ndim <= dim < x.ndim or index.ndim > 1:
        raise Unfit("another dimension or index")
    dim = dim % x.ndim
    if index.dtype not in (torch.int32, torch.int64):
        why = f"index_select takes int32 or int64, not {index.dtype}"
        raise call_error(OutOfRange, why, "index_select", tensor=x, index=index)
    # index_select refuses negative positions, but x[...] would wrap them
    in_range(raw_of(index), x.shape[dim], "index_select", f"index of dimension {dim}")
    out, token = x[(slice(None),) * dim + (index.reshape(-1),)], x.dims[dim]
    kept = out.dims[dim].is_split or not token.is_split or not token.is_plain
    if kept or out.shape[dim] % x.mesh.axis_size(token.axes):
        return out
    cut = reshard(out, Layout((*out.dims[:dim], token, *out.dims[dim + 1 :])))
    # the caller may write to it
    return cut.becomes(cut.raw.clone()) if cut.raw._is_view() else cut


@by_signature("index_copy(input, dim: int, index: tensor, source: tensor)", Tensor.index_copy_)
def index_copy_(
    func: Func, x: ShardedTensor, dim: int, index: ShardedTensor, source: ShardedTensor
) -> ShardedTensor:
    """Write slices along a whole dimension: each rank writes its part of them."""
    if type(x) is not ShardedTensor or not x.ndim or source.ndim != x.ndim:
        raise Unfit("dimensions")
    index, source = _everywhere(index, x), lift(source, x.mesh, "index_copy_")
    cut = x.dims[dim].is_split or x.sharding.partial or source.sharding.partial
    cut = cut or x.raw.requires_grad or source.raw.requires_grad or not is_whole(index)
    if cut or (source.sharding >> x.sharding).bytes(source.shape, x.mesh):
        raise Unfit("slices that are not written as they lie")
    raws = x.raw, reshard(source, x.sharding).raw, index.raw
    for block, part, at in zip(*[blocks(raw, x.mesh) for raw in raws], strict=True):
        block.index_copy_(dim, at, part)
    return x


@by_signature(
    "index_add(input, dim, index: tensor, source: tensor, *, alpha: number = 1)",
    Tensor.index_add_, Tensor.index_add, torch.index_add,
)  # fmt: skip
def index_add(
    func: Func, x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float
) -> Tensor:
    """Add into a split dimension: each rank adds the positions of its block, and nothing moves."""
    mesh = next(v.mesh for v in (x, index, source) if isinstance(v, ShardedTensor))
    if not isinstance(index, ShardedTensor):
        index = replicated(index, mesh)
    x, index, source = (lift(v, mesh, "index_add") for v in (x, index, source))
    dim = dim % max(1, x.ndim)
    if not _adds_in_place(x, dim, index, source):
        raise Unfit("slices that are not added as they lie")
    lies, axes = _unsplit(x, dim), real_axes(mesh, x.dims[dim].axes)
    index, source = _whole(index), reshard(source, lies)
    ids = index.raw.long()
    rows = vary(source.raw, mesh, set(real_axes(mesh, x.sharding.axes)) - set(lies.axes))
    in_range(ids, x.shape[dim], "index_add", f"index of dimension {dim}")
    if axes:
        ids = _in_block(ids, x.shape[dim], x.dims[dim], mesh)
        out = ids == x.raw.shape[dim - x.ndim]
        shape = storage_shape(mesh, *(-1 if d == dim else 1 for d in range(x.ndim)))
        # positions of other ranks add zeros at position 0
        rows, ids = rows.masked_fill(out.view(shape), 0), ids.masked_fill(out, 0)
    writes = func is Tensor.index_add_
    into = torch.zeros_like(x.raw) if writes else x.raw
    out = each(FlatCall.of(torch.index_add, into, dim, ids, rows, alpha=alpha), mesh)
    if not writes:
        return x.becomes(out)
    x.raw.add_(out)
    return x


def _unsplit(x: ShardedTensor, dim: int) -> Layout:
    return Layout((*x.dims[:dim], Dim(), *x.dims[dim + 1 :]))


def _adds_in_place(x: ShardedTensor, dim: int, index: ShardedTensor, source: ShardedTensor) -> bool:
    """Check whether slices of the source can be added to x's blocks, and only the index moves."""
    if not x.ndim or not holds_values(x.mesh) or index.ndim != 1 or source.ndim != x.ndim:
        return False
    for v in (x, index, source):
        if type(v) is not ShardedTensor or not v.place.settled:
            return False
    if source.shape[dim] != index.shape[0]:
        return False
    return not (source.sharding >> _unsplit(x, dim)).bytes(source.shape, x.mesh)


def _everywhere(i: Any, x: ShardedTensor) -> Any:
    """Wrap a plain index as one that is the same on every rank."""
    if isinstance(i, list):
        # not made on the device: a plan knows the values of what it copies there
        i = torch.as_tensor(i, device="cpu").to(x.raw.device)
    if isinstance(i, Tensor) and not isinstance(i, ShardedTensor):
        return replicated(i, x.mesh)
    return i


declare("one_hot(tensor, num_classes: int)")(rows)


@declare("""
    isin(elements, test_elements: tensor, *, assume_unique=False, invert=False)
    bucketize(input, boundaries, *, out_int32=False, right=False)
    """)
def _looked_up(b: Bound) -> Labels:
    """Label the sought values rows; the values they are compared with are whole."""
    # a sought number is no slot
    *sought, among = slots(b)
    return {s.at: tuple(range(s.ndim)) for s in sought} | {among.at: (None,) * among.ndim}


_GROUPED = binder("grouped_mm(mat_a, mat_b, *, offs=None, bias=None, out_dtype=None)")


@implements(
    *(
        f
        for home in (torch, F)
        for n in ("grouped_mm", "_grouped_mm")
        if (f := getattr(home, n, None))
    )
)
def grouped_mm(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Multiply rows in groups, each by its matrix; contraction and columns may be split."""

    def labels(a: Args, k: Kwargs) -> Labels:
        given = _GROUPED(*a, **k)
        x, w, offs = given["mat_a"], given["mat_b"], given["offs"]
        if x.ndim != 2 or w.ndim != 3 or given["bias"] is not None:
            raise Unfit("groups of rows")
        return {x.at: (None, "k"), w.at: (None, "k", "n"), offs.at: (None,)}

    return rows_call(func, args, kwargs, labels, sums=True)


@declare(
    "searchsorted(sorted_sequence, input: tensor, *, out_int32=False, right=False, side=None, "
    "sorter=None)"
)
def _searched(b: Bound) -> Labels:
    """Label values as rows; sequences of several dimensions share the leading ones with them."""
    sequence, values, sorter = b["sorted_sequence"], b["input"], b["sorter"]
    own = ("v",) if sequence.ndim > 1 else tuple(("v", d) for d in range(values.ndim))
    of_sequence = rows_but({sequence.ndim - 1}, sequence.ndim)
    of_values = (*of_sequence[:-1], *own)
    return labelled((sequence, of_sequence), (values, of_values), (sorter, of_sequence))
