"""Memory in large pages, for tensors that are about to be filled.

The kernel then supplies it 2 MiB at a time; 4 KiB at a time takes longer than filling it.

A large page belongs to one mapping, so smaller tensors share one: each has its own storage within
it, and returns its pages when it is freed.
"""

import contextlib
import ctypes
import math
import mmap
import time
import weakref
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


def new(plans: Sequence[Plan]) -> list[Tensor]:
    """Allocate uninitialised tensors, each with its own storage.

    >>> [x.shape for x in new([((2, 3), torch.float32, torch.device("cpu"))])]
    [torch.Size([2, 3])]
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype, _ in plans]
    here = [d.type == "cpu" and n >= _FEW for (_, _, d), n in zip(plans, sizes, strict=True)]
    pages = [-(-n // mmap.PAGESIZE) * mmap.PAGESIZE * h for n, h in zip(sizes, here, strict=True)]
    room = None
    at = 0
    out = []
    if hasattr(mmap, "MADV_HUGEPAGE") and sum(pages) >= _LARGE:
        room, at = _room(sum(pages))
    for (shape, dtype, device), n, mine, taken in zip(plans, sizes, here, pages, strict=True):
        if room is None or not mine:
            out.append(torch.empty(shape, dtype=dtype, device=device))
            continue
        strides = torch.empty(shape, device="meta").stride()
        blank = torch.empty(0, dtype=dtype, device="cpu")
        out.append(blank.set_(_storage(room, at, n, taken), 0, torch.Size(shape), strides))
        at += taken
    return out


def _room(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map memory; return it, and the offset of its first large page."""
    found = mmap.mmap(-1, nbytes + _LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin = -ctypes.addressof(ctypes.c_ubyte.from_buffer(found)) % _LARGE
    end = begin + nbytes // _LARGE * _LARGE
    with contextlib.suppress(OSError):
        # a system without large pages
        found.madvise(mmap.MADV_HUGEPAGE, begin, end - begin)
    slow = 0
    for at in range(begin, end, _LARGE):
        began = time.thread_time()
        found[at] = 0  # a page fault
        slow = slow + 1 if time.thread_time() - began > _LONG else 0
        if slow == _OFTEN:
            found.madvise(mmap.MADV_NOHUGEPAGE, at, end - at)
            break
    return found, begin


def _storage(room: mmap.mmap, at: int, nbytes: int, taken: int) -> torch.UntypedStorage:
    """Make a storage of a part of a room, whose pages return to the system when it is freed."""
    held = (ctypes.c_ubyte * nbytes).from_buffer(room, at)
    # by the room, which is kept alive for it
    weakref.finalize(held, room.madvise, mmap.MADV_DONTNEED, at, taken).atexit = False
    return torch.frombuffer(held, dtype=torch.uint8).untyped_storage()
