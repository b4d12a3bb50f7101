"""Orders of sequence positions over the ranks of a ring (contiguous, zigzag, ...), as runs.

    contiguous              rank r holds one stretch
    zigzag                  2p chunks; rank r holds chunk r and, from the end, chunk 2p-1-r
    striped                 rank r holds r, r + p, r + 2p, ...
    documents; 0 5 9        each document (its borders are given) in zigzag order
    runs; 0:4 8:12 | 4:8    given run by run, ranks between bars: start:stop or start:stop:step

Every rank's block has the same size: that of the longest share, rounded up where the length does
not divide.  A rank with fewer positions has padding at the end of its block.

Source: zigzag and striped balance causal attention (arXiv 2311.09431; Llama 3, arXiv 2407.21783).
"""

import itertools
from functools import lru_cache
from typing import NamedTuple

ORDERS = ("contiguous", "zigzag", "striped", "documents", "runs")


class Run(NamedTuple):
    """Positions start, start + stride, ...: ``length`` of them.

    >>> list(Run(start=2, stride=4, length=3).positions)
    [2, 6, 10]
    """

    start: int
    stride: int
    length: int

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.stride * self.length, self.stride)

    @property
    def last(self) -> int:
        return self.start + self.stride * (self.length - 1)


def declared(order: str) -> int | None:
    """Return the length that an order is written for, None if it fits any."""
    name, _, given = order.partition("; ")
    if name == "documents":
        return int(given.split()[-1])
    if name == "runs":
        return sum(run.length for rank in parse_runs(given) for run in rank)
    return None


@lru_cache(maxsize=256)
def uncovered(order: str) -> str:
    """Return the first position that given runs hold twice or not at all; "" if there is none.

    >>> uncovered("runs; 0:2 | 1:3"), uncovered("runs; 0:2 | 3:4"), uncovered("zigzag")
    ('1 twice', '2 by nobody', '')
    """
    name, _, given = order.partition("; ")
    if name != "runs":
        return ""
    held = sorted(i for rank in parse_runs(given) for run in rank for i in run.positions)
    for i, at in enumerate(held):
        if i != at:
            # sorted, so a position that is held twice is below its index
            return f"{at} twice" if at < i else f"{i} by nobody"
    return ""


def block(order: str, n: int, p: int) -> int:
    """Count the positions of each rank's block: the longest share."""
    if order == "zigzag":
        return 2 * -(-n // (2 * p))
    if declared(order) is None:
        return -(-n // p)
    return max((sum(r.length for r in runs) for runs in _shares(order, p)), default=0)


@lru_cache(maxsize=1024)
def dealt(order: str, n: int, p: int) -> tuple[tuple[Run, ...], ...]:
    """List, for each of p ranks, the runs that it holds of n positions; each position is held once.

    Where an order is written for fewer than n, the remaining positions fill the ranks' blocks.

    >>> for runs in dealt("zigzag", 8, 2):
    ...     print(runs)
    (Run(start=0, stride=1, length=2), Run(start=6, stride=1, length=2))
    (Run(start=2, stride=1, length=4),)
    >>> dealt("striped", 5, 2)[1]
    (Run(start=1, stride=2, length=2),)
    """
    if order == "striped":
        return tuple(joined_runs([Run(r, p, len(range(r, n, p)))]) for r in range(p))
    if order == "contiguous":
        c = block(order, n, p)
        return tuple(joined_runs([_clipped(r * c, (r + 1) * c, n)]) for r in range(p))
    if order == "zigzag":
        c = block(order, n, p) // 2
        chunks = [_clipped(i * c, (i + 1) * c, n) for i in range(2 * p)]
        return tuple(joined_runs([chunks[r], chunks[2 * p - 1 - r]]) for r in range(p))
    shares, room, filled = _shares(order, p), block(order, n, p), declared(order) or 0
    out = []
    for runs in shares:
        spare = min(room - sum(r.length for r in runs), max(0, n - filled))
        out.append(joined_runs([*runs, Run(filled, 1, spare)]))
        filled += spare
    return tuple(out)


def _clipped(start: int, stop: int, n: int) -> Run:
    return Run(min(start, n), 1, max(0, min(stop, n) - min(start, n)))


def joined_runs(runs: list[Run]) -> tuple[Run, ...]:
    """Drop empty runs, and join a run to the one before where it continues it.

    >>> joined_runs([Run(0, 1, 2), Run(2, 1, 3), Run(9, 1, 0)])
    (Run(start=0, stride=1, length=5),)
    """
    out: list[Run] = []
    for run in runs:
        if not run.length:
            continue
        run = run if run.length > 1 or run.stride == 1 else Run(run.start, 1, 1)
        if out and out[-1].stride == run.stride == 1 and out[-1].last + 1 == run.start:
            out[-1] = Run(out[-1].start, 1, out[-1].length + run.length)
        else:
            out.append(run)
    return tuple(out)


@lru_cache(maxsize=256)
def _shares(order: str, p: int) -> tuple[tuple[Run, ...], ...]:
    name, _, given = order.partition("; ")
    if name == "runs":
        return parse_runs(given)
    held: list[list[Run]] = [[] for _ in range(p)]
    load = [0] * p
    borders = [int(b) for b in given.split()]
    for a, b in itertools.pairwise(borders):
        each, left = divmod(b - a, 2 * p)
        owners = [min(i, 2 * p - 1 - i) for i in range(2 * p)]
        # the ranks with the least load get the remainder, one position each
        longer = set(sorted(range(2 * p), key=lambda i: (load[owners[i]], i))[:left])
        start = a
        for i, owner in enumerate(owners):
            length = each + (i in longer)
            held[owner].append(Run(start, 1, length))
            load[owner] += length
            start += length
    return tuple(joined_runs(runs) for runs in held)


@lru_cache(maxsize=256)
def parse_runs(text: str) -> tuple[tuple[Run, ...], ...]:
    """Read ``0:4 8:12 | 4:8`` as runs per rank.

    Raises: ValueError.
    """
    out = []
    for rank in text.split("|"):
        ranges = [range(*map(int, word.split(":"))) for word in rank.split()]
        out.append(joined_runs([Run(r.start, r.step, len(r)) for r in ranges]))
    return tuple(out)
