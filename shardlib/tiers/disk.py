"""Rows on a disk: a file of whole pages, by direct I/O, and a checksum for each row.

A durable file has two places for each row, and two headers.  A row is written to the place that the
last commit does not use; a commit flushes the rows, and then writes the older header.  So a process
that is killed leaves its last committed generation.

Ranks share a directory, each with a file of its own.  A rank writes over the generation before its
last one only when the last one is on the disk of every rank: no rank is more than one ahead, and a
run is resumed at the newest generation that all ranks have committed.

File: a line about the run, two headers, the rows.  A line is JSON, and below it its checksum.
"""

import contextlib
import fcntl
import json
import mmap
import os
import re
import threading
import time
import uuid
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib import filesystem
from shardlib.errors import BadArgument, ShardError, user_line
from shardlib.tiers.mover import Mover, Ticket

_PAGE = max(mmap.PAGESIZE, 1 << 12)
"""Bytes of which direct I/O transfers whole numbers."""

_ABOUT = _NOTES = 1 << 16
"""Bytes for the line about the run, and for the notes of a header."""

_FORMAT = "shardlib rows 1"

_HELD = 8.0
"""Seconds to wait for a lock: children of a killed process may hold it for some."""

_MAKE = os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def ring_for(nbytes: int) -> int:
    """Return the bytes of buffers with which rows of at most ``nbytes`` are read and written."""
    return min(4 << 20, 2 * max(_PAGE, _pages(nbytes)))


def _flush(fd: int) -> None:
    """Flush the bytes of a file to the disk, and no times."""
    getattr(os, "fdatasync", os.fsync)(fd)


def _name(rank: int) -> str:
    return f"rank_{rank:05d}.rows"


_IS_ROWS = re.compile(r"rank_\d{5,}\.rows").fullmatch


class Generation(NamedTuple):
    """Header of a committed generation; its number is -1 before the first commit.

    ``before``  the number of the one before it.
    ``rows``    name -> bytes, place, checksum or None.
    """

    number: int
    before: int
    notes: Any
    rows: Mapping[str, Sequence[Any]]

    def text(self) -> bytes:
        """Return it as a line with its checksum."""
        return filesystem.sealed(json.dumps(self).encode())


class RowFile:
    """File of one rank: the run that it belongs to, its bytes, and where its rows begin.

    Raises: ValueError for a file that no run made; OSError.
    """

    def __init__(self, folder: int, name: str, flags: int = os.O_RDONLY) -> None:
        self.name, self.fd = name, filesystem.open_file(folder, name, flags=flags, direct=True)
        try:
            about = filesystem.parsed(self._line(0, _ABOUT), name)
            if not isinstance(about, dict) or about.get("format") != _FORMAT:
                raise ValueError(f"{name} is not of format {_FORMAT!r}")
        except BaseException:
            self.close()
            raise
        self.run, self.nbytes, self._header = about["run"], about["bytes"], about["header"]
        self.begin = _ABOUT + 2 * self._header

    def close(self) -> None:
        """Close it, and so unlock it."""
        os.close(self.fd)

    @staticmethod
    def make(folder: int, name: str, run: object, sizes: Mapping[str, int], nbytes: int) -> None:
        """Make a file for ``nbytes`` of rows: its space is reserved first, its name given last."""
        longest = Generation(1 << 63, 1 << 63, None, {n: (b, 1, 1 << 32) for n, b in sizes.items()})
        first = Generation(-1, -1, None, {n: (b, 0, None) for n, b in sizes.items()})
        header = _pages(len(longest.text()) + _NOTES)
        total = _ABOUT + 2 * header + nbytes
        about = {"format": _FORMAT, "run": run, "header": header, "bytes": total}
        text = filesystem.sealed(json.dumps(about).encode())
        if len(text) > _ABOUT:
            raise ValueError(f"the run is described by {len(text)} bytes, of at most {_ABOUT}")
        new = f".{name}.new"
        with contextlib.ExitStack() as undo:
            fd = filesystem.open_file(folder, new, flags=_MAKE, direct=True)
            undo.callback(os.close, fd)
            undo.callback(os.unlink, new, dir_fd=folder)
            filesystem.allocate(fd, total)
            os.ftruncate(fd, total)
            _put(fd, text, 0)
            _put(fd, first.text(), _ABOUT)
            os.fsync(fd)
            os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
            undo.pop_all()
            os.close(fd)

    def _line(self, at: int, nbytes: int) -> bytes:
        held = mmap.mmap(-1, nbytes)
        filesystem.read_all(self.fd, memoryview(held), at, self.name, _PAGE)
        return filesystem.unsealed(held[:].rstrip(b"\0"), self.name)

    def generations(self) -> dict[int, tuple[int, Generation]]:
        """Read the headers that are whole: (which of the two, header) by number."""
        found = {}
        for i in (0, 1):
            # one is torn if its process was killed within the commit
            with contextlib.suppress(ValueError):
                line = self._line(_ABOUT + i * self._header, self._header)
                header = Generation(*filesystem.parsed(line, self.name))
                found[header.number] = i, header
        return found

    def put(self, i: int, text: bytes) -> None:
        """Write one of the two headers, and flush it to the disk."""
        _put(self.fd, text.ljust(self._header, b"\0"), _ABOUT + i * self._header)
        _flush(self.fd)

    def check(self) -> None:
        """Raise ValueError for a file that was removed or cut."""
        found = os.fstat(self.fd)
        if not found.st_nlink or found.st_size != self.nbytes:
            raise ValueError(f"another program removed or cut {self.name}")


