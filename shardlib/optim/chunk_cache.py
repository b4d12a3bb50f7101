"""Device cache of chunks of parameters, whose rows are in host memory or on a disk.

A chunk is the buckets of one block of the module.  Its parts are loaded before they are gathered,
in the order of the last step (``tiers/schedule.py``), by a mover beside the computation.  Gathered
buckets and gradients are entered in the same ledger; where they need bytes, chunks are dropped.

All decisions follow from sizes and the order of uses, which are equal on all ranks, and never from
how far a transfer is.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib._compat import backward_now
from shardlib.collectives import played, pmax
from shardlib.dtypes import wider
from shardlib.errors import ShardError
from shardlib.mesh import Mesh
from shardlib.optim.buckets import Bucket, Index
from shardlib.optim.norms import over_ranks
from shardlib.optim.tiered_room import Movers, TieredRoom
from shardlib.optim.tiles import first_word
from shardlib.tiers.depth import Times
from shardlib.tiers.ledger import Ledger
from shardlib.tiers.mover import Ticket
from shardlib.tiers.rows import RowStore, TierRow, on_their_way
from shardlib.tiers.schedule import TRANSITIONS, State, Uses, moves


class DueUpdate(NamedTuple):
    """An update of a chunk on the device: the rows that it takes, and what runs it on their copies."""

    rows: Sequence[TierRow]
    run: Callable[[Mapping[TierRow, Tensor]], Any]


@dataclass
class ChunkCopy:
    """The parts of a chunk on the device, the job that loads them, and their rows' versions then."""

    parts: dict[str, Tensor]
    ticket: Ticket
    versions: dict[str, int]
    phase: State


