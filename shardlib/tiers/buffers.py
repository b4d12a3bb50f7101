"""Memory of the tiers: rows in host memory, and pools of buffers that are reused.

Host rows are pinned for an accelerator.  For a CPU in its place they are in shared pages, which no
limit on a process's private memory (RLIMIT_DATA) counts, so that this is the device's limit.
"""

import math
import mmap
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardlib._compat import storage_users
from shardlib.tiers.ledger import Ledger
from shardlib.tiers.mover import Ticket

PATIENCE = 1.0
"""Seconds before a tier counts as full: a transport's thread may let go of a buffer later than its
transfer ends, on one rank alone, which would raise while the others wait for it."""

Spare = Callable[[], Callable[[int], object] | None]
"""A weak reference to what frees bytes of a tier."""


def host_memory(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, object]:
    """Allocate a vector in host memory for transfers to ``device``.

    Returns the vector, and the object that lives as long as its memory.
    """
    if device.type not in ("cpu", "meta"):
        row = torch.empty(n, dtype=dtype, device="cpu", pin_memory=True)
        return row, row.untyped_storage()
    if device.type == "meta" or not n:
        row = torch.empty(n, dtype=dtype, device=device)
        return row, row.untyped_storage()
    pages = mmap.mmap(-1, -(-n * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE)
    return torch.frombuffer(pages, dtype=dtype, count=n), pages


class Buffers:
    """Buffers of one kind in one tier, entered in the ledger, reused when no tensor refers to them.

    ``shares``  the ranks in this process, which share a buffer under simulate: a tier is one rank's.
    ``spare``   returns what frees bytes of the tier, where too few are left.

    >>> ledger = Ledger(device=1024)
    >>> buffers = Buffers(ledger, "device", "gradients", torch.device("cpu"))
    >>> x = buffers.take((8, 8), torch.float32)
    >>> del x
    >>> y = buffers.take((64,), torch.float32)
    >>> ledger.peak["device"]
    256
    """

    def __init__(
        self, ledger: Ledger, tier: str, kind: str, device: torch.device, shares: int = 1,
        spare: Spare = lambda: None,
    ) -> None:  # fmt: skip
        self.ledger, self.tier, self.kind = ledger, tier, kind
        self.device, self.shares, self.spare = device, shares, spare
        self.held: list[Tensor] = []
        # number of a storage -> the last job that uses it
        self.jobs: dict[int, Ticket] = {}
        self.given: set[int] = set()
        self.entries = ledger.entries_of(self)
        ledger.pools.add(self)

    def take(self, shape: Sequence[int], dtype: torch.dtype, _device: object = None) -> Tensor:
        """Return an uninitialised buffer, which is free again when no tensor refers to it.

        Raises: ShardError if the tier may not hold it.
        """
        n = math.prod(shape)
        nbytes = n * dtype.itemsize // self.shares
        for i, t in enumerate(self.held):
            if t.numel() == n and t.dtype == dtype and self._is_free(t):
                self._wait(t)
                # those that were taken longest ago are free first
                self.held.append(self.held.pop(i))
                return t.view(tuple(shape))
        if nbytes > self.ledger.left(self.tier):
            self.ledger.trim(self.tier)
        if nbytes > self.ledger.left(self.tier) and (spare := self.spare()) is not None:
            spare(nbytes)
        until = time.monotonic() + PATIENCE
        while nbytes > self.ledger.left(self.tier) and time.monotonic() < until:
            time.sleep(0.001)
            self.ledger.trim(self.tier)
        self.ledger.enter(self.tier, self.kind, nbytes)
        self.entries.append((self.tier, self.kind, nbytes))
        made = self._make(n, dtype)
        self.held.append(made)
        return made.view(tuple(shape))

    def give(self, *taken: Tensor) -> None:
        """Say that buffers are used no more: where a transport still has them, it is waited for."""
        ours = set(map(_number, self.held))
        self.given.update(n for n in map(_number, taken) if n in ours)

    def until(self, x: Tensor, ticket: Ticket) -> None:
        """Keep a buffer from being written again before a job on it has ended."""
        self.jobs[_number(x)] = ticket

    @property
    def unused(self) -> int:
        """The bytes of buffers that no tensor refers to."""
        free = (t for t in self.held if storage_users(t) == 1 or _number(t) in self.given)
        return sum(t.nbytes // self.shares for t in free)

    def trim(self) -> None:
        """Free the buffers that no tensor refers to."""
        unused = [t for t in self.held if self._is_free(t)]
        self.held[:] = [t for t in self.held if not any(t is u for u in unused)]
        for t in unused:
            self._wait(t)
            entry = self.tier, self.kind, t.nbytes // self.shares
            self.entries.remove(entry)
            self.ledger.leave(*entry)

    def _make(self, n: int, dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            if self.tier == "host":
                return host_memory(n, dtype, self.device)[0]
            return torch.empty(n, dtype=dtype, device=self.device)

    def _is_free(self, t: Tensor) -> bool:
        until = time.monotonic() + PATIENCE * (_number(t) in self.given)
        while storage_users(t) > 1 and time.monotonic() < until:
            time.sleep(0.0002)
        self.given.discard(_number(t))
        return storage_users(t) == 1

    def _wait(self, t: Tensor) -> None:
        ticket = self.jobs.pop(_number(t), None)
        if ticket is not None:
            ticket.wait()


def _number(x: Tensor) -> int:
    """Return the number of a storage."""
    return x.untyped_storage()._cdata


def host_row(
    shape: Sequence[int], dtype: torch.dtype, ledger: Ledger, kind: str, device: torch.device, shares: int
) -> Tensor:  # fmt: skip
    """Return an uninitialised tensor in host memory, in the ledger as long as its memory lives."""
    n = math.prod(shape)
    nbytes = n * dtype.itemsize // shares
    if nbytes > ledger.left("host"):
        ledger.trim("host")
    ledger.enter("host", kind, nbytes)
    row, owner = host_memory(n, dtype, device)
    ledger.entries_of(owner).append(("host", kind, nbytes))
    return row.view(tuple(shape))
