"""Boxes: the part of a tensor that a rank holds, and the part that it writes.  Pure, no messages.

Per dimension, a box lists the global positions of a block as runs, with the offset of each run in
the block.  A block that several ranks hold is cut into as many parts as it has holders, and each
holder writes one.  The box that one rank writes is its chunk; ``grid`` cuts a chunk into tiles,
each with a checksum.
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
    "Cuts",
    "Held",
    "SavedPlace",
    "BlockRun",
    "along",
    "chunk",
    "coordinate",
    "grid",
    "held",
    "length",
    "meet",
    "packed",
    "shared",
    "shares",
    "size",
    "stretches",
    "whole",
]


class BlockRun(NamedTuple):
    """Positions start, start + stride, ...: ``length`` of them.

    They are contiguous in the block, from offset ``at`` on.
    """

    start: int
    stride: int
    length: int
    at: int

    @property
    def last(self) -> int:
        """The last position."""
        return self.start + self.stride * (self.length - 1)


Held = tuple[BlockRun, ...]
"""Positions of a block along one dimension."""

Box = tuple[Held, ...]
"""Positions of a block, along every dimension."""


_PROCESSES = ""
"""Mesh axis of a plain tensor: a name that no mesh can have."""


class SavedPlace(NamedTuple):
    """A saved tensor's place: true shape, layout, the sizes that its blocks tile, mesh axes.

    ``ranks``  the processes at the mesh's coordinates, in row-major order.
    """

    shape: tuple[int, ...]
    layout: Layout
    tiled: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    @staticmethod
    def of_plain(shape: tuple[int, ...], world: int) -> "SavedPlace":
        """Return the place of a plain tensor that ``world`` processes hold whole."""
        dims = Layout.parse("...").resolve(len(shape))
        return SavedPlace(shape, dims, shape, ((_PROCESSES, world),), tuple(range(world)))

    @property
    def plain(self) -> bool:
        """Whether the tensor was saved as a plain tensor."""
        return self.mesh[:1] == ((_PROCESSES, len(self.ranks)),)


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((BlockRun(0, 1, n, 0),) if n else () for n in shape)


def length(held: Held) -> int:
    """Count the positions along a dimension."""
    return sum(r.length for r in held)


def size(box: Box) -> int:
    """Count the elements of a box."""
    return math.prod(length(held) for held in box)


def _runs(index: Sequence[int], below: int) -> Held:
    """Convert positions into runs, without padding: positions from ``below`` on are dropped."""
    if isinstance(index, range):
        kept = len(range(index.start, min(index.stop, below), index.step))
        return (BlockRun(index.start, index.step if kept > 1 else 1, kept, 0),) if kept else ()
    out: list[BlockRun] = []
    for at, position in enumerate(index):
        if position >= below:
            continue
        if out and out[-1].at + out[-1].length == at:
            start, stride, n, first = out[-1]
            step = position - out[-1].last
            if step == stride or (n == 1 and step > 0):
                out[-1] = BlockRun(start, step, n + 1, first)
                continue
        out.append(BlockRun(position, 1, 1, at))
    return tuple(out)


@lru_cache(maxsize=1 << 14)
def held(place: SavedPlace, rank: int) -> Box:
    """Return the box that a rank of the mesh holds, without padding."""
    sizes = dict(place.mesh)
    index = place.layout.indices(place.tiled, sizes, coordinate(rank, sizes))
    return tuple(_runs(i, n) for i, n in zip(index, place.shape, strict=True))


def coordinate(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the coordinate of a rank in a mesh.

    >>> coordinate(5, {"x": 2, "y": 3})
    {'y': 2, 'x': 1}
    """
    out = {}
    for axis, n in reversed(list(sizes.items())):
        rank, out[axis] = divmod(rank, n)
    return out


def _cut(held: Held, start: int, stop: int) -> Held:
    """Return the positions from the ``start``-th to the ``stop``-th, excluded."""
    out, n = [], 0
    for r in held:
        a, b = max(start - n, 0), min(stop - n, r.length)
        if a < b:
            out.append(
                BlockRun(r.start + a * r.stride, r.stride if b - a > 1 else 1, b - a, r.at + a)
            )
        n += r.length
    return tuple(out)


_SMALL = 1 << 16
"""Elements below which one holder writes the block instead of sharing it."""


