"""Integer program of how many layers run in which way, over the best ways of each part of a step.

A stack of equal layers is some of them run in one way, some in another: counts are integers, and what
they take adds up.  Parts meet in a state, the places of the values between them.  Three moments can
be the peak: while a part runs backward as the first of its stack, when all of the stack is still saved; as
the last, when gradients of the others are there; and the end of backward, when all gradients are.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.errors import ShardError


@dataclass(frozen=True)
class Column:
    """A way to run one of a part's layers.

    ``part``     the part's number, in the order of forward.
    ``begin``, ``end``  states that it begins and ends in.
    ``seconds``  of both passes.
    ``kept``     bytes of parameters and optimizer state, ``gradients`` those of the gradients.
    ``saved``    bytes saved from forward to its backward.
    ``most``     the most bytes beside the kept ones that it holds while it runs.
    ``away``     the share of host memory that it takes.
    ``way``      what it stands for.

    Less of everything is never worse: nothing is subtracted but what is added before.
    """

    part: int
    begin: Hashable
    end: Hashable
    seconds: float
    kept: float
    gradients: float
    saved: float
    most: float
    away: float = 0.0
    way: Any = None

    def beyond(self, last: int) -> float:
        """Return what it holds while it runs beside what ``_held`` counts for it."""
        counted = self.saved
        if last:
            counted = self.gradients
        return max(self.most - counted, 0)


@dataclass(frozen=True)
class Solution:
    """Columns with the number of layers that run so, in order, with seconds and bytes of the step."""

    counts: tuple[tuple[Column, int], ...]
    seconds: float
    peak: float


def solve(
    columns: Sequence[Column], counts: Sequence[int], room: float = math.inf, least: bool = False,
    limit: float = math.inf, gap: float = 0.0,
) -> Solution | None:  # fmt: skip
    """Take ``counts[part]`` columns of each part, of least seconds within ``room`` bytes, or None.

    ``least``  of least bytes instead, whatever the room.
    ``limit``  seconds of the whole step, beyond which no solution is of use.
    ``gap``    share of the least seconds by which those of the solution may be more.
    Raises: ShardError without scipy.

    >>> way = lambda part, s, saved: Column(part, 0, 0, s, 10, 1, saved, 0)
    >>> ways = [way(0, 1.0, 8), way(0, 1.5, 2)]
    >>> found = solve(ways, [4], 66)
    >>> [(c.seconds, n) for c, n in found.counts], found.seconds, found.peak
    ([(1.0, 3), (1.5, 1)], 4.5, 66)
    """
    if {c.part for c in columns} != {*range(len(counts))}:
        return None
    if room == math.inf and not least:
        found = _fastest(columns, counts)
        if found is None or found.seconds <= limit:
            return found
        return None
    rows = _Constraints(columns, counts)
    if limit < math.inf:
        rows.within(limit)
    most = room
    if least:
        room, most = max(c.kept + c.saved + c.most for c in columns), math.inf
    # a power of two: bytes are divided without rounding, and none is lost at the limit
    scale = 2.0 ** math.ceil(math.log2(max(room, 1.0)))
    top = most / scale
    x = rows.minimized(scale, top, least, gap)
    if x is None:
        return None
    taken = tuple((c, n) for c, n in zip(columns, x, strict=True) if n)
    taken = tuple(sorted(taken, key=lambda cn: cn[0].part))
    return Solution(taken, sum(n * c.seconds for c, n in taken), peak(taken))


_Path = tuple[float, tuple[tuple[Column, int], ...]]
"""Seconds, and the columns taken with the number of layers that run so."""


def _fastest(columns: Sequence[Column], counts: Sequence[int]) -> Solution | None:
    """Take one column for all layers of each part, of least seconds in any memory (Bellman)."""
    cost = lambda c: (c.seconds, c.kept + c.saved + c.most)  # noqa: E731
    of: dict[int, dict[tuple[Hashable, Hashable], Column]] = defaultdict(dict)
    for c in sorted(columns, key=cost, reverse=True):
        of[c.part][c.begin, c.end] = c
    reached: dict[Hashable, _Path] = {c.begin: (0.0, ()) for c in of[0].values()}
    for part, count in enumerate(counts):
        ends: dict[Hashable, _Path] = {}
        for (begin, end), c in of[part].items():
            if begin not in reached:
                continue
            spent, taken = reached[begin]
            seconds = spent + count * c.seconds
            if end not in ends or seconds < ends[end][0]:
                ends[end] = seconds, (*taken, (c, count))
        reached = ends
    if not reached:
        return None
    seconds, taken = min(reached.values(), key=lambda way: way[0])
    return Solution(taken, seconds, peak(taken))


def peak(taken: Sequence[tuple[Column, int]]) -> float:
    """Return the most bytes that these layers hold at once."""
    most = sum(n * (c.kept + c.gradients) for c, n in taken)
    for c, _ in taken:
        for last in (0, 1):
            most = max(most, sum(n * _held(d, c, last) for d, n in taken) + c.beyond(last))
    return most


def _held(d: Column, c: Column, last: int) -> float:
    """Return what a layer holds while one of ``c``'s part runs backward, the first or the last."""
    gone = d.part > c.part or (d.part == c.part and last)
    if gone:
        return d.kept + d.gradients
    return d.kept + d.saved


