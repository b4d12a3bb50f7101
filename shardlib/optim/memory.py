"""Memory pools: fresh pages cost as much as a sum over them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import storage_users
from shardlib.capacity import refuse_beyond

__all__ = ["Memory", "Room"]


class Memory:
    """A pool of vectors that are reused, since fresh pages cost as much as a sum over them."""

    def __init__(self) -> None:
        self.free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self.lent: set[int] = set()
        self.views: dict[int, Any] = {}  # address -> the views last made of the memory there

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised contiguous tensor; pass it to ``give`` after the last read."""
        n = math.prod(shape)
        rows = self.free.setdefault((dtype, device), [])
        # a small request must not take a large vector away
        fits = [i for i, t in enumerate(rows) if n <= t.numel() <= 2 * n]
        base = rows.pop(min(fits, key=lambda i: rows[i].numel())) if fits else None
        if base is None:
            base = _empty(n, dtype, device)
        self.lent.add(_storage(base))
        return base[:n].view(shape)

    def give(self, *taken: Tensor) -> None:
        """Take tensors of ``take`` back into the pool; other tensors are ignored."""
        for t in taken:
            base = t if t._base is None else t._base
            if _storage(base) not in self.lent or base.ndim != 1:
                continue
            self.lent.remove(_storage(base))
            self.free.setdefault((base.dtype, base.device), []).append(base)


class Room:
    """Memory shared by all readings of one index.

    ``order``   the buckets in the order in which the last forward read them.
    ``flying``  callbacks that wait for gradient sums in transit.
    """

    def __init__(self) -> None:
        self.memory = Memory()
        self.order: list[str] = []
        self.buffers: list[Tensor] = []
        self.flying: list[Callable[[], object]] = []

    def buffer(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a gather buffer that no tensor uses any more, or a new one."""
        n = math.prod(shape)
        for t in self.buffers:
            fits = n <= t.numel() <= 2 * n and (t.dtype, t.device) == (like.dtype, like.device)
            # 1: only this list refers to the storage
            if fits and storage_users(t) == 1:
                return t[:n].view(shape)
        self.buffers = [t for t in self.buffers if storage_users(t) > 1 or t.numel() >= n]
        self.buffers.append(_empty(n, like.dtype, like.device))
        return self.buffers[-1][:n].view(shape)


def _storage(x: Tensor) -> int:
    """Return the number of a storage: on the meta device all addresses are 0."""
    return x.untyped_storage()._cdata


def _empty(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate memory that later calls may write to, also if this one is in inference mode."""
    if device.type == "cpu":  # the allocator of an accelerator refuses by itself, at no cost
        refuse_beyond(n * dtype.itemsize, device, "zero")
    with torch.inference_mode(False):
        return torch.empty(n, dtype=dtype, device=device)
