"""Which part of a tensor a rank holds, and which it writes.  Pure; no rank asks another.

A box says per dimension which global positions a block holds, as runs, and where in the block each
run begins.  What several ranks hold alike is cut in as many parts as there are holders, so that
each writes its share.  A chunk, the box that one rank writes, is checked tile by tile: ``grid``
says how it is cut.
"""

import bisect
import itertools
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from shardlib.layouts import Layout
from shardlib.mesh import rank_along

__all__ = [
    "Box",
    "Held",
    "Place",
    "Run",
    "chunk",
    "cuts",
    "grid",
    "meet",
    "shares",
    "size",
    "whole",
]


class Run(NamedTuple):
    """Positions start, start + stride, ...: ``length`` of them, which lie side by side from ``at``
    on in the block.
    """

    start: int
    stride: int
    length: int
    at: int

    @property
    def last(self) -> int:
        return self.start + self.stride * (self.length - 1)


Held = tuple[Run, ...]
"""What a block holds along one dimension."""

Box = tuple[Held, ...]
"""What it holds along each."""


class Place(NamedTuple):
    """Where a saved tensor lies: true shape, layout, the sizes that its blocks tile, mesh axes.

    ``ranks``  the processes at the mesh's coordinates, in their order.
    """

    shape: tuple[int, ...]
    layout: Layout
    tiled: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return tuple((Run(0, 1, n, 0),) if n else () for n in shape)


def length(held: Held) -> int:
    return sum(r.length for r in held)


def size(box: Box) -> int:
    """Number of elements."""
    return math.prod(length(held) for held in box)


def _runs(index: Sequence[int], below: int) -> Held:
    """Positions in the order held, as runs; those from ``below`` on are padding and left out."""
    if isinstance(index, range):
        kept = len(range(index.start, min(index.stop, below), index.step))
        return (Run(index.start, index.step if kept > 1 else 1, kept, 0),) if kept else ()
    out: list[Run] = []
    for at, position in enumerate(index):
        if position >= below:
            continue
        if out and out[-1].at + out[-1].length == at:
            start, stride, n, first = out[-1]
            step = position - out[-1].last
            if step == stride or (n == 1 and step > 0):
                out[-1] = Run(start, step, n + 1, first)
                continue
        out.append(Run(position, 1, 1, at))
    return tuple(out)


@lru_cache(maxsize=1 << 14)
def held(place: Place, rank: int) -> Box:
    """What the rank with this number in the mesh holds, padding left out."""
    sizes = dict(place.mesh)
    index = place.layout.indices(place.tiled, sizes, _coordinate(rank, sizes))
    return tuple(_runs(i, n) for i, n in zip(index, place.shape, strict=True))


