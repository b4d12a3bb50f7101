"""The step of stage 3 in memory tiers: chunks are updated one by one, in a thread or on the device.

Where a transform updates one chunk as it updates all of them, ``step`` updates the first chunk and
posts the others; a norm of all gradients is computed before.  Any other transform is run on all
rows at once.  ``value_and_step`` updates a chunk when backward has its gradient.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.collectives import holds_values, spans_processes, storage_shape
from shardlib.dtypes import wider
from shardlib.errors import ShardError, Unsupported
from shardlib.mesh import Mesh, rank_along, within
from shardlib.optim.buckets import Bucket, Buckets, Index, State, Tree, fill_slots
from shardlib.optim.chunk_cache import ChunkCache, DueUpdate, block_of, part_bytes
from shardlib.optim.chunk_trees import (
    GROUP,
    by_chunk,
    grouped,
    joined_chunks,
    leading,
    merged_states,
    numbered,
    numbers_of,
    on_paper,
    opened,
    picked,
    plain,
    rows_of,
    stand_in,
    stored,
    taken,
)
from shardlib.optim.index import Indexed, ZeroSettings
from shardlib.optim.norms import global_norm, run_measured
from shardlib.optim.precision import with_master
from shardlib.optim.stage3 import Parts, SplitParameters, matched, trained
from shardlib.optim.tiered import TieredParts, Tiers, parts_in, valued
from shardlib.optim.tiles import BETWEEN
from shardlib.optim.transform import Step, Transform
from shardlib.optim.trees import is_bucketed
from shardlib.tensor import ShardedTensor
from shardlib.tiers.buffers import host_row
from shardlib.tiers.disk import run_at
from shardlib.tiers.mover import Ticket
from shardlib.tiers.rows import RowSize, TierRow, on_their_way

_BY_ELEMENT = ("elementwise", "norm")
"""Traits of transforms that update chunks, and tiles of tables, one by one on the host."""


class GlobalNorms:
    """Norms of all gradients, which the update of a chunk uses in place of those of its own.

    ``strange``  whether a norm of other values was computed, which needs them all at once.
    """

    def __init__(self, grads: Buckets | None) -> None:
        self.grads, self.found = grads, dict[float, Tensor]()
        self.strange = False

    def of(self, p: float) -> Tensor:
        """Return the norm of order ``p``, computed once; 0 where there are no gradients."""
        if self.grads is None:
            return torch.zeros((), dtype=torch.float64, device="cpu")
        if p not in self.found:
            with within(norms=None):
                self.found[p] = global_norm(self.grads, p)
        return self.found[p]


class _ChunkNorms(dict[Any, Any]):
    """The cache of norms inside the update of a chunk: (order, ids of leaves) -> (leaves, norm)."""

    def __init__(self, every: GlobalNorms, grads: Buckets) -> None:
        super().__init__()
        # in the order of the index, as a norm of them all takes them
        self.every, self.ids = every, tuple(map(id, grads.tree_flatten()[0]))

    def __contains__(self, key: object) -> bool:
        p, *ids = key  # type: ignore[misc]
        if tuple(ids) == self.ids:
            self[key] = (), self.every.of(p)
        elif not super().__contains__(key):
            assert self.every.grads is None, "a chunk's norm in place of all gradients'"
            self.every.strange = True
        return super().__contains__(key)


class TieredParameters(SplitParameters):
    """A transform on rows in host memory: parameters, gradients and state, chunk by chunk."""

    def __init__(self, how: ZeroSettings, tiers: Tiers) -> None:
        super().__init__(how)
        self.tiers = tiers
        self.inner = with_master(how.tx, how.master, how.axes)
        # structure of a state -> chunk -> the numbers that its update changes; None: not one by one
        self.split: dict[Any, dict[str, frozenset[Any]] | None] = {}

    def with_scratch(self, cache: ChunkCache) -> Transform:
        """Return the transform of chunks, with memory where they are updated."""
        memory = cache.joined
        if cache.here:
            memory = cache.memory
        return with_master(self.how.tx, self.how.master, self.how.axes, memory)

    def alone(self) -> None:
        """Refuse to be wrapped where steps are kept on a disk, and what wraps it is not."""
        if self.tiers.durable:
            raise Unsupported(
                "a durable run keeps the state of the transform that is in zero, and not of one around",
                op="tiers",
                fix='sl.optim.zero(sl.optim.skip_nonfinite(tx), "data", stage=3, tiers=tiers)',
            )

    def shard(self, params: Tree) -> Parts:
        """Keep only this rank's parts of the parameters, in host memory and on the disk."""
        if isinstance(params, Parts):
            return params
        found, asks, index, cache = self._cut_for(params, None)
        whole = sum(rows[0] for rows in cache.needs())
        if tile := self._tile(index, whole, found.mesh):
            found, asks, index, cache = self._cut_for(params, tile)
            cache.whole = whole
        cache.divide()
        joined = self._joined(cache, self.how.tx.trait not in _BY_ELEMENT)
        if self.tiers.disk is not None:
            self._open_disk(cache, index, asks, joined)
        cache.reserve(joined)
        for b in index:
            like = torch.empty(
                storage_shape(found.mesh, b.part_length), dtype=b.dtype, device="meta"
            )
            write = partial(_write_part, index.subset((b.name,)), found)
            # on paper nothing is in a tier
            cache.rows[b.name] = TierRow(b.name, like, like)
            if holds_values(found.mesh):
                cache.rows[b.name] = cache.store.make(b.name, like, "parameters", write)
        return parts_in(cache, index, asks)

    def _tile(self, index: Index, whole: int, mesh: Mesh) -> int:
        """Return the bytes of tiles of rows to which tables are cut; 0: they are whole.

        A durable run that is taken up goes on in its own.

        ``whole``  the least budget of the device without tiles.
        """
        if self.tiers.durable and self.tiers.resume and holds_values(mesh):
            there = run_at(self.tiers.disk or "")
            if there:
                return there.get("tile", 0)
        budget = self.tiers.ledger.budget["device"]
        if budget is None or whole <= budget or self.how.tx.trait not in _BY_ELEMENT:
            return 0
        return _block_bytes(index)

    def _joined(self, cache: ChunkCache, together: bool) -> int:
        """Return the bytes of the host for the fp32 parameters that one update joins.

        ``together``  all chunks are updated at once.
        """
        if self.how.master != "bf16+rem" or cache.here:
            return 0
        # of two bytes each
        sizes = [cache.sizes[c] for c in cache.trained]
        if together:
            return 2 * sum(sizes)
        return 2 * min(max(sizes, default=0) + GROUP * (self.tiers.disk is None), sum(sizes))

    def _cut_for(
        self, params: Tree, most: int | None
    ) -> tuple[Indexed, dict[str, bool], Index, ChunkCache]:
        """Return parameters with their index and cache; ``most``  bytes of a tile of rows."""
        self.cache.most_tile = most
        found, asks = self.placed(params)
        index = replace(found.where, buckets=_cut(found.where, found.mesh))
        how = self.tiers.movers(found.mesh.device), self.tiers.depth, self.tiers.update == "device"
        tiers = self.tiers if holds_values(found.mesh) else replace(self.tiers)
        cache = ChunkCache(index, found.mesh, tiers.ledger, *how)
        if cache.here:
            self._count_updates(cache, index, asks)
        return found, asks, index, cache

    def _open_disk(
        self, cache: ChunkCache, index: Index, asks: Mapping[str, bool], joined: int
    ) -> None:
        """Find the rows of parameters and state on paper, and open the disk for them.

        ``joined``  bytes of the host that updates need beside the rows.
        """
        rows = dict[str, RowSize]()
        # in the order in which they are used: the first ones are held by the host
        order = {c: i for i, c in enumerate(reversed(cache.chunks))}
        for b in sorted(index, key=lambda b: order[cache.chunk_of[b.name]]):
            rows[b.name] = RowSize(cache.chunk_of[b.name], "parameters", part_bytes(b))
        mine, leaves, tree = self._on_paper(cache, index, asks)
        for name in list(rows):
            for i, x in enumerate(leaves):
                if is_bucketed(x) and name in x:
                    nbytes = x[name].raw.nbytes // cache.shares
                    rows[f"{name} {i}"] = RowSize(cache.chunk_of[name], "state", nbytes)
        gradients = Counter[str]()
        for name in mine:
            gradients[cache.chunk_of[name]] += rows[name].nbytes
        if self.tiers.durable and any(isinstance(x, Tensor) for x in leaves):
            raise Unsupported(
                "this transform's state has tensors that lie in no bucket, and no row",
                op="tiers",
                fix="sl.optim.Tiers(disk=path, durable=False)",
            )
        run = {"mesh": dict(cache.mesh.axes), "axes": self.how.axes, "state": str(tree)[:1000]}
        if self.cache.most_tile is not None:
            run["tile"] = self.cache.most_tile
        how: dict[str, Any] = {"resume": self.tiers.resume, "run": run}
        if spans_processes(cache.mesh):
            coord, sizes = cache.mesh.coord or {}, cache.mesh.axes
            how |= {"rank": rank_along(sizes, coord, sizes), "ranks": math.prod(sizes.values())}
        path: Any = self.tiers.disk
        # a backward updates chunks by elements alone
        how_many = self.tiers.left_over, self.how.tx.trait != "elementwise", self.tiers.durable
        parts = cache.store.divide(rows, gradients, *how_many, joined)
        if holds_values(cache.mesh):
            cache.store.open(parts, os.fspath(path), how)
        if cache.store.away:
            most = joined + max(r.nbytes for r in rows.values())
            cache.activations.beside = cache.store.buffers + most + on_their_way(gradients.values())

    def _on_paper(
        self, cache: ChunkCache, index: Index, asks: Mapping[str, bool]
    ) -> tuple[Buckets, list[Any], Any]:
        """Return the trained parts, and the leaves and structure of their state, without memory."""
        mine = trained(on_paper(cache, index, asks))
        return mine, *self._begun(cache, mine, lambda i, x: x)

    def _count_updates(self, cache: ChunkCache, index: Index, asks: Mapping[str, bool]) -> None:
        """Count the bytes that each chunk's update on the device takes there."""
        mine, leaves, _ = self._on_paper(cache, index, asks)
        for name, x in (row for some in filter(is_bucketed, leaves) for row in some.items()):
            cache.state_bytes[cache.chunk_of[name]] += x.raw.nbytes // cache.shares
        for name, x in mine.items():
            # sums of gradients are wide, and so are parameters that are joined
            wide, joins = wider(x.dtype).itemsize, self.how.master == "bf16+rem"
            more = x.raw.numel() // cache.shares * (wide * (1 + joins) - x.dtype.itemsize)
            cache.scratch[cache.chunk_of[name]] += more

    def init(self, params: Tree) -> State:
        """Initialise the state of the trained parts, chunk by chunk if the transform takes one.

        Of a durable run that is taken up it is the state of the last completed step.
        """
        if isinstance(params, Parts) and not holds_values(params.mesh):
            # on paper nothing is in a tier
            return super().init(params)
        mine, cache = plain(trained(params)), _cache_of(params)
        notes = cache.store.notes
        if notes is not None:
            mine = on_paper(cache, mine.index, dict.fromkeys(mine, True))
        leaves, tree = self._begun(cache, mine, partial(_rows, cache))
        if notes is not None:
            numbers = iter(notes)
            leaves = [x if is_bucketed(x) else next(numbers) for x in leaves]
        leaves = [_in_host(cache, x) for x in leaves]
        return optree.tree_unflatten(tree, leaves)

    def _begun(
        self, cache: ChunkCache, mine: Buckets, keep: Callable[[int, Buckets], Buckets]
    ) -> tuple[list[Any], Any]:
        """Initialise the state; return its leaves, of which ``keep`` makes rows, and structure."""

        def begun(names: tuple[str, ...]) -> tuple[list[Any], Any]:
            state = self.inner.init(stored(mine, names, lambda x: x.raw))
            leaves, tree = optree.tree_flatten(state, is_leaf=is_bucketed, none_is_leaf=True)
            if len(names) < len(mine) and any(isinstance(x, Tensor) for x in leaves):
                raise ShardError("its tensors that lie in no bucket are of all", op="tiers")
            return [keep(i, x) if is_bucketed(x) else x for i, x in enumerate(leaves)], tree

        try:
            parts = list(map(begun, by_chunk(cache, mine).values()))
        except ShardError:
            # it needs them all, or refuses them
            parts = []
        if len({tree for _, tree in parts}) != 1:
            parts = [begun(tuple(mine))]
        leaves, tree = parts[0]
        rows = zip(*(some for some, _ in parts), strict=True)
        return [
            joined_chunks(row, mine) if is_bucketed(x) else x
            for x, row in zip(leaves, rows, strict=True)
        ], tree

    def donate(self, grads: Tree, state: State, params: Tree, step: Step) -> State:
        """Update the first chunks, and post the updates of the others."""
        self.how.check_state(state)
        cache = _cache_of(params)
        mine, given = map(plain, matched(params, grads, state))
        splits = self._splits(cache, state, mine)
        if splits is None:
            self._refuse_parts(cache)
            cache.reserve(self._joined(cache, True))
            splits = dict.fromkeys(cache.chunks, frozenset[Any]())
            updates = ChunkUpdates(self, cache, state, mine, step, splits, None)
            updates.run(tuple(mine), given)
            return updates.end()
        updates = ChunkUpdates(self, cache, state, mine, step, splits, GlobalNorms(given))
        # in the order in which the last forward read them, which the next one repeats
        rest = by_chunk(cache, mine, cache.trace)
        for chunk in leading(rest, splits):
            updates.run(rest.pop(chunk), given)
            if step.skipped:
                return updates.end()
        # taken now: the values are given up when the step returns
        for names in grouped(cache, list(rest.values())):
            updates.post(names, given)
        return updates.end()

    def _refuse_parts(self, cache: ChunkCache) -> None:
        """Refuse a transform of all chunks together where they are not in one memory."""
        if cache.store.away or cache.here:
            why, fix = "some lie on the disk", "host=None"
            if cache.here:
                why, fix = "the device holds one", 'update="host"'
            raise Unsupported(
                f"this transform needs all blocks at once, and {why}",
                op="tiers",
                fix=f"sl.optim.Tiers({fix})",
            )

    def _splits(
        self, cache: ChunkCache, state: State, params: Buckets
    ) -> dict[str, frozenset[Any]] | None:
        """Return the numbers of the state that the update of each chunk changes, by their places.

        None if chunks may not be updated one by one: found out once, on stand-ins of each.
        """
        leaves, tree = optree.tree_flatten(state, is_leaf=is_bucketed, none_is_leaf=True)
        # in the host's thread nothing is sent between ranks
        alone = {*_BY_ELEMENT} | ({"tensor", "matrix"} if cache.here else set())
        if self.how.tx.trait not in alone or any(isinstance(x, Tensor) for x in leaves):
            return None
        if tree not in self.split:
            cache.release()
            most, found = cache.most, dict[str, frozenset[Any]]()
            chunks = by_chunk(cache, params)
            for chunk, names in chunks.items():
                some = self._stands_alone(cache, names, params, state)
                if some is not None:
                    found[chunk] = some
            self.split[tree] = found if len(found) == len(chunks) else None
            cache.most = most
        return self.split[tree]

    def _stands_alone(
        self, cache: ChunkCache, names: tuple[str, ...], params: Buckets, state: State
    ) -> frozenset[Any] | None:
        """Return the numbers that a chunk's update changes, as that of stand-ins by gradients of zero.

        None if it is not updated alone.
        """
        like = partial(stand_in, cache)
        trees = tuple(stored(t, names, like) for t in (params, state, params))
        for g in trees[0].values():
            g.raw.zero_()
        norms = GlobalNorms(None)
        try:
            after = _updated(self.with_scratch(cache), norms, trees, Step())
        except (ShardError, RuntimeError):
            # it needs them all, or other elements
            return None
        if norms.strange or after is None:
            return None
        old = numbers_of(state)
        return frozenset(i for i, x in numbers_of(after).items() if i not in old or x != old[i])

    def eager(self, params: Tree, state: State, step: Step) -> "Any":
        """Return a context in which backward updates chunks, or None if it needs all gradients."""
        if self.how.tx.trait != "elementwise" or not isinstance(params, TieredParts):
            return None
        self.how.check_state(state)
        mine, cache = plain(trained(params)), params.cache
        splits = self._splits(cache, state, mine)
        if splits is None:
            return None
        return EagerUpdates(self, cache, state, mine, step, splits, GlobalNorms(mine)).open()