_Row = tuple[dict[int, float], float, float]
"""Variable -> factor, and the least and the most of their sum."""


class _Constraints:
    """The constraints of a program.

    Variables, in this order: the count of each column; whether each column of a stack is used; for
    each part and each end of its stack what all layers hold meanwhile; the peak; what all layers
    keep; and what each part saves, and has of gradients.
    """

    def __init__(self, columns: Sequence[Column], counts: Sequence[int]) -> None:
        self.columns, self.counts = columns, counts
        self.entries: list[_Row] = []
        # a part of one layer uses the column that it counts
        self.used = {j: j for j in range(len(columns))}
        stacked = [j for j, c in enumerate(columns) if counts[c.part] > 1]
        self.used |= {j: len(columns) + i for i, j in enumerate(stacked)}
        self.integers = len(columns) + len(stacked)
        self.peak = self.integers + 2 * len(counts)
        self.sums = self.peak + 1
        for part, count in enumerate(counts):
            self._row({j: 1.0 for j, c in enumerate(columns) if c.part == part}, count, count)
        for j in stacked:
            count = counts[columns[j].part]
            self._row({j: 1.0, self.used[j]: -float(count)}, -math.inf, 0.0)
        self._row({j: c.away for j, c in enumerate(columns) if c.away}, 0.0, 1.0)
        self._borders()

    def _row(self, entries: dict[int, float], low: float, high: float) -> None:
        self.entries.append((entries, low, high))

    def within(self, limit: float) -> None:
        """All layers together take at most so many seconds."""
        self._row({j: c.seconds / limit for j, c in enumerate(self.columns)}, 0.0, 1.0)

    def _borders(self) -> None:
        """All layers of a part begin in the state that the part before it ends in."""
        ends: dict[tuple[int, Hashable], dict[int, float]] = defaultdict(dict)
        for j, c in enumerate(self.columns):
            ends[c.part, c.end][j] = 1.0 / self.counts[c.part]
            ends[c.part - 1, c.begin][j] = -1.0 / self.counts[c.part]
        last = len(self.counts) - 1
        for (part, _), entries in ends.items():
            if 0 <= part < last:
                self._row(entries, 0.0, 0.0)

    def minimized(self, scale: float, top: float, least: bool, gap: float) -> list[int] | None:
        """Return the count of each column, or None where the peak is above ``top`` times ``scale``."""
        try:
            import numpy as np
            from scipy import optimize, sparse
        except ImportError as e:
            why = "plans are solved by scipy, which is not installed"
            raise ShardError(why, op="plan", fix="pip install scipy") from e
        program: Any = optimize
        n, size = len(self.columns), self.sums + 1 + 2 * len(self.counts)
        entries = [*self.entries, *self._peaks(scale)]
        cells = [(v, i, j) for i, (row, _, _) in enumerate(entries) for j, v in row.items()]
        values, at, of = zip(*cells, strict=True)
        matrix = sparse.csr_matrix((values, (at, of)), shape=(len(entries), size))
        longest = max(max(c.seconds for c in self.columns), 1e-30)
        cost, most = np.zeros(size), np.full(size, np.inf)
        weights = [1.0, 1e-9]
        if least:
            weights.reverse()
        cost[:n] = [weights[0] * c.seconds / longest for c in self.columns]
        cost[self.peak], most[self.peak] = weights[1], top
        most[: self.integers] = 1.0
        most[:n] = [self.counts[c.part] for c in self.columns]
        found = program.milp(
            cost,
            constraints=program.LinearConstraint(
                matrix, [low for _, low, _ in entries], [high for _, _, high in entries]
            ),
            integrality=np.arange(size) < self.integers,
            bounds=program.Bounds(np.zeros(size), most),
            options={"mip_rel_gap": gap, "time_limit": 60.0},
        )
        if found.x is None:
            return None
        return [round(x) for x in found.x[:n]]

    def _peaks(self, scale: float) -> list[_Row]:
        """No moment holds more than the peak."""
        columns, parts = list(enumerate(self.columns)), range(len(self.counts))
        kept, saved = self.sums, self.sums + 1
        gradients = saved + len(parts)
        of: dict[int, dict[int, float]] = defaultdict(dict)
        for j, c in columns:
            of[kept][j] = c.kept / scale
            of[saved + c.part][j] = c.saved / scale
            of[gradients + c.part][j] = c.gradients / scale
        rows: list[_Row] = [({**row, at: -1.0}, 0.0, 0.0) for at, row in of.items()]
        end = {kept: 1.0, **{gradients + q: 1.0 for q in parts}, self.peak: -1.0}
        rows.append((end, -math.inf, 0.0))
        for part, last in itertools.product(parts, (0, 1)):
            # parts of which all layers are still saved, and those that have their gradients
            before = part + 1 - last
            held = [
                kept,
                *(saved + q for q in parts[:before]),
                *(gradients + q for q in parts[before:]),
            ]
            row = {**dict.fromkeys(held, 1.0), self.integers + 2 * part + last: -1.0}
            rows.append((row, 0.0, 0.0))
        for (j, c), last in itertools.product(columns, (0, 1)):
            row = {self.integers + 2 * c.part + last: 1.0, self.used[j]: c.beyond(last) / scale}
            rows.append(({**row, self.peak: -1.0}, -math.inf, 0.0))
        return rows