def _coordinate(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    out = {}
    for axis, n in reversed(list(sizes.items())):
        rank, out[axis] = divmod(rank, n)
    return out


def _cut(held: Held, start: int, stop: int) -> Held:
    """The ``start``-th to ``stop``-th position held."""
    out, n = [], 0
    for r in held:
        a, b = max(start - n, 0), min(stop - n, r.length)
        if a < b:
            out.append(Run(r.start + a * r.stride, r.stride if b - a > 1 else 1, b - a, r.at + a))
        n += r.length
    return tuple(out)


_SMALL = 1 << 16
"""Elements below which a block is not shared among its holders but written by one of them."""


def chunk(name: str, place: Place, rank: int) -> Box | None:
    """What ``rank`` writes of a tensor, None for nothing.

    Each element is written once, and holders of one block write equal parts of it.

    >>> x = Place((4, 2), Layout.parse("x ."), (4, 2), (("d", 2), ("x", 2)), (0, 1, 2, 3))
    >>> [chunk("w", x, rank) is None for rank in range(4)].count(True)
    2
    """
    sizes = dict(place.mesh)
    coord = _coordinate(rank, sizes)
    box = held(place, rank)
    if not size(box):  # an empty tensor is written too, once
        return box if rank == 0 and not math.prod(place.shape) else None
    free = [a for a in sizes if a not in place.layout.axes]
    copies, which = math.prod(sizes[a] for a in free), rank_along(free, coord, sizes)
    parts = shares(place, rank)
    if len(parts) == copies:
        return parts[which]
    at = [coord[a] for a in place.layout.axes]
    return box if which == zlib.crc32(f"{name} {at}".encode()) % copies else None


def shares(place: Place, rank: int) -> list[Box]:
    """The parts in which the holders of a block write it: one each, or a single one."""
    box = held(place, rank)
    copies = math.prod(n for a, n in place.mesh if a not in place.layout.axes)
    d = _shared(box, copies)
    if copies == 1 or d is None:
        return [box]
    n = length(box[d])
    ends = [(i * n // copies, (i + 1) * n // copies) for i in range(copies)]
    return [(*box[:d], _cut(box[d], a, b), *box[d + 1 :]) for a, b in ends]


def _shared(box: Box, copies: int) -> int | None:
    """The dimension along which holders divide a block; None where it is small."""
    if size(box) < _SMALL:
        return None
    return next((d for d, held in enumerate(box) if length(held) >= copies), None)


# ---------------------------------------------------------------- what two boxes share


Pair = tuple[slice, slice]


def _pairs(a: Held, b: Held) -> Iterator[Pair]:
    """Where the positions that both hold lie in the block of each."""
    if len(a) * len(b) > 64 and all(r.stride == 1 for r in (*a, *b)):
        b = tuple(sorted(b))
        starts = [r.start for r in b]
        for p in a:
            first = max(bisect.bisect_right(starts, p.start) - 1, 0)
            last = bisect.bisect_right(starts, p.last)
            for q in b[first:last]:
                yield from _common(p, q)
        return
    for p, q in itertools.product(a, b):
        yield from _common(p, q)


def _common(p: Run, q: Run) -> Iterator[Pair]:
    """Two arithmetic progressions meet in one."""
    g = math.gcd(p.stride, q.stride)
    if (q.start - p.start) % g:
        return
    step = p.stride // g * q.stride
    i = (q.start - p.start) // g * pow(p.stride // g, -1, q.stride // g) if q.stride > g else 0
    first = p.start + i * p.stride
    floor, last = max(p.start, q.start), min(p.last, q.last)
    first += -((first - floor) // step) * step
    n = (last - first) // step + 1
    if n < 1:
        return
    yield _places(p, first, step, n), _places(q, first, step, n)


def _places(r: Run, first: int, step: int, n: int) -> slice:
    start, by = r.at + (first - r.start) // r.stride, step // r.stride
    return slice(start, start + (n - 1) * by + 1, by if n > 1 else 1)


def meet(a: Box, b: Box) -> list[list[Pair]]:
    """Per dimension the pairs of equal places in both; what both hold is their product.

    >>> meet(((Run(0, 1, 4, 0),),), ((Run(1, 2, 2, 0),),))
    [[(slice(1, 4, 2), slice(0, 2, 1))]]
    """
    return [list(_pairs(p, q)) for p, q in zip(a, b, strict=True)]


# ---------------------------------------------------------------- tiles

STRIP = 1 << 22
"""Bytes that are copied at a time at most, where one row is no longer."""

_FINE = 1 << 12
"""Bytes below which a tile is not cut further."""

_PARTS = (2, 4, 8, 24, 48, 16, 32, 3, 6, 12)  # what is tried first comes first


@lru_cache(maxsize=1 << 14)
def grid(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """In how many parts each dimension of a chunk is cut into tiles, each with its checksum.

    A reader that needs some columns reads and checks the tiles that hold them, so all dimensions
    are cut, in up to 48 equal parts: the borders of other layouts are among these.  The leading
    dimensions are cut further where a strip, the tiles side by side, would be too long to copy.

    >>> grid((512, 512), 4), grid((1024, 4096, 4096), 2)
    ((16, 16), (1024, 32, 32))
    """
    parts, inner = [1] * len(shape), math.prod(shape) * itemsize
    for d, n in enumerate(shape):
        if inner <= STRIP:
            break
        row = inner // n
        if row >= STRIP:
            parts[d], inner = n, row
            continue
        need = -(-n // (STRIP // row))
        parts[d] = next((p for p in range(need, min(4 * need, n) + 1) if n % p == 0), need)
        break
    tile = math.prod(-(-n // p) for n, p in zip(shape, parts, strict=True)) * itemsize
    while tile > _FINE:
        free = [
            (n // parts[d], -d, more)
            for d, n in enumerate(shape)
            if (more := _more(n, parts[d])) and _wide(shape, d, more, itemsize)
        ]
        if not free:
            break
        _, d, more = max(free)  # tiles are about square
        tile, parts[-d] = tile * parts[-d] // more, more
    return tuple(parts)


def _more(n: int, parts: int) -> int:
    """The next number of equal parts that has all borders of these; 0 for none."""
    return next((p for p in _PARTS if p > parts and p % parts == 0 and n % p == 0), 0)


def _wide(shape: tuple[int, ...], d: int, parts: int, itemsize: int) -> bool:
    """Whether a tile's rows would still be worth reading apart."""
    return math.prod(shape[d + 1 :]) * itemsize * shape[d] // parts >= 128


def cuts(n: int, parts: int) -> list[slice]:
    """``n`` places in so many parts, as equal as can be.

    >>> cuts(5, 2)
    [slice(0, 2, None), slice(2, 5, None)]
    """
    return [slice(i * n // parts, (i + 1) * n // parts) for i in range(parts)]
