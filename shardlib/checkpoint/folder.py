"""Directories that appear complete or not at all: their disk, their contents, and the commit.

A file is written by a thread that overlaps writing with preparing the next bytes.

All writers follow one rule: a path may be replaced, and a directory removed, if it does not exist,
or has only files that a manifest of shardlib lists.  A work directory whose ``lock`` has its own id
was made by a save and may be removed as a whole.

The work directory is next to its target, ``.<target>.tmp-<id>``.  Everything in it is flushed to
the disk, then one rename is the commit: an exchange of names if the target exists already.  If the
file system has no exchange, the old target is first renamed to ``.<target>.old-<id>``, where
``opened`` finds it if the new one never comes.

A save that gives up renames its work directory away and then checks the id of the target.  One of
the two renames comes first, so a save that raised has not been committed.  Every save holds a
shared lock on the file ``lock`` of its work directory: a leftover is one whose lock can be taken.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from shardlib.filesystem import (
    READ_FOLDER,
    descriptor,
    directory,
    fsync_folder,
    locked,
    make_parents,
    open_file,
    parsed,
    reason,
    sealed,
    try_lock,
    unsealed,
    write_all,
    write_new,
)
from shardlib.optional import optional_text

Directory = str | os.PathLike[str]
"""A path of a user."""

# ---------------------------------------------------------------- disk

SILENT = 1800.0
"""Default seconds without progress after which a disk counts as lost."""

_FLUSH = 1 << 28
"""Bytes between two fsyncs, so that the last one is short."""

_EARLY = 1 << 23
"""Bytes after which the disk begins to write, while the next bytes are checksummed."""

# SYNC_FILE_RANGE_WRITE: begin to write, wait for nothing
_SEND, _BEGIN = getattr(ctypes.CDLL(None), "sync_file_range", None), 2

_ALONE = 1 << 18
"""Bytes below which a file's first write is not worth a thread."""


