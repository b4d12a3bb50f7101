"""The step of stage 3 in memory tiers: chunks are updated one by one, in a thread or on the device.

Where a transform updates one chunk as it updates all of them, ``step`` updates the first chunk and
posts the others; a norm of all gradients is computed before.  Any other transform is run on all
rows at once.  ``value_and_step`` updates a chunk when backward has its gradient.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    by_chunk,
    copied_to,
    grouped,
    in_reading_order,
    is_buckets,
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
from shardlib.tensor import ShardedTensor
from shardlib.tiers.buffers import Buffers
from shardlib.tiers.ledger import Ledger
from shardlib.tiers.mover import Ticket
from shardlib.tiers.rows import RowSize, TierRow


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
        host = Buffers(Ledger(host=None), "host", "buffers", torch.device("cpu"))
        self.inner = self._with_master(host)
        # structure of a state -> chunk -> the numbers that its update changes; None: not one by one
        self.split: dict[Any, dict[str, frozenset[Any]] | None] = {}

    def _with_master(self, memory: Any) -> Transform:
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
        updates = self._update_bytes(cache, index, asks)
        if (budget := self.tiers.ledger.budget["device"]) is not None:
            whole, most = sum(rows[0] for rows in cache.needs(*updates)), _block_bytes(index)
            if whole > budget and most and self.how.tx.trait in ("elementwise", "norm"):
                found, asks, index, cache = self._cut_for(params, most)
                updates, cache.whole = self._update_bytes(cache, index, asks), whole
        cache.divide(*updates)
        if self.tiers.disk is not None and holds_values(found.mesh):
            self._open_disk(cache, index, asks)
        for b in index:
            like = torch.empty(
                storage_shape(found.mesh, b.part_length), dtype=b.dtype, device="meta"
            )
            write = partial(_write_part, index.subset((b.name,)), found)
            cache.rows[b.name] = cache.store.make(b.name, like, "parameters", write)
        return parts_in(cache, index, asks)

    def _cut_for(
        self, params: Tree, most: int | None
    ) -> tuple[Indexed, dict[str, bool], Index, ChunkCache]:
        """Return parameters with their index and cache; ``most``  bytes of a tile of rows."""
        self.cache.most_tile = most
        found, asks = self.placed(params)
        index = replace(found.where, buckets=_cut(found.where, found.mesh))
        device = found.mesh.device
        movers = self.tiers.movers(device)
        how = movers, self.tiers.depth, self.tiers.update == "device"
        return found, asks, index, ChunkCache(index, found.mesh, self.tiers.ledger, *how)

    def _open_disk(self, cache: ChunkCache, index: Index, asks: Mapping[str, bool]) -> None:
        """Find the rows of parameters and state on paper, and open the disk for them."""
        rows = dict[str, RowSize]()
        # in the order in which they are used: the first ones are held by the host
        order = {c: i for i, c in enumerate(reversed(cache.chunks))}
        for b in sorted(index, key=lambda b: order[cache.chunk_of[b.name]]):
            rows[b.name] = RowSize(cache.chunk_of[b.name], "parameters", part_bytes(b))
        mine, leaves, tree = self._on_paper(cache, index, asks)
        for name in list(rows):
            for i, x in enumerate(leaves):
                if is_buckets(x) and name in x:
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
        how: dict[str, Any] = {"resume": self.tiers.resume, "run": run}
        if spans_processes(cache.mesh):
            coord, sizes = cache.mesh.coord or {}, cache.mesh.axes
            how |= {"rank": rank_along(sizes, coord, sizes), "ranks": math.prod(sizes.values())}
        path: Any = self.tiers.disk
        beside = gradients, self.tiers.left_over
        cache.store.open(rows, *beside, os.fspath(path), self.tiers.durable, how)
        if cache.store.away:
            cache.activations.hold(cache.store.activations)

    def _on_paper(
        self, cache: ChunkCache, index: Index, asks: Mapping[str, bool]
    ) -> tuple[Buckets, list[Any], Any]:
        """Return the trained parts, and the leaves and structure of their state, without memory."""
        mine = trained(on_paper(cache, index, asks))
        return mine, *self._begun(cache, mine, lambda i, x: x)

    def _update_bytes(
        self, cache: ChunkCache, index: Index, asks: Mapping[str, bool]
    ) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Count the bytes that each bucket's update on the device takes there: state, and others."""
        states, more = Counter[str](), Counter[str]()
        if not cache.here:
            return states, more
        mine, leaves, _ = self._on_paper(cache, index, asks)
        for x in filter(is_buckets, leaves):
            states.update({n: v.raw.nbytes // cache.shares for n, v in x.items()})
        for name, x in mine.items():
            # sums of gradients are wide, and so are parameters that are joined
            wide, joins = wider(x.dtype).itemsize, self.how.master == "bf16+rem"
            more[name] = x.raw.numel() // cache.shares * (wide * (1 + joins) - x.dtype.itemsize)
        return states, more

    def init(self, params: Tree) -> State:
        """Initialise the state of the trained parts, chunk by chunk if the transform takes one.

        Of a durable run that is taken up it is the state of the last completed step.
        """
        if isinstance(params, Parts) and not holds_values(params.mesh):
            # on paper nothing is in a tier
            return super().init(params)
        mine, cache = plain(trained(params)), _cache_of(params)
        keep = partial(_rows, cache)
        if cache.store.notes is None:
            leaves, tree = self._begun(cache, mine, keep)
            return optree.tree_unflatten(tree, leaves)
        paper = on_paper(cache, mine.index, dict.fromkeys(mine, True))
        leaves, tree = self._begun(cache, paper, keep)
        numbers = iter(cache.store.notes)
        leaves = [x if is_buckets(x) else next(numbers) for x in leaves]
        return optree.tree_unflatten(tree, leaves)

    def _begun(
        self, cache: ChunkCache, mine: Buckets, keep: Callable[[int, Buckets], Buckets]
    ) -> tuple[list[Any], Any]:
        """Initialise the state; return its leaves, of which ``keep`` makes rows, and structure."""

        def begun(names: tuple[str, ...]) -> tuple[list[Any], Any]:
            state = self.inner.init(stored(mine, names, lambda x: x.raw))
            leaves, tree = optree.tree_flatten(state, is_leaf=is_buckets, none_is_leaf=True)
            return [keep(i, x) if is_buckets(x) else x for i, x in enumerate(leaves)], tree

        chunks = by_chunk(cache, mine)
        try:
            parts = list(map(begun, chunks))
        except ShardError:
            # it needs them all, or refuses them
            parts = []
        if len({tree for _, tree in parts}) != 1:
            parts = [begun(tuple(mine))]
        leaves, tree = parts[0]
        rows = zip(*(some for some, _ in parts), strict=True)
        return [
            joined_chunks(row, mine) if is_buckets(x) else x
            for x, row in zip(leaves, rows, strict=True)
        ], tree

    def donate(self, grads: Tree, state: State, params: Tree, step: Step) -> State:
        """Update the first chunk, and post the updates of the others."""
        self.how.check_state(state)
        cache = _cache_of(params)
        mine, given = map(plain, matched(params, grads, state))
        given = _on_host(cache, given)
        _settle(cache)
        chunks = by_chunk(cache, mine)
        splits = self._splits(cache, state, mine)
        if splits is None:
            after = self._update_all(cache, given, state, mine, step)
            cache.end_step({cache.chunk_of[names[0]]: None for names in chunks})
            _commit(cache, after)
            return after
        norms = GlobalNorms(given)
        begun = replace(step)
        rest = {cache.chunk_of[names[0]]: names for names in in_reading_order(cache, chunks)}
        tickets, found = dict[str, Ticket | None](), dict[str, Any]()
        for chunk in leading(rest, splits):
            trees = taken(rest.pop(chunk), given, state, mine)
            told = replace(begun) if found else step
            if cache.here:
                self._due(cache, norms, trees, told)
                found[chunk] = cache.update(chunk)
            else:
                found[chunk] = self._update(cache, norms, trees, told)
            tickets[chunk] = None
            if step.skipped:
                rest.clear()
                break
        # taken now: the values are given up when the step returns
        jobs = [(n, taken(n, given, state, mine)) for n in grouped(cache, list(rest.values()))]
        for names, trees in jobs:
            ticket = None
            if cache.here:
                self._due(cache, norms, trees, replace(begun))
            else:
                ticket = self._post(cache, norms, trees, replace(begun))
            tickets.update((cache.chunk_of[n], ticket) for n in names)
        cache.end_step(tickets)
        merged = picked(merged_states(found, splits), state)
        _commit(cache, merged, tickets)
        return merged

    def _post(
        self, cache: ChunkCache, norms: GlobalNorms, trees: Any, step: Step, after: Sequence[Ticket] = ()
    ) -> Ticket:  # fmt: skip
        """Post the update of a chunk."""
        rows = rows_of(trees)
        cache.store.due.append(rows)
        job = partial(self._update, cache, norms, trees, step, rows)
        return cache.movers.updates.submit(job, after=after)

    def _update(
        self, cache: ChunkCache, norms: GlobalNorms, trees: Any, step: Step, rows: Any = None
    ) -> Any:
        """Update one chunk in place; return its state, with the number of each buckets in its place.

        If it raises, what is on the disk stays.
        """
        memory = cache.store.fetched(rows or rows_of(trees))
        after = self._run(self.inner, norms, opened(trees, memory), step)
        cache.store.changed(memory)
        return after

    def _run(self, inner: Transform, norms: GlobalNorms, trees: Any, step: Step) -> Any:
        given, state, mine = trees
        with within(norms=_ChunkNorms(norms, given)):
            after = run_measured(inner, given, state, mine, step)
        return numbered(after, state)

    def _due(
        self, cache: ChunkCache, norms: GlobalNorms, trees: Any, step: Step, there: bool = False
    ) -> None:
        """Have a chunk updated on the device when it is read; ``there``: its gradients are already."""
        given, *others = trees
        if not there:
            rows = {n: TierRow("", x.raw, x.raw) for n, x in given.items()}
            given = given.like({n: valued(cache, n, rows[n], x.place) for n, x in given.items()})
        trees = given, *others
        inner, context = self._with_master(cache.memory), copy_context()

        def run(memory: Mapping[TierRow, Tensor]) -> Any:
            with torch.no_grad():
                return context.run(self._run, inner, norms, opened(trees, memory), step)

        rows = rows_of(trees)
        cache.due[cache.chunk_of[next(iter(given))]] = DueUpdate(rows, run)

    def _update_all(
        self, cache: ChunkCache, given: Buckets, state: State, mine: Buckets, step: Step
    ) -> State:
        """Update all chunks together, where that is not the same as one by one."""
        if cache.store.away or cache.here:
            why, fix = "some lie on the disk", "host=None"
            if cache.here:
                why, fix = "the device holds one", 'update="host"'
            raise Unsupported(
                f"this transform needs all blocks at once, and {why}",
                op="tiers",
                fix=f"sl.optim.Tiers({fix})",
            )
        trees = taken(tuple(mine), given, state, mine)
        memory = cache.store.fetched(rows_of(trees))
        given, old, mine = opened(trees, memory)
        after = run_measured(self.inner, given, old, mine, step)
        found = numbered(after, old)
        cache.store.changed(memory)
        if found is None:
            return after
        return picked(found, state)

    def _splits(
        self, cache: ChunkCache, state: State, params: Buckets
    ) -> dict[str, frozenset[Any]] | None:
        """Return the numbers of the state that the update of each chunk changes, by their places.

        None if chunks may not be updated one by one: found out once, on copies of each.
        """
        leaves, tree = optree.tree_flatten(state, is_leaf=is_buckets, none_is_leaf=True)
        # in the host's thread nothing is sent between ranks
        if self.how.tx.trait not in (
            "elementwise",
            "norm",
            *("tensor", "matrix")[: 2 * cache.here],
        ):
            return None
        if any(isinstance(x, Tensor) for x in leaves):
            return None
        if tree not in self.split:
            cache.release()
            most, found = cache.most, dict[str, frozenset[Any]]()
            chunks = by_chunk(cache, params)
            for names in chunks:
                some = self._stands_alone(cache, names, params, state)
                if some is not None:
                    found[cache.chunk_of[names[0]]] = some
            self.split[tree] = found if len(found) == len(chunks) else None
            cache.most = most
        return self.split[tree]

    def _stands_alone(
        self, cache: ChunkCache, names: tuple[str, ...], params: Buckets, state: State
    ) -> frozenset[Any] | None:
        """Return the numbers that a chunk's update changes, as that of copies by gradients of zero.

        None if it is not updated alone.
        """
        copied = partial(copied_to, cache)
        trees = tuple(stored(t, names, copied) for t in (params, state, params))
        for g in trees[0].values():
            g.raw.zero_()
        norms, inner = GlobalNorms(None), self.inner
        if cache.here:
            inner = self._with_master(cache.memory)
        try:
            after = self._run(inner, norms, trees, Step())
        except ShardError:
            # it needs them all
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
        mine = plain(trained(params))
        splits = self._splits(params.cache, state, mine)
        if splits is None:
            return None
        return EagerUpdates(self, params.cache, state, mine, step, splits).open()


class EagerUpdates:
    """Updates of chunks while backward runs, each when all of its gradients are there.

    ``missing``  chunk -> its buckets whose gradients are to come; ``came``  those that are there.
    ``tickets``  chunk -> the job that updates it on the host; ``found``  its state, updated here.
    """

    def __init__(
        self, by: TieredParameters, cache: ChunkCache, state: State, params: Buckets, step: Step,
        splits: Mapping[str, frozenset[Any]],
    ) -> None:  # fmt: skip
        self.by, self.cache, self.state, self.params = by, cache, state, params
        self.splits, self.norms = splits, GlobalNorms(params)
        self.step, self.begun = step, replace(step)
        self.missing = {cache.chunk_of[names[0]]: set(names) for names in by_chunk(cache, params)}
        self.came: dict[str, tuple[Ticket | None, Tensor]] = {}
        self.tickets: dict[str, Ticket] = {}
        self.found: dict[str, Any] = {}

    @contextmanager
    def open(self) -> Iterator[Callable[[], State]]:
        """Take the gradients of a backward; yield a function for the new state."""
        _settle(self.cache)
        self.cache.eager = self.take
        try:
            yield self.end
        finally:
            self.cache.eager = None
            # also where backward raised
            self.cache.updates.update(self.tickets)

    def take(self, name: str, ticket: Ticket | None, row: Tensor) -> None:
        """Take the gradient of a bucket; ``ticket``  the job that brings it to the host."""
        chunk = self.cache.chunk_of[name]
        self.came[name] = ticket, row
        self.missing[chunk].discard(name)
        if not self.missing[chunk]:
            del self.missing[chunk]
            self._update(chunk)

    def _update(self, chunk: str) -> None:
        by, cache, params = self.by, self.cache, self.params
        names = tuple(b.name for b in cache.chunks[chunk] if b.name in params)
        given = {n: self.came.pop(n) for n in names}
        grads = {n: ShardedTensor(row, params[n].place) for n, (_, row) in given.items()}
        own = Buckets(grads, params.index.subset(names), params.mesh)
        trees = own, *taken(names, self.state, params)
        # the first one fills it in, and what it has there meanwhile is not for the others
        filled = self.step
        if self.tickets or cache.due or self.found:
            filled = replace(self.begun)
        if cache.here:
            self._update_here(0)
            by._due(cache, self.norms, trees, filled, there=True)
            # while the next block's gradient is made
            self._update_here(int(cache.ahead))
            return
        # at most two chunks' gradients wait for their update
        for old in list(self.tickets.values())[:-1]:
            old.on_host()
        after = [ticket for ticket, _ in given.values() if ticket is not None]
        self.tickets[chunk] = by._post(cache, self.norms, trees, filled, after)

    def _update_here(self, most: int) -> None:
        """Update chunks on the device, but the last ones, which are brought."""
        cache = self.cache
        for chunk in list(cache.due)[: len(cache.due) - most]:
            self.found[chunk] = cache.update(chunk)
        for chunk in cache.due:
            cache.bring(chunk)

    def end(self) -> State:
        """End a backward: return the state, as all updates leave it."""
        cache = self.cache
        # what the loss does not depend on has a gradient of zero
        for name in [n for some in self.missing.values() for n in some]:
            like = cache.rows[name].shape, self.params[name].dtype
            if cache.here:
                self.take(name, None, cache.memory.take(*like).zero_())
            else:
                nothing = cache.movers.gradients.submit(lambda: None)
                self.take(name, nothing, cache.gradients.take(*like).zero_())
        self._update_here(0)
        told = leading(self.tickets, self.splits)
        self.found.update({c: self.tickets[c].on_host() for c in told})
        updates = dict.fromkeys(self.found) | self.tickets
        cache.end_step(updates)
        merged = picked(merged_states(self.found, self.splits), self.state)
        _commit(cache, merged, updates)
        return merged


def _on_host(cache: ChunkCache, grads: Buckets) -> Buckets:
    """Return gradients in host memory: zeros that nothing depends on are made on the device."""
    host, found = torch.device("cpu"), dict(grads)
    for name, g in grads.items():
        if g.device != host:
            row = cache.gradients.take(g.raw.shape, g.dtype).copy_(g.raw)
            found[name] = ShardedTensor(row, g.place)
    return Buckets(found, grads.index, grads.mesh)


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


def _rows(cache: ChunkCache, i: int, some: Buckets) -> Buckets:
    """Make rows of buckets of a state, its leaf number ``i``."""
    out = {}
    for name, x in some.items():
        row = cache.store.make(f"{name} {i}", x.raw, "state", lambda to, x=x: to.copy_(x.raw))
        out[name] = valued(cache, name, row, x.place)
    return Buckets(out, some.index, some.mesh)


def _settle(cache: ChunkCache) -> None:
    """Wait for the last step."""
    for chunk in cache.chunks:
        cache.wait(chunk)
    cache.store.wait()


def _commit(cache: ChunkCache, state: State, chunks: Iterable[str] = ()) -> None:
    """Post the commit of a step when the updates of these chunks are posted."""
    notes = list(numbers_of(state).values())

    def commit() -> None:
        tickets = [cache.updates[c] for c in chunks if c in cache.updates]
        cache.store.commit(notes, cache.movers.updates, tickets)

    cache.finish = commit
    if not cache.due:
        cache.finish = None
        commit()
