"""Memory tiers on paper: what a step loads, sends and holds, from its actions, which run once each.

On paper parameters in tiers note what is read, sent and saved, in order, and nothing is loaded.  An
action is a forward, a backward, or both, of a micro-batch; the replay repeats them in the order of
the step, with the schedule of loads and with buffers that are used again.
"""

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardlib.collectives import storage_shape
from shardlib.dtypes import wider
from shardlib.errors import ShardError
from shardlib.optim.buckets import Bucket, Index, pytree_node
from shardlib.optim.chunk_cache import ChunkCache, part_bytes
from shardlib.optim.stage3 import BucketReading, Gradient, Parts, Reading
from shardlib.optim.tiered import ChunkReading
from shardlib.planning.cluster import Cluster
from shardlib.planning.explanation import TierUse
from shardlib.tiers.activations import HostActivations, SavedActivation
from shardlib.tiers.ledger import Ledger
from shardlib.tiers.schedule import Uses
from shardlib.tiers.schedule import loads as scheduled_loads
from shardlib.tiers.timeline import step_seconds

Note = tuple[Any, ...]
"""The name of a method of ``TierReplay``, and its arguments."""

# ---------------------------------------------------------------- on paper


@pytree_node
class PaperParts(Parts):
    """Parameters in memory tiers, on paper: nothing is loaded, and what would be is noted."""

    in_tiers = True

    @classmethod
    def of(cls, values: Any, index: Index, mesh: Any, cache: ChunkCache, notes: list[Note]) -> Any:
        """Return the parameters of a cache; what happens to them is added to ``notes``.

        Rows of the host, for gradients and their sums, are made here: the device holds none of them.
        """
        rows = {
            b.name: torch.empty(
                storage_shape(mesh, b.part_length), dtype=wider(b.dtype), device="meta"
            )
            for b in index
        }
        index.room.paper = cache, notes, rows
        index.room.activations = _PaperActivations(notes)
        return cls(values, index, mesh)

    def _new_reading(self) -> Reading:
        return _PaperReading(self, self.index.room.paper[0])

    def end_action(self) -> None:
        """Drop what was gathered and saved last, as another action that follows does."""
        if (last := self.index.room.reading()) is not None:
            last.drop_all()
        self.index.room.activations.settle()


class _PaperReading(ChunkReading):
    """A reading on paper, which notes the chunks that one of memory tiers loads."""

    def _reading_of(self, bucket: Bucket, params: Parts) -> BucketReading:
        return _PaperBucket(bucket, params)

    def _part(self, one: BucketReading) -> Tensor:
        self.room.paper[1].append(("read", self.cache.chunk_of[one.bucket.name]))
        return super()._part(one)


class _PaperBucket(BucketReading):
    def __init__(self, bucket: Bucket, params: Parts) -> None:
        super().__init__(bucket, params)
        cache, self.notes, rows = params.index.room.paper
        self.block, self.row = cache.block_of[cache.chunk_of[bucket.name]], rows[bucket.name]

    def _new_gradient(self) -> Gradient:
        how = self.index, self.bucket, self.mesh, self.part
        return _PaperGradient(self.notes, self.row, *how)


class _PaperGradient(Gradient):
    """A gradient that would be sent to a row of the host."""

    def __init__(self, notes: list[Note], row: Tensor, *of: Any) -> None:
        super().__init__(*of)
        self.notes, self.row = notes, row

    def post(self) -> Any:
        finish = super().post()
        if finish is not None:
            self.notes.append(("send", self.bucket.name))
            flying = self.index.room.flying
            if not self.bucket.hops and len(flying) > 1:
                # nothing is summed over ranks: each is sent at once, while the next one is made
                flying.pop(0)()
        return finish

    def _landed(self, out: Tensor) -> Any:
        self.index.room.memory.give(out)
        return self.row

    def returned(self, finish: Any) -> Tensor:
        """Return what stands for the part: its shape, without memory."""
        row = finish()
        return row.new_empty((), dtype=self.bucket.dtype).expand(row.shape)


class _PaperActivations(HostActivations):
    """Saved tensors that would be in host memory, by numbers from ``count`` on."""

    def __init__(self, notes: list[Note]) -> None:
        super().__init__(Ledger(device=None, host=None), torch.device("meta"), 1)
        self.notes, self.count, self.numbers = notes, 0, dict[int, int]()
        # copies that a node of backward has got
        self.given: list[weakref.ref[Tensor]] = []

    def note(self, kind: str, one: SavedActivation) -> None:
        """Note that a tensor is saved, fetched or used."""
        if kind == "fetch":
            self.notes.append((kind, self.numbers[id(one)]))
            return
        if kind == "back":
            copies = [x for ref in self.given if (x := ref()) is not None]
            if one.copy is not None:
                copies.append(one.copy)
            self.given = [weakref.ref(x) for x in copies]
            self.notes.append((kind, self.numbers[id(one)], sum(x.nbytes for x in copies)))
            return
        n = self.numbers[id(one)] = self.count
        self.count += 1
        self.notes.append((kind, n, (math.prod(one.form.shape), one.form.dtype)))


