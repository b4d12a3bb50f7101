"""Rows of a run: each in host memory, or on the disk and in host memory while a job uses it.

Rows are held by the host in the order in which they are given, as many as its budget has bytes for;
the others lie on the disk alone.  The update of a chunk reads those of the next one ahead, and
writes its own behind it, in buffers that take a fixed part of the budget.  A durable run also writes
the rows that the host holds, and every step commits a generation.
"""

import atexit
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.errors import ShardError
from shardlib.tiers.buffers import Buffers, host_row
from shardlib.tiers.disk import DiskRows, ring_for
from shardlib.tiers.ledger import Ledger
from shardlib.tiers.mover import Mover, Ticket


class TierRow:
    """A row: ``memory`` in the host; None: its bytes are on the disk, written ``count`` times."""

    __slots__ = ("count", "dtype", "key", "memory", "shape")

    def __init__(self, key: str, like: Tensor, memory: Tensor | None) -> None:
        self.key, self.shape, self.dtype, self.memory = key, like.shape, like.dtype, memory
        self.count = 0

    @property
    def version(self) -> int:
        """A number that changes when the row does."""
        if self.memory is None:
            return self.count
        return self.memory._version


class RowSize(NamedTuple):
    """A row that will be made: its chunk, kind, and bytes of one rank."""

    chunk: str
    kind: str
    nbytes: int


def divided(
    rows: Mapping[str, RowSize], budget: int, gradients: Mapping[str, int], ring: int, activations: int = 0,
    together: bool = False, held: int = 0,
) -> tuple[frozenset[str], int, int]:  # fmt: skip
    """Divide what is left of the host's budget: buffers first, then gradients, then rows in their order.

    Returns the rows that lie on the disk alone, and the bytes of one rank for the rows of chunks that
    are updated, and for those of chunks that are loaded.

    ``gradients``  chunk -> bytes; all of them wait for a norm, or are sums of micro-batches; three on
                   their way are the least, or all where they are needed ``together``.
    ``ring``       bytes of the disk's buffers; ``activations``  bytes that are left over.
    ``held``       bytes of the budget that are taken already.
    Raises: ShardError for a budget that has no bytes for the buffers.

    >>> rows = {n: RowSize(n[0], "state", 10) for n in ("a m", "a v", "b m", "b v")}
    >>> divided(rows, 200, {"a": 10, "b": 10}, 0)[0], sorted(divided(rows, 35, {}, 0)[0])
    (frozenset(), ['a m', 'a v', 'b m', 'b v'])
    """
    waiting, few = sum(gradients.values()), on_their_way(gradients.values())
    total = sum(r.nbytes for r in rows.values())
    if total + waiting + few + ring + activations <= budget:
        return frozenset(), 0, 0
    chunk, beside, loading = _needs(rows, ring, activations)
    # a chunk is updated, the next one read, the one before it written
    least = waiting if together else few
    plans = [(n * chunk, waiting + few) for n in (3, 2, 1)] + [(chunk, waiting), (chunk, least)]
    fits = [(staging, budget - beside - staging - more) for staging, more in plans]
    staging, left = next((fit for fit in fits if fit[1] >= 0), (0, -1))
    if left < 0:
        least += beside + chunk + held
        raise ShardError(
            f"the largest block's rows, {'all' if together else 'three'} gradients, the disk's buffers and "
            f"what activations are left need {least:,} bytes of host memory, which may hold {budget + held:,}",
            op="tiers",
            fix=_asking(least, activations),
        )
    away = set()
    for key, r in rows.items():
        if r.nbytes > left:
            away.add(key)
        else:
            left -= r.nbytes
    return frozenset(away), staging, loading


