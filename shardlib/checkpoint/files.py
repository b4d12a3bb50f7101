"""safetensors files, written chunk by chunk with checksums and read tile by tile.

A file has the data of one rank.  Its header is written last, into space reserved for it, so no
chunk is held or read twice and every file describes itself: ``__metadata__["shardlib"]`` has, per
tensor, the chunk's box, its tiles and the position of their checksums.  Nothing is used before it
is checked, and nothing is unpickled.
"""

import contextlib
import gc
import itertools
import json
import math
import operator
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from shardlib.checkpoint.boxes import (
    BlockRun,
    Box,
    ChunkChecksums,
    Cuts,
    Pair,
    along,
    grid,
    length,
    meet,
    packed,
    shared,
    size,
    stretches,
    sums_of,
    whole,
)
from shardlib.checkpoint.folder import SILENT, Behind
from shardlib.filesystem import allocate, memory, new_file, open_file, parsed, read_all, write_all

_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64",
    "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32",
    "uint64": "U64", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0", "complex64": "C64",
}  # fmt: skip
_BYTES = "float8_e4m3fnuz float8_e5m2fnuz complex32 complex128".split()
"""dtypes that safetensors has no code for: stored as bytes, and named in shardlib's metadata."""

_CODES: dict[torch.dtype, str] = {
    getattr(torch, n): code for n, code in _NAMES.items() if hasattr(torch, n)
} | {getattr(torch, n): f"U8 {n}" for n in _BYTES if hasattr(torch, n)}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}

_HEADER = 100 << 20
"""The most bytes of a header, as in safetensors itself."""


def code_of(dtype: torch.dtype) -> str | None:
    """Return the name of a dtype in a file, or None."""
    return _CODES.get(dtype)


def dtype_of(code: object) -> torch.dtype | None:
    """Return the dtype of a name in a file, or None."""
    return _DTYPES.get(code) if isinstance(code, str) else None


def _stored(shape: Sequence[int], dtype: torch.dtype) -> tuple[str, list[int]]:
    """Return the dtype's name and the shape of a header's entry: odd dtypes are stored as bytes."""
    code, _, odd = (code_of(dtype) or "").partition(" ")
    return code, [*shape, dtype.itemsize] if odd else [*shape]


def _described(box: Box) -> list[list[list[int]]]:
    """Return a box as shardlib's metadata has it: start, stride and length of each run."""
    return [[[r.start, r.stride, r.length] for r in held] for held in box]


class Chunk:
    """A box of a tensor that is contiguous in a file, cut into tiles."""

    box: Box
    dtype: torch.dtype
    cuts: Cuts

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the chunk."""
        return tuple(length(held) for held in self.box)

    @property
    def nbytes(self) -> int:
        """The bytes of the chunk."""
        return size(self.box) * self.dtype.itemsize

    @property
    def sums(self) -> ChunkChecksums:
        """The checksums of the chunk."""
        return sums_of(self.shape, self.cuts, self.dtype)


# ---------------------------------------------------------------- writing


@dataclass(frozen=True)
class WrittenPart(Chunk):
    """A part of a tensor that a rank writes; ``get()`` returns its values when they are written.

    ``of``  the shape of the whole tensor.
    """

    name: str
    box: Box
    of: tuple[int, ...]
    dtype: torch.dtype
    get: Callable[[], Tensor]

    @staticmethod
    def of_whole(
        name: str, shape: tuple[int, ...], dtype: torch.dtype, get: Callable[[], Tensor]
    ) -> "WrittenPart":
        """Return the part that is a whole tensor."""
        return WrittenPart(name, whole(shape), shape, dtype, get)

    @cached_property
    def cuts(self) -> Cuts:  # type: ignore[override]
        """The cuts between its tiles."""
        return grid(self.box, self.of, self.dtype.itemsize)

    @cached_property
    def key(self) -> str:
        """The tensor's name and its chunk, in slice notation."""
        return f"{self.name}@{','.join(map(_slices, self.box))}"


def _slices(held: Sequence[BlockRun]) -> str:
    texts = [f"{r.start}:{r.last + 1}:{r.stride}".removesuffix(":1") for r in held[:4]]
    if len(held) > 4:
        texts.append("...")
    return " ".join(texts)


def written(part: WrittenPart, write: Callable[[memoryview], None]) -> list[int]:
    """Write a part strip by strip, and return the checksums of its tiles and strips."""
    if not part.nbytes:
        return []
    x = part.get()

    def strips() -> Iterator[Tensor]:
        for where, _ in part.sums.strips:
            strip = x[where].detach().resolve_conj().resolve_neg().cpu().contiguous()
            write(memory(strip))
            yield strip

    return part.sums.of_all(strips())