def world_size() -> int:
    """Count the processes of the job."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _spare() -> bool:
    """Return whether each process of the job on this host may have a core for a second thread."""
    if not hasattr(os, "sched_getaffinity"):
        return True
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    return len(os.sched_getaffinity(0)) > here


class Behind:
    """A writer of a file, from an offset on, in a second thread if a core is free.

    One piece is written while the caller prepares the next.

    ``put`` takes the next piece, which must not change until the ``with`` ends: then all is
    written, though not yet flushed.  A piece that takes longer than ``seconds`` is an OSError; the
    thread writes through its own descriptor, so it cannot reach a file that is opened later.
    """

    def __init__(self, fd: int, at: int, seconds: float = SILENT) -> None:
        self.fd = fd
        self.at = at
        self.seconds = seconds
        self.unsent = 0
        self.waiting = 0
        self.beside = _spare()
        self.idle = threading.Semaphore()
        self.due: SimpleQueue[tuple[memoryview, int] | None] = SimpleQueue()
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def __enter__(self) -> "Behind":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.due.put(None)
        if self.thread is not None:
            self.thread.join(self.seconds)
            if kind is None:
                self._check(not self.thread.is_alive())

    def put(self, data: memoryview) -> None:
        """Write ``data`` next; return when the previous piece is written.

        Raises: OSError of the previous piece.
        """
        at, self.at = self.at, self.at + len(data)
        if self.thread is None and self.beside and len(data) >= _ALONE:
            self._begin()
        if self.thread is None:
            return self._write(self.fd, data, at)
        self._check(self.idle.acquire(timeout=self.seconds))
        self.due.put((data, at))

    def _check(self, done: bool) -> None:
        """Raise the error of the previous piece; it is late unless it is ``done``."""
        if not done:
            self.thread = None  # is not waited for again
            raise OSError(errno.ETIMEDOUT, f"the disk took nothing for {self.seconds:g} s")
        if self.error is not None:
            raise self.error

    def _begin(self) -> None:
        own = os.dup(self.fd)
        thread = threading.Thread(target=self._run, args=(own,), name="shardlib write", daemon=True)
        try:
            thread.start()
            self.thread = thread
        except RuntimeError:  # at the interpreter's end
            os.close(own)

    def _run(self, own: int) -> None:
        while (due := self.due.get()) is not None:
            try:
                self._write(own, *due)
            except Exception as e:
                self.error = e
            # frees a copy as soon as it is written
            del due
            self.idle.release()
        os.close(own)

    def _write(self, fd: int, data: memoryview, at: int) -> None:
        write_all(fd, data, at)
        self.unsent += len(data)
        self.waiting += len(data)
        if self.waiting > _FLUSH:
            os.fsync(fd)
            self.unsent = self.waiting = 0
        elif self.unsent >= _EARLY and _SEND is not None:
            begin = ctypes.c_int64(at + len(data) - self.unsent)
            _SEND(fd, begin, ctypes.c_int64(self.unsent), _BEGIN)
            self.unsent = 0


# ---------------------------------------------------------------- contents

MANIFEST, LOCK = "shardlib.json", "lock"
FORMAT = "shardlib checkpoint 4"

_LONGEST = 1 << 30
"""The most bytes of a manifest."""


steps_pattern = r"step_\d{8,}"


def folder_of(path: str, step: int | None) -> str:
    """Return the directory of a step, or the path itself if ``step`` is None."""
    return path if step is None or not path else os.path.join(path, f"step_{step:08d}")


def write_manifest(folder: int, manifest: Mapping[str, object]) -> None:
    """Write the manifest into the work directory, and flush it."""
    body = json.dumps(manifest, sort_keys=True).encode()
    write_new(folder, MANIFEST, sealed(body))


def read_manifest(folder: int, formats: Sequence[str] = (FORMAT,)) -> dict[str, Any]:
    """Read the manifest of a directory.

    Raises: ValueError, OSError.
    """
    with os.fdopen(open_file(folder, MANIFEST), "rb") as f:
        if os.fstat(f.fileno()).st_size > _LONGEST:
            raise ValueError(f"{MANIFEST} is longer than {_LONGEST} bytes")
        found = parsed(unsealed(f.read(), MANIFEST), MANIFEST)
    said = found.get("format") if isinstance(found, dict) else None
    if said not in formats:
        raise ValueError(f"{MANIFEST} is of format {said!r}, not {formats[0]!r}")
    return found


def occupied(target: str) -> str:
    """Return why a path, without links in it, may not be replaced; "" if it may."""
    try:
        if not os.path.lexists(target):
            return ""
        if os.path.ismount(target):
            return "a file system is mounted there"
        if os.path.samefile(target, os.curdir):
            return "it is the working directory"
        other = strangers(target)
    except NotADirectoryError:
        return "it is no directory"
    except OSError as e:
        return reason(e)
    if not other:
        return ""
    more = optional_text(" and {} more", len(other) - 1)
    return f"it holds {other[0]!r}{more}, which no {MANIFEST} lists"


def strangers(path: str) -> list[str]:
    """List the files in a directory that no save wrote; foreign directories end in a slash.

    Raises: OSError.
    """
    found = dict(_within(path))
    ours = _listed(path, found)
    if ours is None:
        return []
    parents = {name[:i] for name in ours for i, c in enumerate(name) if c == "/"}
    return sorted(
        f"{name}/" if kind == "folder" else name
        for name, kind in found.items()
        if (name not in parents if kind == "folder" else kind != "file" or name not in ours)
    )


def remove(path: str) -> bool:
    """Remove a directory if a save wrote all of it; return whether it is gone.

    The lock goes second to last and the manifest last, so a half removed directory is still
    recognised.
    """
    with contextlib.suppress(OSError):
        if os.path.islink(path) or strangers(path):
            return False
        # a folder after all that is in it
        found = [*_within(path)][::-1]
        for name, kind in sorted(found, key=lambda f: (f[0] == MANIFEST, f[0] == LOCK)):
            take_away = os.rmdir if kind == "folder" else os.unlink
            take_away(os.path.join(path, name))
        os.rmdir(path)
    return not os.path.lexists(path)


def flushed(path: str) -> list[str]:
    """Flush each file of a directory to the disk, and list them.

    Raises: OSError.
    """
    found = dict(_within(path))
    for name in found:
        with descriptor(os.path.join(path, name), os.O_RDONLY) as fd:
            os.fsync(fd)
    return [name for name, kind in found.items() if kind == "file" and name != LOCK]


def _within(path: str, start: str = "") -> Iterator[tuple[str, str]]:
    """Walk a directory: yield each relative name, and "file", "folder" or "neither"."""
    with os.scandir(path) as entries:
        for e in sorted(entries, key=lambda e: e.name):
            name = start + e.name
            if e.is_dir(follow_symlinks=False):
                yield name, "folder"
                yield from _within(e.path, f"{name}/")
            else:
                yield name, "file" if e.is_file(follow_symlinks=False) else "neither"


def _listed(path: str, found: dict[str, str]) -> set[str] | None:
    """Return the names in a directory's manifest; None if it is a work directory of a save."""
    work = re.search(r"\.(?:tmp|gone|old)-([0-9a-f]{32})$", path)
    if work and _head(os.path.join(path, LOCK)) == work[1]:
        return None
    if work and not _head(os.path.join(path, LOCK)) and set(found) <= {LOCK}:
        return None  # a save was just making it
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        with directory(path) as fd:
            said = read_manifest(fd, (FORMAT, f"{FORMAT} of Hugging Face"))
        return {MANIFEST, LOCK, *(f["file"] for f in said["files"])}
    return set()


