"""Files and directories: memory to a disk and back, names that last, and locks.

Checkpoints and the rows of memory tiers are written with these.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

READ_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_ALLOCATE = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)


def memory(x: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    nbytes = x.numel() * x.dtype.itemsize
    if not nbytes:
        return memoryview(b"")
    # numpy is not a dependency
    held = (ctypes.c_ubyte * nbytes).from_address(x.data_ptr())
    held.tensor = x  # type: ignore[attr-defined]  # kept alive as long as the view
    return memoryview(held).cast("B")


def open_file(
    folder: int, name: str, links: bool = False, flags: int = os.O_RDONLY, direct: bool = False
) -> int:
    """Open a file of a directory; refuse pipes and devices without waiting for them.

    ``direct``  without the page cache, where the file system can.
    Raises: OSError, ValueError.
    """
    # without O_NONBLOCK, opening a pipe waits for its writer
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW * (not links)
    more = getattr(os, "O_DIRECT", 0) * direct
    try:
        fd = os.open(name, flags | more, 0o666, dir_fd=folder)
    except OSError as e:
        if not more or e.errno != errno.EINVAL:
            raise
        fd = os.open(name, flags, 0o666, dir_fd=folder)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(f"{name} is no file")
        undo.pop_all()
    return fd


def allocate(fd: int, nbytes: int) -> None:
    """Reserve a file's length on the disk at once, not page by page.

    Raises: OSError if the disk is full; file systems without this call are skipped.
    """
    if _ALLOCATE is None:
        return
    if _ALLOCATE(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        e = ctypes.get_errno()
        if e in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(e, os.strerror(e))


def write_all(fd: int, data: memoryview, at: int = 0, unit: int = 1) -> int:
    """Write all bytes, from an offset on; return the offset behind them.

    ``unit``  bytes of a page: direct I/O transfers whole pages.
    """
    while len(data):
        n = os.pwrite(fd, data, at) // unit * unit
        if not n:
            raise OSError(errno.EIO, "the disk took no whole page")
        data, at = data[n:], at + n
    return at


def read_all(
    fd: int,
    out: memoryview,
    at: int,
    name: str,
    unit: int = 1,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Fill memory with the bytes of a file from an offset on.

    Nothing is memory-mapped: if the file were truncated meanwhile, SIGBUS would end the process.
    Raises: ValueError, OSError.
    """
    while len(out):
        n = os.preadv(fd, [out], at) // unit * unit
        if not n:
            raise ValueError(f"{name} ends before its data does")
        out, at = out[n:], at + n
        progress()


def sealed(body: bytes) -> bytes:
    """Return a line of text, and below it its checksum."""
    return body + f"\n{zlib.crc32(body):08x}\n".encode()


def unsealed(text: bytes, name: str) -> bytes:
    """Return a line of text whose checksum is right.  Raises: ValueError."""
    body, _, tail = text.partition(b"\n")
    if tail != f"{zlib.crc32(body):08x}\n".encode():
        raise ValueError(f"{name} is damaged: its checksum is wrong")
    return body


def parsed(text: bytes | str, name: str) -> Any:
    """Parse JSON, and refuse duplicate keys.

    Raises: ValueError.
    """

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


@contextlib.contextmanager
def descriptor(path: str, flags: int, folder: int | None = None) -> Iterator[int]:
    """Open a path, in a directory if one is given, inside the ``with``."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def new_file(folder: int, name: str, shared: bool = False) -> Iterator[int]:
    """Make a new file of a directory; flush it at the end of the ``with``, and close it.

    ``shared``  other processes write other parts of it, and the first makes it.
    """
    with descriptor(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL * (not shared), folder) as fd:
        yield fd
        os.fsync(fd)


def write_new(folder: int, name: str, text: bytes) -> None:
    """Write a new file of a directory, and flush it."""
    with new_file(folder, name) as fd:
        write_all(fd, memoryview(text))


def directory(path: str) -> contextlib.AbstractContextManager[int]:
    """Open a directory inside the ``with``.

    Raises: OSError.
    """
    return descriptor(path, READ_FOLDER)


def reason(error: OSError | ValueError) -> str:
    """Return the text of an error, without a path."""
    return getattr(error, "strerror", None) or str(error)


_NOT_FLUSHED = (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.EACCES)
"""Errors of directories whose names cannot be flushed, or that may not be read."""


def fsync_folder(path: str) -> None:
    """Flush the names in a directory to the disk.

    Raises: OSError.
    """
    try:
        with directory(path) as fd:
            os.fsync(fd)
    except OSError as e:
        if e.errno not in _NOT_FLUSHED:
            raise


def make_parents(path: str) -> None:
    """Make a directory and its parents, and flush each to the disk."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    make_parents(above)
    with contextlib.suppress(FileExistsError):
        # another process was quicker
        os.mkdir(path)
    fsync_folder(above)


@contextlib.contextmanager
def locked(path: str, how: int, seconds: float = 0.0) -> Iterator[bool]:
    """Lock a directory inside the ``with``; yield whether it is locked, which some systems cannot.

    Raises: OSError if others hold it for all of ``seconds``, if ``seconds`` is not 0.
    """
    with directory(path) as fd:
        had = lock_within(fd, how, seconds)
        if had is None and seconds:
            said = f"another process held the lock of the directory for {seconds:g} s"
            raise OSError(errno.ETIMEDOUT, said, path)
        yield bool(had)


def lock_within(fd: int, how: int, seconds: float) -> bool | None:
    """Try to lock a file for some time; None if others hold it, False if the system has no locks."""
    until = time.monotonic() + seconds
    while (had := try_lock(fd, how)) is None and time.monotonic() < until:
        time.sleep(0.02)
    return had


def try_lock(fd: int, how: int) -> bool | None:
    """Try to lock a file; None if others hold it, False if the system has no locks."""
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return None
    except OSError:
        return False