class ChunkCache(TieredRoom):
    """Device copies of the chunks of one model's parameters.

    ``chunks``   chunk -> its buckets.
    ``rows``     bucket -> its part; ``store`` has these rows and those of the state.
    ``updates``  chunk -> the job of its last update on the host, or which sends what the device has
                 updated.
    ``due``      chunk -> its update on the device, which runs when it is read; it then stays valid.
    ``brought``  rows of such updates that are there already, and the job that brings them.
    ``loads``    chunks loaded so far.
    ``ahead``    whether the next block is gathered while one is computed, and a gradient may be on
                 its way to the host while the next one is made: there are bytes for both.
    """

    def __init__(
        self, index: Index, mesh: Mesh, ledger: Ledger, movers: Movers, depth: int | None,
        here: bool = False,
    ) -> None:  # fmt: skip
        device = mesh.device
        super().__init__(ledger, movers, device, len(played(mesh)), here)
        # not the index, whose room this is: memory is freed without the collector
        self.mesh, self.asked = mesh, depth
        self.depth = 2 if depth is None else depth
        self.times = Times(device if movers.loads.stream is not None else None, depth is None)
        self.chunk_of: dict[str, str] = {}
        self.block_of: dict[str, str] = {}
        self.chunks: dict[str, list[Bucket]] = {}
        self.trained = frozenset[str]()
        for b in index:
            block, frozen = block_of(index, b)
            # copies of what is frozen are never stale
            self.chunk_of[b.name] = chunk = block + " frozen" * frozen
            self.block_of[chunk] = block
            self.chunks.setdefault(chunk, []).append(b)
            if not frozen:
                self.trained |= {chunk}
        self.sizes = {c: sum(map(part_bytes, some)) for c, some in self.chunks.items()}
        self.rows: dict[str, TierRow] = {}
        self.store = RowStore(ledger, device, self.shares)
        # what stands for a row in a graph: no memory
        self.standing = {b.name: torch.empty((), dtype=b.dtype, device=device) for b in index}
        # of each chunk's update on the device: its state, and other memory that it takes there
        self.state_bytes, self.scratch = Counter[str](), Counter[str]()
        # the least budget without tiles of rows
        self.whole = 0
        self.due: dict[str, DueUpdate] = {}
        self.brought: dict[str, tuple[dict[TierRow, Tensor], Ticket]] = {}
        # chunks that backward has read and not updated, and how many of them stay there
        self.coming: dict[str, None] = {}
        self.waits = 1
        # jobs that send what was updated, of which the memory is still in use
        self.sending: list[Ticket] = []
        # what follows the last update of a step
        self.finish: Callable[[], object] | None = None
        self.copies: dict[str, ChunkCopy] = {}
        self.updates: dict[str, Ticket] = {}
        # until a step has been recorded, blocks are read in module order
        names = list(self.chunks)[::-1]
        self.uses = Uses(names + names[::-1], self._stale)
        self.trace: list[str] = []
        self.at = -1
        # the chunks in use: those of one block
        self.used: dict[str, None] = {}
        self.steps = self.loads = 0
        self.most, self.ahead = 1 << 62, True

    @property
    def _stale(self) -> frozenset[str]:
        return frozenset() if self.here else self.trained

    def needs(self) -> list[list[int]]:
        """List the bytes of blocks, largest first: parts, gathered, gradients, and updates there.

        The least budget of the device is the sum of the first of each.
        """
        found = [Counter[str]() for _ in range(4)]
        for chunk, some in self.chunks.items():
            sums = [sum(map(f, some)) for f in (part_bytes, _gathered_bytes, _gradient_bytes)]
            sums.append(self.state_bytes[chunk] + self.scratch[chunk])
            for row, nbytes in zip(found, sums, strict=True):
                row[self.block_of[chunk]] += nbytes
        return [sorted(row.values(), reverse=True) for row in found]

    def divide(self) -> None:
        """Divide the device's budget: find the bytes that chunks may take, and whether to work ahead.

        Raises: ShardError for a budget below what one block needs.
        """
        budget = self.ledger.budget["device"]
        parts, gathered, gradients, updates = self.needs()
        self.largest = parts[0]
        # used, the next one, and what is not summed yet when the next is gathered already
        self.waits = 2 + (self.here and gathered[0] > 0)
        if budget is None:
            return
        beside = sum(gathered[:2]) + sum(gradients[:2]) + sum(updates[:2])
        self.most = budget - beside
        if self.most >= sum(parts[: self.waits]):
            return
        self.waits = 1
        beside = gathered[0] + gradients[0] + updates[0]
        self.most, self.ahead = budget - beside, False
        least = beside + parts[0]
        if budget < least:
            also = f", its update {updates[0]:,}" * self.here
            raise ShardError(
                f"the largest block needs {least:,} bytes: its parameters {parts[0]:,}, gathered "
                f"{gathered[0]:,}, its gradient {gradients[0]:,}{also}; the device tier may hold "
                f"{budget:,}",
                op="tiers",
                mesh=self.mesh,
                fix=f"sl.optim.Tiers(device={least})",
            )

    # ------------------------------------------------------------ reading

    def read(self, name: str) -> Tensor:
        """Return the device copy of a bucket's part; load it, and post the loads that come next.

        Raises: ShardError if the device tier cannot hold it.
        """
        chunk = self.chunk_of[name]
        if chunk not in self.used or not self._is_valid(chunk):
            with self.times:
                self._use(chunk)
                self.copies[chunk].ticket.wait()
        self.copies[chunk].ticket.wait()
        return self.copies[chunk].parts[name]

    def _use(self, chunk: str) -> None:
        if self.here and self.eager is not None and backward_now() != -1:
            self._await(chunk)
        if any(self.block_of[c] != self.block_of[chunk] for c in self.used):
            self.release()
        self.trace.append(chunk)
        self.at = self.uses.find(chunk, self.at)
        self._place(chunk)
        if chunk in self.due:
            self.update(chunk)
        if self.ahead and not self.brought:
            coming = (c for _, c in self.uses.coming(self.at, self.depth) if c in self.due)
            for other in islice(coming, 1):
                self.bring(other)

    def _await(self, chunk: str) -> None:
        """Keep what backward reads until it is updated, and update what has waited for one block."""
        # the last block of forward is still gathered, and not read again
        last = [c for c in self.used if self._phase(c) == "used"]
        self.coming |= {c: None for c in (*last, chunk) if c in self.trained}
        ready = [c for c in self.coming if c in self.due]
        for other in ready[: max(len(self.coming) - self.waits, 0)]:
            self.update(other)

    def _place(self, chunk: str) -> None:
        """Have a valid copy of a chunk there, and post the loads that come next."""
        if chunk in self.copies and not self._is_valid(chunk):
            self.used.pop(chunk, None)
            self._drop(chunk)
        how = self.copies, self.sizes, self.most, self.depth
        # what is updated soon stays where there are bytes, and what was used where no block is computed
        stays = {*self.used, *self.brought, *self.coming}, self.used, ()
        tries = (moves(self.uses, self.at, chunk, *how, some) for some in stays)
        found = next((made for made in tries if made is not None), None)
        if found is None:
            raise self.ledger.full("device", f"block {chunk!r} does not fit", self.sizes[chunk])
        # before it is loaded, so that it is not dropped for what is loaded with it
        self.used[chunk] = None
        for kind, other in found:
            if kind == "drop":
                self._drop(other)
            elif other == chunk or self._fits(other):
                self._load(other)
        self._loaded(chunk)
        self._event(chunk, "use")

    def release(self) -> None:
        """End the use of all chunks."""
        for chunk in self.used:
            if self._phase(chunk) == "used":
                self._event(chunk, "release")
        self.used.clear()

    def _fits(self, chunk: str) -> bool:
        """Return whether a chunk may be loaded early without dropping what is needed sooner."""
        unused = sum(pool.unused for pool in (self.parts, self.states, self.memory))
        return self.sizes[chunk] <= self.ledger.left("device") + unused

    def _is_valid(self, chunk: str) -> bool:
        if chunk not in self.copies:
            return False
        if self._phase(chunk) == "storing":
            # nobody else has changed its rows
            return True
        self._loaded(chunk)
        return all(self.rows[n].version == v for n, v in self.copies[chunk].versions.items())

    def _load(self, chunk: str) -> None:
        rows = {b.name: self.rows[b.name] for b in self.chunks[chunk]}
        parts = {n: self.parts.take(row.shape, row.dtype) for n, row in rows.items()}
        versions: dict[str, int] = {}
        after = list(filter(None, [self.updates.get(chunk)]))
        job = partial(self.store.load, rows, parts, versions)
        ticket = self.movers.loads.submit(job, sum(x.nbytes for x in parts.values()), after)
        for x in parts.values():
            self.parts.until(x, ticket)
        self.copies[chunk] = ChunkCopy(parts, ticket, versions, TRANSITIONS["absent", "load"])
        self.loads += 1
        if self.times.measures:
            self.times.loads[chunk] = ticket

    def _loaded(self, chunk: str) -> None:
        """Wait for what is under way between a copy and its rows."""
        if self._phase(chunk) == "loading":
            self.copies[chunk].ticket.wait()
            self._event(chunk, "loaded")
        elif self._phase(chunk) == "storing":
            self.updates[chunk].wait()
            versions = self.copies[chunk].versions
            versions.update((n, self.rows[n].version) for n in versions)
            self._event(chunk, "stored")

    def _drop(self, chunk: str) -> None:
        if chunk not in self.copies:
            # it was dropped for other bytes meanwhile
            return
        self._loaded(chunk)
        if self._phase(chunk) == "used":
            self._event(chunk, "release")
        self._event(chunk, "drop")
        del self.copies[chunk]

    def _phase(self, chunk: str) -> State:
        return self.copies[chunk].phase if chunk in self.copies else "absent"

    def _event(self, chunk: str, event: str) -> None:
        self.copies[chunk].phase = TRANSITIONS[self._phase(chunk), event]

    def spare(self, nbytes: int) -> None:
        """Free bytes of the device tier: after all else, of this model's chunks."""
        self.land(0)
        super().spare(nbytes)
        self._drop_until(nbytes)

    def give_way(self, nbytes: int) -> None:
        """Free bytes for another model, also of chunks in use."""
        self.release()
        for _, ticket in self.brought.values():
            ticket.wait()
        # it is brought again
        self.brought.clear()
        self.ledger.trim("device")
        most = self.most
        self._drop_until(nbytes)
        self.most = most

    def _drop_until(self, nbytes: int) -> None:
        """Drop chunks until so many bytes are left; they may take fewer from now on."""
        rows = [(self.uses.after(c, self.at), c) for c in self.copies if c not in self.used]
        for _, chunk in sorted(rows, reverse=True):
            if nbytes <= self.ledger.left("device"):
                break
            self._drop(chunk)
            self.parts.trim()
            self.most = max(sum(self.sizes[c] for c in self.copies), self.largest)

    def forget(self) -> None:
        """Drop what a backward that raised has left."""
        super().forget()
        if self.eager is not None:
            store = self.store
            for some in (self.due, self.brought, self.coming, store.due, store.ahead):
                some.clear()

    @property
    def sums(self) -> int:
        """Bytes of a rank's sums of micro-batches' gradients, those of half precision in fp32."""
        some = (b for c in self.trained for b in self.chunks[c])
        return sum(b.part_length * wider(b.dtype).itemsize for b in some)

    def gradient_row(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return memory of the host for a gradient.

        Raises: ShardError with a budget for all of a step's, also for sums of micro-batches.
        """
        try:
            return super().gradient_row(shape, dtype)
        except ShardError as e:
            held = self.ledger.held["host"]
            few = on_their_way(self.sizes[c] for c in self.trained)
            asked = math.prod(shape) * dtype.itemsize // self.shares
            need = (
                max(held["gradients"] + asked, self.sums) + self.ledger.peaks["host"]["activations"]
            )
            rows = held.total() - held["gradients"] - held["activations"]
            e.fix = f"sl.optim.Tiers(host={rows + need + few})"
            if self.activations.beside:
                e.fix = self.activations.asking(need)
            raise

    # ------------------------------------------------------------ updates on the device

    def bring(self, chunk: str) -> None:
        """Post the copies of what a chunk's update takes beside the parameters."""
        if chunk in self.brought:
            return
        self.land(int(self.ahead))
        mine = [self.rows[b.name] for b in self.chunks[chunk]]
        rows = dict[TierRow, Tensor]()
        for row in (r for r in self.due[chunk].rows if r not in mine):
            pool = self.states if row.key else self.memory
            rows[row] = pool.take(row.shape, row.dtype)
        # the host's buffers of rows on the disk are for one chunk
        after = self.sending[-1:] if self.store.away else []
        job = partial(self.store.bring, rows, mine)
        ticket = self.movers.loads.submit(job, sum(x.nbytes for x in rows.values()), after)
        self.brought[chunk] = rows, ticket

    def update(self, chunk: str) -> Any:
        """Update a chunk on the device, and post the copies of its rows to the host."""
        stays = chunk in self.used
        if self._phase(chunk) != "used" or not self._is_valid(chunk):
            self._place(chunk)
        self.bring(chunk)
        self.coming.pop(chunk, None)
        due, (rows, ticket) = self.due.pop(chunk), self.brought.pop(chunk)
        self.copies[chunk].ticket.wait()
        found = ticket.wait()
        mine = {self.rows[n]: x for n, x in self.copies[chunk].parts.items()}
        after = due.run({**rows, **mine})
        self._event(chunk, "update")
        changed = {row: x for row, x in {**rows, **mine}.items() if row.key}
        nbytes = sum(x.nbytes for x in changed.values())
        sent = self.movers.gradients.submit(partial(self.store.send, changed, found), nbytes)
        self._event(chunk, "store")
        for row, x in changed.items():
            pool = self.parts if row in mine else self.states
            pool.until(x, sent)
        if not stays:
            self.used.pop(chunk)
        self.updates[chunk] = sent
        self.sending.append(sent)
        if self.finish is not None:
            self.at_end(self.finish)
        return after

    def at_end(self, finish: Callable[[], object]) -> None:
        """Call a function when the last update of a step is posted."""
        self.finish = finish
        if not self.due:
            self.finish = None
            finish()

    def land(self, most: int) -> None:
        """Wait until at most so many updated chunks are on their way to the host."""
        while len(self.sending) > most:
            self.sending.pop(0).wait()

    # ------------------------------------------------------------ steps

    def wait(self, chunk: str) -> None:
        """Wait for the update of a chunk."""
        if chunk in self.due:
            self.update(chunk)
        if self._phase(chunk) == "storing":
            self._loaded(chunk)
        if chunk in self.updates:
            self.updates[chunk].on_host()

    def end_step(self, updated: Mapping[str, Ticket | None]) -> None:
        """Make the copies of updated chunks stale; the uses of this step are those of the next.

        Those that were updated on the device, or will be, are not.
        """
        self.release()
        for chunk, ticket in updated.items():
            if chunk in self.copies and not self.here:
                self._drop(chunk)
            if ticket is not None:
                self.updates[chunk] = ticket
        self.trained = frozenset(updated)
        if self.trace and (tuple(self.trace) != self.uses.order or self._stale != self.uses.stale):
            self.uses = Uses(self.trace, self._stale)
            self.times.clear(self.asked is None)
        elif self.times.measures and self.steps:
            self._measured()
        else:
            self.times.clear(self.times.measures)
        self.trace = []
        self.coming.clear()
        self.at = -1
        self.steps += 1

    def _measured(self) -> None:
        """Choose the depth from a step that repeated the one before it: the most of all ranks'."""
        depth = self.times.depth(self.trace)
        mine = torch.tensor(depth, dtype=torch.float64, device=self.device)
        self.depth = int(over_ranks([mine] * self.shares, self.mesh, pmax))
        self.times.clear(False)


def block_of(index: Index, bucket: Bucket) -> tuple[str, bool]:
    """Return the name of the module's block whose parameters are in a bucket; whether they are frozen."""
    words = index.items[bucket.slots[0].leaves[0]].group
    return str(first_word(words)), isinstance(words, tuple) and words[-1] == "frozen"


def part_bytes(bucket: Bucket) -> int:
    """Return the bytes of a rank's part."""
    return bucket.part_length * bucket.dtype.itemsize


def _gathered_bytes(bucket: Bucket) -> int:
    return bool(bucket.hops) * bucket.length * bucket.dtype.itemsize


def _gradient_bytes(bucket: Bucket) -> int:
    """Return the bytes of a gradient, of what is received for its sum, and of its part."""
    if not bucket.hops:
        return part_bytes(bucket)
    middle = bucket.length * (len(bucket.hops) > 1)
    return (2 * bucket.length + middle) * bucket.dtype.itemsize + part_bytes(bucket)
