"""A directory that appears whole or not at all.

The work directory stands beside its target, ``.<target>.tmp-<id>``.  Everything in it is flushed to
the disk, then one rename is the commit: an exchange of names where something stands there already.
Where the file system has no exchange, the old one first steps aside as ``.<target>.old-<id>``,
where ``opened`` finds it should the new one never come.

Whoever gives up renames the work directory away and then looks whose id the target has.  One of
the two renames comes first, so what raised was not written.  Every saver holds a shared lock on the
file ``lock`` of its work directory: a leftover is one whose lock can be taken.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import sys
import time
import uuid
import zlib
from collections.abc import Iterator
from typing import Any

from shardlib.checkpoint.disk import open_file, write_all
from shardlib.checkpoint.files import parsed

__all__ = ["MANIFEST", "Work", "clean", "exchange", "fsync_folder", "opened", "read_manifest"]

MANIFEST = "shardlib.json"
FORMAT = "shardlib checkpoint 4"

_LONGEST = 1 << 30
"""Bytes of a manifest at most."""

_ABANDONED = 86400.0
"""Seconds after which a work directory is a leftover where files cannot be locked."""


def fsync_folder(path: str) -> None:
    """Flush the names in a directory to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def exchange(a: str, b: str) -> bool:
    """Swap two names at once; False where this system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None or not sys.platform.startswith("linux"):
        return False
    at_cwd, swap = -100, 2
    if not call(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), swap):
        return True
    e = ctypes.get_errno()
    if e in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(e, os.strerror(e), b)


class Work:
    """One rank's hold on a work directory."""

    def __init__(self, target: str, name: str) -> None:
        self.target, (self.parent, self.base) = target, os.path.split(target)
        self.path, self.id = os.path.join(self.parent, name), name[-32:]
        self.fd = self._opened()
        self.lock = os.open("lock", os.O_RDWR | os.O_CLOEXEC, dir_fd=self.fd)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self.lock, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _opened(self) -> int:
        """Open the directory; what another rank has just made may be seen a moment later."""
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
    def make(target: str) -> tuple[str, int]:
        """Make a work directory; return its name and a descriptor that holds it until closed."""
        parent, base = os.path.split(target)
        name = f".{base}.tmp-{uuid.uuid4().hex}"
        path = os.path.join(parent, name)
        with _locked(parent, fcntl.LOCK_SH):  # until it is held, nobody takes it for a leftover
            os.mkdir(path)
            lock = os.path.join(path, "lock")
            hold = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(hold, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return name, hold

    def commit(self, overwrite: bool) -> None:
        """Make it the target.

        Raises: OSError; see ``committed`` for what then holds.
        """
        os.fsync(self.fd)
        while not self._placed(overwrite):
            pass  # another saver was quicker: look again
        fsync_folder(self.parent)
        shutil.rmtree(self.path, ignore_errors=True)  # the old one, if names were exchanged
        shutil.rmtree(self._aside, ignore_errors=True)

    def _placed(self, overwrite: bool) -> bool:
        """Rename; False where something stands there by now, or no longer does."""
        try:
            if not os.path.lexists(self.target):
                os.rename(self.path, self.target)
                return True
            if not overwrite:
                raise FileExistsError(errno.EEXIST, "it exists, and overwrite=False", self.target)
            if exchange(self.path, self.target):
                return True
            os.rename(self.target, self._aside)
            os.rename(self.path, self.target)
            return True
        except OSError as e:
            if e.errno == errno.ENOTEMPTY or (e.errno == errno.EEXIST and overwrite):
                shutil.rmtree(self._aside, ignore_errors=True)
                return False
            if e.errno == errno.ENOENT and os.path.lexists(self.path):
                return False
            raise

    @property
    def _aside(self) -> str:
        return os.path.join(self.parent, f".{self.base}.old-{self.id}")

    def committed(self) -> bool:
        """Give up unless it is done already, and say whether the target is this one."""
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
            shutil.rmtree(away, ignore_errors=True)
        return done

    def close(self) -> None:
        """Let go of the work directory."""
        os.close(self.lock)
        os.close(self.fd)


def _id(path: str) -> str:
    try:
        with open(os.path.join(path, MANIFEST)) as f:
            return json.loads(f.readline()).get("id", "")
    except (OSError, ValueError):
        return ""


def _ours(base: str) -> re.Pattern[str]:
    return re.compile(rf"\.(?P<base>{base})\.(?P<kind>tmp|gone|old)-(?P<id>[0-9a-f]{{32}})")


def clean(parent: str, base: str) -> list[str]:
    """Remove what crashed savers left of targets whose name fits the pattern ``base``.

    Nothing that others made is touched, nor what is in use; an old checkpoint that stepped aside
    for one that never came steps back.
    """
    gone = []
    with _locked(parent, fcntl.LOCK_EX | fcntl.LOCK_NB) as settled:
        for entry in sorted(os.listdir(parent)):
            found = _ours(base).fullmatch(entry)
            if not found:
                continue
            path, target = os.path.join(parent, entry), os.path.join(parent, found["base"])
            with contextlib.suppress(OSError):
                if found["kind"] == "old" and not os.path.lexists(target):
                    os.rename(path, target)
                elif _abandoned(path, settled or found["kind"] != "tmp"):
                    gone.append(entry)
    for entry in gone:
        shutil.rmtree(os.path.join(parent, entry), ignore_errors=True)
    return gone


@contextlib.contextmanager
def _locked(path: str, how: int) -> Iterator[bool]:
    """Lock a directory inside the ``with``; give whether it was had, which some systems deny."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    had = True
    try:
        fcntl.flock(fd, how)
    except OSError:
        had = False
    try:
        yield had
    finally:
        os.close(fd)


def _abandoned(path: str, settled: bool) -> bool:
    """Say whether nobody holds its lock.

    ``settled``  it is not being made just now, when its lock is not there yet, or not yet held;
                 else it is none for a minute.
    """
    if not settled and time.time() - os.stat(path).st_mtime <= 60:
        return False
    try:
        fd = os.open(os.path.join(path, "lock"), os.O_RDWR)
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


# ---------------------------------------------------------------- manifests


def write_manifest(folder: int, manifest: dict[str, Any]) -> None:
    """Write the manifest into the work directory, and flush it."""
    body = json.dumps(manifest, sort_keys=True).encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    fd = os.open(MANIFEST, flags, 0o666, dir_fd=folder)
    try:
        write_all(fd, memoryview(body + f"\n{zlib.crc32(body):08x}\n".encode()))
        os.fsync(fd)
    finally:
        os.close(fd)


def opened(path: str) -> int:
    """Open a checkpoint's directory, where it has stepped aside too.

    Raises: OSError.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        parent, base = os.path.split(os.path.abspath(path))
        entries = os.listdir(parent) if os.path.isdir(parent) else []
        for entry in entries:
            found = _ours(re.escape(base)).fullmatch(entry)
            if found and found["kind"] == "old":
                return os.open(os.path.join(parent, entry), flags)
        raise


def read_manifest(folder: int) -> dict[str, Any]:
    """Read a checkpoint's manifest.

    Raises: ValueError, OSError.
    """
    with os.fdopen(open_file(folder, MANIFEST), "rb") as f:
        if os.fstat(f.fileno()).st_size > _LONGEST:
            raise ValueError(f"{MANIFEST} is longer than {_LONGEST} bytes")
        body, _, tail = f.read().partition(b"\n")
    if tail != f"{zlib.crc32(body):08x}\n".encode():
        raise ValueError(f"{MANIFEST} is damaged: its checksum is wrong")
    found = parsed(body, MANIFEST)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        said = found.get("format") if isinstance(found, dict) else None
        raise ValueError(f"{MANIFEST} is of format {said!r}, not {FORMAT!r}")
    return found
