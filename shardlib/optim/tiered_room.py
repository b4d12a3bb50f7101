"""Device memory of a model in memory tiers: gathered buckets, gradients on their way, and updates.

All of it is entered in the ledger.  Where it needs bytes, what is on its way is waited for, then
models that are idle give way, and incomplete gradients are sent to the host.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.optim.buckets import Room
from shardlib.tiers.activations import HostActivations
from shardlib.tiers.buffers import Buffers
from shardlib.tiers.ledger import Ledger
from shardlib.tiers.mover import Mover, Ticket, copied


class Movers(NamedTuple):
    """The movers of one device: to it, from it, and updates on the host."""

    loads: Mover
    gradients: Mover
    updates: Mover


class TieredRoom(Room):
    """Memory of the readings of one index whose parts are in tiers.

    ``parts``    buffers of the device for parameters; ``states``  for the state of updates there;
                 ``memory``  for gradients; ``gathered``  for whole buckets.
    ``gradients``  rows of the host; ``joined``  what an update on the host joins to full precision,
                   within the bytes that are ``reserved``.
    ``here``     whether chunks are updated on the device.
    ``eager``    takes each bucket's gradient when it is sent, where chunks are updated in backward.
    ``sent``     gradients on their way to the host, and their device memory.
    ``partial``  gradients of blocks that are read again before they are complete.
    """

    def __init__(
        self, ledger: Ledger, movers: Movers, device: torch.device, shares: int, here: bool
    ) -> None:
        super().__init__()
        self.ledger, self.movers, self.device, self.shares = ledger, movers, device, shares
        self.here = here
        kinds = "parameters", "state", "gradients", "gathered"
        spare = weakref.WeakMethod(self.spare)
        how = device, shares
        pools = (Buffers(ledger, "device", kind, *how, spare) for kind in kinds)
        self.parts, self.states, self.memory, self.gathered = pools
        self.gradients = Buffers(ledger, "host", "gradients", *how)
        self.reserved, self.entries = 0, ledger.entries_of(self)
        self.joined = Buffers(Ledger(host=1), "host", "buffers", torch.device("cpu"), shares)
        ways = movers.gradients, movers.loads
        self.activations = HostActivations(ledger, *how, *ways, spare)
        ledger.idle.append(weakref.ref(self))
        self.eager: Callable[[str, Ticket | None, Tensor], None] | None = None
        self.sent: list[tuple[Ticket, Tensor]] = []
        self.partial: list[Any] = []

    def reserve(self, nbytes: int) -> None:
        """Have so many bytes of the host for what an update joins.  Raises: ShardError if they do not fit."""
        more = nbytes - self.reserved
        if more > 0:
            self.ledger.enter("host", "buffers", more)
            self.entries.append(("host", "buffers", more))
            self.reserved = self.joined.ledger.budget["host"] = nbytes

    def buffer(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a gather buffer that no tensor uses any more, or a new one."""
        return self.gathered.take(shape, like.dtype)

    def spare(self, nbytes: int) -> None:
        """Free bytes of the device tier.

        Gradients that are on their way are waited for.  Chunks of other models go next, then
        incomplete gradients, which are sent to the host.
        """
        ledger = self.ledger
        ledger.trim("device")
        while nbytes > ledger.left("device") and (under_way := len(self.flying) + len(self.sent)):
            self.settle(under_way - 1)
            ledger.trim("device")
        if nbytes > ledger.left("device"):
            self.activations.give_way()
        ledger.free(nbytes, self)
        while self.partial and nbytes > ledger.left("device"):
            self.partial.pop(0).leave()
            self.memory.trim()

    def settle(self, most: int) -> None:
        """Send what is summed, and wait for gradients on their way until at most so many are left."""
        while self.flying:
            self.flying.pop(0)()
        while len(self.sent) > most:
            ticket, _ = self.sent.pop(0)
            ticket.wait()

    def send(self, name: str, out: Tensor) -> tuple[Ticket | None, Tensor]:
        """Post the copy of a reduced gradient to a row of the host, which is returned.

        It stays where backward updates chunks on the device.
        """
        if self.eager is not None and self.here:
            self.eager(name, None, out)
            return None, out.new_empty(()).expand(out.shape)
        row = self.gradient_row(out.shape, out.dtype)
        ticket = self.movers.gradients.submit(partial(copied, [(row, out)]), out.nbytes)
        self.sent.append((ticket, out))
        if self.eager is None:
            return ticket, row
        self.eager(name, ticket, row)
        # it is used there alone
        return ticket, row.new_empty(()).expand(row.shape)

    def gradient_row(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory of the host for a gradient."""
        return self.gradients.take(shape, dtype)

    def forget(self) -> None:
        """Drop what a backward that raised has left."""
        self.flying.clear()
        for ticket, _ in self.sent:
            ticket.on_host()
        self.sent.clear()
        self.partial.clear()
