"""Exchange: a redistribution in which each rank receives exactly the elements it lacks.

Two layouts cut a tensor into boxes.  The elements that a rank lacks of its new box are in other
ranks' old boxes, and each overlap is sent once.  No plan can send fewer words, since a rank has to
receive every element that it does not hold.  Overlaps of one shape between ranks equally far apart
share one ppermute, so a box of any shape can go to any rank.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from shardlib.layouts.dims import Dim, indices
from shardlib.mesh import coordinates

__all__ = ["Exchange", "Round", "exchange", "lacking"]

Held = tuple[Sequence[int], ...]  # per dimension the positions that a rank holds, in its order
Box = tuple[Sequence[int], ...]  # per dimension positions within a block
Side = tuple[tuple[Dim, ...], str]  # dimensions and skew


@dataclass(frozen=True)
class Round:
    """One ppermute: ``takes[s]`` of the sender's old block becomes ``puts[d]`` of the new one."""

    pairs: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    takes: Mapping[int, Box]
    puts: Mapping[int, Box]


@dataclass(frozen=True)
class Exchange:
    """Plan from old blocks to new ones: the elements each rank keeps, and rounds of ppermute.

    ``kept``   rank -> its kept elements, in the old block and in the new one.
    ``shape``  of the new blocks.
    """

    shape: tuple[int, ...]
    kept: Mapping[int, tuple[Box, Box]]
    rounds: tuple[Round, ...]


def lacking(
    a: Side, b: Side, shape: Sequence[int], sizes: Mapping[str, int], axes: Sequence[str]
) -> Fraction:
    """Count the words a rank must receive, on average, to hold box ``b`` where it holds ``a``."""
    total, count = 0, 0
    for old, new in zip(
        *(_held(side, tuple(shape), tuple(sizes.items()), tuple(axes)) for side in (a, b)),
        strict=True,
    ):
        total += math.prod(map(len, new)) - math.prod(
            _common(o, n) for o, n in zip(old, new, strict=True)
        )
        count += 1
    return Fraction(total, count)


def exchange(
    a: Side, b: Side, shape: Sequence[int], sizes: Mapping[str, int], axes: Sequence[str]
) -> Exchange:
    """Plan the sends; of several ranks that hold the same box the least busy one sends."""
    old, new = (_held(side, tuple(shape), tuple(sizes.items()), tuple(axes)) for side in (a, b))
    p, holders = len(old), {}
    for rank, held in enumerate(old):
        holders.setdefault(held, []).append(rank)
    busy, kept = [0] * p, {}
    rounds: dict[tuple[int, tuple[int, ...]], list[tuple[int, int, Box, Box]]] = {}
    for target, wanted in enumerate(new):
        for held, ranks in holders.items():
            places = [_places(h, w) for h, w in zip(held, wanted, strict=True)]
            if not all(places):
                continue
            take, put = (tuple(side) for side in zip(*places, strict=True)) if places else ((), ())
            if target in ranks:
                kept[target] = (take, put)
                continue
            source = min(ranks, key=lambda r, t=target: (busy[r], (t - r) % p))
            size = tuple(map(len, put))
            busy[source] += math.prod(size)
            # of one distance and size: each rank sends and receives once, so one ppermute does
            rounds.setdefault(((target - source) % p, size), []).append((source, target, take, put))
    return Exchange(
        tuple(map(len, new[0])),
        kept,
        tuple(
            Round(
                tuple((s, d) for s, d, *_ in moved),
                size,
                {s: take for s, _, take, _ in moved},
                {d: put for _, d, _, put in moved},
            )
            for (_, size), moved in sorted(rounds.items(), key=lambda item: item[0])
        ),
    )


@lru_cache(maxsize=256)
def _held(
    side: Side, shape: tuple[int, ...], mesh: tuple[tuple[str, int], ...], axes: tuple[str, ...]
) -> tuple[Held, ...]:
    """Return the positions that every rank along ``axes`` holds, in rank order."""
    sizes = dict(mesh)
    every = [
        indices(*side, shape, sizes, dict.fromkeys(sizes, 0) | coord)
        for coord in coordinates({a: sizes[a] for a in axes})
    ]
    return tuple(tuple(h if isinstance(h, range) else tuple(h) for h in held) for held in every)


@lru_cache(maxsize=8192)
def _common(old: Sequence[int], new: Sequence[int]) -> int:
    """Count the positions that are in both."""
    if isinstance(old, range) and isinstance(new, range):
        return max(0, min(old.stop, new.stop) - max(old.start, new.start))
    return len({*old} & {*new})


@lru_cache(maxsize=8192)
def _places(old: Sequence[int], new: Sequence[int]) -> tuple[Sequence[int], Sequence[int]] | None:
    """Return where shared positions are in each, in ``new``'s order; None if there are none."""
    if isinstance(old, range) and isinstance(new, range):
        start, stop = max(old.start, new.start), min(old.stop, new.stop)
        if start >= stop:
            return None
        return range(start - old.start, stop - old.start), range(
            start - new.start, stop - new.start
        )
    at = {position: i for i, position in enumerate(old)}
    both = [(at[position], i) for i, position in enumerate(new) if position in at]
    take, put = (_run(side) for side in zip(*both, strict=True)) if both else ((), ())
    return (take, put) if both else None


def _run(places: Sequence[int]) -> Sequence[int]:
    """Write positions as a range if they are consecutive."""
    follow = all(b == a + 1 for a, b in itertools.pairwise(places))
    return range(places[0], places[-1] + 1) if follow else tuple(places)
