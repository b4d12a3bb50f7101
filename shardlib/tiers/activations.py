"""Activations of a memory tier: what autograd saves in regions with ``remat="host"``.

A tensor is copied to a row of the host when it is saved, and back when backward needs it, while the
one that was saved before it is fetched ahead.  Two copies to the host may be under way: forward then
waits for the older one, so that it does not run ahead of the link with all that it saved on the
device.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardlib.errors import ShardError
from shardlib.memory_sharing import SavedTensor, TensorForm, one_storage
from shardlib.tiers.buffers import Buffers, Spare
from shardlib.tiers.ledger import Ledger
from shardlib.tiers.mover import Mover, Ticket, copied

UNDER_WAY = 2
"""Copies to the host for which forward does not wait."""


class HostActivations:
    """Saved tensors of one model in host memory, and their copies on the device.

    ``rows``, ``copies``  their memory in the host and on the device, entered in the ledger.
    ``down``, ``up``      the movers of the two directions; None on paper, where bytes are counted.
    ``saved``, ``fetched``  bytes of a rank that were saved here so far, and copied back.
    ``missing``  bytes of this forward for which the host has no memory.
    """

    def __init__(
        self, ledger: Ledger, device: torch.device, shares: int, down: Any = None, up: Any = None,
        spare: Spare = lambda: None,
    ) -> None:  # fmt: skip
        self.ledger, self.shares = ledger, shares
        self.down: Mover = down
        self.up: Mover = up
        # where rows lie on a disk too, the host's bytes beside them: they take all that is left
        self.beside = 0
        self.rows = Buffers(ledger, "host", "activations", device, shares)
        self.copies = Buffers(ledger, "device", "activations", device, shares, spare)
        self.saved = self.fetched = self.missing = 0
        self.leaving: list[SavedActivation] = []
        self.last: Callable[[], SavedActivation | None] = lambda: None
        # the one that was fetched ahead
        self.ahead: Callable[[], SavedActivation | None] = lambda: None

    def keep(self, x: Tensor) -> "SavedActivation":
        """Post the copy of a tensor to the host."""
        for old in self.leaving:
            # another node has saved it too
            if old.is_of(x):
                return old
        one = SavedActivation(self, x, self.last)
        self.last = weakref.ref(one)
        self.saved += one.nbytes
        self.note("save", one)
        if not x.is_meta:
            self._send(one, x)
        self.leaving.append(one)
        if len(self.leaving) > UNDER_WAY:
            self.leaving.pop(0).leave()
        return one

    def begin(self) -> None:
        """Begin a reading: what it saves is not fetched with what another one has saved."""
        self.last = lambda: None

    def note(self, kind: str, one: "SavedActivation") -> None:
        """Hear that a tensor is saved, fetched or used, on paper."""

    def _send(self, one: "SavedActivation", x: Tensor) -> None:
        with suppress(ShardError):
            if not self.missing:
                one.row = self.rows.take((x.numel(),), x.dtype)
        if one.row is None:
            # counted until forward ends: the error then says how much it needs
            self.missing += one.nbytes
            return
        to = one.row.as_strided(x.shape, one.form.strides)
        one.sent = self.down.submit(partial(copied, [(to, x.detach())]), x.nbytes)
        self.rows.until(one.row, one.sent)

    def asking(self, nbytes: int) -> str:
        """Return tiers whose rows leave so many bytes of the host."""
        most = max(self.ledger.budget["host"] or 0, self.beside + nbytes)
        return f"sl.optim.Tiers(host={most}, disk=path, activations={nbytes})"

    def check(self) -> None:
        """End a forward.  Raises: ShardError if the host had too few bytes for what it saved."""
        missing, self.missing = self.missing, 0
        if missing:
            why = f"{missing:,} bytes of saved activations do not fit"
            error = self.ledger.full("host", why, missing)
            if self.beside:
                error.fix = self.asking(self.ledger.held["host"]["activations"] + missing)
            raise error

    def give_way(self) -> None:
        """Free the copy that was fetched ahead, for bytes that are needed now."""
        one = self.ahead()
        if one is not None and one.coming is not None:
            # a job that is under way refers to it
            one.coming.wait()
            one.copy = None
        self.copies.trim()

    def settle(self) -> None:
        """End a backward: nothing that was saved is needed any more."""
        while self.leaving:
            self.leaving.pop(0).leave()
        self.give_way()


class SavedActivation:
    """A tensor that autograd saved, in a row of the host; ``back()`` copies it to the device.

    ``form``    its form, with its strides, by which kernels round.
    ``near``    it, until it has left the device; ``copy``  it, when it is back.
    ``sent``, ``coming``  the jobs that copy it to the host and back.
    ``before``  returns the one that was saved before it, if that is alive.
    """

    def __init__(
        self, of: HostActivations, x: Tensor, before: "Callable[[], SavedActivation | None]"
    ) -> None:
        self.of, self.before = of, before
        self.form = TensorForm.of(x)
        self.nbytes = x.nbytes // of.shares
        self.near: SavedTensor | None = SavedTensor(x)
        self.copy: Tensor | None = None
        self.row: Tensor | None = None
        self.sent: Ticket | None = None
        self.coming: Ticket | None = None

    def is_of(self, x: Tensor) -> bool:
        """Return whether it is this tensor, unchanged."""
        if self.near is None or self.near.is_written:
            return False
        ours, theirs = (
            (y.shape, y.stride(), y.storage_offset(), y.dtype) for y in (self.near.x, x)
        )
        return ours == theirs and one_storage(self.near.x, x)

    def leave(self) -> None:
        """Free the device's memory; one that was written to stays, and ``back`` refuses it."""
        if self.sent is not None:
            self.sent.wait()
        if self.near is not None and not self.near.is_written:
            self.near = None

    def fetch(self) -> None:
        """Post the copy to the device, where it is not there."""
        self.of.note("fetch", self)
        if self.near is not None or self.copy is not None:
            return
        of = self.of
        of.fetched += self.nbytes
        if self.row is None:
            # on paper
            self.copy = self.form.empty("meta")
            return
        assert self.sent is not None, "it has a row"
        copy = of.copies.take(self.row.shape, self.row.dtype)
        job = partial(copied, [(copy, self.row)])
        self.coming = of.up.submit(job, copy.nbytes, [self.sent])
        of.rows.until(self.row, self.coming)
        of.copies.until(copy, self.coming)
        self.copy = copy.as_strided(self.form.shape, self.form.strides)

    def back(self) -> Tensor:
        """Return the tensor, and fetch the one that was saved before it where there are bytes."""
        self.fetch()
        one = self.before()
        if one is not None and self.nbytes_left() >= one.nbytes:
            one.fetch()
            self.of.ahead = self.before
        self.of.note("back", self)
        near, copy, self.near, self.copy = self.near, self.copy, None, None
        if near is not None:
            return near.back()
        if self.coming is not None:
            self.coming.wait()
        assert copy is not None, "it was fetched"
        return copy

    def nbytes_left(self) -> int:
        """Return the bytes of the device that a copy may take without dropping anything."""
        return self.of.ledger.left("device") + self.of.copies.unused
