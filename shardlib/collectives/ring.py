"""Ring communication: passing blocks to the next rank, the basis of every ring algorithm.

``rotate`` passes blocks on, ``rotate_sum`` passes sums on; the next transfer is under way while the
caller works on the received block.  ``cut`` and ``joined`` address blocks relative to this rank, so
that ring code needs no rank arithmetic and runs for all ranks at once under simulate.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shardlib.collectives.simulate import Stacked, of
from shardlib.collectives.verbs import axis_index, axis_size, shift, start


def rotate(
    blocks: Sequence[Tensor], axis: str, ways: Sequence[int] = (1,)
) -> Iterator[list[Tensor]]:
    """Yield these blocks of this rank, then of its neighbours one step back: p steps in all.

    Block j moves ``ways[j]`` ranks per step, so that at step t it is that of rank i - t ways[j]:
    two halves with ways (1, -1) use both directions of every link.
    Moves:  (p-1) n bytes in p-1 messages for each block.
    Grad:   none; for code that writes its own.

    >>> import shardlib as sl
    >>> with sl.simulate(x=3):
    ...     sum(block for (block,) in rotate([axis_index("x") * 1.0], "x"))
    tensor(3.)
    """
    now, p = list(blocks), axis_size(axis)
    for step in range(p):
        coming = []
        if step < p - 1:
            coming = [start(shift, x, axis, by) for x, by in zip(now, ways, strict=True)]
        yield now
        now = [c.wait() for c in coming]


def rotate_sum(
    parts: Sequence[Callable[[int], Tensor]], axis: str, ways: Sequence[int] = (1,)
) -> list[Tensor]:
    """Sum the ranks' parts of this rank's blocks, by passing partial sums round the ring.

    ``parts[j](back)`` is this rank's part of block j of rank i - back.
    Moves:  (p-1) n bytes in p-1 messages for each block, n one part.
    """
    p = axis_size(axis)
    totals = [part(by * (1 - p)) for part, by in zip(parts, ways, strict=True)]
    for step in range(1, p):
        coming = [start(shift, total, axis, by) for total, by in zip(totals, ways, strict=True)]
        # computed while the sums are in transit
        mine = [part(by * (1 - p + step)) for part, by in zip(parts, ways, strict=True)]
        totals = [c.wait().add_(m) for c, m in zip(coming, mine, strict=True)]
    return totals


def cut(x: Tensor, axis: str, back: int, dim: int = 0) -> Tensor:
    """Return the block of ``x`` along ``dim`` that belongs to rank i - back.

    x [.., n, ..] -> [.., n / p, ..].
    """
    p, i = axis_size(axis), axis_index(axis)
    n = x.shape[dim] // p
    if not isinstance(i, Stacked):
        return x.narrow(dim, (i - back) % p * n, n)
    at = dim % x.ndim + 1
    blocks = of(x, i.mesh).unflatten(at, (p, n)).movedim(at, 1)
    rows = torch.arange(len(blocks), device=x.device)
    return Stacked(blocks[rows, (i.ranks - back) % p], i.mesh)


def joined(blocks: list[Tensor], axis: str, dim: int = 0, way: int = 1) -> Tensor:
    """Concatenate blocks of rank i, i - way, i - 2 way, ... in rank order.

    p of [.., n, ..] -> [.., n p, ..].
    """
    p, i = axis_size(axis), axis_index(axis)
    if not isinstance(i, Stacked):
        return torch.cat([blocks[way * (i - j) % p] for j in range(p)], dim) if p > 1 else blocks[0]
    raw = torch.stack([of(b, i.mesh) for b in blocks], 1)  # [P, p, ...]
    order = way * (i.ranks.unsqueeze(1) - torch.arange(p, device=raw.device)) % p
    placed = raw[torch.arange(len(raw), device=raw.device).unsqueeze(1), order]
    at = dim % blocks[0].ndim + 1
    return Stacked(placed.movedim(1, at).flatten(at, at + 1), i.mesh)