class ChunkUpdates:
    """Updates of chunks one by one: in a thread of the host, or on the device when it reads them.

    ``splits``   chunk -> the numbers of the state that its update changes.
    ``tickets``  chunk -> the job that updates it on the host; None: it has none.
    ``found``    chunk -> its state, with ... in the place of buckets, where that was waited for.
    """

    def __init__(
        self, by: TieredParameters, cache: ChunkCache, state: State, params: Buckets, step: Step,
        splits: Mapping[str, frozenset[Any]], norms: GlobalNorms | None,
    ) -> None:  # fmt: skip
        for chunk in cache.chunks:
            cache.wait(chunk)
        cache.store.wait()
        self.cache, self.state, self.params = cache, state, params
        self.inner = by.with_scratch(cache)
        self.splits, self.norms = splits, norms
        # the first update fills it in, and what it has there meanwhile is not for the others
        self.step, self.begun = step, replace(step)
        self.tickets: dict[str, Ticket | None] = {}
        self.found: dict[str, Any] = {}

    def run(self, names: tuple[str, ...], grads: Buckets) -> None:
        """Update a chunk, whose buckets have these names."""
        cache, (chunk, trees, step) = self.cache, self._next(names, grads)
        if cache.here:
            self._due(chunk, trees, step)
            self.found[chunk] = cache.update(chunk)
        else:
            self.found[chunk] = self._update(rows_of(trees), trees, step)

    def post(
        self, names: tuple[str, ...], grads: Buckets, after: Sequence[Ticket] = (), there: bool = False
    ) -> None:  # fmt: skip
        """Post the update of chunks; ``there``  their gradients are on the device."""
        cache, (chunk, trees, step) = self.cache, self._next(names, grads)
        if cache.here:
            self._due(chunk, trees, step, there)
            return
        rows = rows_of(trees)
        cache.store.due.append(rows)
        job = partial(self._update, rows, trees, step)
        ticket = cache.movers.updates.submit(job, after=after)
        self.tickets.update((cache.chunk_of[n], ticket) for n in names)

    def _next(self, names: tuple[str, ...], grads: Buckets) -> tuple[str, Any, Step]:
        """Return a chunk, its trees, which outlive those that are given up, and its step."""
        chunk, step = self.cache.chunk_of[names[0]], self.step
        if self.tickets:
            step = replace(self.begun)
        self.tickets.update((self.cache.chunk_of[n], None) for n in names)
        return chunk, taken(names, grads, self.state, self.params), step

    def _update(self, rows: Sequence[TierRow], trees: Any, step: Step) -> Any:
        """Update chunks in host memory; if it raises, what is on the disk stays."""
        memory = self.cache.store.fetched(rows)
        after = _updated(self.inner, self.norms, opened(trees, memory), step)
        self.cache.store.changed(memory)
        return after

    def _due(self, chunk: str, trees: Any, step: Step, there: bool = False) -> None:
        """Have a chunk updated on the device when it is read."""
        given, *others = trees
        if not there:
            # what is brought is a row; one without a key is not sent back
            rows = {n: TierRow("", x.raw, x.raw) for n, x in given.items()}
            values = {n: valued(self.cache, n, rows[n], x.place) for n, x in given.items()}
            trees = given.like(values), *others
        inner, norms, context = self.inner, self.norms, copy_context()

        def run(memory: Mapping[TierRow, Tensor]) -> Any:
            with torch.no_grad():
                return context.run(_updated, inner, norms, opened(trees, memory), step)

        rows, mine = rows_of(trees), [self.cache.rows[b.name] for b in self.cache.chunks[chunk]]
        # the parameters are there when it runs
        self.cache.store.due.append([r for r in rows if r not in mine])
        self.cache.due[chunk] = DueUpdate(rows, run)

    def end(self) -> State:
        """End the step: return the state, as all updates leave it."""
        cache = self.cache
        for chunk in leading(self.tickets, self.splits):
            if (ticket := self.tickets[chunk]) is not None:
                self.found[chunk] = ticket.on_host()
        cache.end_step(self.tickets)
        merged = picked(merged_states(self.found, self.splits), self.state)
        notes, chunks = list(numbers_of(merged).values()), list(self.tickets)
        # jobs that are posted refer to this
        del self.state, self.params

        def commit() -> None:
            tickets = [cache.updates[c] for c in chunks if c in cache.updates]
            cache.store.commit(notes, cache.movers.updates, tickets)

        cache.at_end(commit)
        return merged