def _head(path: str, nbytes: int = 64) -> str:
    """Return the first line of a file, of so many bytes at most; "" without one."""
    try:
        with open(path, "rb") as f:
            return f.readline(nbytes).decode()
    except (OSError, UnicodeError):
        return ""


# ---------------------------------------------------------------- work directories

_ABANDONED = 86400.0
"""Seconds after which a work directory is a leftover, if files cannot be locked."""


def exchange(a: str, b: str) -> bool:
    """Exchange two names atomically; False if this system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None or not sys.platform.startswith("linux"):
        return False
    # AT_FDCWD and RENAME_EXCHANGE of linux/fs.h
    at_cwd, swap = -100, 2
    if not call(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), swap):
        return True
    e = ctypes.get_errno()
    if e in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(e, os.strerror(e), b)


class Work:
    """One rank's descriptors of a work directory; a target that is a link is resolved."""

    def __init__(self, target: str, name: str) -> None:
        self.target = os.path.realpath(target)
        self.parent, self.base = os.path.split(self.target)
        self.name, self.id = name, name[-32:]
        self.path = os.path.join(self.parent, name)
        self.fd = self._opened()
        self.lock = os.open(LOCK, os.O_RDWR | os.O_CLOEXEC, dir_fd=self.fd)
        try_lock(self.lock, fcntl.LOCK_SH)

    def _opened(self) -> int:
        """Open the directory; on network file systems it may appear here a moment later."""
        until = time.monotonic() + 1.0
        while True:
            try:
                return os.open(self.path, READ_FOLDER)
            except FileNotFoundError:
                if time.monotonic() > until:
                    raise FileNotFoundError(
                        errno.ENOENT, "rank 0 made a directory that is not seen here", self.path
                    ) from None
                time.sleep(0.02)

    @staticmethod
    def make(
        target: str, overwrite: bool = True, siblings: str = "", seconds: float = SILENT
    ) -> "Work":
        """Make a work directory.

        ``siblings``  pattern of other targets whose leftovers are removed too.
        ``seconds``   to wait for another save that holds the parent's lock.
        Raises: ValueError if the target may not be replaced; OSError.
        """
        if not target:
            raise ValueError("the path is empty: it would name the working directory")
        target = os.path.realpath(target)
        parent, base = os.path.split(target)
        _check_free(target, overwrite)
        make_parents(parent)
        clean(parent, "|".join(filter(None, [re.escape(base), siblings])))
        name = f".{base}.tmp-{uuid.uuid4().hex}"
        path = os.path.join(parent, name)
        # until it is locked, it looks like a leftover
        with locked(parent, fcntl.LOCK_SH, seconds):
            os.mkdir(path)
            with open(os.path.join(path, LOCK), "x") as lock:
                lock.write(name[-32:])
            return Work(target, name)

    def commit(self, overwrite: bool) -> str:
        """Rename it to the target; return a warning if the disk did not confirm the name.

        Raises: OSError, ValueError; then ``committed`` tells whether it is the target.
        """
        # the names in the directory must be on the disk before the rename
        os.fsync(self.fd)
        while not self._placed(overwrite):
            # another save was quicker: look again
            pass
        try:
            fsync_folder(self.parent)
        except OSError as e:
            # the old one is kept until the next save
            return (
                f"{self.target} is written and stands there, but the disk did not confirm its name "
                f"({e.strerror}): after a power cut what it replaced may be back"
            )
        # the old one, if names were exchanged
        remove(self.path)
        remove(self._aside)
        return ""

    def _placed(self, overwrite: bool) -> bool:
        """Rename; False if the target has appeared or disappeared meanwhile."""
        try:
            if not os.path.lexists(self.target):
                os.rename(self.path, self.target)
                return True
            _check_free(self.target, overwrite)
            if exchange(self.path, self.target):
                return True
            # no exchange: until the second rename only ``opened`` finds the old one
            os.rename(self.target, self._aside)
            os.rename(self.path, self.target)
            return True
        except OSError as e:
            # a target has appeared since the test
            if e.errno in (errno.ENOTEMPTY, errno.EEXIST):
                remove(self._aside)
                return False
            # the target has disappeared since the test
            if e.errno == errno.ENOENT and os.path.lexists(self.path):
                return False
            raise

    @property
    def _aside(self) -> str:
        return os.path.join(self.parent, f".{self.base}.old-{self.id}")

    def committed(self) -> bool:
        """Give up unless it is committed already; return whether it is."""
        # once renamed, no rank can commit it any more
        away = os.path.join(self.parent, f".{self.base}.gone-{self.id}")
        try:
            os.rename(self.path, away)
        except OSError:
            away = ""
        done = _id(self.target) == self.id
        if not done and not os.path.lexists(self.target):
            with contextlib.suppress(OSError):
                os.rename(self._aside, self.target)
        if away:
            remove(away)
        return done

    def close(self) -> None:
        """Close the descriptors, and so unlock the work directory."""
        os.close(self.lock)
        os.close(self.fd)


