"""Checksums of a chunk's tiles and strips, computed at memory bandwidth."""

import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from shardlib.checkpoint.boxes import STRIP, Cuts, along, stretches
from shardlib.checkpoint.folder import memory

__all__ = ["Strip", "ChunkChecksums", "checksum", "outline", "strips", "sums_of"]

Strip = tuple[tuple[slice, ...], list[list[int]]]
"""A contiguous part of a chunk, and the lengths of its tiles along each dimension."""


@lru_cache(maxsize=256)
def strips(shape: tuple[int, ...], cuts: Cuts, itemsize: int) -> list[Strip]:
    """Cut a chunk into strips of some megabytes at most: a few rows of tiles each, in order."""
    if not shape:
        return [((), [])]
    d = along(shape, itemsize)
    fine = [
        [t.stop - t.start for t in stretches(n, c)]
        for n, c in zip(shape[d + 1 :], cuts[d + 1 :], strict=True)
    ]
    row, bands = math.prod(shape[d + 1 :]) * itemsize, [[]]
    for band in stretches(shape[d], cuts[d]):
        if bands[-1] and (band.stop - bands[-1][0].start) * row > STRIP:
            bands.append([])
        bands[-1].append(band)
    out: list[Strip] = []
    for before in itertools.product(*(range(n) for n in shape[:d])):
        for some in bands:
            lengths = [[1]] * d + [[c.stop - c.start for c in some]] + fine
            where = tuple(slice(i, i + 1) for i in before)
            out.append(((*where, slice(some[0].start, some[-1].stop)), lengths))
    return out


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
        if (
            self.flat
            or not self.in_words
            or self.last != along(self.shape, self.dtype.itemsize) + 1
        ):
            return False
        return all(sum(lengths[self.last - 1]) <= _ROWS for _, lengths in self.strips)

    @cached_property
    def strips(self) -> list[Strip]:
        """The strips of the chunk, as ``strips`` cuts it."""
        return strips(self.shape, self.cuts, self.dtype.itemsize)

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

    def of_tiles(
        self, x: Tensor, lengths: list[list[int]], where: Sequence[slice] = ()
    ) -> list[int]:
        """Compute the checksums of adjacent tiles, given their lengths along each dimension.

        ``where``  their position in the chunk.
        """
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
        lanes = self._lanes(x)
        if lanes.data_ptr() != x.data_ptr():  # a copy, made before the strip was read
            read(memory(x))
            lanes, read = self._lanes(x), lambda piece: None
        lanes = lanes.flatten(0, -2)
        some, room = _room(lanes.shape[-1])
        total, at = lanes.new_zeros(lanes.shape[-1]), where[self.last - 1].start
        for part in lanes.split(some):
            read(memory(part))
            mixed = torch.bitwise_right_shift(part, 16, out=room[: len(part)]).add_(part)
            total.addmv_(mixed.t(), _factors(at, len(part)))
            at += len(part)
        return [_crc(total)]

    def _rows(self, x: Tensor, lengths: list[list[int]], where: Sequence[slice]) -> Tensor:
        """Compute the sums of the rows of tiles, neighbouring tiles in one row."""
        first = where[self.last - 1].start if self.joined else None
        lanes = self._lanes(x)
        width = lanes.shape[-1]
        sums = torch.zeros(
            math.prod(map(len, lengths[: self.last])), width, dtype=torch.int32, device="cpu"
        )
        some, room = _room(width)
        heights = [tuple(h) for h in lengths[: self.last] if h != [1]]
        if len(heights) < 2:
            self._mix(lanes.flatten(0, -2), _walk((*heights, (1,))[0], some, first), room, sums)
            return sums
        tiles = itertools.product(*map(_pieces, lengths[: self.last]))
        for where, row in zip(tiles, sums.split(1), strict=True):
            block = lanes[where].reshape(-1, width)
            self._mix(block, _walk((len(block),), some, None), room, row)
        return sums

    def _of_rows(self, rows: Tensor, lengths: list[list[int]], where: Sequence[slice]) -> list[int]:
        """Compute each tile's checksum: its row sums times other odd numbers, in 8 bytes."""
        n, lanes = sum(lengths[self.last]), rows.shape[1]
        first = where[self.last].start * lanes // n if len(where) > self.last else 0
        # cumulative sums give every tile's sum as a difference of two
        sums = (rows * _lane_factors(first % _ROWS, lanes)).cumsum(1)
        ends = sums[:, [lanes * k // n - 1 for k in itertools.accumulate(lengths[self.last])]]
        ends[:, 1:] -= ends[:, :-1].clone()
        return ends.view(-1).tolist()

    def _mix(self, lanes: Tensor, walk: "list[Walk]", room: Tensor, sums: Tensor) -> None:
        """Add the rows of each tile, mixed in ``room``, to the tile's row of ``sums``."""
        rows = sums.unbind()
        for start, stop, parts in walk:
            part, mixed = lanes[start:stop], room[: stop - start]
            if self.in_words:
                torch.bitwise_right_shift(part, 16, out=mixed).add_(part)
            else:
                mixed.copy_(part)
            for i, first, last, factors in parts:
                rows[i].addmv_(mixed[first:last].t(), factors)

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


def _pieces(lengths: Sequence[int]) -> list[slice]:
    return [slice(b - n, b) for n, b in zip(lengths, itertools.accumulate(lengths), strict=True)]


def _crc(x: Tensor) -> int:
    return zlib.crc32(memory(x))


def _room(width: int) -> tuple[int, Tensor]:
    """Return the number of rows that fit the processor's cache, and a buffer for as many."""
    some = max(1, _PIECE // (4 * width))
    return some, torch.empty(some, width, dtype=torch.int32, device="cpu")


Walk = tuple[int, int, list[tuple[int, int, int, Tensor]]]
"""Rows that are mixed together: first, end, and (tile, first, end, factors) of each part."""


@lru_cache(maxsize=256)
def _walk(heights: tuple[int, ...], some: int, number: int | None) -> list[Walk]:
    """Divide tiles of these heights, one below the other, into groups of about ``some`` rows.

    ``number``  of the first row; None: each tile counts its own rows.
    """
    out: list[Walk] = []
    at = 0
    for i, height in enumerate(heights):
        for first in range(0, height, some):
            n = min(some, height - first)
            if not out or at + n - out[-1][0] > some:
                out.append((at, at, []))
            start, _, parts = out[-1]
            parts.append(
                (
                    i,
                    at - start,
                    at + n - start,
                    _factors(first if number is None else number + at, n),
                )
            )
            out[-1] = (start, at + n, parts)
            at += n
    return out


_LANES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

_ROW = 1 << 12
"""Bytes of a row of ``checksum``."""

_LONG = 1 << 15
"""Bytes from which on ``checksum`` sums rows and columns."""

_PIECE = 1 << 19
"""Bytes that are summed at a time, so that they stay in the processor's cache."""


def checksum(data: memoryview, first: Callable[[memoryview], None] = lambda piece: None) -> int:
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


def _factors(first: int, count: int) -> Tensor:
    """Return the factors of rows, from the ``first`` on.

    A factor depends on the row's number alone, because writer and reader cut pieces differently.
    """
    first %= _ROWS
    return _repeated(-(-(first + count) // _ROWS))[first : first + count]


@lru_cache(maxsize=8)
def _repeated(times: int) -> Tensor:
    return _distinct(_ROWS).repeat(times)


@lru_cache(maxsize=64)
def _lane_factors(first: int, count: int) -> Tensor:
    """Return the factors of positions in a row of sums, from the ``first`` on."""
    table = _odd(_ROWS)
    return (
        table[first : first + count]
        if first + count <= _ROWS
        else table.roll(-first).repeat(-(-count // _ROWS))[:count]
    )


@lru_cache(maxsize=1)
def _distinct(count: int) -> Tensor:
    """Return fixed odd numbers of 4 bytes.

    The last 17 bits of 32,768 in a row differ, and none is another's negative: so one bit in two
    rows of a column never cancels, nor do two bits of it in any rows.
    """
    lower = torch.arange(count, device="cpu") * 0x2545 % _ROWS * 4 + 1
    return (_odd(count) & ~0x1FFFF | lower).to(torch.int32)
