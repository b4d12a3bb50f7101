"""Blocks travelling round a ring: what every ring algorithm is made of.

``rotate`` passes blocks on, ``rotate_sum`` passes sums on; the next transfer is under way while the
caller works on what has arrived.  ``cut`` and ``joined`` name blocks relative to this rank, so that
ring code needs no rank arithmetic and runs for all ranks at once under simulate.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shardlib.collectives.api import axis_index, axis_size, shift, start
from shardlib.collectives.stacked import Stacked, of

__all__ = ["cut", "joined", "rotate", "rotate_sum"]


def rotate(x: Tensor, axis: str, by: int = 1) -> Iterator[Tensor]:
    """This rank's block, then that of rank i - by, i - 2 by, ...: one of every rank of the axis.

    Moves: (p-1) n bytes in p-1 messages.    Grad: none; for code that writes its own.

    >>> import shardlib as sl
    >>> with sl.simulate(x=3):
    ...     sum(rotate(axis_index("x") * 1.0, "x"))
    tensor(3.)
    """
    p = axis_size(axis)
    for step in range(p):
        coming = start(shift, x, axis, by) if step < p - 1 else None
        yield x
        if coming is not None:
            x = coming.wait()


def rotate_sum(part: Callable[[int], Tensor], axis: str, by: int = 1) -> Tensor:
    """The sum over ranks of their parts of this rank's block, gathered on the way round.

    ``part(back)`` is this rank's part of the block of rank i - back.
    Moves: (p-1) n bytes in p-1 messages, n one part.
    """
    p = axis_size(axis)
    total = part((by * (1 - p)) % p if p > 1 else 0)
    for step in range(1, p):
        coming = start(shift, total, axis, by)
        mine = part((by * (1 - p + step)) % p)  # while the sum so far travels
        total = coming.wait().add_(mine)
    return total


def cut(x: Tensor, axis: str, back: int, dim: int = 0) -> Tensor:
    """The block of ``x`` along ``dim`` that belongs to rank i - back.  x [.., n, ..] -> [.., n / p, ..]."""
    p, i = axis_size(axis), axis_index(axis)
    n = x.shape[dim] // p
    if not isinstance(i, Stacked):
        return x.narrow(dim, (i - back) % p * n, n)
    at = dim % x.ndim + 1
    blocks = of(x, i.mesh).unflatten(at, (p, n)).movedim(at, 1)
    return Stacked(blocks[torch.arange(len(blocks)), (i.ranks - back) % p], i.mesh)


def joined(blocks: list[Tensor], axis: str, dim: int = 0) -> Tensor:
    """Blocks of rank i, i - 1, i - 2, ... side by side in rank order.  p of [.., n, ..] -> [.., n p, ..]."""
    p, i = axis_size(axis), axis_index(axis)
    if not isinstance(i, Stacked):
        return torch.cat([blocks[(i - j) % p] for j in range(p)], dim) if p > 1 else blocks[0]
    raw = torch.stack([of(b, i.mesh) for b in blocks], 1)  # [P, p, ...]
    order = (i.ranks.unsqueeze(1) - torch.arange(p)) % p
    placed = raw[torch.arange(len(raw)).unsqueeze(1), order]
    at = dim % blocks[0].ndim + 1
    return Stacked(placed.movedim(1, at).flatten(at, at + 1), i.mesh)
