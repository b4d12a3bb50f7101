"""Device memory of a model in memory tiers: gathered buckets, gradients on their way, and what gives way.

All of it is entered in the ledger.  Where it needs bytes, what is on its way is waited for, models
that are idle give way, and then chunks of this one are dropped.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardlib.optim.buckets import Memory, Room
from shardlib.optim.chunk_cache import ChunkCache
from shardlib.tiers.buffers import Buffers, host_memory
from shardlib.tiers.mover import Ticket, copied


class ExactMemory(Memory):
    """A pool of vectors in host memory, each lent for its own size alone."""

    slack = 1

    def _made(self, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return host_memory(n, dtype, device)[0]


class GradientMemory(Memory):
    """A pool in the device's memory, entered in the ledger; ``spare``  frees bytes of the tier."""

    slack = 1

    def __init__(self, pool: Buffers, spare: Callable[[int], object]) -> None:
        super().__init__()
        self.pool, self.spare = pool, spare

    def _made(self, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # a tensor of its own, by which the pool knows that it is in use
        return self.pool.take((n,), dtype, self.spare).detach()

    def trim(self) -> None:
        """Free the vectors that are not lent."""
        for rows in self.free.values():
            rows.clear()
        self.pool.trim()

    def forget(self) -> None:
        """Remove what was lent to a backward that raised."""
        self.lent.clear()
        self.trim()


class TieredRoom(Room):
    """Memory of the readings of one index whose parts are in tiers."""

    def __init__(self, cache: ChunkCache) -> None:
        super().__init__()
        self.cache = cache
        # a chunk that is loaded may send incomplete gradients to the host, too
        spare = cache.spared = weakref.WeakMethod(self.spare)
        self.activations = cache.activations
        self.activations.spared = spare
        of = cache.device, cache.shares
        gradients = Buffers(cache.ledger, "device", "gradients", *of)
        self.memory = GradientMemory(gradients, lambda n: spare()(n))  # type: ignore[misc]
        self.gathered = Buffers(cache.ledger, "device", "gathered", *of)
        cache.ledger.idle.append(weakref.WeakMethod(self.give_way))
        # whether the others are freeing bytes for this one
        self.asks = False
        # gradients on their way to the host, and their device memory
        self.sent: list[tuple[Ticket, Tensor]] = []
        # those of blocks that are read again before they are complete
        self.partial: list[Any] = []

    def buffer(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a gather buffer that no tensor uses any more, or a new one."""
        return self.gathered.take(shape, like.dtype, self.spare)

    def spare(self, nbytes: int) -> None:
        """Free bytes of the device tier.

        Gradients that are on their way are waited for.  Chunks of other models go next, then
        incomplete gradients, which are sent to the host, then chunks of this one.
        """
        ledger = self.cache.ledger
        self.cache.land(0)
        self.trim()
        while nbytes > ledger.left("device") and (under_way := len(self.flying) + len(self.sent)):
            self.settle(under_way - 1)
            self.trim()
        if nbytes > ledger.left("device"):
            self.activations.give_way()
        self.asks = True
        ledger.free(nbytes)
        self.asks = False
        while self.partial and nbytes > ledger.left("device"):
            self.partial.pop(0).leave()
            self.memory.trim()  # type: ignore[attr-defined]
        self.cache.spare(nbytes)

    def trim(self) -> None:
        """Free the buffers that no tensor refers to."""
        for pool in (self.gathered, *self.cache.pools, self.memory, self.activations.copies):
            pool.trim()  # type: ignore[union-attr]

    def give_way(self, nbytes: int) -> None:
        """Free bytes for another model."""
        if self.asks:
            return
        self.trim()
        self.cache.spare(nbytes, all_of_it=True)

    def settle(self, most: int) -> None:
        """Send what is summed, and wait for gradients on their way until at most so many are left."""
        while self.flying:
            self.flying.pop(0)()
        while len(self.sent) > most:
            ticket, out = self.sent.pop(0)
            ticket.wait()
            self.memory.give(out)

    def send(self, name: str, out: Tensor) -> tuple[Ticket | None, Tensor]:
        """Post the copy of a reduced gradient to a row of the host, which is returned.

        It stays where backward updates chunks on the device.
        """
        cache = self.cache
        if cache.eager is not None and cache.here:
            return cache.eager(name, None, out), cache.standing[name].expand(out.shape)
        row = cache.gradient_row(out.shape, out.dtype)
        ticket = cache.movers.gradients.submit(partial(copied, [(row, out)]), out.nbytes)
        self.sent.append((ticket, out))
        if cache.eager is None:
            return ticket, row
        cache.eager(name, ticket, row)
        # it is used there alone
        return ticket, row.new_empty(()).expand(row.shape)

    def forget(self) -> None:
        """Drop what a backward that raised has left."""
        self.flying.clear()
        for ticket, _ in self.sent:
            ticket.on_host()
        self.sent.clear()
        self.partial.clear()
        if self.cache.eager is not None:
            for some in (self.cache.due, self.cache.brought, self.cache.coming):
                some.clear()
        self.memory.forget()  # type: ignore[attr-defined]