def _needs(rows: Mapping[str, RowSize], ring: int, activations: int) -> tuple[int, int, int]:
    """Return the most bytes of a chunk's rows, those beside these, and those of a chunk that is loaded."""
    chunks, loads = Counter[str](), Counter[str]()
    for r in rows.values():
        chunks[r.chunk] += r.nbytes
        loads[r.chunk] += r.nbytes * (r.kind == "parameters")
    loading = max(loads.values())
    # a row that is read by the caller
    return (
        max(chunks.values()),
        loading + ring + activations + max(r.nbytes for r in rows.values()),
        loading,
    )


def _asking(host: int, activations: int) -> str:
    """Write tiers whose rows leave so many bytes of the host."""
    more = f", activations={activations}" * bool(activations)
    return f"sl.optim.Tiers(host={host}, disk=path{more})"


def on_their_way(gradients: Iterable[int]) -> int:
    """Return the bytes of the gradients, of these sizes, that are on their way to the host at once."""
    return sum(sorted(gradients)[-3:])


class RowStore:
    """The rows of one run.

    ``disk``     where rows lie that the host does not hold; None: it holds all.
    ``sizes``    key -> the row's chunk, kind and bytes; ``away`` the keys of those on the disk alone.
    ``buffers``  bytes of the host for what is read ahead and written behind.
    ``notes``    of the generation that was taken up; None for a new run.
    ``bytes_read``, ``bytes_written``  from the disk and to it so far, of the ranks in this process.
    """

    def __init__(self, ledger: Ledger, device: torch.device, shares: int) -> None:
        self.ledger, self.device, self.shares = ledger, device, shares
        self.disk: DiskRows | None = None
        self.sizes: Mapping[str, RowSize] = {}
        self.away: frozenset[str] = frozenset()
        self.durable = False
        self.buffers = 0
        # bytes of the host that are left over, and those that it needs where all gradients wait
        self.activations = self.together = 0
        self.notes: Any = None
        self.bytes_read = self.bytes_written = 0
        # rows of the updates to come; key -> a row that was read ahead
        self.due: list[Sequence[TierRow]] = []
        self.ahead: dict[str, tuple[Tensor, Ticket]] = {}
        self.writes: list[Ticket] = []
        self.committed: Ticket | None = None
        # of the last commit; not its ticket, whose error refers to all that it passed through
        self.ends: list[threading.Event] = []

    def divide(
        self, rows: Mapping[str, RowSize], gradients: Mapping[str, int], activations: int, together: bool,
        durable: bool, joined: int = 0,
    ) -> tuple[int, ...]:  # fmt: skip
        """Divide the host's budget between the rows: return the bytes of the buffers of each kind.

        ``joined``  bytes that updates need beside the rows.
        Raises: ShardError for a budget below the least.
        """
        longest = max((r.nbytes for r in rows.values()), default=0)
        ring = ring_for(longest * self.shares)
        held = self.ledger.held["host"].total() + joined
        beside = gradients, ring // self.shares, activations, together, held
        self.away, *parts = divided(rows, self.ledger.left("host") - joined, *beside)
        if self.away:
            self.activations = activations
            self.together = held + sum(_needs(rows, *beside[1:3])[:2]) + sum(gradients.values())
        self.sizes, self.durable = rows, durable
        if durable or self.away:
            self.buffers = ring // self.shares + sum(parts)
        return ring, *parts

    def open(self, buffers: Sequence[int], path: str, how: Any) -> None:
        """Open the disk for the rows that lie there, as ``divide`` has found.  Raises: as ``DiskRows``."""
        (ring, *parts), durable = buffers, self.durable
        kept = {k: r for k, r in self.sizes.items() if durable or k in self.away}
        if not kept:
            return
        sizes = {k: r.nbytes * self.shares for k, r in kept.items()}
        ours = [
            ("host", "buffers", self.buffers),
            *(("disk", r.kind, r.nbytes * (1 + durable)) for r in kept.values()),
        ]
        entries = self.ledger.entries_of(self)
        for entry in ours:
            self.ledger.enter(*entry)
            entries.append(entry)
        # of exact size, in the part of the budget that was entered
        landed = weakref.WeakMethod(self._landed)
        self.staging, self.loading = (
            Buffers(Ledger(host=max(n, 1)), "host", "buffers", self.device, self.shares, landed)
            for n in parts
        )
        # a run of this process that was dropped may hold the file until it is collected
        gc.collect()
        self.disk = DiskRows(path, sizes, durable=durable, ring=ring, **how)
        if self.disk.generation >= 0:
            self.notes = self.disk.notes
        # at exit, before the disk is closed; not where this is dropped, as in the thread of a job
        finish = partial(_finish, self.ends)
        atexit.register(finish)
        weakref.finalize(self, atexit.unregister, finish).atexit = False

    def traffic(
        self, updated: Collection[str], loads: Sequence[str], once: bool = False
    ) -> tuple[int, int]:
        """Return the bytes of a rank from the disk, and to it, in a step.

        ``updated``  the chunks that are updated; ``loads``  those that are loaded, in order.
        ``once``     the update takes the parameters that were loaded.
        """
        read = written = 0
        often = Counter(loads)
        for key, r in self.sizes.items():
            away, changes = key in self.away, r.chunk in updated
            written += r.nbytes * (changes and (away or self.durable))
            loaded = often[r.chunk] * (r.kind == "parameters")
            again = changes and not (once and r.kind == "parameters")
            read += r.nbytes * away * (again + loaded)
        return read, written

    def make(self, key: str, like: Tensor, kind: str, write: Callable[[Tensor], object]) -> TierRow:
        """Make a row, and have its memory written; of a run that was taken up, it has its value."""
        memory = None
        if key not in self.away:
            memory = host_row(like.shape, like.dtype, *self._where(kind))
        row = TierRow(key, like, memory)
        if self.notes is None:
            self.fill(row, write)
        elif memory is not None and self.disk is not None:
            self.disk.read(key, memory).wait()
        return row

    def _where(self, kind: str) -> tuple[Ledger, str, torch.device, int]:
        return self.ledger, kind, self.device, self.shares

    def _buffer(self, row: TierRow) -> Tensor:
        """Return memory for a row on the disk.

        Raises: ShardError, with tiers that leave bytes for it beside the gradients that wait.
        """
        try:
            return host_row(row.shape, row.dtype, *self._where("buffers"))
        except ShardError as e:
            left, most = self.activations, self.ledger.budget["host"] or 0
            if self.together <= most:
                # the caller has other rows
                more = row.shape.numel() * row.dtype.itemsize // self.shares
                left, most = left + more, most + more
            e.fix = _asking(max(self.together, most), left)
            raise

    @torch.no_grad()
    def fill(self, row: TierRow, write: Callable[[Tensor], object]) -> None:
        """Have the memory of a row that no job uses written; of one on the disk, it is a buffer."""
        held = row.memory
        if held is None:
            held = self._buffer(row)
        write(held)
        if row.memory is None:
            # so that there is one such buffer at most
            self._written(row, held).wait()
        else:
            self.changed({row: held})

    def value(self, row: TierRow) -> Tensor:
        """Return a row's memory, or a copy of what lies on the disk."""
        if row.memory is not None:
            return row.memory
        out = self._buffer(row)
        self._read(row, out).wait()
        return out

    @torch.no_grad()
    def load(
        self, rows: Mapping[str, TierRow], into: Mapping[str, Tensor], versions: dict[str, int]
    ) -> None:
        """Copy rows to the device, and note their versions; in the thread of one mover alone."""
        versions.update((name, row.version) for name, row in rows.items())
        reads: list[tuple[str, Tensor, Ticket]] = []
        for name, row in rows.items():
            if row.memory is not None:
                into[name].copy_(row.memory, non_blocking=True)
                continue
            held = into[name]
            if held.device.type != "cpu":
                held = self.loading.take(row.shape, row.dtype)
            reads.append((name, held, self._read(row, held)))
        for name, held, ticket in reads:
            ticket.wait()
            if held is not into[name]:
                into[name].copy_(held, non_blocking=True)
        if reads and self.device.type != "cpu":
            torch.accelerator.current_stream().synchronize()

    def fetched(
        self, rows: Sequence[TierRow], blank: Sequence[TierRow] = ()
    ) -> dict[TierRow, Tensor]:
        """Return the memory of rows that will be changed, and of ``blank`` ones, which are not read."""
        if rows in self.due:
            self.due.remove(rows)
        self._read_ahead(rows, waits=True)
        found = {r: r.memory for r in blank if r.memory is not None}
        for row in (r for r in blank if r.memory is None):
            found[row] = self.staging.take(row.shape, row.dtype)
        if self.due:
            self._read_ahead(self.due[0])
        for row in rows:
            held = row.memory
            if held is None:
                held, ticket = self.ahead.pop(row.key)
                ticket.wait()
            found[row] = held
        return found

    def changed(self, found: Mapping[TierRow, Tensor]) -> None:
        """Write behind what was fetched, and has changed in memory."""
        self.writes[:] = [t for t in self.writes if not t.finished.is_set()]
        for row, held in found.items():
            if self.disk is not None and (self.durable or row.memory is None):
                self.writes.append(self._written(row, held))

    @torch.no_grad()
    def bring(
        self, rows: Mapping[TierRow, Tensor], blank: Sequence[TierRow]
    ) -> dict[TierRow, Tensor]:
        """Copy rows to the device; return the memory to which ``send`` copies them back."""
        found = self.fetched(list(rows), blank)
        for row, there in rows.items():
            there.copy_(found[row], non_blocking=True)
        return found

    @torch.no_grad()
    def send(self, rows: Mapping[TierRow, Tensor], found: Mapping[TierRow, Tensor]) -> None:
        """Copy rows back from the device, and write them behind."""
        for row, there in rows.items():
            found[row].copy_(there, non_blocking=True)
        if self.disk is not None and self.device.type != "cpu":
            torch.accelerator.current_stream().synchronize()
        self.changed({row: found[row] for row in rows})

    def commit(self, notes: Any, mover: Mover, after: Sequence[Ticket]) -> None:
        """Post the commit of what jobs write, as a generation; there is none if one of them raises."""
        if self.disk is not None and self.durable:
            self.committed = mover.submit(partial(_commit, self.disk, notes), after=after)
            self.ends[:] = [self.committed.finished]

    def wait(self) -> int:
        """Wait for the last commit; return the number of generations.  Raises: its error."""
        if self.committed is not None:
            self.committed.wait()
        if self.disk is None:
            return 0
        return max(self.disk.generation, 0)

    def _read_ahead(self, rows: Sequence[TierRow], waits: bool = False) -> None:
        """Post the reads of rows on the disk, where there are bytes, or ``waits`` for them."""
        for row in rows:
            if row.memory is not None or row.key in self.ahead:
                continue
            nbytes = row.shape.numel() * row.dtype.itemsize // self.shares
            if not waits and nbytes > self.staging.ledger.left("host") + self.staging.unused:
                return
            held = self.staging.take(row.shape, row.dtype)
            self.ahead[row.key] = held, self._read(row, held)

    def _landed(self, nbytes: int) -> None:
        """Wait for the writes behind, whose buffers are then free."""
        for ticket in self.writes:
            ticket.finished.wait()
        self.writes.clear()
        self.staging.trim()

    def _read(self, row: TierRow, into: Tensor) -> Ticket:
        assert self.disk is not None
        self.bytes_read += into.nbytes
        return self.disk.read(row.key, into)

    def _written(self, row: TierRow, held: Tensor) -> Ticket:
        assert self.disk is not None
        row.count += 1
        self.bytes_written += held.nbytes
        return self.disk.write(row.key, held)


def _commit(disk: DiskRows, notes: Any) -> None:
    disk.commit(max(disk.generation, 0) + 1, notes)


def _finish(ends: Sequence[threading.Event]) -> None:
    for end in ends:
        end.wait()
