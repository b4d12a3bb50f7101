"""safetensors files written chunk by chunk with checksums, and read tile by tile into own memory.

A file holds what one rank wrote.  Its header is written twice at one size, first with blank
checksums and at the end with the right ones, so that no chunk is held or read twice and every file
says what is in it: ``__metadata__["shardlib"]`` has, per tensor, the chunk's box, its tiles and
their crc32.  Nothing that is read is believed before it was checked, and nothing is unpickled.
"""

import ctypes
import itertools
import json
import math
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from shardlib.checkpoint.boxes import (
    STRIP,
    Box,
    Cuts,
    Pair,
    Run,
    along,
    grid,
    length,
    meet,
    size,
    stretches,
)

__all__ = [
    "Chunk", "Folder", "Header", "Part", "check_chunk", "checksum", "code_of", "dtype_of", "fill", "in_large_pages",
    "layout_of_file", "memory", "open_file", "read_header", "sums_of", "strips", "written", "write_file",
]  # fmt: skip

_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32",
    "uint64": "U64", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0", "complex64": "C64",
}  # fmt: skip
_BYTES = "float8_e4m3fnuz float8_e5m2fnuz complex32 complex128".split()
"""dtypes that safetensors has no code for: kept as bytes, and named in our metadata."""

_CODES: dict[torch.dtype, str] = {
    getattr(torch, n): code for n, code in _NAMES.items() if hasattr(torch, n)
} | {getattr(torch, n): f"U8 {n}" for n in _BYTES if hasattr(torch, n)}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}

_HEADER = 100 << 20
"""Bytes of a header at most, as safetensors itself has it."""

_FLUSH = 1 << 28
"""Bytes after which what was written is sent to the disk, so that the last fsync is short."""


def code_of(dtype: torch.dtype) -> str | None:
    """The name of a dtype in a file, None where it has none."""
    return _CODES.get(dtype)


def dtype_of(code: object) -> torch.dtype | None:
    return _DTYPES.get(code) if isinstance(code, str) else None


