"""Indexing by tensors: along the indexed dimension operands are whole, all others are rows."""

from typing import Any

import torch
from torch import Tensor

from shardlib.ops.declare import Bound, declare, slots, where
from shardlib.ops.dims import Labels, Unfit, rows_call
from shardlib.ops.signatures import Slot
from shardlib.ops.views import piece
from shardlib.ops.whole import on_whole
from shardlib.tensor import ShardedTensor, implements, replicated


def _dim(b: Bound) -> int:
    ndim = b["input"].ndim
    return next(iter(where(b["dim"], ndim))) if ndim else 0


def _at_positions(b: Bound) -> Labels:
    """Operands of one rank; a row has the same size in all of them (torch allows smaller indices)."""
    x, dim = b["input"], _dim(b)
    found = slots(b)
    if any(s.ndim != x.ndim for s in found):
        raise Unfit("dimensions")
    alike = [d for d in range(x.ndim) if d != dim and all(s.shape[d] == x.shape[d] for s in found)]
    return {s.at: tuple(d if d in alike else None for d in range(s.ndim)) for s in found}


declare(
    """
    gather(input, dim, index, *, sparse_grad=False)
    take_along_dim(input, index, dim: int)
    scatter_add(input, dim, index, src)
    scatter(input, dim, index, src, *, reduce=None)
    scatter_reduce(input, dim, index, src, reduce, *, include_self=True)
    """,
    _at_positions,
)


def _slices(b: Bound) -> Labels:
    """An index of one dimension picks slices, whose other dimensions are rows."""
    index, dim = b["index"], _dim(b)
    out: Labels = {s.at: tuple(None if d == dim else d for d in range(s.ndim)) for s in slots(b) if s is not index}
    out[index.at] = ("i",) if "source" not in b and index.ndim == 1 else (None,) * index.ndim
    return out


declare(
    """
    index_select(input, dim, index)
    index_add(input, dim, index, source, *, alpha=1)
    index_copy(input, dim, index, source)
    index_reduce(input, dim, index, source, reduce, *, include_self=True)
    index_fill(input, dim, index, value: number)
    """,
    _slices,
)


def _indexed(b: Bound) -> Labels:
    """x[...]: dimensions taken whole are rows, and so are those of the indices."""
    x, index = b["input"], b["index"]
    index = index if isinstance(index, tuple) else (index,)
    named = sum(i is not None and i is not Ellipsis for i in index)
    if any(isinstance(i, list) for i in index) or index.count(None) + named != len(index) - (Ellipsis in index):
        raise Unfit("lists")
    fill = (slice(None),) * (x.ndim - named)
    at = next((k for k, i in enumerate(index) if i is Ellipsis), len(index))
    index = (*index[:at], *fill, *index[at + 1 :])
    mine: list[Any] = []
    out: Labels = {}
    for i in index:
        if i is None:
            continue
        mine.append(len(mine) if isinstance(i, slice) and i == slice(None) else None)
        if isinstance(i, Slot):
            out[i.at] = tuple(("i", d - i.ndim) for d in range(i.ndim))
    out[x.at] = tuple(mine)
    return out


@implements(Tensor.__getitem__)
def getitem(func: Any, args: Any, kwargs: Any) -> Any:
    """Numbers and slices cut a piece; one tensor picks slices; masks, and several tensors, need the whole."""
    x, index = args
    given = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(i, Tensor | list) for i in given):
        return piece(func, args, kwargs)
    given = tuple(_everywhere(i, x) for i in given)
    picks = [i for i in given if isinstance(i, Tensor)]
    index = given if isinstance(index, tuple) else given[0]
    if len(picks) > 1 or any(i.dtype == torch.bool for i in picks):
        return on_whole(func, (x, index), {}, None)
    return rows_call(func, (x, index), {}, lambda a, k: _indexed({"input": a[0], "index": a[1]}))


def _everywhere(i: Any, x: ShardedTensor) -> Any:
    """torch takes plain indices; they are the same on every rank."""
    i = torch.as_tensor(i) if isinstance(i, list) else i
    return replicated(i, x.mesh) if isinstance(i, Tensor) and not isinstance(i, ShardedTensor) else i


def _looked_up(b: Bound) -> Labels:
    """What is looked for is rows, where it is looked for is whole."""
    sought, among = slots(b)
    return {sought.at: tuple(range(sought.ndim)), among.at: (None,) * among.ndim}


declare(
    """
    isin(elements, test_elements: tensor, *, assume_unique=False, invert=False)
    bucketize(input, boundaries, *, out_int32=False, right=False)
    """,
    _looked_up,
)