def entries(parts: Mapping[str, WrittenPart]) -> tuple[dict[str, Any], int]:
    """Return the header's entry of each part, one after the other, and the bytes of all."""
    table, end = {}, 0
    for key, p in parts.items():
        code, shape = _stored(p.shape, p.dtype)
        table[key] = {"dtype": code, "shape": shape, "data_offsets": [end, end + p.nbytes]}
        end += p.nbytes
    return table, end


def framed(header: str) -> bytes:
    """Return the bytes of a header, with its length in front."""
    text = header.encode()
    # safetensors aligns the data to 8 bytes with spaces
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_file(
    folder: int,
    name: str,
    parts: Iterable[WrittenPart],
    about: dict[str, str],
    progress: Callable[[], None] = lambda: None,
    seconds: float = SILENT,
) -> dict[str, Any]:
    """Write a new file, flush it to the disk, and return name, size and its header's crc32.

    ``folder``    a descriptor of the directory.
    ``progress``  called after every strip; ``seconds``  the disk may take for one.
    """
    parts = list(parts)
    index: dict[str, Any] = {}
    count = 0
    for p in parts:
        index[p.key] = [_described(p.box), p.cuts, count, code_of(p.dtype)]
        count += p.sums.count
    about = {"format": "pt", **about, "shardlib": json.dumps(index), "sums": ""}
    table, end = entries({p.key: p for p in parts})
    head, tail = json.dumps({"__metadata__": about, **table}).split(_BLANK)

    def header(crcs: list[int]) -> bytes:
        return framed(f'{head}{_SUMS}{_packed(crcs).hex()}"{tail}')

    with new_file(folder, name) as fd:
        # checksums have a fixed width, so this is as long as the final header
        blank = header([0] * count)
        if len(blank) > _HEADER:
            raise ValueError(f"{name}: a header of {len(blank)} bytes; safetensors takes {_HEADER}")
        allocate(fd, len(blank) + end)
        with Behind(fd, len(blank), seconds) as behind:

            def write(data: memoryview) -> None:
                behind.put(data)
                progress()

            crcs = [crc for p in parts for crc in written(p, write)]
        final = header(crcs)
        assert len(final) == len(blank), "checksums have a fixed width"
        # until now the file begins with zeros, which no reader accepts
        write_all(fd, memoryview(final), 0)
    return {"file": name, "bytes": len(final) + end, "crc": zlib.crc32(final)}


_SUMS = '"sums": "'
_BLANK = '"sums": ""'
"""Unique in the JSON text: a quote inside a string is escaped."""


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class FileChunk(Chunk):
    """A box of a tensor, in a file of ``folder`` from ``offset`` on.

    ``crcs``  of each tile, and of the strips; None in foreign files.
    """

    folder: "Folder"
    file: str
    box: Box
    dtype: torch.dtype
    offset: int
    cuts: Cuts
    crcs: bytes | None

    def empty(self, device: str = "cpu") -> Tensor:
        """Make a tensor of its shape and dtype, uninitialised."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def reader(self) -> Callable[[memoryview], None]:
        """Return a function that reads the next bytes of the chunk into memory."""
        at = self.offset

        def read(piece: memoryview) -> None:
            nonlocal at
            self.folder.into(piece, self.file, at)
            self.folder.bytes_read += len(piece)
            at += len(piece)

        return read


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Stop the garbage collector, which would scan a growing table again and again."""
    # restored, not enabled: calls may be nested
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _header_of(fd: int, name: str, have: int, crc: int | None) -> bytes:
    """Read the text of a file's header.  Raises: ValueError."""
    first = os.pread(fd, 8, 0)
    long = int.from_bytes(first, "little")
    if len(first) < 8 or long > min(have - 8, _HEADER):
        raise ValueError(f"{name} has no whole header")
    text = os.pread(fd, long, 8)
    if crc is not None and zlib.crc32(first + text) != crc:
        raise ValueError(f"{name}: the checksum of its header is wrong")
    return text


@uncollected()
def layout_of_file(fd: int, name: str, nbytes: int | None = None, crc: int | None = None) -> Any:
    """Read (table, metadata, offset of the data) of a safetensors file.

    Raises: ValueError for any wrong size, checksum, offset, type or key.
    """
    have = os.fstat(fd).st_size
    if nbytes is not None and have != nbytes:
        raise ValueError(f"{name} has {have} bytes, not {nbytes}")
    text = _header_of(fd, name, have, crc)
    table = parsed(text, name)
    if not isinstance(table, dict):
        raise ValueError(f"{name}: its header is no table")
    meta = table.pop("__metadata__", {})
    if not isinstance(meta, dict) or not all(isinstance(v, str) for v in meta.values()):
        raise ValueError(f"{name}: its metadata is no table of text")
    start = 8 + len(text)
    says = start + _end_of(table, name)
    # nothing may follow the last tensor
    if says != have:
        raise ValueError(f"{name} has {have} bytes, its header says {says}")
    return table, meta, start