def chunk(name: str, place: SavedPlace, rank: int) -> Box | None:
    """Return the box that a rank writes, or None.

    Each element is written once, and holders of one block write equal parts of it.

    >>> x = SavedPlace((4, 2), Layout.parse("x ."), (4, 2), (("d", 2), ("x", 2)), (0, 1, 2, 3))
    >>> [chunk("w", x, rank) is None for rank in range(4)].count(True)
    2
    """
    sizes = dict(place.mesh)
    coord = coordinate(rank, sizes)
    box = held(place, rank)
    if not size(box):  # an empty tensor is written too, once
        return box if rank == 0 and not math.prod(place.shape) else None
    # ranks that differ along these axes hold copies
    free = [a for a in sizes if a not in place.layout.axes]
    copies, which = math.prod(sizes[a] for a in free), rank_along(free, coord, sizes)
    parts = shares(place, rank)
    if len(parts) == copies:
        return parts[which]
    at = [coord[a] for a in place.layout.axes]
    # small blocks are spread over their holders by a hash, so that no rank writes them all
    return box if which == zlib.crc32(f"{name} {at}".encode()) % copies else None


def shares(place: SavedPlace, rank: int) -> list[Box]:
    """Return the parts of a block that its holders write: one each, or a single one."""
    box = held(place, rank)
    copies = math.prod(n for a, n in place.mesh if a not in place.layout.axes)
    d = _shared(box, copies)
    if copies == 1 or d is None:
        return [box]
    n = length(box[d])
    ends = [(i * n // copies, (i + 1) * n // copies) for i in range(copies)]
    return [(*box[:d], _cut(box[d], a, b), *box[d + 1 :]) for a, b in ends]


def _shared(box: Box, copies: int) -> int | None:
    """Return the dimension along which holders divide a block; None if it is small."""
    if size(box) < _SMALL:
        return None
    return next((d for d, held in enumerate(box) if length(held) >= copies), None)


# ---------------------------------------------------------------- intersection of two boxes


Pair = tuple[slice, slice]


def _pairs(a: Held, b: Held) -> Iterator[Pair]:
    """List the positions that both hold, as slices of the block of each."""
    # many runs: bisect instead of intersecting all pairs
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


def _common(p: BlockRun, q: BlockRun) -> Iterator[Pair]:
    """Intersect two arithmetic progressions; the result is one too."""
    g = math.gcd(p.stride, q.stride)
    if (q.start - p.start) % g:
        return
    step = p.stride // g * q.stride
    # solve p.start + i * p.stride = q.start (mod q.stride), by the inverse modulo q.stride / g
    i = (q.start - p.start) // g * pow(p.stride // g, -1, q.stride // g) if q.stride > g else 0
    first = p.start + i * p.stride
    floor, last = max(p.start, q.start), min(p.last, q.last)
    first += -((first - floor) // step) * step
    n = (last - first) // step + 1
    if n < 1:
        return
    yield _places(p, first, step, n), _places(q, first, step, n)


def _places(r: BlockRun, first: int, step: int, n: int) -> slice:
    start, by = r.at + (first - r.start) // r.stride, step // r.stride
    return slice(start, start + (n - 1) * by + 1, by if n > 1 else 1)


def meet(a: Box, b: Box) -> list[list[Pair]]:
    """List, per dimension, the slices of common positions; the intersection is their product.

    >>> meet(((BlockRun(0, 1, 4, 0),),), ((BlockRun(1, 2, 2, 0),),))
    [[(slice(1, 4, 2), slice(0, 2, 1))]]
    """
    return [list(_pairs(p, q)) for p, q in zip(a, b, strict=True)]


def shared(met: Sequence[Sequence[Pair]]) -> int:
    """Count the common positions of ``meet``.

    >>> shared([[(slice(1, 4, 2), slice(0, 2, 1))], [(slice(0, 3, 1), slice(0, 3, 1))]])
    6
    """
    return math.prod(sum(len(range(10**18)[s]) for s, _ in pairs) for pairs in met)


def packed(box: Box) -> Box:
    """Return the same positions as a block that holds nothing else.

    >>> packed(((BlockRun(4, 1, 2, 7), BlockRun(9, 1, 1, 0)),))
    ((BlockRun(start=4, stride=1, length=2, at=0), BlockRun(start=9, stride=1, length=1, at=2)),)
    """
    ends = [itertools.accumulate((r.length for r in held), initial=0) for held in box]
    return tuple(
        tuple(r._replace(at=at) for r, at in zip(held, places, strict=False))
        for held, places in zip(box, ends, strict=True)
    )


# ---------------------------------------------------------------- tiles

STRIP = 1 << 22
"""Bytes that are copied at a time at most, if a row is not longer."""

Cuts = tuple[tuple[int, ...], ...]
"""Per dimension of a chunk its cuts: offsets between 0 and its length, ascending."""

_TILE, _SMALLEST, _NARROWEST = 12 << 10, 1 << 10, 1 << 2
"""Bytes, roughly, of a large chunk's tile, of a small chunk's, and of a tile's row."""

_WORLDS = (2, 4, 8, 3, 6, 5, 7, 16, 12, 10, 32, 24, 64, 48, 128, 256)
"""Numbers of ranks that a reader may split a dimension over, the likeliest first."""


@lru_cache(maxsize=1 << 14)
def grid(box: Box, shape: tuple[int, ...], itemsize: int) -> Cuts:
    """Cut a chunk of a tensor of this shape into tiles, each with its checksum.

    A reader reads and checks every tile that it needs a part of.  Tiles therefore end where the
    blocks of other meshes end: at multiples of n / ranks, rounded up if there is padding, for as
    many numbers of ranks as keep tiles above the least size.  The leading dimensions are cut
    further if a strip, a row of adjacent tiles, would exceed ``STRIP`` bytes.

    >>> grid(whole((1024, 128)), (1024, 128), 4)[0][:4]
    (128, 256, 342, 384)
    >>> grid(whole((10, 2)), (10, 2), 4)
    ((), ())
    """
    lengths = [length(held) for held in box]
    nbytes = math.prod(lengths) * itemsize
    cuts: list[set[int]] = [set() for _ in box]
    tile = _TILE if len(box) > 1 else 8 * _TILE
    # the most tiles: 128 of a small chunk, about ``tile`` bytes each of a large one
    most = nbytes // min(tile, max(_SMALLEST, nbytes // 128))
    first, row = along(lengths, itemsize) if box else 0, nbytes
    for d, n in enumerate(lengths[: first + 1]):
        row //= max(n, 1)
        cuts[d] = set(range(step := max(1, STRIP // max(row, 1)), n, step))
    level, left = [0] * len(box), set(range(first, len(box)))
    while left and most > 1:
        d = min(left, key=lambda d: (level[d], d))
        more = cuts[d] | _borders(box[d], shape[d], level[d])
        others = math.prod(len(c) + 1 for i, c in enumerate(cuts) if i != d)
        narrow = d == len(box) - 1 and lengths[d] * itemsize < _NARROWEST * (len(more) + 1)
        if others * (len(more) + 1) > most or narrow:
            left.remove(d)
            continue
        cuts[d], level[d] = more, level[d] + 1
        if level[d] > len(_WORLDS):
            left.remove(d)
    return tuple(tuple(sorted(c)) for c in cuts)


def _borders(held: Held, n: int, level: int) -> set[int]:
    """List the offsets where runs begin (level 0) or where blocks of ``n`` positions end.

    Level k takes blocks over the k-th of ``_WORLDS`` ranks.
    """
    if len(held) > 64:
        return set()
    out: set[int] = set()
    at = 0
    for r in held:
        if level == 0:
            out.add(at)
        else:
            block = -(-n // _WORLDS[level - 1])
            for border in range(-(-(r.start + 1) // block) * block, r.last + 1, block):
                out.add(at - (r.start - border) // r.stride)
        at += r.length
    return out - {0}


def stretches(n: int, cuts: Sequence[int]) -> list[slice]:
    """Cut ``n`` positions into the slices between the cuts.

    >>> stretches(5, (2,))
    [slice(0, 2, None), slice(2, 5, None)]
    """
    return [slice(a, b) for a, b in itertools.pairwise([0, *cuts, n])]


def along(shape: Sequence[int], itemsize: int) -> int:
    """Return the dimension along which strips are cut: the first whose rows fit one strip."""
    inner = math.prod(shape) * itemsize
    for d, n in enumerate(shape):
        inner //= max(n, 1)
        if inner <= STRIP:
            return d
    return 0
