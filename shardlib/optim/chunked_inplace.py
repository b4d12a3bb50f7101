"""Chunked elementwise steps in place, so that temporaries stay small."""

from collections.abc import Iterator, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.collectives import blocks
from shardlib.tensor import ShardedTensor

__all__ = ["SPAN", "lies_flat", "spans", "writable"]

SPAN = 1 << 16
"""Elements per chunk: the temporaries of a step have this size, and fit a core's cache."""


def spans(*rows: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield chunks of ``SPAN`` elements of parallel lists of tensors, as views: writes change them.

    Tensors that are not contiguous are cut into slices of their first dimension.

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
    """Return whether each block is contiguous, so that reshaping it to a vector is a view."""
    if isinstance(x, ShardedTensor):
        return all(b.is_contiguous() for b in blocks(x.raw, x.mesh))
    return x.is_contiguous()


def writable(grads: Any, like: Any, copy: bool = False) -> Any:
    """Return memory for a step's directions.

    It is the gradients' own, which the step may overwrite, if their dtype is ``like``'s; else new
    memory in that dtype.  A leaf that is None in either tree stays None.

    ``copy``  copy the gradients into new memory.
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
