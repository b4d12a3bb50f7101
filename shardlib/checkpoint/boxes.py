"""Boxes: the part of a tensor that a rank holds, the part that it writes, and its checksums.

Per dimension, a box lists the global positions of a block as runs, with the offset of each run in
the block.  A block that several ranks hold is cut into as many parts as it has holders, and each
holder writes one.  The box that one rank writes is its chunk; ``grid`` cuts a chunk into tiles,
each with a checksum, which is computed at memory bandwidth.  Nothing here sends a message.
"""

import bisect
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from shardlib.filesystem import memory
from shardlib.layouts import Layout
from shardlib.mesh import rank_along


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
    """A saved tensor's place: true shape, dtype, layout, the sizes that its blocks tile, mesh axes.

    ``ranks``  the processes at the mesh's coordinates, in row-major order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    tiled: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    @staticmethod
    def of_plain(shape: tuple[int, ...], dtype: torch.dtype, world: int) -> "SavedPlace":
        """Return the place of a plain tensor that ``world`` processes hold whole."""
        dims = Layout.parse("...").resolve(len(shape))
        mesh = ((_PROCESSES, world),)
        return SavedPlace(shape, dtype, dims, shape, mesh, tuple(range(world)))

    @property
    def plain(self) -> bool:
        """Whether the tensor was saved as a plain tensor."""
        return self.mesh[:1] == ((_PROCESSES, len(self.ranks)),)

    def among(self, ranks: Sequence[int]) -> "SavedPlace":
        """Return the place of a plain tensor that only these processes hold; else itself."""
        mesh = ((_PROCESSES, len(ranks)),)
        return self._replace(mesh=mesh, ranks=tuple(ranks)) if self.plain else self


def _run(start: int, stride: int, count: int, at: int = 0) -> Held:
    """Return one run, whose stride is 1 if it has one position; none without positions."""
    if count < 1:
        return ()
    return (BlockRun(start, stride if count > 1 else 1, count, at),)


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple(_run(0, 1, n) for n in shape)


def length(held: Held) -> int:
    """Count the positions along a dimension."""
    return sum(r.length for r in held)


def size(box: Box) -> int:
    """Count the elements of a box."""
    return math.prod(length(held) for held in box)


def _runs(index: Sequence[int], below: int) -> Held:
    """Convert positions into runs, without padding: positions from ``below`` on are dropped."""
    if isinstance(index, range):
        kept = range(index.start, min(index.stop, below), index.step)
        return _run(index.start, index.step, len(kept))
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
        out += _run(r.start + a * r.stride, r.stride, b - a, r.at + a)
        n += r.length
    return tuple(out)


_SMALL = 1 << 16
"""Elements below which one holder writes the block instead of sharing it."""


def chunk(name: str, place: SavedPlace, rank: int) -> Box | None:
    """Return the box that a rank writes, or None.

    Each element is written once, and holders of one block write equal parts of it.

    >>> mesh, layout = (("d", 2), ("x", 2)), Layout.parse("x .")
    >>> x = SavedPlace((4, 2), torch.int8, layout, (4, 2), mesh, (0, 1, 2, 3))
    >>> [chunk("w", x, rank) is None for rank in range(4)].count(True)
    2
    """
    sizes = dict(place.mesh)
    coord = coordinate(rank, sizes)
    box = held(place, rank)
    if not size(box):
        # an empty tensor is written too, once
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
    # the first dimension that is long enough; small blocks are not shared
    long = (d for d, held in enumerate(box) if length(held) >= copies)
    d = next(long, None)
    if copies == 1 or size(box) < _SMALL or d is None:
        return [box]
    n = length(box[d])
    ends = [(i * n // copies, (i + 1) * n // copies) for i in range(copies)]
    return [(*box[:d], _cut(box[d], a, b), *box[d + 1 :]) for a, b in ends]


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
    i = (q.start - p.start) // g * pow(p.stride // g, -1, q.stride // g)
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
    first, row = along(lengths, itemsize), nbytes
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


# ---------------------------------------------------------------- checksums

Lengths = list[list[int]]
"""Lengths of adjacent tiles along each dimension."""

Strip = tuple[tuple[slice, ...], Lengths]
"""A contiguous part of a chunk, and the lengths of its tiles."""

Where = Sequence[slice]
"""Position in a chunk, along each dimension."""


def _nothing(piece: object) -> None:
    """Do nothing with a piece that is in memory."""


@dataclass(frozen=True)
class ChunkChecksums:
    """Checksums of the tiles of one chunk, as ``grid`` cuts it, and of its strips.

    A tile consists of rows: its range of the last dimension that is cut, with everything within.
    Its rows, multiplied by fixed odd numbers, are summed in 4-byte integers; the elements of that
    sum, multiplied by other odd numbers, are summed in 8 bytes: the tile's checksum.  So no tile is
    copied, and reading runs at memory bandwidth.  Before the sum, each number is added its upper 16
    bits: the upper bits of two rows would cancel otherwise.  A strip's checksum is the crc32 of the
    sum of all its rows; a reader of the whole chunk compares only those.

    If tiles are contiguous, each has its ``checksum``, and strips have none.  A strip's checksum is
    not computed from its tiles' if rows are not whole 4-byte numbers, or are cut in two dimensions.
    """

    shape: tuple[int, ...]
    cuts: Cuts
    dtype: torch.dtype

    @cached_property
    def last(self) -> int:
        """The last dimension that is cut."""
        return max((d for d, c in enumerate(self.cuts) if c), default=0)

    @cached_property
    def flat(self) -> bool:
        """Whether each tile is contiguous."""
        before = zip(self.shape[: self.last], self.cuts[: self.last], strict=True)
        return all(len(c) == n - 1 for n, c in before)

    @cached_property
    def in_words(self) -> bool:
        """Whether every row of every tile is a whole number of 4-byte words."""
        inner = math.prod(self.shape[self.last + 1 :]) * self.dtype.itemsize
        return not any(n * inner % 4 for n in (*self.cuts[self.last], self.shape[self.last]))

    @cached_property
    def joined(self) -> bool:
        """Whether a strip's checksum is computed from the sums of its tiles."""
        in_rows = self.last == along(self.shape, self.dtype.itemsize) + 1
        if self.flat or not self.in_words or not in_rows:
            return False
        return all(sum(lengths[self.last - 1]) <= _ROWS for _, lengths in self.strips)

    @cached_property
    def strips(self) -> list[Strip]:
        """The chunk's strips of some megabytes at most: a few rows of tiles each, in order."""
        shape, cuts = self.shape, self.cuts
        if not shape:
            return [((), [])]
        d = along(shape, self.dtype.itemsize)
        fine = [_lengths(stretches(n, c)) for n, c in zip(shape, cuts, strict=True)][d + 1 :]
        row, bands = math.prod(shape[d + 1 :]) * self.dtype.itemsize, [[]]
        for band in stretches(shape[d], cuts[d]):
            if bands[-1] and (band.stop - bands[-1][0].start) * row > STRIP:
                bands.append([])
            bands[-1].append(band)
        out: list[Strip] = []
        for before in itertools.product(*(range(n) for n in shape[:d])):
            where = [slice(i, i + 1) for i in before]
            for some in bands:
                cut = *where, slice(some[0].start, some[-1].stop)
                out.append((cut, [[1]] * d + [_lengths(some)] + fine))
        return out

    @cached_property
    def tiles(self) -> int:
        """The number of tiles."""
        return math.prod(len(c) + 1 for c in self.cuts) if math.prod(self.shape) else 0

    @cached_property
    def count(self) -> int:
        """The number of checksums, of tiles and of strips."""
        return self.tiles + (0 if self.flat or not self.tiles else len(self.strips))

    def of_strip(self, x: Tensor, i: int) -> tuple[list[int], list[int]]:
        """Compute a strip's tile checksums and its own.

        ``x``, on the CPU, is the strip; it has no checksum of its own if tiles are contiguous.
        """
        where, lengths = self.strips[i]
        if not lengths or self.flat:
            return self.of_tiles(x, lengths), []
        rows = self._rows(x, lengths, where)
        own = _crc(rows.sum(0, dtype=rows.dtype)) if self.joined else checksum(memory(x))
        return self._of_rows(rows, lengths, where), [own]

    def of_all(self, strips: Iterable[Tensor]) -> list[int]:
        """Compute the checksums of a chunk, its tiles' and then its strips', one strip at a time."""
        found = [self.of_strip(x, i) for i, x in enumerate(strips)]
        return [n for each in zip(*found, strict=True) for some in each for n in some]

    def of_tiles(self, x: Tensor, lengths: Lengths, where: Where = ()) -> list[int]:
        """Compute the checksums of adjacent tiles, given their lengths and position."""
        if not lengths:
            return [checksum(memory(x.contiguous()))]
        if self.flat:
            whole = itertools.product(*map(_pieces, lengths[: self.last + 1]))
            return [checksum(memory(x[where].contiguous())) for where in whole]
        return self._of_rows(self._rows(x, lengths, where), lengths, where)

    def whole(self, x: Tensor, i: int, read: Callable[[memoryview], None]) -> list[int]:
        """Compute the checksums that cover all of a strip: its own, or those of its tiles.

        ``read``  called with each piece of its memory before the piece is summed.
        """
        where, lengths = self.strips[i]
        if self.flat or not lengths:
            read(memory(x))
            return self.of_tiles(x, lengths)
        if not self.joined:
            return [checksum(memory(x), read)]
        read(memory(x))
        one = [[sum(some)] for some in lengths]  # all rows are one tile's
        return [_crc(self._rows(x, one, where))]

    def _rows(self, x: Tensor, lengths: Lengths, where: Where) -> Tensor:
        """Compute the sums of the rows of tiles, neighbouring tiles in one row."""
        lanes, heights = self._lanes(x), lengths[: self.last]
        width = lanes.shape[-1]
        sums = torch.zeros(math.prod(map(len, heights)), width, dtype=torch.int32, device="cpu")
        # rows that fit the processor's cache
        some = min(_ROWS, max(1, _PIECE // (4 * width)))
        room = torch.empty(some, width, dtype=torch.int32, device="cpu")
        # a row is counted from the chunk's first if strips are joined, else from its tile's
        first = where[self.last - 1].start if self.joined else None
        tall = tuple(math.prod(sizes) for sizes in itertools.product(*heights))
        work = [(lanes, tall, sums)]
        if sum(h != [1] for h in heights) > 1:
            # rows of neighbours do not follow one another
            tiles = (lanes[tile] for tile in itertools.product(*map(_pieces, heights)))
            work = zip(tiles, ((n,) for n in tall), sums.split(1), strict=True)
        for block, each, into in work:
            rows = block.reshape(-1, width)
            into = into.unbind()
            for a, b, tile, factors in _walk(each, some, first):
                if a % some == 0:
                    # mixed together with those of the next tiles
                    part = rows[a : a + some]
                    self._mix(part, room[: len(part)])
                into[tile].addmv_(room[a % some : a % some + b - a].t(), factors)
        return sums

    def _of_rows(self, rows: Tensor, lengths: Lengths, where: Where) -> list[int]:
        """Compute each tile's checksum: its row sums times other odd numbers, in 8 bytes."""
        n, lanes = sum(lengths[self.last]), rows.shape[1]
        first = where[self.last].start * lanes // n if len(where) > self.last else 0
        # cumulative sums give every tile's sum as a difference of two
        sums = (rows * _lane_factors(first % _ROWS, lanes)).cumsum(1)
        ends = sums[:, [lanes * k // n - 1 for k in itertools.accumulate(lengths[self.last])]]
        ends[:, 1:] -= ends[:, :-1].clone()
        return ends.view(-1).tolist()

    def _mix(self, part: Tensor, out: Tensor) -> None:
        """Copy rows of numbers; to each of 4 bytes its upper 16 bits are added."""
        if self.in_words:
            torch.bitwise_right_shift(part, 16, out=out).add_(part)
        else:
            out.copy_(part)

    def _lanes(self, x: Tensor) -> Tensor:
        """View a tensor as rows of integers, of 4 bytes if possible."""
        x = (torch.view_as_real(x) if x.is_complex() else x).flatten(self.last)
        if not self.in_words:
            return x.view(_LANES[min(x.dtype.itemsize, 4)])
        apart = (x.storage_offset(), *x.stride()[:-1])
        if x.stride(-1) != 1 or any(n * x.dtype.itemsize % 4 for n in apart):
            x = x.clone(memory_format=torch.contiguous_format)
        return x.view(torch.int32)


sums_of = lru_cache(maxsize=1 << 12)(ChunkChecksums)
"""``ChunkChecksums``, cached: chunks with equal cuts share one."""


def _lengths(cut: Sequence[slice]) -> list[int]:
    return [s.stop - s.start for s in cut]


def _pieces(lengths: Sequence[int]) -> list[slice]:
    return [slice(b - n, b) for n, b in zip(lengths, itertools.accumulate(lengths), strict=True)]


def _crc(x: Tensor) -> int:
    return zlib.crc32(memory(x))


_LANES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

_ROW = 1 << 12
"""Bytes of a row of ``checksum``."""

_LONG = 1 << 15
"""Bytes from which on ``checksum`` sums rows and columns."""

_PIECE = 1 << 19
"""Bytes that are summed at a time, so that they stay in the processor's cache."""


def checksum(data: memoryview, first: Callable[[memoryview], None] = _nothing) -> int:
    """Compute the crc32 of short data; of long data, that of the sums of its rows and columns.

    Long data are summed piece by piece, rows and columns times fixed odd numbers.  Two flipped bits
    are in two rows, or in two columns, or in one number: at least one sum changes.
    ``first``  called with each piece before the piece is summed.
    """
    crc = 0
    for at in range(0, len(data), _PIECE):
        piece = data[at : at + _PIECE]
        first(piece)
        rows = len(piece) // _ROW if len(data) >= _LONG else 0
        if rows:
            # an odd factor is invertible modulo 2^64: one changed word always changes a sum
            words = torch.frombuffer(piece[: rows * _ROW], dtype=torch.int64).view(rows, -1)
            crc = zlib.crc32(memory(words @ _odd(_ROW // 8)), crc)
            crc = zlib.crc32(memory(words.t() @ _odd(_PIECE // _ROW)[:rows]), crc)
        crc = zlib.crc32(piece[rows * _ROW :], crc)
    return crc


def outline(data: memoryview) -> int:
    """Compute a fingerprint by which two ranks compare replicas.

    For short data it is the crc32; for long data the crc32 of sums over 256 bytes each, at a third
    of the cost of ``checksum``.
    """
    long = len(data) // _SEGMENT * _SEGMENT if len(data) >= _LONG else 0
    crc = 0
    if long:
        words = torch.frombuffer(data[:long], dtype=torch.int64).view(-1, _SEGMENT // 8)
        crc = _crc(words.sum(1))
    return zlib.crc32(data[long:], crc)


_SEGMENT = 1 << 8


@lru_cache(maxsize=256)
def _odd(count: int) -> Tensor:
    """Return fixed odd numbers that look random.

    Source: splitmix64's mixing, Steele et al., 2014.
    """
    x = torch.arange(1, count + 1, dtype=torch.int64, device="cpu") * -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return (x ^ ((x >> 31) & 0x1FFFFFFFF)) | 1


_ROWS = 1 << 15
"""Rows, or positions in a row, that have different factors."""


Piece = tuple[int, int, int, Tensor]
"""Rows of one tile: first, end, tile, and their factors."""


@lru_cache(maxsize=256)
def _walk(tall: Sequence[int], some: int, number: int | None) -> list[Piece]:
    """Cut the rows of tiles of these heights, one below the other, also at each multiple of ``some``.

    A factor depends on the row's number alone, because writer and reader cut pieces differently.
    ``number``  of the first row; None: each tile counts its own rows.
    """
    out = []
    for i, tile in enumerate(_pieces(tall)):
        cuts = range(tile.start // some * some + some, tile.stop, some)
        for a, b in itertools.pairwise([tile.start, *cuts, tile.stop]):
            first = (a - tile.start if number is None else number + a) % _ROWS
            out.append((a, b, i, _distinct()[first : first + b - a]))
    return out


@lru_cache(maxsize=64)
def _lane_factors(first: int, count: int) -> Tensor:
    """Return the factors of positions in a row of sums, from the ``first`` on."""
    return _odd(_ROWS)[torch.arange(first, first + count, device="cpu") % _ROWS]


@lru_cache(maxsize=1)
def _distinct() -> Tensor:
    """Return fixed odd numbers of 4 bytes.

    The last 17 bits of 32,768 in a row differ, and none is another's negative: so one bit in two
    rows of a column never cancels, nor do two bits of it in any rows.
    """
    lower = torch.arange(_ROWS, device="cpu") * 0x2545 % _ROWS * 4 + 1
    return (_odd(_ROWS) & ~0x1FFFF | lower).to(torch.int32).repeat(2)
