"""Disk access: a writer thread that overlaps writing with preparing the next bytes."""

import ctypes
import errno
import os
import stat
import threading
from queue import Empty, SimpleQueue

import torch.distributed as dist
from torch import Tensor

__all__ = ["SILENT", "Behind", "allocate", "memory", "open_file", "write_all"]

SILENT = 1800.0
"""Default seconds without progress after which a disk counts as lost."""

_FLUSH = 1 << 28
"""Bytes between two fsyncs, so that the last one is short."""

_EARLY = 1 << 23
"""Bytes after which the disk begins to write, while the next bytes are checksummed."""

# SYNC_FILE_RANGE_WRITE: begin to write, wait for nothing
_SEND, _BEGIN = getattr(ctypes.CDLL(None), "sync_file_range", None), 2

_ALLOCATE = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)

_ALONE = 1 << 18
"""Bytes below which a file's first write is not worth a thread."""


def memory(x: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    nbytes = x.numel() * x.dtype.itemsize
    if not nbytes:
        return memoryview(b"")
    held = (ctypes.c_ubyte * nbytes).from_address(x.data_ptr())  # numpy is not a dependency
    held.tensor = x  # type: ignore[attr-defined]  # kept alive as long as the view
    return memoryview(held).cast("B")


def open_file(folder: int, name: str, links: bool = False) -> int:
    """Open a file of a directory for reading; refuse pipes and devices without waiting for them.

    Raises: OSError, ValueError.
    """
    # without O_NONBLOCK, opening a pipe waits for its writer
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    fd = os.open(name, flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ValueError(f"{name} is no file")
    return fd


def allocate(fd: int, nbytes: int) -> None:
    """Reserve a file's length on the disk at once, not page by page.

    Raises: OSError if the disk is full; file systems without this call are skipped.
    """
    if _ALLOCATE is None or nbytes < _EARLY:
        return
    if _ALLOCATE(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        e = ctypes.get_errno()
        if e in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(e, os.strerror(e))


def write_all(fd: int, data: memoryview, at: int | None = None) -> None:
    """Write all bytes, at the descriptor's position or at a given offset."""
    while len(data):
        n = os.write(fd, data) if at is None else os.pwrite(fd, data, at)
        data, at = data[n:], None if at is None else at + n


def _spare() -> bool:
    """Return whether each process of the job on this host may have a core for a second thread."""
    if not hasattr(os, "sched_getaffinity"):
        return True
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return len(os.sched_getaffinity(0)) > int(os.environ.get("LOCAL_WORLD_SIZE", world))


class Behind:
    """A writer of a file, from an offset on, in a second thread if a core is free.

    One piece is written while the caller prepares the next.

    ``put`` takes the next piece, which must not change until ``end`` returns: then all is written,
    though not yet flushed.  A piece that takes longer than ``seconds`` is an OSError; the thread
    writes through its own descriptor, so it cannot reach a file that is opened later.
    """

    def __init__(self, fd: int, at: int, seconds: float = SILENT) -> None:
        self.fd = fd
        self.at = at
        self.seconds = seconds
        self.unsent = 0
        self.waiting = 0
        self.beside = _spare()
        self.idle: SimpleQueue[None] = SimpleQueue()
        self.due: SimpleQueue[tuple[memoryview, int] | None] = SimpleQueue()
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def __enter__(self) -> "Behind":
        return self

    def __exit__(self, *_: object) -> None:
        if self.thread is not None:
            thread, self.thread = self.thread, None
            self.due.put(None)
            thread.join(0 if self.error is not None else self.seconds)
            if thread.is_alive():
                self.error = self.error or self._late()

    def put(self, data: memoryview) -> None:
        """Write ``data`` next; return when the previous piece is written.

        Raises: OSError of the previous piece.
        """
        at, self.at = self.at, self.at + len(data)
        if self.thread is None and (len(data) < _ALONE or not self.beside):
            return self._write(data, at)
        if self.thread is None:
            own = os.dup(self.fd)
            thread = threading.Thread(
                target=self._run, args=(own,), name="shardlib write", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:  # at the interpreter's end
                os.close(own)
                return self._write(data, at)
            self.thread, self.fd = thread, own
            self.idle.put(None)
        try:
            self.idle.get(timeout=self.seconds)
        except Empty:
            self.error = self._late()
            raise self.error from None
        self.due.put((data, at))
        self._raise()

    def end(self) -> None:
        """Wait until everything is written.

        Raises: OSError.
        """
        self.__exit__()
        self._raise()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _late(self) -> OSError:
        return OSError(errno.ETIMEDOUT, f"the disk took nothing for {self.seconds:g} s")

    def _run(self, own: int) -> None:
        while (due := self.due.get()) is not None:
            try:
                if self.error is None:
                    self._write(*due)
            except Exception as e:
                self.error = e
            del due  # frees a copy as soon as it is written
            self.idle.put(None)
        os.close(own)

    def _write(self, data: memoryview, at: int) -> None:
        write_all(self.fd, data, at)
        self.unsent += len(data)
        self.waiting += len(data)
        if self.waiting > _FLUSH:
            os.fsync(self.fd)
            self.unsent = self.waiting = 0
        elif self.unsent >= _EARLY and _SEND is not None:
            begin = ctypes.c_int64(at + len(data) - self.unsent)
            _SEND(self.fd, begin, ctypes.c_int64(self.unsent), _BEGIN)
            self.unsent = 0