class EagerUpdates(ChunkUpdates):
    """Updates of chunks while backward runs, each when all of its gradients are there.

    ``missing``  chunk -> its buckets whose gradients are to come; ``came``  those that are there.
    """

    chunks: dict[str, tuple[str, ...]]
    missing: dict[str, set[str]]
    came: dict[str, tuple[Ticket | None, Tensor]]

    @contextmanager
    def open(self) -> Iterator[Callable[[], State]]:
        """Take the gradients of a backward; yield a function for the new state."""
        cache = self.cache
        self.chunks = by_chunk(cache, self.params)
        self.missing = {chunk: set(names) for chunk, names in self.chunks.items()}
        self.came = {}
        cache.eager = self.take
        try:
            yield self.end
        finally:
            cache.eager = None
            # also where backward raised
            cache.updates.update({c: t for c, t in self.tickets.items() if t is not None})

    def take(self, name: str, ticket: Ticket | None, row: Tensor) -> None:
        """Take the gradient of a bucket; ``ticket``  the job that brings it to the host."""
        chunk = self.cache.chunk_of[name]
        self.came[name] = ticket, row
        self.missing[chunk].discard(name)
        if not self.missing[chunk]:
            del self.missing[chunk]
            self._post(chunk)

    def _post(self, chunk: str) -> None:
        cache, params, names = self.cache, self.params, self.chunks[chunk]
        given = {n: self.came.pop(n) for n in names}
        values = {n: ShardedTensor(row, params[n].place) for n, (_, row) in given.items()}
        grads = Buckets(values, params.index.subset(names), params.mesh)
        if cache.here:
            self._update_here(0)
        # at most two chunks' gradients wait for their update
        for old in list(filter(None, self.tickets.values()))[:-1]:
            old.on_host()
        after = [ticket for ticket, _ in given.values() if ticket is not None]
        self.post(names, grads, after, there=cache.here)
        # while the next block's gradient is made
        self._update_here(int(cache.ahead))

    def _update_here(self, most: int) -> None:
        """Update chunks on the device, but the last ones, which are brought."""
        cache = self.cache
        for chunk in list(cache.due)[: len(cache.due) - most]:
            self.found[chunk] = cache.update(chunk)
        for chunk in cache.due:
            cache.bring(chunk)

    def end(self) -> State:
        """End a backward, and the step: what the loss does not depend on has a gradient of zero."""
        cache = self.cache
        pool = cache.memory if cache.here else cache.gradients
        for name in [n for some in self.missing.values() for n in some]:
            self.take(
                name, None, pool.take(cache.rows[name].shape, self.params[name].dtype).zero_()
            )
        self._update_here(0)
        return super().end()


