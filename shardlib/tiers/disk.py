"""Rows on a disk: a file of whole pages by direct I/O, each row with a checksum.

A durable file has two places for each row, and two headers.  A row is written to the place that the
last commit did not use; a commit flushes the rows and then writes the older header.  So a process
that is killed leaves its last committed generation.

Ranks share a directory, each with a file of its own.  A rank is at most one generation ahead: it
writes over the generation before its last one only when the last one is on the disk of every rank.
A run is resumed at the newest generation that all ranks have committed.

File: one line of JSON about the run, two headers, then the rows; each line with its checksum.
"""

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import stat
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

from shardlib.errors import BadArgument, ShardError, user_line
from shardlib.filesystem import (
    READ_FOLDER,
    allocate,
    fsync_folder,
    lock_within,
    locked,
    make_parents,
    memory,
    parsed,
    read_all,
    reason,
    sealed,
    try_lock,
    unsealed,
    write_all,
)
from shardlib.tiers.mover import Mover, Ticket

_PAGE = max(mmap.PAGESIZE, 1 << 12)
"""Bytes of which direct I/O transfers whole numbers."""

_ABOUT = _NOTES = 1 << 16
"""Bytes for the description of the run, and in a header for notes."""

_FORMAT = "shardlib rows 1"

_HELD = 8.0
"""Seconds to wait for the lock of a process that was killed, whose children hold it for a moment."""

_DIRECT, _NO_LINK = getattr(os, "O_DIRECT", 0), getattr(os, "O_NOFOLLOW", 0)
_FLUSH = getattr(os, "fdatasync", os.fsync)


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _open(name: str, flags: int, folder: int) -> int:
    """Open a file for direct I/O where the file system has it; links and devices are refused."""
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | _NO_LINK
    try:
        fd = os.open(name, flags | _DIRECT, 0o600, dir_fd=folder)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        fd = os.open(name, flags, 0o600, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError(f"{name} is no file")
    return fd


class Generation(NamedTuple):
    """Header of a committed generation; the number is None before the first commit.

    ``before``  the number of the generation before it.
    ``rows``    name -> (bytes, place, checksum).
    """

    number: int | None
    before: int | None
    notes: Any
    rows: Mapping[str, Sequence[Any]]

    def text(self) -> bytes:
        """Return the header as a line with its checksum."""
        return sealed(json.dumps(self).encode())


class RowFile:
    """Open file of one rank: its run, its headers, and where its rows begin.

    Raises: ValueError for a file that no run made; OSError.
    """

    def __init__(self, fd: int, name: str) -> None:
        self.fd, self.name = fd, name
        about = parsed(self._line(0, _ABOUT), name)
        if not isinstance(about, dict) or about.get("format") != _FORMAT:
            raise ValueError(f"{name} is not of format {_FORMAT!r}")
        self.run, self.slot, self.nbytes = about["run"], about["slot"], about["bytes"]
        self.begin = _ABOUT + 2 * self.slot

    @staticmethod
    @contextlib.contextmanager
    def opened(folder: int, rank: int, flags: int = os.O_RDONLY) -> "Iterator[RowFile]":
        """Open the file of a rank inside the ``with``."""
        fd = _open(_name(rank), flags, folder)
        try:
            yield RowFile(fd, _name(rank))
        finally:
            os.close(fd)

    @staticmethod
    def make(folder: int, name: str, run: object, sizes: Mapping[str, int], nbytes: int) -> int:
        """Make a file for ``nbytes`` of rows and lock it; return its descriptor.

        Its space is reserved first, and its name is given last.
        """
        longest = Generation(1 << 63, 1 << 63, None, {n: (b, 1, 1 << 32) for n, b in sizes.items()})
        slot = _pages(len(longest.text()) + _NOTES)
        total = _ABOUT + 2 * slot + nbytes
        about = {"format": _FORMAT, "run": run, "slot": slot, "bytes": total}
        text = sealed(json.dumps(about).encode())
        if len(text) > _ABOUT:
            raise ValueError(
                f"the run is described by {len(text)} bytes, and {_ABOUT} are the most"
            )
        new = f".{name}.new"
        fd = _open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, folder)
        try:
            allocate(fd, total)
            os.ftruncate(fd, total)
            if not try_lock(fd, fcntl.LOCK_EX):
                raise OSError(errno.ENOLCK, "this file system has no locks")
            _put(fd, text, 0)
            none = Generation(None, None, None, {n: (b, 0, None) for n, b in sizes.items()})
            _put(fd, none.text(), _ABOUT)
            os.fsync(fd)
            os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=folder)
            raise
        return fd

    def _line(self, at: int, nbytes: int) -> bytes:
        held = mmap.mmap(-1, nbytes)
        read_all(self.fd, memoryview(held), at, self.name, _PAGE)
        return unsealed(held[:].rstrip(b"\0"), self.name)

    def headers(self) -> dict[int, Generation]:
        """Read the headers that are whole, by slot."""
        found = {}
        for slot in (0, 1):
            # torn if its process was killed within the commit
            with contextlib.suppress(ValueError):
                line = self._line(_ABOUT + slot * self.slot, self.slot)
                found[slot] = Generation(*parsed(line, self.name))
        return found

    def generations(self) -> dict[int, Generation]:
        """Read the committed generations, by number."""
        return {g.number: g for g in self.headers().values() if g.number is not None}

    def put(self, slot: int, text: bytes) -> None:
        """Write a header, and flush it to the disk."""
        assert len(text) <= self.slot
        _put(self.fd, text.ljust(self.slot, b"\0"), _ABOUT + slot * self.slot)
        _FLUSH(self.fd)

    def go_back(self, number: int | None) -> None:
        """Remove the headers of later generations than this one."""
        for slot, header in self.headers().items():
            if header.number is not None and (number is None or header.number > number):
                self.put(slot, b"")