def _check_free(target: str, overwrite: bool) -> None:
    """Refuse to replace a path with foreign contents.

    Raises: ValueError.
    """
    if there := occupied(target):
        raise ValueError(f"{target} is not replaced: {there}")
    if not overwrite and os.path.lexists(target):
        raise ValueError(f"{target} exists, and overwrite=False")


def _id(path: str) -> str:
    with contextlib.suppress(ValueError):
        return json.loads(_head(os.path.join(path, MANIFEST), _LONGEST)).get("id", "")
    return ""


def _leftovers(parent: str, base: str) -> list[tuple[str, str, str]]:
    """List (kind, path, target) of the work directories of targets that match a pattern."""
    pattern = re.compile(rf"\.(?P<base>{base})\.(?P<kind>tmp|gone|old)-[0-9a-f]{{32}}")
    there = sorted(os.listdir(parent)) if os.path.isdir(parent) else ()
    return [
        (found["kind"], os.path.join(parent, entry), os.path.join(parent, found["base"]))
        for entry in there
        if (found := pattern.fullmatch(entry))
    ]


def clean(parent: str, base: str) -> list[str]:
    """Remove leftovers of crashed saves, of targets whose name matches the pattern ``base``.

    Foreign files and directories in use are not touched; an old checkpoint whose replacement never
    came is renamed back.  Return the removed names.
    """
    gone = []
    with locked(parent, fcntl.LOCK_EX) as settled:
        for kind, path, target in _leftovers(parent, base):
            with contextlib.suppress(OSError):
                if os.path.islink(path):
                    continue
                if kind == "old" and not os.path.lexists(target):
                    if not occupied(path):
                        os.rename(path, target)
                elif _abandoned(path, settled or kind != "tmp"):
                    gone.append(path)
    return [os.path.basename(path) for path in gone if remove(path)]


def _abandoned(path: str, settled: bool) -> bool:
    """Return whether no process holds its lock.

    ``settled``  no save is making it at this moment, when its lock is absent or not yet held;
                 otherwise it counts as being made for a minute.
    """
    if not settled and time.time() - os.stat(path).st_mtime <= 60:
        return False
    try:
        with descriptor(os.path.join(path, LOCK), os.O_RDWR) as fd:
            had = try_lock(fd, fcntl.LOCK_EX)
            old = time.time() - os.fstat(fd).st_mtime > _ABANDONED
            return had or (had is False and old)
    except FileNotFoundError:
        return True  # half removed


def opened(path: str) -> int:
    """Open a checkpoint's directory, also if it was renamed aside.

    Raises: OSError.
    """
    try:
        return os.open(path, READ_FOLDER)
    except FileNotFoundError:
        parent, base = os.path.split(os.path.realpath(path))
        for kind, aside, _ in _leftovers(parent, re.escape(base)):
            if kind == "old":
                return os.open(aside, READ_FOLDER)
        raise