def memory(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor of this host."""
    nbytes = x.numel() * x.dtype.itemsize
    if not nbytes:
        return memoryview(b"")
    held = (ctypes.c_ubyte * nbytes).from_address(x.data_ptr())  # numpy is not a dependency
    held.tensor = x  # type: ignore[attr-defined]  # which lives as long as the view
    return memoryview(held).cast("B")


def _here(x: Tensor) -> Tensor:
    """Contiguous on this host, and a copy only where it was not."""
    return x.detach().resolve_conj().resolve_neg().cpu().contiguous()


def in_large_pages(x: Tensor) -> None:
    """Ask the system to back new memory of this host by large pages, where it may: what is about to
    be filled is then not fetched 4096 bytes at a time.
    """
    if _MADVISE is None or x.device.type != "cpu" or x.nbytes < _FEW:
        return
    start = x.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = x.data_ptr() + x.nbytes - start
    _MADVISE(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


_FEW = 1 << 18
_MADVISE = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None


# ---------------------------------------------------------------- writing


@dataclass(frozen=True)
class Part:
    """What a rank writes of a tensor: ``get()`` is the block's part, asked for when it is due.

    ``of``  the shape of the whole tensor.
    """

    name: str
    box: Box
    of: tuple[int, ...]
    dtype: torch.dtype
    get: Callable[[], Tensor]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(length(held) for held in self.box)

    @property
    def nbytes(self) -> int:
        return size(self.box) * self.dtype.itemsize

    @property
    def cuts(self) -> Cuts:
        return grid(self.box, self.of, self.dtype.itemsize)


Strip = tuple[tuple[slice, ...], list[list[int]]]
"""A stretch of a chunk that lies in one piece, and how its dimensions are cut into tiles."""


@lru_cache(maxsize=256)
def strips(shape: tuple[int, ...], cuts: Cuts, itemsize: int) -> list[Strip]:
    """A chunk in stretches of some megabytes at most, each a few rows of tiles, in their order."""
    if not shape:
        return [((), [])]
    d = along(shape, itemsize)
    fine = [_lengths(n, c) for n, c in zip(shape[d + 1 :], cuts[d + 1 :], strict=True)]
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


def _lengths(n: int, cuts: Sequence[int]) -> list[int]:
    return [c.stop - c.start for c in stretches(n, cuts)]


@dataclass(frozen=True)
class Sums:
    """Checksums of the tiles of one chunk, as ``grid`` cuts it, and of its strips.

    A tile is rows: its part of the last dimension that is cut, with what is within.  The sum of the
    rows times fixed odd numbers, in integers of 4 bytes, is one row, whose crc32 is the tile's.  So
    no tile is copied, and what is read runs at the speed of memory.  Before it is summed a number
    is added its upper half: the upper bits of two rows would cancel otherwise.
    A tile that lies in one stretch has that stretch's ``checksum``, and so has each strip where
    tiles do not: whoever reads a chunk from end to end compares those.
    """

    shape: tuple[int, ...]
    cuts: Cuts
    dtype: torch.dtype

    @cached_property
    def last(self) -> int:
        return max((d for d, c in enumerate(self.cuts) if c), default=0)

    @cached_property
    def flat(self) -> bool:
        """Whether tiles lie in one stretch each."""
        before = zip(self.shape[: self.last], self.cuts[: self.last], strict=True)
        return all(len(c) == n - 1 for n, c in before)

    @cached_property
    def in_words(self) -> bool:
        """Whether every row of every tile is whole numbers of 4 bytes."""
        inner = math.prod(self.shape[self.last + 1 :]) * self.dtype.itemsize
        return not any(n * inner % 4 for n in (*self.cuts[self.last], self.shape[self.last]))

    @cached_property
    def strips(self) -> list[Strip]:
        return strips(self.shape, self.cuts, self.dtype.itemsize)

    @cached_property
    def tiles(self) -> int:
        """How many tiles there are."""
        return math.prod(len(c) + 1 for c in self.cuts) if math.prod(self.shape) else 0

    @cached_property
    def count(self) -> int:
        """How many checksums there are, of tiles and of strips."""
        return self.tiles + (0 if self.flat or not self.tiles else len(self.strips))

    def of(self, x: Tensor, lengths: list[list[int]]) -> list[int]:
        """Those of some tiles side by side, on this host: their lengths along each dimension."""
        if not lengths:
            return [checksum(memory(x.contiguous()))]
        ends = [[0, *itertools.accumulate(some)] for some in lengths]
        pieces = [list(map(slice, e, e[1:])) for e in ends]
        if self.flat:
            whole = itertools.product(*pieces[: self.last + 1])
            return [checksum(memory(x[where].contiguous())) for where in whole]
        lanes = self._lanes(torch.view_as_real(x) if x.is_complex() else x)
        tiles, columns = list(itertools.product(*pieces[: self.last])), ends[self.last]
        width = lanes.shape[-1]
        sums = torch.zeros(len(tiles), width, dtype=torch.int32)
        some = max(1, _PIECE // (4 * width))  # rows that stay near the processor
        room = torch.empty(some, width, dtype=torch.int32)
        for where, row in zip(tiles, sums, strict=True):
            block = lanes[where]
            if block.ndim != 2:
                block = block.reshape(-1, width)
            for part, factors in zip(
                block.split(some), _distinct(len(block)).split(some), strict=True
            ):
                mixed = room[: len(part)]
                if self.in_words:
                    torch.bitwise_right_shift(part, 16, out=mixed).add_(part)
                else:
                    mixed.copy_(part)
                row.addmv_(mixed.t(), factors)
        data, step = memory(sums), sums.shape[1] * sums.itemsize // columns[-1]
        cuts = [(a * step, b * step) for a, b in itertools.pairwise(columns)]
        begins, crc32 = range(0, len(data), columns[-1] * step), zlib.crc32
        return [crc32(data[i + a : i + b]) for i in begins for a, b in cuts]

    def _lanes(self, x: Tensor) -> Tensor:
        """Rows of numbers, of 4 bytes where they can be."""
        x = x.flatten(self.last)
        if not self.in_words:
            return x.view(_LANES[min(x.dtype.itemsize, 4)])
        apart = (x.storage_offset(), *x.stride()[:-1])
        if x.stride(-1) != 1 or any(n * x.dtype.itemsize % 4 for n in apart):
            x = x.clone(memory_format=torch.contiguous_format)
        return x.view(torch.int32)


sums_of = lru_cache(maxsize=1 << 12)(Sums)
"""Those of chunks that are cut alike, made once."""

_LANES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

_ROW = 1 << 12
"""Bytes of a row of a stretch."""

_LONG = 1 << 15
"""Bytes of a stretch from which on it has rows."""

_PIECE = 1 << 19
"""Bytes of a stretch that are summed at a time: they stay near the processor meanwhile."""


def checksum(data: memoryview, first: Callable[[memoryview], None] = lambda piece: None) -> int:
    """The crc32 of a short stretch; of the sums of a long one's rows and columns, piece by piece.

    Rows are summed times fixed odd numbers, columns as they are.  Two flipped bits lie in two rows,
    or in two columns, or in one number: two sums change, or one does.
    ``first``  called with each piece before it is looked at.
    """
    crc = 0
    for at in range(0, len(data), _PIECE):
        piece = data[at : at + _PIECE]
        first(piece)
        rows = len(piece) // _ROW if len(data) >= _LONG else 0
        if rows:
            words = torch.frombuffer(piece[: rows * _ROW], dtype=torch.int64).view(rows, -1)
            crc = zlib.crc32(memory(words @ _odd(_ROW // 8)), crc)
            crc = zlib.crc32(memory(words.sum(0)), crc)
        crc = zlib.crc32(piece[rows * _ROW :], crc)
    return crc


@lru_cache(maxsize=256)
def _odd(count: int) -> Tensor:
    """Fixed odd numbers without a pattern.  Source: splitmix64's mixing, Steele et al., 2014."""
    x = torch.arange(1, count + 1, dtype=torch.int64) * -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return (x ^ ((x >> 31) & 0x1FFFFFFFF)) | 1


@lru_cache(maxsize=256)
def _distinct(count: int) -> Tensor:
    """Fixed odd numbers of 4 bytes; the lower halves of 16,384 differ, and are none's negative: so
    one bit in two rows of a column never cancels, nor two of its bits in any rows.
    """
    lower = torch.arange(count) * 0x2545 % (1 << 14) * 4 + 1
    return (_odd(count) & ~0xFFFF | lower).to(torch.int32)


def written(part: Part, write: Callable[[memoryview], None]) -> list[int]:
    """Write a part strip by strip; the checksums of its tiles, and of its strips."""
    crcs: list[int] = []
    of_strips: list[int] = []
    if not part.nbytes:
        return crcs
    x, sums = part.get(), sums_of(part.shape, part.cuts, part.dtype)
    for where, lengths in sums.strips:
        strip = _here(x[where])
        crcs += sums.of(strip, lengths)
        if sums.flat:
            write(memory(strip))
        else:
            of_strips.append(checksum(memory(strip), write))
    return crcs + of_strips


def write_file(
    folder: int,
    name: str,
    parts: Iterable[Part],
    about: dict[str, str],
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Write a new file and flush it to the disk; its name, size and the crc32 of its header.

    ``folder``  a descriptor of the directory.   ``progress``  called after every strip.
    """
    parts = list(parts)
    table: dict[str, Any] = {}
    index: dict[str, Any] = {}
    end = 0
    for p in parts:
        shape = p.shape
        code, _, odd = (code_of(p.dtype) or "").partition(" ")
        stored = [*shape, p.dtype.itemsize] if odd else list(shape)
        table[_key(p)] = {
            "dtype": code,
            "shape": stored,
            "data_offsets": [end, end + p.nbytes],
        }
        index[_key(p)] = [
            [[[r.start, r.stride, r.length] for r in held] for held in p.box],
            p.cuts,
            "0" * 8 * sums_of(p.shape, p.cuts, p.dtype).count,
            code_of(p.dtype),
        ]
        end += p.nbytes

    def header() -> bytes:
        text = json.dumps(
            {"__metadata__": {"format": "pt", **about, "shardlib": json.dumps(index)}, **table}
        ).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder)
    try:
        blank, unsent = header(), 0
        if len(blank) > _HEADER:
            raise ValueError(f"{name}: a header of {len(blank)} bytes; safetensors takes {_HEADER}")

        def write(data: memoryview) -> None:
            nonlocal unsent
            write_all(fd, data)
            unsent += len(data)
            if unsent > _FLUSH:
                os.fsync(fd)
                unsent = 0
            progress()

        write_all(fd, memoryview(blank))
        for p in parts:
            index[_key(p)][2] = _packed(written(p, write)).hex()
        final = header()
        assert len(final) == len(blank), "checksums have a fixed width"
        os.lseek(fd, 0, os.SEEK_SET)
        write_all(fd, memoryview(final))
        os.fsync(fd)
    finally:
        os.close(fd)
    return {"file": name, "bytes": len(final) + end, "crc": zlib.crc32(final)}


def _key(p: Part) -> str:
    """A tensor's name and its chunk, in the words of a slice."""
    box = ",".join(
        " ".join(f"{r.start}:{r.last + 1}" + f":{r.stride}" * (r.stride > 1) for r in held[:4])
        + " ..." * (len(held) > 4)
        for held in p.box
    )
    return f"{p.name}@{box}"


def write_all(fd: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(fd, data) :]


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, in a file from ``offset`` on.

    ``cuts``  of its tiles; ``crcs``  of each, and of the strips; None in foreign files.
    """

    file: str
    box: Box
    dtype: torch.dtype
    offset: int
    nbytes: int
    cuts: Cuts
    crcs: bytes | None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(length(held) for held in self.box)

    @property
    def sums(self) -> Sums:
        return sums_of(self.shape, self.cuts, self.dtype)


def layout_of_file(fd: int, name: str, nbytes: int | None = None, crc: int | None = None) -> Any:
    """(table, metadata, where data begins) of a safetensors file.

    Raises: ValueError for whatever is out of order: sizes, checksum, offsets, types, keys.
    """
    have = os.fstat(fd).st_size
    if nbytes is not None and have != nbytes:
        raise ValueError(f"{name} has {have} bytes, not {nbytes}")
    first = os.pread(fd, 8, 0)
    long = int.from_bytes(first, "little")
    if len(first) < 8 or long > min(have - 8, _HEADER):
        raise ValueError(f"{name} has no whole header")
    text = os.pread(fd, long, 8)
    if crc is not None and zlib.crc32(first + text) != crc:
        raise ValueError(f"{name}: the checksum of its header is wrong")
    table = parsed(text, name)
    if not isinstance(table, dict):
        raise ValueError(f"{name}: its header is no table")
    meta = table.pop("__metadata__", {})
    if not _is(meta, dict, str, str):
        raise ValueError(f"{name}: its metadata is no table of text")
    end = 0
    for key, t in sorted(table.items(), key=lambda i: _begin(i[1], name)):
        a, b = t["data_offsets"]
        shape, dtype = t.get("shape"), dtype_of(t.get("dtype"))
        if not _is(shape, list, int) or min(shape, default=0) < 0 or dtype is None:
            raise ValueError(f"{name}: {key!r} has no shape or dtype that is known")
        if a != end or b - a != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: {key!r} does not fit its place")
        end = b
    if 8 + long + end != have:
        raise ValueError(f"{name} has {have} bytes, its header says {8 + long + end}")
    return table, meta, 8 + long


def _begin(entry: Any, name: str) -> tuple[int, int]:
    found: Any = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not _is(found, list, int) or len(found) != 2 or found[0] < 0:
        raise ValueError(f"{name}: its header has an entry without a place")
    return found[0], found[1]


def _is(value: Any, kind: type, *inner: type) -> bool:
    """Whether it is a list or table of such, and no bool among the numbers."""
    if not isinstance(value, kind):
        return False
    if kind is dict:
        return all(isinstance(k, inner[0]) and isinstance(v, inner[1]) for k, v in value.items())
    return set(map(type, value)) <= {inner[0]}


def parsed(text: bytes | str, name: str) -> Any:
    """JSON in which no key stands twice.  Raises: ValueError."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError(f"{name}: a key stands twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise ValueError(f"{name}: nested too deeply") from None
    except ValueError as e:
        raise ValueError(f"{name}: {e}" if name not in str(e) else str(e)) from None


def read_header(fd: int, name: str, nbytes: int, crc: int) -> "Header":
    """The chunks of one of our files.  Raises: ValueError."""
    table, meta, begin = layout_of_file(fd, name, nbytes, crc)
    index = parsed(meta.get("shardlib", "{}"), name)
    if not isinstance(index, dict) or index.keys() != table.keys():
        raise ValueError(f"{name}: what it says of its chunks does not fit them")
    return Header(name, begin, {k.rpartition("@")[0]: (k, table[k], index[k]) for k in table})


@dataclass(frozen=True)
class Header:
    """What a file says of its chunks: by the tensor's name key, entry and description."""

    file: str
    begin: int
    said: dict[str, tuple[str, Any, Any]]

    def get(self, name: str) -> Chunk | None:
        """A chunk, None where the file has none of this tensor.  Raises: ValueError."""
        if name not in self.said:
            return None
        key, entry, described = self.said[name]
        try:
            box, cuts, digits, code = described
            return _chunk(self.file, entry, box, cuts, digits, code, self.begin)
        except (TypeError, ValueError, KeyError, AttributeError):
            raise ValueError(f"{self.file}: {key!r} is not described as a chunk") from None


def _chunk(name: str, entry: Any, box: Any, cuts: Any, digits: Any, code: Any, begin: int) -> Chunk:
    a, b = entry["data_offsets"]
    found = tuple(_held(held) for held in box)
    shape, dtype = tuple(length(held) for held in found), dtype_of(code)
    stored, _, odd = str(code).partition(" ")  # odd: bytes of a dtype that safetensors lacks
    last = [dtype.itemsize] if odd and dtype is not None else []
    if entry["dtype"] != stored or entry["shape"] != [*shape, *last]:
        raise ValueError
    if dtype is None or not isinstance(cuts, list) or not isinstance(digits, str):
        raise ValueError
    for n, some in zip(shape, cuts, strict=True):
        if not _is(some, list, int) or sorted(set(some)) != some:
            raise ValueError
        if some and not 0 < some[0] <= some[-1] < n:
            raise ValueError
    d = along(shape, dtype.itemsize) if shape else 0
    if any(len(some) != n - 1 for some, n in zip(cuts[:d], shape[:d], strict=True)):
        raise ValueError
    tiles: Cuts = tuple(tuple(some) for some in cuts)
    if len(digits) != 8 * sums_of(shape, tiles, dtype).count:
        raise ValueError
    crcs = bytes.fromhex(digits)
    if len(crcs) * 2 != len(digits):  # it leaves spaces out
        raise ValueError
    return Chunk(name, found, dtype, begin + a, b - a, tiles, crcs)


def _held(runs: Any) -> tuple[Run, ...]:
    out, at = [], 0
    for run in runs:
        if not _is(run, list, int) or len(run) != 3 or run[0] < 0 or min(run[1:]) < 1:
            raise ValueError
        out.append(Run(run[0], run[1], run[2], at))
        at += run[2]
    return tuple(out)


def open_file(folder: int, name: str, links: bool = False) -> int:
    """A descriptor to read a file of a directory by; what is no file is not waited for.

    Raises: OSError, ValueError.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    fd = os.open(name, flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError(f"{name} is no file")
    return fd


class Folder:
    """Files of one directory, opened by its descriptor and kept open; ``bytes_read`` is counted.

    ``links``  whether files may be links, as those of Hugging Face's cache are.
    """

    def __init__(
        self, fd: int, links: bool = False, progress: Callable[[], None] = lambda: None
    ) -> None:
        self.fd, self.links, self.progress = fd, links, progress
        self.open: dict[str, int] = {}
        self.maps: dict[str, mmap.mmap] = {}
        self.bytes_read = 0

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.open):
            self._close(name)
        os.close(self.fd)

    def _close(self, name: str) -> None:
        self.maps.pop(name, None)
        os.close(self.open.pop(name))

    def file(self, name: str) -> int:
        """A descriptor.  Raises: ValueError for what is no plain name; OSError."""
        if name not in self.open:
            if not name or os.path.basename(name) != name or name.startswith(".") or "\0" in name:
                raise ValueError(f"{name!r} is no file of this directory")
            if len(self.open) > _OPEN:
                self._close(next(iter(self.open)))
            self.open[name] = open_file(self.fd, name, self.links)
        return self.open[name]

    def into(self, out: memoryview, file: str, offset: int) -> None:
        """The bytes of a file from ``offset`` on."""
        at, fd = 0, self.file(file)
        while at < len(out):
            got = os.preadv(fd, [out[at:]], offset + at)
            if not got:
                raise ValueError(f"{file} ends before its data does")
            at += got
            self.progress()
        self.bytes_read += len(out)

    def mapped(self, c: Chunk) -> Tensor:
        """A chunk as it lies in the file; what is looked at must be copied and checked."""
        if c.file not in self.maps:
            self.maps[c.file] = mmap.mmap(
                self.file(c.file), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        flat = torch.frombuffer(
            self.maps[c.file], dtype=torch.uint8, count=c.nbytes, offset=c.offset
        )
        if c.offset % c.dtype.itemsize:  # foreign files align nothing
            return flat.reshape(*c.shape, c.dtype.itemsize)
        return flat.view(c.dtype).reshape(c.shape)

    def let_go(self, c: Chunk) -> None:
        """Pages that were looked at are not ours to hold."""
        page = mmap.PAGESIZE
        first = c.offset // page * page
        self.maps[c.file].madvise(mmap.MADV_DONTNEED, first, c.offset + c.nbytes - first)


_OPEN = 256
"""Files open at a time."""


def fill(
    out: Tensor, wanted: Box, chunk: Chunk, folder: Folder, turn: Sequence[int] | None = None
) -> int:
    """Copy into the block ``out``, which holds ``wanted``, what a
    chunk has of it; number of elements.  Only the tiles that hold some are read, and each is checked.

    ``turn``  the chunk's dimensions in the order of the block's, where a file has it transposed.
    Raises: ValueError naming the file where a checksum is wrong.
    """
    box = chunk.box if turn is None else tuple(chunk.box[d] for d in turn)
    shared = meet(box, wanted)
    count = math.prod(sum(len(range(10**18)[s]) for s, _ in pairs) for pairs in shared)
    if not count:
        return 0
    if turn is None and _direct(out, chunk, shared, count):
        _read(out[tuple(pairs[0][1] for pairs in shared)] if shared else out, chunk, folder)
        return count
    source = folder.mapped(chunk)
    if turn is not None:
        shared = [shared[list(turn).index(d)] for d in range(len(turn))]
    rows = [
        _groups(n, cuts, pairs, chunk.crcs is not None)
        for n, cuts, pairs in zip(chunk.shape, chunk.cuts, shared, strict=True)
    ]
    for group in itertools.product(*rows):
        block = source[tuple(slice(c[0].start, c[-1].stop) for _, c, _ in group)]
        tiles = [(first, c) for first, c, _ in group]
        folder.bytes_read += math.prod(c[-1].stop - c[0].start for _, c in tiles) * out.itemsize
        folder.progress()
        whole = turn is None and all(_is_all(c, pairs) for _, c, pairs in group)
        if whole and block.dtype == out.dtype and out.device.type == "cpu":
            piece = out[tuple(pairs[0][1] for _, _, pairs in group)].copy_(block)
            _compare(piece, tiles, chunk)
            continue
        block = block.clone(memory_format=torch.contiguous_format)
        if block.ndim > len(group):
            block = block.view(chunk.dtype)[..., 0]
        _compare(block, tiles, chunk)
        for pairs in itertools.product(*(inside for _, _, inside in group)):
            piece, where = block[tuple(s for s, _ in pairs)], tuple(t for _, t in pairs)
            if turn is not None:
                piece, where = piece.permute(*turn), tuple(where[d] for d in turn)
            out[where] = piece.to(out.device, out.dtype)
    del source
    folder.let_go(chunk)
    return count


def _is_all(cuts: list[slice], pairs: list[Pair]) -> bool:
    """Whether all of some tiles is wanted, side by side."""
    if len(pairs) != 1:
        return False
    source, target = pairs[0]
    return source == slice(0, cuts[-1].stop - cuts[0].start, 1) and target.step == 1


def _direct(out: Tensor, chunk: Chunk, shared: list[list[Pair]], count: int) -> bool:
    """Whether all of the chunk is wanted, and goes to one place in memory."""
    if out.device.type != "cpu" or out.dtype != chunk.dtype or count != size(chunk.box):
        return False
    if any(len(pairs) != 1 or pairs[0][1].step != 1 or pairs[0][0].step != 1 for pairs in shared):
        return False
    return out[tuple(pairs[0][1] for pairs in shared)].is_contiguous() if shared else True


def _read(out: Tensor, chunk: Chunk, folder: Folder) -> None:
    """A whole chunk, each piece of it checked as soon as it is read.  Raises: ValueError, OSError."""
    found: list[int] = []
    at, sums, checked = chunk.offset, chunk.sums, chunk.crcs is not None

    def read(piece: memoryview) -> None:
        nonlocal at
        folder.into(piece, chunk.file, at)
        at += len(piece)

    for where, lengths in sums.strips:
        strip = out[where]
        if checked and not sums.flat:
            found.append(checksum(memory(strip), read))
            continue
        read(memory(strip))
        if checked:
            found += sums.of(strip, lengths)
    _check(found, chunk, 0 if sums.flat else sums.tiles)


def check_chunk(chunk: Chunk, folder: Folder) -> None:
    """Read a whole chunk, strip by strip, and check it.  Raises: ValueError, OSError."""
    found: list[int] = []
    of_strips: list[int] = []
    at, sums = chunk.offset, chunk.sums
    if not chunk.nbytes:
        return
    for _, lengths in sums.strips:
        strip = torch.empty([sum(some) for some in lengths], dtype=chunk.dtype)
        folder.into(memory(strip), chunk.file, at)
        at += strip.nbytes
        found += sums.of(strip, lengths)
        if not sums.flat:
            of_strips.append(checksum(memory(strip)))
    _check(found + of_strips, chunk)


def _packed(crcs: list[int]) -> bytes:
    return struct.pack(f">{len(crcs)}I", *crcs)


def _check(found: list[int], chunk: Chunk, first: int = 0) -> None:
    """Compare checksums, from the ``first`` on.  Raises: ValueError."""
    if chunk.crcs is not None and _packed(found) != chunk.crcs[4 * first :]:
        raise ValueError(f"{chunk.file} is damaged: a checksum is wrong")


def _inside(pairs: list[Pair], cut: slice) -> list[Pair]:
    """The pairs as far as they lie within a cut of the source, counted from its start."""
    out = []
    for s, t in pairs:
        first = max(0, -((s.start - cut.start) // s.step)) if s.start < cut.start else 0
        begin = s.start + first * s.step
        end = min(s.stop, cut.stop)
        if begin >= end:
            continue
        n = -(-(end - begin) // s.step)
        start = t.start + first * t.step
        out.append(
            (
                slice(begin - cut.start, end - cut.start, s.step),
                slice(start, start + (n - 1) * t.step + 1, t.step),
            )
        )
    return out


Group = tuple[int, list[slice], list[Pair]]
"""Tiles side by side along one dimension: number of the first, their cuts, and what is wanted."""


def _groups(n: int, cuts: Sequence[int], pairs: list[Pair], checked: bool) -> list[Group]:
    """The tiles of a dimension that hold something wanted, as far as they are neighbours."""
    out: list[Group] = []
    for i, cut in enumerate(stretches(n, cuts)):
        if not any(_inside(pairs, cut)):
            continue
        if out and out[-1][0] + len(out[-1][1]) == i and len(out[-1][1]) < _TOGETHER:
            out[-1][1].append(cut)
        else:
            out.append((i, [cut], []))
    groups = [(i, c, _inside(pairs, slice(c[0].start, c[-1].stop))) for i, c, _ in out]
    if checked:
        return groups
    return [  # without what is not wanted: no checksum asks for it
        (
            i,
            [slice(c[0].start + s.start, c[0].start + s.stop)],
            [(slice(0, s.stop - s.start, s.step), t)],
        )
        for i, c, inside in groups
        for s, t in inside
    ]


_TOGETHER = 16
"""Tiles along one dimension that are read together: some megabytes at most."""


def _compare(x: Tensor, tiles: list[tuple[int, list[slice]]], chunk: Chunk) -> None:
    """Per dimension the first tile's number, and the cuts.  Raises: ValueError."""
    if chunk.crcs is None:
        return
    found = chunk.sums.of(x, [[c.stop - c.start for c in some] for _, some in tiles])
    numbers = [0]
    for cuts, (first, some) in zip(chunk.cuts, tiles, strict=True):
        count = len(cuts) + 1
        numbers = [k * count + i for k in numbers for i in range(first, first + len(some))]
    if _packed(found) != b"".join(chunk.crcs[4 * k : 4 * k + 4] for k in numbers):
        raise ValueError(f"{chunk.file} is damaged: a checksum is wrong")
