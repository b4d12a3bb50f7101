"""Bytes between memory and disk: what is written goes there while the next is made ready."""

import ctypes
import mmap
import os
import stat
import threading
from queue import SimpleQueue

from torch import Tensor

__all__ = ["Behind", "in_large_pages", "memory", "open_file", "write_all"]

_FLUSH = 1 << 28
"""Bytes after which what was written is sent to the disk, so that the last fsync is short."""

_ALONE = 1 << 18
"""Bytes below which a file's first stretch is not worth a thread."""

_FEW = 1 << 18
"""Bytes of memory below which it is not worth large pages."""

_MADVISE = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None


def memory(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor of this host."""
    nbytes = x.numel() * x.dtype.itemsize
    if not nbytes:
        return memoryview(b"")
    held = (ctypes.c_ubyte * nbytes).from_address(x.data_ptr())  # numpy is not a dependency
    held.tensor = x  # type: ignore[attr-defined]  # which lives as long as the view
    return memoryview(held).cast("B")


def in_large_pages(x: Tensor) -> None:
    """Ask the system to back new memory of this host by large pages, where it may: what is about to
    be filled is then not fetched 4096 bytes at a time.
    """
    if _MADVISE is None or x.device.type != "cpu" or x.nbytes < _FEW:
        return
    start = x.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = x.data_ptr() + x.nbytes - start
    _MADVISE(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


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


def write_all(fd: int, data: memoryview, at: int | None = None) -> None:
    """Where the descriptor stands, or from a place of the file on."""
    while len(data):
        n = os.write(fd, data) if at is None else os.pwrite(fd, data, at)
        data, at = data[n:], None if at is None else at + n


class Behind:
    """Writes a file from a place on: one stretch goes there while the caller looks at it, or makes
    the next.

    ``put`` takes what comes next, which stays as it is until ``end`` returns: then all is written,
    though not yet flushed.
    """

    def __init__(self, fd: int, at: int) -> None:
        self.fd, self.at, self.unsent = fd, at, 0
        self.idle: SimpleQueue[None] = SimpleQueue()
        self.due: SimpleQueue[tuple[memoryview, int] | None] = SimpleQueue()
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def __enter__(self) -> "Behind":
        return self

    def __exit__(self, *_: object) -> None:
        if self.thread is not None:
            self.due.put(None)
            self.thread.join()
            self.thread = None

    def put(self, data: memoryview) -> None:
        """Return when what came before is written.  Raises: OSError of that."""
        at, self.at = self.at, self.at + len(data)
        if len(data) < _ALONE and self.thread is None:
            return self._write(data, at)
        if self.thread is None:
            thread = threading.Thread(target=self._run, name="shardlib write")
            try:
                thread.start()
            except RuntimeError:  # at the interpreter's end
                return self._write(data, at)
            self.thread = thread
            self.idle.put(None)
        self.idle.get()
        self.due.put((data, at))
        self._raise()

    def end(self) -> None:
        """Raises: OSError."""
        self.__exit__()
        self._raise()

    def _raise(self) -> None:
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        while (due := self.due.get()) is not None:
            try:
                if self.error is None:
                    self._write(*due)
            except Exception as e:
                self.error = e
            del due  # a copy is not kept longer than it is needed
            self.idle.put(None)

    def _write(self, data: memoryview, at: int) -> None:
        write_all(self.fd, data, at)
        self.unsent += len(data)
        if self.unsent > _FLUSH:
            os.fsync(self.fd)
            self.unsent = 0
