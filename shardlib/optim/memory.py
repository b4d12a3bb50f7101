"""Memory that is used again: fresh pages cost as much as a sum over them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import storage_users

__all__ = ["Memory", "Room"]


class Memory:
    """Vectors that are used again, since fresh pages cost as much as a sum over them."""

    def __init__(self) -> None:
        self.free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self.lent: set[int] = set()
        self.views: dict[int, Any] = {}  # address -> what was made of the memory there last

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a contiguous tensor that holds anything, to be given back when nobody reads it."""
        n = math.prod(shape)
        rows = self.free.setdefault((dtype, device), [])
        fits = [i for i, t in enumerate(rows) if n <= t.numel() <= 2 * n]
        base = rows.pop(min(fits, key=lambda i: rows[i].numel())) if fits else None
        if base is None:
            base = _empty(n, dtype, device)
        self.lent.add(base.data_ptr())
        return base[:n].view(shape)

    def give(self, *taken: Tensor) -> None:
        """Take back what ``take`` gave; what came from elsewhere is left alone."""
        for t in taken:
            base = t if t._base is None else t._base
            if base.data_ptr() not in self.lent or base.ndim != 1:
                continue
            self.lent.remove(base.data_ptr())
            self.free.setdefault((base.dtype, base.device), []).append(base)


class Room:
    """Memory that readings of one index share.

    ``order``   the buckets in the order in which the last one read them.
    ``flying``  what waits for the sums of gradients that are on their way.
    """

    def __init__(self) -> None:
        self.memory = Memory()
        self.order: list[str] = []
        self.buffers: list[Tensor] = []
        self.flying: list[Callable[[], object]] = []

    def buffer(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return memory of an earlier gather that no tensor looks at any more, or new memory."""
        n = math.prod(shape)
        for t in self.buffers:
            fits = n <= t.numel() <= 2 * n and (t.dtype, t.device) == (like.dtype, like.device)
            if fits and storage_users(t) == 1:
                return t[:n].view(shape)
        self.buffers = [t for t in self.buffers if storage_users(t) > 1 or t.numel() >= n]
        self.buffers.append(_empty(n, like.dtype, like.device))
        return self.buffers[-1][:n].view(shape)


def _empty(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return new memory that later calls may write to, also where this one is under inference mode."""
    with torch.inference_mode(False):
        return torch.empty(n, dtype=dtype, device=device)