def run_at(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Return what describes the run in a directory; empty where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as undo:
        folder = os.open(path, filesystem.READ_FOLDER)
        undo.callback(os.close, folder)
        for entry in filter(_IS_ROWS, sorted(os.listdir(folder))):
            with contextlib.closing(RowFile(folder, entry)) as file:
                return file.run
    return {}


def _put(fd: int, text: bytes, at: int) -> None:
    """Write a text as whole pages."""
    held = mmap.mmap(-1, _pages(len(text)))
    held[: len(text)] = text
    filesystem.write_all(fd, memoryview(held), at, _PAGE)


def _scratch(folder: int, nbytes: int, undo: contextlib.ExitStack) -> int:
    """Make a file without a name, which ends with its process; return its descriptor."""
    name = f".scratch-{uuid.uuid4().hex}"
    fd = filesystem.open_file(folder, name, flags=_MAKE, direct=True)
    undo.callback(os.close, fd)
    os.unlink(name, dir_fd=folder)
    filesystem.allocate(fd, nbytes)
    return fd


@dataclass
class RowCopy:
    """Row in one of its places; the checksum is None until it is written."""

    place: int
    crc: int | None = None
    ticket: Ticket | None = None


class DiskRows:
    """Rows of bytes in a file, written behind and read ahead by two threads.

    ``path``     the directory of the run.
    ``rows``     name -> bytes.
    ``run``      describes the run, in JSON; no other is taken up.
    ``rank``     of ``ranks`` that share the directory.
    ``durable``  what is committed lasts; else the file has no name, and ends with the process.
    ``resume``   take up the run that is there; else begin one, where none has committed.
    ``ring``     the most bytes of buffers, of which it then has the exact number.
    ``timeout``  seconds to wait for other ranks.

    ``generation`` and ``notes`` are of the last commit; -1 and None before the first.
    Raises: ShardError, which names the file, for a full disk, another run, a run without
    ``resume``, a directory in use; BadArgument.

    >>> import tempfile
    >>> moment, found = torch.arange(6.0), torch.empty(6)
    >>> with tempfile.TemporaryDirectory() as path:
    ...     with DiskRows(path, {"w": 24}, run={"mesh": "x=2"}) as rows:
    ...         _ = rows.write("w", moment)
    ...         rows.commit(1, notes={"count": 1})
    ...         _ = rows.write("w", moment + 1)  # not committed
    ...     with DiskRows(path, {"w": 24}, run={"mesh": "x=2"}, resume=True) as rows:
    ...         rows.read("w", found).wait()
    ...         print(found, rows.generation, rows.notes)
    tensor([0., 1., 2., 3., 4., 5.]) 1 {'count': 1}
    """

    def __init__(
        self, path: str | os.PathLike[str], rows: Mapping[str, int], *,
        run: Mapping[str, object] | None = None, rank: int = 0, ranks: int = 1, durable: bool = True,
        resume: bool = False, ring: int = 4 << 20, timeout: float = 600.0,
    ) -> None:  # fmt: skip
        self.path, self.sizes = os.path.realpath(path), dict(sorted(rows.items()))
        self.rank, self.ranks, self.durable, self.timeout = rank, ranks, durable, timeout
        self.generation, self.notes = -1, None
        # as last committed, and as last written
        self._kept = {name: RowCopy(0) for name in self.sizes}
        self._last = dict(self._kept)
        # whether no rank goes back beyond the last commit
        self._settled = not durable
        self._error: ShardError | None = None
        self._calls, self._closing = threading.Lock(), threading.Event()
        self._places, self._begin, nbytes = 1 + durable, dict[str, int](), 0
        for name, size in self.sizes.items():
            self._begin[name], nbytes = nbytes, nbytes + self._places * _pages(size)
        about = json.loads(json.dumps({**(run or {}), "ranks": ranks}))
        self._file: RowFile | None = None
        with self._named("no file for the rows"), contextlib.ExitStack() as undo:
            filesystem.make_parents(self.path)
            self._folder = os.open(self.path, filesystem.READ_FOLDER)
            undo.callback(os.close, self._folder)
            if durable:
                with filesystem.locked(self.path, fcntl.LOCK_EX, max(timeout, _HELD)):
                    self._file = self._taken(about, resume, nbytes, undo)
                self._fd = self._file.fd
            else:
                self._fd = _scratch(self._folder, nbytes, undo)
            half = ring // 2 // _PAGE * _PAGE
            self.ring = 2 * half
            movers = [Mover(f"disk {i}", torch.device("cpu")) for i in range(2)]
            pairs = [(mover, mmap.mmap(-1, half)) for mover in movers]
            # the jobs of one row are in one thread, in their order
            self._mover = {name: pairs[i % 2] for i, name in enumerate(self.sizes)}
            self._end = weakref.finalize(self, _end, self._closing, movers, self._fd, self._folder)
            undo.pop_all()

    def __enter__(self) -> "DiskRows":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish what was posted, and end the threads; what was not committed is not kept."""
        self._closing.set()
        with self._calls:
            self._end()

    def write(self, name: str, x: Tensor) -> Ticket:
        """Write a row from a contiguous tensor in host memory, which must not change meanwhile.

        Raises: ShardError of an earlier write or commit that failed; BadArgument.
        """
        data = self._bytes(name, x)
        with self._calls:
            copy = RowCopy((self._kept[name].place + 1) % self._places)
            # before it is posted: if this is interrupted, the row counts as not written
            self._last[name] = copy
            copy.ticket = self._post(self._write, name, data, copy)
            return copy.ticket

    def read(self, name: str, into: Tensor) -> Ticket:
        """Read a row, as it was written last, into a contiguous tensor in host memory.

        The ticket raises ShardError for a row that is damaged or was never written; ``into`` then
        has arbitrary values.
        Raises: ShardError of an earlier write or commit that failed; BadArgument.
        """
        data = self._bytes(name, into)
        with self._calls:
            return self._post(self._read, name, data, self._last[name])

    def commit(self, generation: int, notes: Any = None) -> None:
        """Make the rows, as they were written last, what a killed process leaves.

        ``generation``  a number above the last one.
        ``notes``       kept with it: JSON of at most 64 KiB.
        Raises: ShardError if it is not on the disk; the run then goes on from its last commit, in a
        new DiskRows with ``resume``.
        """
        if type(generation) is not int or not self.generation < generation < 1 << 63:
            text = f"generation {generation!r} is no number above {self.generation}"
            raise BadArgument(text, op="tiers")
        if (long := len(json.dumps(notes))) > _NOTES:
            raise BadArgument(f"notes of {long} bytes: {_NOTES} are the most", op="tiers")
        with self._calls:
            self._check()
            with self._named(f"generation {generation} is not committed", final=True):
                for name, copy in self._last.items():
                    if copy.ticket is not None:
                        copy.ticket.wait()
                    if copy.crc is None and copy is not self._kept[name]:
                        raise ValueError(f"row {name!r} is not written")
                if self._file is not None:
                    self._settle()
                    self._file.check()
                    _flush(self._fd)
                    rows = {n: (self.sizes[n], c.place, c.crc) for n, c in self._last.items()}
                    self._header = 1 - self._header
                    header = Generation(generation, self.generation, notes, rows)
                    self._file.put(self._header, header.text())
            self._kept, self._settled = dict(self._last), not self.durable
            self.generation, self.notes = generation, notes

    def _taken(self, run: Any, resume: bool, nbytes: int, undo: contextlib.ExitStack) -> RowFile:
        """Take up this rank's file, or make one; the directory is locked."""
        mine, fix = _name(self.rank), f"sl.optim.Tiers(disk={self.path!r}, resume=True)"
        with contextlib.ExitStack() as stack:
            here: dict[str, RowFile] = {}
            for entry in filter(_IS_ROWS, os.listdir(self._folder)):
                here[entry] = RowFile(self._folder, entry, os.O_RDWR)
                stack.callback(here[entry].close)
            for file in here.values():
                self._compare("run", file.run, run)
            begun = any(max(file.generations(), default=-1) >= 0 for file in here.values())
            if mine in here and begun and not resume:
                raise self._refused("a run is there already", fix)
            number = self._common(here)
            if mine not in here:
                RowFile.make(self._folder, mine, run, self.sizes, nbytes)
                filesystem.fsync_folder(self.path)
            file = RowFile(self._folder, mine, os.O_RDWR)
            undo.callback(file.close)
            if not filesystem.lock_within(file.fd, fcntl.LOCK_EX, _HELD):
                raise self._refused("another process that is alive uses it, or it has no locks")
            self._take_up(number, file)
            for entry, other in here.items():
                # a rank that is alive has done so itself, and may have committed since
                if entry == mine or filesystem.try_lock(other.fd, fcntl.LOCK_EX):
                    for later, (i, _) in other.generations().items():
                        if later > number:
                            other.put(i, b"")
        return file

    def _compare(self, what: str, there: dict[str, Any], here: dict[str, Any]) -> None:
        """Refuse a directory of which one of these facts differs."""
        for key in {**there, **here}:
            if (a := there.get(key)) != (b := here.get(key)):
                said = f"{key!r} is {a!r} there, and {b!r} here"
                raise self._refused(f"the directory belongs to another {what}: {said}")

    def _common(self, here: dict[str, RowFile]) -> int:
        """Return the newest generation that all ranks have committed; -1 before the first."""
        found = {name: file.generations() for name, file in here.items()}
        every = [{*found.get(_name(r), ())} - {-1} for r in range(self.ranks)]
        common = max(set.intersection(*every), default=-1)
        begun = (g.before >= 0 for some in found.values() for _, g in some.values())
        if common == -1 and any(begun):
            said = ", ".join(f"rank {r} {sorted(some) or 'none'}" for r, some in enumerate(every))
            raise self._refused(f"no generation is on the disk of every rank: {said}")
        return common

    def _take_up(self, number: int, file: RowFile) -> None:
        """Go on from a generation of this rank's file."""
        file.check()
        # a killed process may have written a header that is not on the disk yet
        _flush(file.fd)
        found = file.generations()
        if number not in found:
            raise ValueError(f"the headers of {file.name} are damaged")
        self._header, header = found[number]
        self._compare("model", {n: row[0] for n, row in header.rows.items()}, self.sizes)
        self._kept = {n: RowCopy(place, crc) for n, (_, place, crc) in header.rows.items()}
        self._last = dict(self._kept)
        self._begin = {n: file.begin + at for n, at in self._begin.items()}
        self.generation, self.notes = header.number, header.notes

    def _settle(self) -> None:
        """Wait until the last commit is on the disk of every rank."""
        until = time.monotonic() + self.timeout
        behind = [r for r in range(self.ranks) if r != self.rank and self.generation >= 0]
        while behind := [r for r in behind if not self._has_last(r)]:
            if self._closing.wait(0.01) or time.monotonic() > until:
                said = f"has not committed generation {self.generation} in {self.timeout:g} s"
                raise ValueError(f"rank {behind[0]} {said}, or the rows are closed")
        self._settled = True

    def _has_last(self, rank: int) -> bool:
        try:
            file = RowFile(self._folder, _name(rank))
        except FileNotFoundError:
            return False
        with contextlib.closing(file):
            has = max(file.generations(), default=-1) >= self.generation
            if has:
                # the other rank may not have come to that
                _flush(file.fd)
            return has

    def _post(self, job: Any, name: str, data: Tensor, copy: RowCopy) -> Ticket:
        self._check()
        mover, held = self._mover[name]
        args = name, data, copy, torch.frombuffer(held, dtype=torch.uint8), user_line()
        return mover.submit(partial(job, *args), data.numel())

    @torch.inference_mode()
    def _write(self, name: str, data: Tensor, copy: RowCopy, held: Tensor, line: str) -> None:
        with self._named(f"row {name!r} is not written", line, final=True):
            if not self._settled:
                self._settle()
            crc = 0
            for piece, page, at in self._pieces(name, data, copy, held):
                held[: piece.numel()].copy_(piece)
                crc = zlib.crc32(page[: piece.numel()], crc)
                filesystem.write_all(self._fd, page, at, _PAGE)
            copy.crc = crc

    @torch.inference_mode()
    def _read(self, name: str, data: Tensor, copy: RowCopy, held: Tensor, line: str) -> None:
        with self._named(f"row {name!r} is not read", line):
            if copy.crc is None:
                # its write failed, or the one before it
                if self._error is not None:
                    raise self._error
                raise ValueError("it was never written")
            crc = 0
            for piece, page, at in self._pieces(name, data, copy, held):
                filesystem.read_all(self._fd, page, at, "the file", _PAGE)
                crc = zlib.crc32(page[: piece.numel()], crc)
                piece.copy_(held[: piece.numel()])
            if crc != copy.crc:
                raise ValueError("it is damaged: its checksum is wrong")

    def _pieces(
        self, name: str, data: Tensor, copy: RowCopy, held: Tensor
    ) -> Iterator[tuple[Tensor, memoryview, int]]:
        """Yield the next piece of a row, its pages of the buffer, and its offset in the file."""
        at = self._begin[name] + copy.place * _pages(data.numel())
        for piece in data.split(held.numel()):
            yield piece, filesystem.memory(held[: _pages(piece.numel())]), at
            at += piece.numel()

    def _bytes(self, name: str, x: Tensor) -> Tensor:
        """Return the bytes of a row's tensor.  Raises: BadArgument."""
        if name not in self.sizes:
            raise BadArgument(f"there is no row {name!r}", op="tiers")
        if x.device.type != "cpu" or not x.is_contiguous() or x.nbytes != self.sizes[name]:
            text = f"row {name!r} has {self.sizes[name]} bytes in host memory, not {x.nbytes} on {x.device}"
            raise BadArgument(text, op="tiers")
        return x.detach().reshape(-1).view(torch.uint8)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._end.alive:
            raise self._refused("the rows are closed")

    @contextlib.contextmanager
    def _named(self, what: str, line: str = "", final: bool = False) -> Iterator[None]:
        """Name what failed inside the ``with``; ``final``: later calls raise it too."""
        error = None
        try:
            yield
        except ShardError as e:
            error = e
            raise
        except (OSError, ValueError) as e:
            error = self._refused(f"{what}: {filesystem.reason(e)}", line=line)
            raise error from e
        except BaseException as e:
            error = self._refused(f"{what}: {e!r}", line=line)
            raise
        finally:
            if final:
                self._error = self._error or error

    def _refused(self, text: str, fix: str = "", line: str = "") -> ShardError:
        where = {"disk": self.path}
        with contextlib.suppress(OSError):
            room = os.statvfs(self.path)
            where["free"] = f"{room.f_bavail * room.f_frsize:,} bytes"
        fix = fix or f"sl.optim.Tiers(disk={self.path + '-2'!r})"
        return ShardError(text, op="tiers", operands=where, fix=fix, line=line)


def _end(closing: threading.Event, movers: Sequence[Mover], *fds: int) -> None:
    """End the threads when their jobs are done, without waiting for other ranks."""
    closing.set()
    for mover in movers:
        mover.close()
    for fd in fds:
        # what was committed is on the disk already
        with contextlib.suppress(OSError):
            os.close(fd)
