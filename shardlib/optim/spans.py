"""A span of elements at a time: steps in place whose temporaries stay small."""

from collections.abc import Iterator, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.collectives import blocks
from shardlib.tensor import ShardedTensor

__all__ = ["SPAN", "lies_flat", "spans", "writable"]

SPAN = 1 << 16
"""Elements at a time: the temporaries of a step are of this size, and stay in a core's cache."""


def spans(*rows: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Give ``SPAN`` elements at a time of each of some lists of tensors alike; writes stay.

    Tensors whose elements do not follow one another are cut in slices of their first dimension.

    >>> [x.shape[0] for (x,) in spans([torch.ones(2, SPAN // 2), torch.ones(3)])]
    [65536, 3]
    """
    for row in zip(*rows, strict=True):
        first = row[0]
        if all(t.is_contiguous() for t in row):
            flat, n = [t.view(-1) for t in row], SPAN
        else:
            flat, n = list(row), max(SPAN * first.shape[0] // max(first.numel(), 1), 1)
        if len(flat[0]) <= n:
            yield tuple(flat)
        else:
            yield from zip(*(t.split(n) for t in flat), strict=True)


def lies_flat(x: Tensor) -> bool:
    """Say whether a reshape of each block to a vector is a view of it."""
    if isinstance(x, ShardedTensor):
        return all(b.is_contiguous() for b in blocks(x.raw, x.mesh))
    return x.is_contiguous()


def writable(grads: Any, like: Any, copy: bool = False) -> Any:
    """Return the memory that a step's directions can be written to.

    That is the gradients' own, which are given up, where their dtype is ``like``'s; elsewhere new
    memory in that dtype.  None stays where either tree has it.

    ``copy``  new memory holds the gradients too.
    """

    def one(g: Any, m: Any) -> Any:
        if g is None or m is None:
            return None
        if g.dtype == m.dtype and lies_flat(g):
            return g
        raw = g.raw if isinstance(g, ShardedTensor) else g
        new = torch.empty_like(raw, dtype=m.dtype, memory_format=torch.contiguous_format)
        if copy:
            new.copy_(raw)
        return g.becomes(new) if isinstance(g, ShardedTensor) else new

    return optree.tree_map(one, grads, like, none_is_leaf=True)