def _updated(inner: Transform, norms: GlobalNorms | None, trees: Any, step: Step) -> Any:
    """Update chunks in place; return their state, with ... in the place of its buckets.

    ``norms``  None: the chunks are all, and the state may have other memory afterwards.
    """
    given, state, mine = trees
    with nullcontext() if norms is None else within(norms=_ChunkNorms(norms, given)):
        after = run_measured(inner, given, state, mine, step)
    found = numbered(after, state)
    return after if found is None and norms is None else found


def _write_part(one: Index, found: Indexed, row: Tensor) -> None:
    """Write this rank's part of a bucket's parameters, from where they are."""
    fill_slots(one.of_parts([row.zero_()], found.mesh), found.leaves)


def _cut(index: Index, mesh: Mesh) -> tuple[Bucket, ...]:
    """Return the buckets without gathers over axes of one rank, which would copy every part."""
    hops = ((tuple(a for a in hop if mesh.axes[a] > 1) for hop in b.hops) for b in index)
    return tuple(
        replace(b, hops=tuple(filter(None, some))) for b, some in zip(index, hops, strict=True)
    )


def _block_bytes(index: Index) -> int:
    """Return the bytes of the largest block of the module, 0 where none is numbered."""
    found = Counter[str]()
    for b in index:
        found[block_of(index, b)[0]] += b.length * b.dtype.itemsize
    return max((n for block, n in found.items() if not block.startswith(BETWEEN)), default=0)


def _cache_of(params: Tree) -> ChunkCache:
    if not isinstance(params, TieredParts):
        raise ShardError(
            "these parameters are in no memory tiers",
            op="tiers",
            fix="params = tx.shard(params)",
        )
    return params.cache


def _in_host(cache: ChunkCache, x: Any) -> Any:
    """Return a copy of a state's tensor that lies in no bucket, in the ledger; or another value."""
    if not isinstance(x, ShardedTensor):
        return x
    where = cache.ledger, "state", cache.device, cache.shares
    return ShardedTensor(host_row(x.raw.shape, x.raw.dtype, *where).copy_(x.raw), x.place)


def _rows(cache: ChunkCache, i: int, some: Buckets) -> Buckets:
    """Make rows of buckets of a state, its leaf number ``i``."""
    out = {}
    for name, x in some.items():
        row = cache.store.make(f"{name} {i}", x.raw, "state", lambda to, x=x: to.copy_(x.raw))
        out[name] = valued(cache, name, row, x.place)
    return Buckets(out, some.index, some.mesh)