def _name(rank: int) -> str:
    return f"rank_{rank:05d}.rows"


def _put(fd: int, text: bytes, at: int) -> None:
    """Write a text as whole pages."""
    held = mmap.mmap(-1, _pages(len(text)))
    held[: len(text)] = text
    write_all(fd, memoryview(held), at, _PAGE)


def _scratch(folder: int, nbytes: int) -> int:
    """Make a file without a name, which ends with its process; return its descriptor."""
    name = f".scratch-{uuid.uuid4().hex}"
    fd = _open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, folder)
    try:
        os.unlink(name, dir_fd=folder)
        allocate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


@dataclass
class RowCopy:
    """Bytes of a row in one of its places; the checksum is None until they are written."""

    place: int
    crc: int | None = None
    ticket: Ticket | None = None


class DiskRows:
    """Rows of bytes in a file of this rank, written behind and read ahead by two threads.

    ``path``     directory of the run; without ``durable`` the file has no name, and ends with the
                 process.
    ``rows``     name -> bytes.
    ``run``      describes the run, as JSON: ``resume`` takes up no other.
    ``rank``     of ``ranks`` that share the directory.
    ``durable``  two places for each row: a killed process leaves its last commit.
    ``resume``   take up the run in the directory, or begin one where there is none.
    ``ring``     bytes of page-aligned buffers, at most.
    ``timeout``  seconds to wait for the other ranks.

    Attributes: ``generation``, ``notes`` of the last commit (None before the first); ``ring``, the
    bytes held.  Jobs of one row run in the order of their calls.
    Raises: ShardError for a full disk, another run, a run without ``resume``, a directory in use;
    BadArgument.

    >>> import tempfile
    >>> place = tempfile.TemporaryDirectory()
    >>> m, found = torch.arange(6.0), torch.empty(6)
    >>> with DiskRows(place.name, {"w.m": 24}, run={"mesh": "x=2"}) as rows:
    ...     ticket = rows.write("w.m", m)  # m must not change before
    ...     ticket.wait()
    ...     rows.commit(1, notes={"count": 1})
    ...     rows.write("w.m", m + 1).wait()  # not committed
    >>> with DiskRows(place.name, {"w.m": 24}, run={"mesh": "x=2"}, resume=True) as rows:
    ...     rows.read("w.m", found).wait()
    ...     print(found, rows.generation, rows.notes)
    tensor([0., 1., 2., 3., 4., 5.]) 1 {'count': 1}
    >>> place.cleanup()
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rows: Mapping[str, int],
        *,
        run: Mapping[str, object] | None = None,
        rank: int = 0,
        ranks: int = 1,
        durable: bool = True,
        resume: bool = False,
        ring: int = 8 << 20,
        timeout: float = 600.0,
    ) -> None:
        sizes = dict(sorted(rows.items()))
        if wrong := [n for n, b in sizes.items() if type(b) is not int or b < 0]:
            raise self._bad(f"row {wrong[0]!r} has {sizes[wrong[0]]!r} bytes")
        if ring < 2 * _PAGE:
            raise self._bad(f"ring={ring} bytes are less than two pages of {_PAGE}")
        if not 0 <= rank < ranks:
            raise self._bad(f"rank {rank} is none of {ranks}")
        self.path, self.sizes, self.durable = os.path.realpath(path), sizes, durable
        self.rank, self.ranks, self.timeout = rank, ranks, timeout
        self.generation: int | None = None
        self.notes: Any = None
        places, self._at, nbytes = 1 + durable, {}, 0
        for name, size in sizes.items():
            self._at[name], nbytes = nbytes, nbytes + places * _pages(size)
        # last committed, and last written
        self._kept: dict[str, RowCopy] = {}
        self._last: dict[str, RowCopy] = {}
        # whether the last commit is on the disk of every rank
        self._settled, self._before = not durable, None
        self._file: RowFile | None = None
        self._error: ShardError | None = None
        self._calls = threading.Lock()
        with self._named("the rows on this disk cannot be used"), contextlib.ExitStack() as undo:
            make_parents(self.path)
            self._folder = os.open(self.path, READ_FOLDER)
            undo.callback(os.close, self._folder)
            if durable:
                about = json.loads(json.dumps({"ranks": ranks, **(run or {})}))
                with locked(self.path, fcntl.LOCK_EX, timeout):
                    self._fd = self._taken(about, resume, nbytes)
            else:
                self._fd, self._begin = _scratch(self._folder, nbytes), 0
            undo.pop_all()
        half = ring // 2 // _PAGE * _PAGE
        self.ring = 2 * half
        self._buffers = [mmap.mmap(-1, half) for _ in range(2)]
        self._movers = [Mover(f"disk {i}", torch.device("cpu")) for i in range(2)]
        self._mover = {name: i % 2 for i, name in enumerate(sizes)}
        self._end = weakref.finalize(self, _end, self._movers, self._fd, self._folder)

    def __enter__(self) -> "DiskRows":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish the jobs that were posted, and end the threads; what is not committed is lost."""
        with self._calls:
            self._end()

    def write(self, name: str, x: Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Write a row from a contiguous CPU tensor, which must not change before the ticket is done.

        ``after``  jobs that come before.
        Raises: ShardError of an earlier write or commit that failed; BadArgument.
        """
        data = self._bytes(name, x)
        with self._calls:
            self._check()
            kept = self._kept.get(name)
            copy = RowCopy(1 - kept.place if kept is not None and self.durable else 0)
            job = partial(self._write, name, data, copy, user_line())
            mover = self._movers[self._mover[name]]
            self._last[name] = copy
            copy.ticket = mover.submit(job, data.numel(), after)
            return copy.ticket

    def read(self, name: str, into: Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Read the row that was written last into a contiguous CPU tensor.

        The ticket raises ShardError for a row that was never written or is damaged; ``into`` then
        has any values.
        Raises: ShardError of an earlier write or commit that failed; BadArgument.
        """
        data = self._bytes(name, into)
        with self._calls:
            self._check()
            job = partial(self._read, name, data, self._last.get(name), user_line())
            return self._movers[self._mover[name]].submit(job, data.numel(), after)

    def commit(self, generation: int, notes: Any = None) -> None:
        """Make what was written last a generation, which a killed process leaves.

        Rows that were not written since the last commit belong to it as they are.
        ``generation``  a number above that of the last commit.
        ``notes``       JSON, of 64 KiB at most, that is kept with it.
        Raises: ShardError if a row or the header is not on the disk; then only ``close`` and
        another opening, with ``resume``, go on from here.
        """
        last = -1 if self.generation is None else self.generation
        if type(generation) is not int or not last < generation < 1 << 63:
            raise self._bad(f"generation {generation!r} is no number above {last}")
        if (long := len(json.dumps(notes))) > _NOTES:
            raise self._bad(f"the notes have {long} bytes, and {_NOTES} are the most")
        with self._calls:
            self._check()
            with self._named(f"generation {generation} is not committed", final=True):
                for copy in self._last.values():
                    if copy.ticket is not None:
                        copy.ticket.wait()
                if self._file is not None:
                    self._settle()
                    self._write_header(generation, notes, self._file)
            self._kept = dict(self._last)
            self._before, self.generation, self.notes = self.generation, generation, notes
            self._settled = not self.durable

    # ------------------------------------------------------------ the file of this rank

    def _taken(self, run: dict[str, Any], resume: bool, nbytes: int) -> int:
        """Take this rank's file, or make it; return its descriptor.  The directory is locked."""
        with contextlib.ExitStack() as stack:
            here = {
                int(found[1]): stack.enter_context(
                    RowFile.opened(self._folder, int(found[1]), os.O_RDWR)
                )
                for entry in sorted(os.listdir(self._folder))
                if (found := re.fullmatch(r"rank_(\d{5,})\.rows", entry))
            }
            for file in here.values():
                self._compare(file.run, run)
            mine = here.get(self.rank)
            if mine is not None:
                if not resume:
                    fix = f"sl.optim.Tiers(disk={self.path!r}, resume=True)"
                    raise self._refused("a run is there already", fix)
                self._lock(mine)
            number = self._common({r: file.generations() for r, file in here.items()})
            for file in here.values():
                # a process that lives has done so itself, and may have committed since
                if file is mine or try_lock(file.fd, fcntl.LOCK_EX):
                    file.go_back(number)
            if mine is None:
                fd = RowFile.make(self._folder, _name(self.rank), run, self.sizes, nbytes)
                fsync_folder(self.path)
            else:
                fd = os.dup(mine.fd)
        try:
            self._begin_at(number, RowFile(fd, _name(self.rank)))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _compare(self, there: dict[str, Any], here: dict[str, Any]) -> None:
        for key in (k for k in {**there, **here} if there.get(k) != here.get(k)):
            said = f"{key} is {there.get(key)!r} there, and {here.get(key)!r} here"
            raise self._refused(f"the directory belongs to another run: {said}")

    def _lock(self, file: RowFile) -> None:
        had = lock_within(file.fd, fcntl.LOCK_EX, _HELD)
        if had is None:
            raise self._refused("the directory is in use by another process that is alive")
        if not had:
            raise OSError(errno.ENOLCK, "this file system has no locks")

    def _common(self, found: dict[int, dict[int, Generation]]) -> int | None:
        """Return the newest generation that all ranks committed; None before the first."""
        numbers = [set(found.get(r, ())) for r in range(self.ranks)]
        common = max(set.intersection(*numbers), default=None)
        every = [g for some in found.values() for g in some.values()]
        if common is None and any(g.before is not None for g in every):
            lacks = min(range(self.ranks), key=lambda r: max(numbers[r], default=-1))
            text = f"no generation is on the disk of all {self.ranks} ranks: {_name(lacks)} has"
            raise self._refused(f"{text} {sorted(numbers[lacks]) or 'none'}")
        return common

    def _begin_at(self, number: int | None, file: RowFile) -> None:
        """Take up a generation of this rank's file."""
        found = [(slot, g) for slot, g in file.headers().items() if g.number == number]
        if not found:
            raise ValueError(f"{file.name}: its headers are damaged")
        self._slot, header = found[0]
        sizes = {n: row[0] for n, row in header.rows.items()}
        for name in (n for n in {**sizes, **self.sizes} if sizes.get(n) != self.sizes.get(n)):
            said = f"{sizes.get(name)} bytes there, and {self.sizes.get(name)} here"
            raise self._refused(f"the directory belongs to another model: row {name!r} has {said}")
        self._kept = {n: RowCopy(place, crc) for n, (_, place, crc) in header.rows.items()}
        self._last = dict(self._kept)
        self._file, self._begin = file, file.begin
        self.generation, self._before, self.notes = header[:3]
        self._whole()

    def _whole(self) -> None:
        """Raise an error for a file that another program removed or cut."""
        assert self._file is not None
        found = os.fstat(self._file.fd)
        if not found.st_nlink:
            raise ValueError(f"{self._file.name} was removed by another program")
        if found.st_size != self._file.nbytes:
            said = f"{found.st_size} bytes, not {self._file.nbytes}"
            raise ValueError(f"{self._file.name} was cut by another program: it has {said}")

    def _write_header(self, number: int, notes: Any, file: RowFile) -> None:
        self._whole()
        _FLUSH(file.fd)
        rows = {n: (b, 0, None) for n, b in self.sizes.items()}
        rows |= {n: (self.sizes[n], c.place, c.crc) for n, c in self._last.items()}
        file.put(1 - self._slot, Generation(number, self.generation, notes, rows).text())
        self._slot = 1 - self._slot

    def _settle(self) -> None:
        """Wait until the last commit is on the disk of every rank: none goes back beyond it then."""
        until = time.monotonic() + self.timeout
        behind = list(range(self.ranks))
        while not self._settled:
            behind = [r for r in behind if not self._has_last(r)]
            self._settled = not behind
            if behind and time.monotonic() > until:
                said = f"generation {self.generation} within {self.timeout:g} s"
                raise ValueError(f"rank {behind[0]} has not committed {said}")
            if behind:
                time.sleep(0.01)

    def _has_last(self, rank: int) -> bool:
        if self.generation is None:
            return True
        with (
            contextlib.suppress(FileNotFoundError),
            RowFile.opened(self._folder, rank) as file,
        ):
            if max(file.generations(), default=-1) >= self.generation:
                # the rank may not have come to that
                _FLUSH(file.fd)
                return True
        return False

    # ------------------------------------------------------------ jobs, in the movers' threads

    def _write(self, name: str, data: Tensor, copy: RowCopy, line: str) -> None:
        with self._named(f"row {name!r} is not written", line, final=True):
            if not self._settled:
                self._settle()
            crc = 0
            for held, piece, at in self._pieces(name, data, copy):
                held[: piece.numel()].copy_(piece)
                pages = memory(held)
                crc = zlib.crc32(pages[: piece.numel()], crc)
                write_all(self._fd, pages[: _pages(piece.numel())], at, _PAGE)
            copy.crc = crc

    def _read(self, name: str, data: Tensor, copy: RowCopy | None, line: str) -> None:
        with self._named(f"row {name!r} is not read", line):
            if copy is None or copy.crc is None:
                raise ValueError("it was never written")
            crc = 0
            for held, piece, at in self._pieces(name, data, copy):
                pages = memory(held)
                read_all(self._fd, pages[: _pages(piece.numel())], at, "the file", _PAGE)
                crc = zlib.crc32(pages[: piece.numel()], crc)
                piece.copy_(held[: piece.numel()])
            if crc != copy.crc:
                raise ValueError("its checksum is not that of the bytes that were written")

    def _pieces(
        self, name: str, data: Tensor, copy: RowCopy
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield the mover's buffer, the next piece of a row, and its offset in the file."""
        held = torch.frombuffer(self._buffers[self._mover[name]], dtype=torch.uint8)
        at = self._begin + self._at[name] + copy.place * _pages(data.numel())
        for piece in data.split(held.numel()) if data.numel() else ():
            yield held, piece, at
            at += piece.numel()

    # ------------------------------------------------------------ errors

    def _bytes(self, name: str, x: Tensor) -> Tensor:
        """Return the bytes of a row's tensor.  Raises: BadArgument."""
        if name not in self.sizes:
            raise self._bad(f"there is no row {name!r}")
        if x.device.type != "cpu" or not x.is_contiguous() or x.nbytes != self.sizes[name]:
            text = f"row {name!r} has {self.sizes[name]} bytes, contiguous in host memory"
            raise BadArgument(
                text, op="tiers", operands={"tensor": f"{x.nbytes} bytes, {x.device}"}
            )
        return x.detach().reshape(-1).view(torch.uint8)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._end.alive:
            raise self._refused("the rows are closed")

    @contextlib.contextmanager
    def _named(self, what: str, line: str = "", final: bool = False) -> Iterator[None]:
        """Name what failed inside the ``with``; ``final``: every later call raises it again."""
        try:
            yield
        except BaseException as e:
            error = e if isinstance(e, ShardError) else None
            if error is None and isinstance(e, OSError | ValueError):
                error = self._refused(f"{what}: {reason(e)}", line=line)
            if final:
                self._error = error or self._refused(f"{what}: {type(e).__name__} {e}", line=line)
            if error is None or error is e:
                raise
            raise error from e

    def _bad(self, text: str) -> BadArgument:
        return BadArgument(text, op="tiers")

    def _refused(self, text: str, fix: str = "", line: str = "") -> ShardError:
        with contextlib.suppress(OSError):
            room = os.statvfs(self.path)
            free = f"{room.f_bavail * room.f_frsize:,} bytes free"
        fix = fix or f"sl.optim.Tiers(disk={self.path + '-2'!r})"
        return ShardError(
            text, op="tiers", operands={"disk": f"{self.path}, {free}"}, fix=fix, line=line
        )


def _end(movers: Sequence[Mover], *fds: int) -> None:
    """End the threads when their jobs are done, then close the descriptors."""
    for mover in movers:
        mover.close()
    for fd in fds:
        os.close(fd)