# ---------------------------------------------------------------- in the order of the step

Form = tuple[int, torch.dtype]
"""Elements of a buffer, and their dtype."""


class _ReusedRows:
    """Rows of the host of one kind, each of which is used again for one of the same form."""

    def __init__(self) -> None:
        self.free, self.nbytes = Counter[Form](), 0

    def take(self, form: Form) -> None:
        if self.free[form]:
            self.free[form] -= 1
        else:
            self.nbytes += form[0] * form[1].itemsize

    def give(self, form: Form) -> None:
        self.free[form] += 1


@dataclass(eq=False)
class _Posted:
    """A gradient that was posted: whether it has a row, and whether it was added to its sum."""

    bucket: Bucket
    landed: bool = False
    added: bool = False

    @property
    def form(self) -> Form:
        return self.bucket.part_length, self.bucket.dtype


@dataclass(eq=False)
class TierReplay:
    """A step in memory tiers, action by action.

    ``summed``   whether gradients of micro-batches are added up.
    ``order``    the chunks in the order of their uses; ``computing`` seconds of each; ``last`` the
                 positions of those in backward.
    ``sent``, ``saved``, ``fetched``  bytes of gradients to the host, and of activations both ways.
    ``copied``   the most bytes that were copied back and that one node of backward reads at once.
    ``leaving``  the last two saved tensors, of which ``near`` are still on the device.
    """

    cache: ChunkCache
    summed: bool
    order: list[str] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)
    last: set[int] = field(default_factory=set)
    sent: int = 0
    saved: int = 0
    fetched: int = 0
    copied: int = 0

    def __post_init__(self) -> None:
        self.buckets = {b.name: b for some in self.cache.chunks.values() for b in some}
        self.gradients, self.activations = _ReusedRows(), _ReusedRows()
        self.flying: list[_Posted] = []
        self.owed: list[_Posted] = []
        self.sums: set[str] = set()
        self.forms: dict[Any, Form] = {}
        self.leaving: list[Any] = []
        self.near: set[Any] = set()
        self.copies: set[Any] = set()
        self.at: list[int] = []
        self.of: object = None
        # seconds before anything is read
        self.before = 0.0

    def run(
        self, notes: Iterable[Note], seconds: float, kind: str = "B", of: object = None
    ) -> None:
        """Replay an action, which takes so many seconds of computing.

        ``kind``  of the action, as in schedules; a forward with its backward is a "B".
        ``of``    the stage and the micro-batch.
        """
        self.at, self.of, backward = [], of, kind != "F"
        for name, *what in notes:
            getattr(self, name)(*what)
        last = set[int]()
        if backward:
            last = set({self.order[i]: i for i in self.at}.values())
            self.last |= last
            self._land(0)
            self._add(0)
            for some in (self.leaving, self.near, self.copies):
                some.clear()
            # of a graph that is kept for gradients of weights, these are not
            for key in [key for key in self.forms if key[0] == of]:
                self.activations.give(self.forms.pop(key))
        if not self.order:
            self.before += seconds
            return
        shares = {i: self.cache.sizes[self.order[i]] * (1 + (i in last)) for i in self.at}
        shares = shares or {len(self.order) - 1: 1}
        for i, share in shares.items():
            self.computing[i] += seconds * share / sum(shares.values())

    def read(self, chunk: str) -> None:
        """Use a chunk."""
        if self.order[-1:] != [chunk]:
            self.order.append(chunk)
            self.computing.append(0.0)
        if self.at[-1:] != [len(self.order) - 1]:
            self.at.append(len(self.order) - 1)

    # ------------------------------------------------------------ gradients

    def send(self, name: str) -> None:
        """Post a gradient: at most two are in transit between ranks, and one waits to be added."""
        one = _Posted(self.buckets[name])
        self.sent += part_bytes(one.bucket)
        if not self.summed:
            return
        self.flying.append(one)
        self._land(2)
        if not one.bucket.hops:
            # nothing is summed over ranks: it is sent at once
            self.flying.remove(one)
            self._row(one)
        self.owed.append(one)
        self._add(1)

    def _row(self, one: _Posted) -> None:
        if not one.landed:
            one.landed = True
            self.gradients.take(one.form)

    def _land(self, most: int) -> None:
        while len(self.flying) > most:
            one = self.flying.pop(0)
            self._row(one)
            if one.added:
                self.gradients.give(one.form)

    def _add(self, most: int) -> None:
        while len(self.owed) > most:
            one = self.owed.pop(0)
            self._row(one)
            wide, first = _wide(one.bucket), one.bucket.name not in self.sums
            self.sums.add(one.bucket.name)
            if first and wide == one.form:
                # it is the sum
                continue
            if first:
                self.gradients.take(wide)
            one.added = True
            if one not in self.flying:
                self.gradients.give(one.form)

    def _held(self) -> int:
        """End the step: return the bytes of the host that its gradients take."""
        trained = [b for c in self.cache.trained for b in self.cache.chunks[c]]
        if not self.summed:
            return sum(map(part_bytes, trained))
        for b in trained:
            # sums of half precision are rounded, and what has none is zero
            own = b.part_length, b.dtype
            if b.name not in self.sums:
                self.gradients.take(own)
            elif _wide(b) != own:
                self.gradients.take(own)
                self.gradients.give(_wide(b))
        return self.gradients.nbytes

    # ------------------------------------------------------------ saved activations

    def save(self, n: int, form: Form) -> None:
        """Save a tensor on the host; it leaves the device when two others were saved."""
        key = self.of, n
        self.forms[key] = form
        self.activations.take(form)
        self.saved += form[0] * form[1].itemsize
        self.near.add(key)
        self.leaving.append(key)
        if len(self.leaving) > 2:
            self.near.discard(self.leaving.pop(0))

    def fetch(self, n: int) -> None:
        """Copy a tensor back, where it is not there."""
        key = self.of, n
        if key not in self.near and key not in self.copies:
            numel, dtype = self.forms[key]
            self.fetched += numel * dtype.itemsize
            self.copies.add(key)

    def back(self, n: int, copied: int) -> None:
        """Use a tensor; ``copied``  bytes of it and of others that the same node reads."""
        self.copied = max(self.copied, copied)
        self.near.discard((self.of, n))
        self.copies.discard((self.of, n))

    # ------------------------------------------------------------ the whole

    def use(self, index: Index, state: int, cluster: Cluster) -> TierUse:
        """Return what the step holds and moves; ``state``  bytes of the optimizer's.

        Raises: ShardError where the device's budget holds no block beside what is copied back.
        """
        cache, rate = self.cache, cluster.host
        budget, least = cache.ledger.budget["device"], sum(n[0] for n in cache.needs())
        if budget is not None and budget < least + self.copied:
            raise ShardError(
                f"the largest block needs {least:,} bytes, and {self.copied:,} of saved activations "
                f"are copied back for one operation; the device tier may hold {budget:,}",
                op="tiers",
                mesh=cache.mesh,
                fix=f"sl.optim.Tiers(device={least + self.copied})",
            )
        uses = Uses(self.order, cache.uses.stale)
        how = uses, cache.sizes, cache.most, cache.depth
        loads = scheduled_loads(*how) or []
        host = {
            "parameters": sum(cache.sizes.values()), "gradients": self._held(), "state": state,
            "activations": self.activations.nbytes,
            "buffers": cache.store.buffers + cache.reserved,
        }  # fmt: skip
        # on the device each takes state and a gradient, and sends state and parameters back
        updates = {c: cache.sizes[c] + cache.state_bytes[c] for c in cache.trained if cache.here}
        sent = self.sent + self.saved + sum(updates.values())
        loaded = sum(cache.sizes[c] for c in loads) + self.fetched + sum(updates.values())
        store, disk = cache.store, 0
        for key, row in store.sizes.items():
            host[row.kind] -= row.nbytes * (key in store.away)
            disk += row.nbytes * (2 * store.durable or key in store.away)
        host = {
            kind: n for kind, n in host.items() if n or kind in ("parameters", "gradients", "state")
        }
        seconds = self.before + step_seconds(
            *how, self.computing, rate, self.saved, self.fetched, self.last, cache.trained, updates
        )
        return TierUse(
            min(cache.most, sum(cache.sizes.values())), host, len(cache.sizes), len(loads), loaded,
            sent, self.before + sum(self.computing), max(loaded, sent) / rate, seconds,
            _largest(cache, index, host), disk,
            *store.traffic(cache.trained, loads, cache.here),
        )  # fmt: skip


def _wide(bucket: Bucket) -> Form:
    """Return the form of a sum of gradients."""
    return bucket.part_length, wider(bucket.dtype)


def _largest(cache: ChunkCache, index: Index, host: Mapping[str, int]) -> int | None:
    """Count the parameters of the most such blocks whose rows the host's budget holds."""
    budget, items = cache.ledger.budget["host"], index.items
    if budget is None:
        return None
    numbers = {items[i].value: math.prod(items[i].whole) for i in index.where}
    # of more blocks the same
    buffers = host.get("buffers", 0)
    return sum(numbers.values()) * (budget - buffers) // (sum(host.values()) - buffers)
