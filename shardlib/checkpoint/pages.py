"""Memory in large pages, for tensors that are about to be filled.

The kernel then supplies it 2 MiB at a time; 4 KiB at a time takes longer than filling it.

A large page belongs to one mapping, so smaller tensors share one: each has its own storage within
it, and returns its pages when it is freed.
"""

import ctypes
import math
import mmap
import time
from collections.abc import Sequence

import torch
from torch import Tensor

Plan = tuple[tuple[int, ...], torch.dtype, torch.device]
"""Shape, dtype and device of a tensor."""

_LARGE = 1 << 21
"""Bytes of a large page."""

_FEW = 1 << 16
"""Bytes below which a tensor is allocated by torch."""

_LONG, _OFTEN = 1e-3, 2
"""Seconds that a large page may take, about as long as small pages do; and how many in a row may
take longer.  They do if memory is fragmented and must be compacted first, or in a virtual machine
whose host has reclaimed free memory.
"""

_MADVISE = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_HUGEPAGE") else None


def new(plans: Sequence[Plan]) -> list[Tensor]:
    """Allocate uninitialised tensors, each with its own storage.

    >>> [x.shape for x in new([((2, 3), torch.float32, torch.device("cpu"))])]
    [torch.Size([2, 3])]
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in plans]
    here = [d.type == "cpu" and n >= _FEW for (_, _, d), n in zip(plans, sizes, strict=True)]
    pages = [-(-n // mmap.PAGESIZE) * mmap.PAGESIZE * h for n, h in zip(sizes, here, strict=True)]
    room = _room(sum(pages)) if _MADVISE is not None and sum(pages) >= _LARGE else None
    out, at = [], 0
    for (shape, dtype, device), n, mine, taken in zip(plans, sizes, here, pages, strict=True):
        if room is None or not mine:
            out.append(torch.empty(shape, dtype=dtype, device=device))
            continue
        held = _storage(*room, at, n, taken)
        out.append(
            torch.empty(0, dtype=dtype, device="cpu").set_(
                held, 0, torch.Size(shape), torch.empty(shape, device="meta").stride()
            )
        )
        at += taken
    return out


def _room(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map memory; return it, and the offset of its first large page."""
    assert _MADVISE is not None
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    found = mmap.mmap(-1, nbytes + _LARGE, flags=flags)
    begin, large = -_address(found, 0) % _LARGE, nbytes // _LARGE * _LARGE
    _MADVISE(_pointer(found, begin), ctypes.c_size_t(large), mmap.MADV_HUGEPAGE)
    slow = 0
    for at in range(begin, begin + large, _LARGE):
        slow = slow + 1 if _touched(found, at) > _LONG else 0
        if slow == _OFTEN:
            rest = ctypes.c_size_t(begin + large - at)
            _MADVISE(_pointer(found, at), rest, mmap.MADV_NOHUGEPAGE)
            break
    return found, begin


def _touched(room: mmap.mmap, at: int) -> float:
    """Measure this thread's CPU seconds for the page fault at ``at``."""
    began = time.thread_time()
    room[at] = 0
    return time.thread_time() - began


def _address(room: mmap.mmap, at: int) -> int:
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(room, at))


def _pointer(room: mmap.mmap, at: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(_address(room, at))


def _storage(room: mmap.mmap, begin: int, at: int, nbytes: int, taken: int) -> torch.UntypedStorage:
    held = (ctypes.c_ubyte * nbytes).from_buffer(room, begin + at)
    held.pages = _Pages(room, begin + at, taken)  # type: ignore[attr-defined]
    return torch.frombuffer(held, dtype=torch.uint8).untyped_storage()


class _Pages:
    """The pages of one tensor, returned to the system when it is freed."""

    def __init__(self, room: mmap.mmap, at: int, nbytes: int) -> None:
        self.room = room  # kept alive, so that the addresses stay valid
        self.where, self.nbytes = _pointer(room, at), ctypes.c_size_t(nbytes)

    def __del__(self) -> None:
        if _MADVISE is not None:
            _MADVISE(self.where, self.nbytes, mmap.MADV_DONTNEED)
