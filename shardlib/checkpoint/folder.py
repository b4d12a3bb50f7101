"""A directory that appears complete or not at all.

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
import time
import uuid
from collections.abc import Iterator

from shardlib.checkpoint.contents import LOCK, MANIFEST, occupied, remove
from shardlib.checkpoint.disk import SILENT

__all__ = ["Work", "clean", "exchange", "fsync_folder", "opened"]

_ABANDONED = 86400.0
"""Seconds after which a work directory is a leftover, if files cannot be locked."""


_NOT_FLUSHED = (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.EACCES)
"""Errors of directories whose names cannot be flushed, or that may not be read."""


def fsync_folder(path: str) -> None:
    """Flush the names in a directory to the disk.

    Raises: OSError.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as e:
        if e.errno not in _NOT_FLUSHED:
            raise


def _make_parents(path: str) -> None:
    """Make a directory and its parents, and flush each to the disk."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    _make_parents(above)
    with contextlib.suppress(FileExistsError):  # another process was quicker
        os.mkdir(path)
    fsync_folder(above)


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
        self.path, self.id = os.path.join(self.parent, name), name[-32:]
        self.fd = self._opened()
        self.lock = os.open(LOCK, os.O_RDWR | os.O_CLOEXEC, dir_fd=self.fd)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self.lock, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _opened(self) -> int:
        """Open the directory; on network file systems it may appear here a moment later."""
        until = time.monotonic() + 1.0
        while True:
            try:
                return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                if time.monotonic() > until:
                    raise FileNotFoundError(
                        errno.ENOENT, "rank 0 made a directory that is not seen here", self.path
                    ) from None
                time.sleep(0.02)

    @staticmethod
    def make(
        target: str, overwrite: bool = True, siblings: str = "", seconds: float = SILENT
    ) -> tuple[str, int]:
        """Make a work directory; return its name and a descriptor that locks it until closed.

        ``siblings``  pattern of other targets whose leftovers are removed too.
        ``seconds``   to wait for another save that holds the parent's lock.
        Raises: ValueError if the target may not be replaced; OSError.
        """
        if not target:
            raise ValueError("the path is empty: it would name the working directory")
        target = os.path.realpath(target)
        parent, base = os.path.split(target)
        _check_free(target, overwrite)
        _make_parents(parent)
        clean(parent, re.escape(base) + f"|{siblings}" * bool(siblings))
        name = f".{base}.tmp-{uuid.uuid4().hex}"
        path = os.path.join(parent, name)
        with _locked(
            parent, fcntl.LOCK_SH, seconds
        ):  # until it is locked, it looks like a leftover
            os.mkdir(path)
            lock = os.path.join(path, LOCK)
            hold = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(hold, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.write(hold, name[-32:].encode())
        return name, hold

    def commit(self, overwrite: bool) -> str:
        """Rename it to the target; return a warning if the disk did not confirm the name.

        Raises: OSError, ValueError; then ``committed`` tells whether it is the target.
        """
        # the names in the directory must be on the disk before the rename
        os.fsync(self.fd)
        while not self._placed(overwrite):
            pass  # another save was quicker: look again
        try:
            fsync_folder(self.parent)
        except OSError as e:  # the old one is kept until the next save
            return (
                f"{self.target} is written and stands there, but the disk did not confirm its name "
                f"({e.strerror}): after a power cut what it replaced may be back"
            )
        remove(self.path)  # the old one, if names were exchanged
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
    try:
        with open(os.path.join(path, MANIFEST)) as f:
            return json.loads(f.readline()).get("id", "")
    except (OSError, ValueError):
        return ""


def _ours(base: str) -> re.Pattern[str]:
    return re.compile(rf"\.(?P<base>{base})\.(?P<kind>tmp|gone|old)-(?P<id>[0-9a-f]{{32}})")


def clean(parent: str, base: str) -> list[str]:
    """Remove leftovers of crashed saves, of targets whose name matches the pattern ``base``.

    Foreign files and directories in use are not touched; an old checkpoint whose replacement never
    came is renamed back.  Return the removed names.
    """
    gone = []
    with _locked(parent, fcntl.LOCK_EX) as settled:
        for entry in sorted(os.listdir(parent)):
            found = _ours(base).fullmatch(entry)
            if not found:
                continue
            path, target = os.path.join(parent, entry), os.path.join(parent, found["base"])
            with contextlib.suppress(OSError):
                if os.path.islink(path):
                    continue
                if found["kind"] == "old" and not os.path.lexists(target):
                    if not occupied(path):
                        os.rename(path, target)
                elif _abandoned(path, settled or found["kind"] != "tmp"):
                    gone.append(entry)
    return [entry for entry in gone if remove(os.path.join(parent, entry))]


@contextlib.contextmanager
def _locked(path: str, how: int, seconds: float = 0.0) -> Iterator[bool]:
    """Lock a directory inside the ``with``; yield whether it is locked, which some systems cannot.

    Raises: OSError if others hold it for all of ``seconds``, if ``seconds`` is not 0.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    until = time.monotonic() + seconds
    try:
        while (had := _lock(fd, how)) is None and time.monotonic() < until:
            time.sleep(0.02)
        if had is None and seconds:
            said = f"another saver held the lock of the directory for {seconds:g} s"
            raise OSError(errno.ETIMEDOUT, said, path)
        yield bool(had)
    finally:
        os.close(fd)


def _lock(fd: int, how: int) -> bool | None:
    """Try to lock a file; None if others hold it, False if the system has no locks."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return None
    except OSError:
        return False


def _abandoned(path: str, settled: bool) -> bool:
    """Return whether no process holds its lock.

    ``settled``  no save is making it at this moment, when its lock is absent or not yet held;
                 otherwise it counts as being made for a minute.
    """
    if not settled and time.time() - os.stat(path).st_mtime <= 60:
        return False
    try:
        fd = os.open(os.path.join(path, LOCK), os.O_RDWR)
    except FileNotFoundError:
        return True  # half removed
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(fd).st_mtime > _ABANDONED
    finally:
        os.close(fd)


def opened(path: str) -> int:
    """Open a checkpoint's directory, also if it was renamed aside.

    Raises: OSError.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        parent, base = os.path.split(os.path.realpath(path))
        entries = os.listdir(parent) if os.path.isdir(parent) else []
        for entry in entries:
            found = _ours(re.escape(base)).fullmatch(entry)
            if found and found["kind"] == "old":
                return os.open(os.path.join(parent, entry), flags)
        raise