def _end_of(table: dict[str, Any], name: str) -> int:
    """Return the bytes of all tensors, which follow one another without gaps."""
    end = 0
    for key, t in sorted(table.items(), key=lambda i: _begin(i[1], name)):
        a, b = t["data_offsets"]
        shape, dtype = t.get("shape"), dtype_of(t.get("dtype"))
        if not _is_numbers(shape) or not is_shape(shape) or dtype is None:
            raise ValueError(f"{name}: {key!r} has no shape or dtype that is known")
        if a != end or b - a != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name}: {key!r} does not fit its place")
        end = b
    return end


def _begin(entry: object, name: str) -> tuple[int, int]:
    found: Any = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not _is_numbers(found) or len(found) != 2 or found[0] < 0:
        raise ValueError(f"{name}: its header has an entry without a place")
    return found[0], found[1]


def _is_numbers(value: object) -> bool:
    """Return whether a value is a list of int; bool is not int."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


def is_shape(shape: Sequence[int]) -> bool:
    """Return whether these may be the sizes of a tensor whose byte count fits 64 bits."""
    return min(shape, default=0) >= 0 and math.prod(max(n, 1) for n in shape) < 1 << 58


@uncollected()
def read_header(folder: "Folder", name: str, nbytes: int, crc: int) -> "Header":
    """Read the header of one of shardlib's files.

    Raises: ValueError, OSError.
    """
    table, meta, begin = layout_of_file(folder.file(name), name, nbytes, crc)
    index = parsed(meta.get("shardlib", "{}"), name)
    if not isinstance(index, dict) or index.keys() != table.keys():
        raise ValueError(f"{name}: what it says of its chunks does not fit them")
    try:
        crcs = bytes.fromhex(meta.get("sums", ""))
    except ValueError:
        raise ValueError(f"{name}: what it says of its checksums is none") from None
    said = {k.rpartition("@")[0]: (k, table[k], index[k]) for k in table}
    return Header(folder, name, begin, said, crcs)


@dataclass(frozen=True)
class Header:
    """The header of a file: a description of its chunks.

    ``said``  the tensor's name -> key, entry and description.
    ``crcs``  their checksums, concatenated.
    """

    folder: "Folder"
    file: str
    begin: int
    said: dict[str, tuple[str, Any, Any]]
    crcs: bytes

    def get(self, name: str, box: Box, dtype: torch.dtype) -> FileChunk:
        """Return a tensor's chunk, which must have this box and dtype.

        Raises: ValueError.
        """
        key, entry, described = self.said.get(name, ("", {}, []))
        if not isinstance(described, list) or described[3:] != [code_of(dtype)]:
            raise ValueError(f"{self.file} does not hold its part of {name!r}")
        there, cuts, first, _ = described
        if there != _described(box):
            raise ValueError(f"{self.file} holds another part of {name!r} than its rank's")
        box = packed(box)
        shape = tuple(length(held) for held in box)
        try:
            sums = _sums(shape, tuple(map(tuple, cuts)), dtype)
            crcs = self.crcs[8 * first : 8 * (first + sums.count)]
            _fit(first >= 0 and len(crcs) == 8 * sums.count)
            _fit((entry["dtype"], entry["shape"]) == _stored(shape, dtype))
        except (TypeError, ValueError):
            raise ValueError(f"{self.file}: {key!r} is not described as a chunk") from None
        offset = self.begin + entry["data_offsets"][0]
        return FileChunk(self.folder, self.file, box, dtype, offset, sums.cuts, crcs)


def _fit(true: bool) -> None:
    """Refuse a description of a chunk."""
    if not true:
        raise ValueError


@lru_cache(maxsize=1 << 12)
def _sums(shape: tuple[int, ...], cuts: Cuts, dtype: torch.dtype) -> ChunkChecksums:
    """Return the checksums of a chunk with these cuts.

    Raises: ValueError for cuts that do not fit the chunk.
    """
    for n, some in zip(shape, cuts, strict=True):
        places = (0, *some, n)
        _fit(set(map(type, some)) <= {int})
        _fit(not any(map(operator.ge, places, some and places[1:])))
    d = along(shape, dtype.itemsize)
    _fit(all(len(some) == n - 1 for some, n in zip(cuts[:d], shape[:d], strict=True)))
    return sums_of(shape, cuts, dtype)


class Folder:
    """Files of one directory, opened by its descriptor and kept open; ``bytes_read`` is counted.

    ``links``  whether files may be links, as in Hugging Face's cache.
    """

    def __init__(
        self, fd: int, links: bool = False, progress: Callable[[], None] = lambda: None
    ) -> None:
        self.fd = fd
        self.links = links
        self.progress = progress
        self.open: dict[str, int] = {}
        self.bytes_read = 0

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        while self.open:
            os.close(self.open.popitem()[1])
        os.close(self.fd)

    def file(self, name: str) -> int:
        """Return the descriptor of a file.

        Raises: ValueError for a name with a path; OSError.
        """
        if name not in self.open:
            if not name or os.path.basename(name) != name or name.startswith(".") or "\0" in name:
                raise ValueError(f"{name!r} is no file of this directory")
            if len(self.open) > _OPEN:
                os.close(self.open.pop(next(iter(self.open))))
            self.open[name] = open_file(self.fd, name, self.links)
        return self.open[name]

    def into(self, out: memoryview, file: str, offset: int) -> None:
        """Read the bytes of a file from ``offset`` on into ``out``.

        Raises: ValueError, OSError.
        """
        read_all(self.file(file), out, offset, file, progress=self.progress)

    def block(self, c: FileChunk, where: Sequence[slice], out: Tensor) -> Tensor:
        """Read a part of a chunk into ``out``, which has its shape and dtype, on the CPU.

        Rows that are close together are read with the gaps between them, others one by one.
        Raises: ValueError, OSError.
        """
        strides = torch.empty(c.shape, device="meta").stride()
        # elements that are contiguous in the file
        run = 1
        for n, all_of_it in zip(reversed(out.shape), reversed(c.shape), strict=True):
            run *= n
            if n < all_of_it:
                break
        begin = sum(s.start * n for s, n in zip(where, strides, strict=True))
        self._rows(c, out, begin, strides, run)
        return out

    def _rows(self, c: FileChunk, out: Tensor, at: int, strides: tuple[int, ...], run: int) -> None:
        """Read a box of a chunk that begins at element ``at``, with the file's ``strides``."""
        item = c.dtype.itemsize
        span = 1 + sum((n - 1) * s for n, s in zip(out.shape, strides, strict=True))
        gaps = (span - out.numel()) * item
        if not gaps and out.is_contiguous():
            return self.into(memory(out), c.file, c.offset + at * item)
        near = gaps <= _NEAR * (out.numel() // run)
        if near and span * item <= _SPAN:
            rows = torch.empty(span, dtype=c.dtype, device="cpu")
            self.into(memory(rows), c.file, c.offset + at * item)
            out.copy_(rows.as_strided(out.shape, strides))
            return None
        if near and (count := _SPAN // (strides[0] * item)):
            for i, part in enumerate(out.split(count)):
                self._rows(c, part, at + i * count * strides[0], strides, run)
            return None
        for i, part in enumerate(out):
            self._rows(c, part, at + i * strides[0], strides[1:], run)
        return None


_SPAN, _NEAR = 1 << 18, 1 << 13
"""The most bytes read at once, and the gap between two rows up to which they are read together."""

_OPEN = 256
"""Files open at a time."""


def fill(out: Tensor, wanted: Box, chunk: FileChunk) -> int:
    """Copy the part of ``wanted`` that a chunk has into ``out``; return the number of elements.

    Only the tiles that contain some are read, and each is checked.
    Raises: ValueError naming the file if a checksum is wrong.
    """
    met = meet(chunk.box, wanted)
    count = shared(met)
    if not count:
        return 0
    as_stored = chunk.dtype == out.dtype and out.device.type == "cpu"
    # everything is wanted as it is stored: read it into place
    if as_stored and count == size(chunk.box) and all(map(_is_run, met)):
        place = out[tuple(pairs[0][1] for pairs in met)]
        if place.is_contiguous():
            _read(place, chunk)
            return count
    rows = [
        _groups(n, cuts, pairs, chunk.crcs is not None)
        for n, cuts, pairs in zip(chunk.shape, chunk.cuts, met, strict=True)
    ]
    for group in itertools.product(*rows):
        _fill_tiles(out, group, chunk, as_stored)
    return count


def _fill_tiles(out: Tensor, group: "tuple[Group, ...]", chunk: FileChunk, as_stored: bool) -> None:
    """Read some adjacent tiles, check them, and copy what is wanted of them."""
    cut = [slice(c[0].start, c[-1].stop) for _, c, _ in group]
    sizes = [s.stop - s.start for s in cut]
    wanted = [pairs for *_, pairs in group]
    tiles = [(first, c) for first, c, _ in group]
    chunk.folder.bytes_read += math.prod(sizes) * chunk.dtype.itemsize
    if as_stored and all(map(_is_run, wanted)) and shared(wanted) == math.prod(sizes):
        piece = chunk.folder.block(chunk, cut, out[tuple(pairs[0][1] for pairs in wanted)])
        _compare(piece, tiles, chunk)
        return
    block = torch.empty(sizes, dtype=chunk.dtype, device="cpu")
    _compare(chunk.folder.block(chunk, cut, block), tiles, chunk)
    for pairs in itertools.product(*wanted):
        piece = block[tuple(s for s, _ in pairs)]
        out[tuple(t for _, t in pairs)] = piece.to(out.device, out.dtype)


def _is_run(pairs: list[Pair]) -> bool:
    """Return whether the wanted positions of a dimension are contiguous, here and there."""
    return len(pairs) == 1 and pairs[0][0].step == pairs[0][1].step == 1


def _read(out: Tensor, chunk: FileChunk) -> None:
    """Read a whole chunk, and check each piece as soon as it is read.

    Raises: ValueError, OSError.
    """
    found: list[int] = []
    sums, read = chunk.sums, chunk.reader()
    for i, (where, _) in enumerate(sums.strips):
        strip = out[where]
        if chunk.crcs is None:
            read(memory(strip))
        else:
            found += sums.whole(strip, i, read)
    _check(found, chunk, 0 if sums.flat else sums.tiles)


def check_chunk(chunk: FileChunk) -> None:
    """Read a whole chunk, strip by strip, and check it.

    Raises: ValueError, OSError.
    """
    if not chunk.nbytes:
        return
    sums, read = chunk.sums, chunk.reader()

    def strips() -> Iterator[Tensor]:
        for _, lengths in sums.strips:
            strip = torch.empty([sum(some) for some in lengths], dtype=chunk.dtype, device="cpu")
            read(memory(strip))
            yield strip

    _check(sums.of_all(strips()), chunk)


def _packed(crcs: list[int]) -> bytes:
    return struct.pack(f">{len(crcs)}q", *crcs)


def _check(found: list[int], chunk: FileChunk, first: int = 0) -> None:
    """Compare checksums, from the ``first`` on.

    Raises: ValueError.
    """
    if chunk.crcs is not None and _packed(found) != chunk.crcs[8 * first :]:
        raise ValueError(f"{chunk.file} is damaged: a checksum is wrong")


def _inside(pairs: list[Pair], cut: slice) -> list[Pair]:
    """Return the part of the pairs within a cut of the source, counted from the cut's start."""
    out = []
    for s, t in pairs:
        first = max(0, -((s.start - cut.start) // s.step))
        begin = s.start + first * s.step
        end = min(s.stop, cut.stop)
        if begin >= end:
            continue
        n = -(-(end - begin) // s.step)
        start = t.start + first * t.step
        there = slice(start, start + (n - 1) * t.step + 1, t.step)
        out.append((slice(begin - cut.start, end - cut.start, s.step), there))
    return out


Group = tuple[int, list[slice], list[Pair]]
"""Adjacent tiles along one dimension: number of the first, their slices, and the wanted pairs."""


def _groups(n: int, cuts: Sequence[int], pairs: list[Pair], checked: bool) -> list[Group]:
    """List the tiles of a dimension that have wanted positions, neighbours joined."""
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
    # only the wanted positions: there is no checksum that needs the rest
    return [
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


def _compare(x: Tensor, tiles: list[tuple[int, list[slice]]], chunk: FileChunk) -> None:
    """Check the tiles of a block, given per dimension as the first tile's number and the slices.

    Raises: ValueError.
    """
    if chunk.crcs is None:
        return
    lengths = [[c.stop - c.start for c in some] for _, some in tiles]
    found = chunk.sums.of_tiles(x, lengths, [some[0] for _, some in tiles])
    numbers = [0]
    for cuts, (first, some) in zip(chunk.cuts, tiles, strict=True):
        count = len(cuts) + 1
        numbers = [k * count + i for k in numbers for i in range(first, first + len(some))]
    if _packed(found) != b"".join(chunk.crcs[8 * k : 8 * k + 8] for k in numbers):
        raise ValueError(f"{chunk.file} is damaged: a checksum is wrong")
