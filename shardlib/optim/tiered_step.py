"""The step of stage 3 in memory tiers: chunks are updated on the host, one by one, in a thread.

Where a transform updates one chunk as it updates all of them, ``step`` updates the first chunk and
posts the others; a norm of all gradients is computed before.  Any other transform is run on all
rows at once.  ``value_and_step`` updates a chunk when backward has its gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.collectives import holds_values
from shardlib.errors import ShardError
from shardlib.mesh import Mesh, within
from shardlib.optim.buckets import Bucket, Buckets, Index, Memory, State, Tree, parts_of
from shardlib.optim.chunk_cache import ChunkCache
from shardlib.optim.index import ZeroSettings
from shardlib.optim.norms import global_norm, run_measured
from shardlib.optim.precision import with_master
from shardlib.optim.stage3 import Parts, SplitParameters, matched, trained
from shardlib.optim.tiered import RowRead, TieredParts, Tiers, parts_in, row_of
from shardlib.optim.transform import Step
from shardlib.tensor import Facts, ShardedTensor
from shardlib.tiers.buffers import host_memory
from shardlib.tiers.mover import Ticket

GROUP = 1 << 20
"""Bytes of parameters below which Python takes longer than the update itself."""


class HostMemory(Memory):
    """A pool of vectors in host memory."""

    def take(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised contiguous tensor; pass it to ``give`` after the last read."""
        n = torch.Size(shape).numel()
        rows = self.free.setdefault((dtype, device), [])
        if not any(t.numel() == n for t in rows):
            rows.append(host_memory(n, dtype, device)[0])
        base = rows.pop(next(i for i, t in enumerate(rows) if t.numel() == n))
        self.lent.add(base.untyped_storage()._cdata)
        return base.view(tuple(shape))


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
        self.inner = with_master(how.tx, how.master, how.axes, HostMemory())
        # structure of a state -> whether chunks are updated one by one
        self.split: dict[Any, bool] = {}

    def shard(self, params: Tree) -> Parts:
        """Keep only this rank's parts of the parameters, in host memory."""
        if isinstance(params, Parts):
            return params
        found, asks = self.placed(params)
        index = replace(found.where, buckets=_cut(found.where, found.mesh))
        cache = ChunkCache(
            index, found.mesh, self.tiers.ledger, self.tiers.movers(found.raws[0].device), self.tiers.depth,
            found.raws[0].device,
        )  # fmt: skip
        for bucket in index:
            # one at a time: the parts of all of them may not fit in the device
            (part,) = parts_of(found.leaves, index.subset((bucket.name,)), found.mesh).values()
            cache.keep(bucket.name, part.raw)
        return parts_in(cache, index, asks)

    def init(self, params: Tree) -> State:
        """Initialise the state of the trained parts, chunk by chunk if the transform takes one."""
        if isinstance(params, Parts) and not holds_values(params.mesh):
            # on paper nothing is in a tier
            return super().init(params)
        mine, cache = _plain(trained(params)), _cache_of(params)
        chunks = _by_chunk(cache, mine)
        try:
            parts = [self._begun(cache, _stored(mine, names)) for names in chunks]
        except ShardError:
            # it needs them all, or refuses them
            parts = []
        if len({tree for _, tree in parts}) != 1:
            parts = [self._begun(cache, _stored(mine, tuple(mine)))]
        leaves, tree = parts[0]
        rows = zip(*(some for some, _ in parts), strict=True)
        whole = [
            _joined(row, mine) if _is_buckets(x) else x for x, row in zip(leaves, rows, strict=True)
        ]
        return optree.tree_unflatten(tree, whole)

    def _begun(self, cache: ChunkCache, some: Buckets) -> tuple[list[Any], Any]:
        """Initialise the state of some buckets in host memory; return its leaves and structure."""
        leaves, tree = optree.tree_flatten(
            self.inner.init(some), is_leaf=_is_buckets, none_is_leaf=True
        )
        return [_rows(cache, x) if _is_buckets(x) else x for x in leaves], tree

    def donate(self, grads: Tree, state: State, params: Tree, step: Step) -> State:
        """Update the first chunk, and post the updates of the others."""
        self.how.check_state(state)
        mine, given = map(_plain, matched(params, grads, state))
        cache = _cache_of(params)
        for chunk in cache.chunks:
            cache.wait(chunk)
        chunks = _by_chunk(cache, mine)
        if not self._splits(cache, state, mine):
            after = run_measured(self.inner, given, state, mine, step)
            cache.end_step({cache.chunk_of[names[0]]: None for names in chunks})
            return after
        norms = GlobalNorms(given)
        begun = replace(step)
        first, *rest = _in_order(cache, chunks)
        after = self._update(norms, _taken(first, given, state, mine), step)
        # taken now: the values are given up when the step returns
        if step.skipped:
            rest = []
        jobs = [(n, _taken(n, given, state, mine)) for n in _grouped(cache, rest)]
        tickets: dict[str, Ticket | None] = {cache.chunk_of[first[0]]: None}
        for names, trees in jobs:
            job = partial(self._update, norms, trees, replace(begun))
            ticket = cache.movers.updates.submit(job)
            tickets.update((cache.chunk_of[n], ticket) for n in names)
        cache.end_step(tickets)
        return _merged(after, state)

    def _update(self, norms: GlobalNorms, trees: tuple[Any, Any, Any], step: Step) -> State:
        """Update one chunk in place; return its state."""
        with within(norms=_ChunkNorms(norms, trees[0])):
            return run_measured(self.inner, *trees, step)

    def _splits(self, cache: ChunkCache, state: State, params: Buckets) -> bool:
        """Return whether chunks may be updated one by one: found out once, on copies of each."""
        leaves, tree = optree.tree_flatten(state, is_leaf=_is_buckets, none_is_leaf=True)
        if self.how.tx.trait not in ("elementwise", "norm"):
            return False
        if any(isinstance(x, Tensor) for x in leaves):
            return False
        if tree not in self.split:
            self.split[tree] = all(
                self._stands_alone(_taken(names, params, state, params, copy=True))
                for names in _by_chunk(cache, params)
            )
        return self.split[tree]

    def _stands_alone(self, trees: tuple[Any, Any, Any]) -> bool:
        """Return whether a chunk is updated alone, as copies of it are by gradients of zero."""
        grads, state, _ = trees
        for g in grads.values():
            g.raw.zero_()
        norms = GlobalNorms(None)
        try:
            after = self._update(norms, trees, Step())
        except ShardError:
            # it needs them all
            return False
        return not norms.strange and _merged(after, state) is not None

    def eager(self, params: Tree, state: State, step: Step) -> "Any":
        """Return a context in which backward updates chunks, or None if it needs all gradients."""
        if self.how.tx.trait != "elementwise" or not isinstance(params, TieredParts):
            return None
        self.how.check_state(state)
        mine = _plain(trained(params))
        if not self._splits(params.cache, state, mine):
            return None
        return _eager(self, params.cache, state, mine, step)


@contextmanager
def _eager(
    by: TieredParameters, cache: ChunkCache, state: State, params: Buckets, step: Step
) -> Iterator[Callable[[], State]]:
    """Update each chunk when its gradients are in host memory; yield a function for the new state."""
    for chunk in cache.chunks:
        cache.wait(chunk)
    missing = {cache.chunk_of[names[0]]: set(names) for names in _by_chunk(cache, params)}
    came: dict[str, tuple[Ticket, Tensor]] = {}
    tickets: dict[str, Ticket] = {}
    norms = GlobalNorms(params)

    def update(chunk: str) -> None:
        names = tuple(b.name for b in cache.chunks[chunk] if b.name in params)
        given = {n: came.pop(n) for n in names}
        grads = {n: ShardedTensor(row, params[n].place) for n, (_, row) in given.items()}
        trees = (
            Buckets(grads, params.index.subset(names), params.mesh),
            *_taken(names, state, params),
        )
        # the first one fills it in
        job = partial(by._update, norms, trees, replace(step) if tickets else step)
        after = [ticket for ticket, _ in given.values()]
        # at most two chunks' gradients wait for their update
        for old in list(tickets.values())[:-1]:
            old.on_host()
        tickets[chunk] = cache.movers.updates.submit(job, after=after)

    def arrived(name: str, ticket: Ticket, row: Tensor) -> None:
        chunk = cache.chunk_of[name]
        came[name] = ticket, row
        missing[chunk].discard(name)
        if not missing[chunk]:
            del missing[chunk]
            update(chunk)

    def after() -> State:
        # what the loss does not depend on has a gradient of zero
        for name in [n for some in missing.values() for n in some]:
            row = cache.gradients.take(row_of(params[name]).shape, params[name].dtype).zero_()
            arrived(name, cache.movers.gradients.submit(lambda: None), row)
        first = next(iter(tickets.values())).on_host()
        cache.end_step(tickets)
        return _merged(first, state)

    cache.eager = arrived
    try:
        yield after
    finally:
        cache.eager = None
        # also where backward raised
        cache.updates.update(tickets)


def _cut(index: Index, mesh: Mesh) -> tuple[Bucket, ...]:
    """Return the buckets without gathers over axes of one rank, which would copy every part."""
    hops = ((tuple(a for a in hop if mesh.axes[a] > 1) for hop in b.hops) for b in index)
    return tuple(
        replace(b, hops=tuple(filter(None, some))) for b, some in zip(index, hops, strict=True)
    )


def _is_buckets(x: object) -> bool:
    return isinstance(x, Buckets)


def _cache_of(params: Tree) -> ChunkCache:
    if not isinstance(params, TieredParts):
        raise ShardError(
            "these parameters are in no memory tiers",
            op="tiers",
            fix="params = tx.shard(params)",
        )
    return params.cache


def _by_chunk(cache: ChunkCache, mine: Buckets) -> list[tuple[str, ...]]:
    """List the names of the buckets of each chunk."""
    found = (tuple(b.name for b in some if b.name in mine) for some in cache.chunks.values())
    return [names for names in found if names]


def _in_order(cache: ChunkCache, chunks: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Sort chunks by the order in which the step before read them, which the next one repeats."""
    order = {c: i for i, c in enumerate(dict.fromkeys((*cache.trace, *cache.chunks)))}
    return sorted(chunks, key=lambda names: order[cache.chunk_of[names[0]]])


def _grouped(cache: ChunkCache, chunks: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Join chunks to groups of GROUP bytes at least, each of which one job updates."""
    found: list[tuple[str, ...]] = []
    size = GROUP
    for names in chunks:
        if size >= GROUP:
            found.append(())
            size = 0
        found[-1] += names
        size += cache.sizes[cache.chunk_of[names[0]]]
    return found


def _stored(tree: Tree, names: tuple[str, ...], copy: bool = False) -> Any:
    """Return a tree with the buckets of these names alone, without waiting for their updates."""

    def one(x: Any) -> Any:
        if not isinstance(x, Buckets):
            return x
        raws = {n: row_of(x[n]).detach() for n in names if n in x}
        values = {n: ShardedTensor(_copied(r) if copy else r, x[n].place) for n, r in raws.items()}
        return Buckets(values, x.index.subset(tuple(raws)), x.mesh)

    return optree.tree_map(one, tree, is_leaf=_is_buckets, none_is_leaf=True)


def _copied(row: Tensor) -> Tensor:
    """Return a copy in host memory, which is not the device's where a CPU is both."""
    return host_memory(row.numel(), row.dtype, row.device)[0].view(row.shape).copy_(row)


def _taken(names: tuple[str, ...], *trees: Tree, copy: bool = False) -> Any:
    """Return trees with the buckets of these names alone."""
    return tuple(_stored(t, names, copy) for t in trees)


def _rows(cache: ChunkCache, some: Buckets) -> Buckets:
    """Copy buckets of a state to host memory."""
    out = {}
    for name, x in some.items():
        row = cache.row(x.raw.detach(), "state")
        facts = Facts(RowRead(cache, name, row))
        out[name] = ShardedTensor.when_read(x.place, row.dtype, row.device, facts)
    return Buckets(out, some.index, some.mesh)


def _joined(parts: Sequence[Buckets], mine: Buckets) -> Buckets:
    """Return the buckets of all chunks as one."""
    found = {n: x for some in parts for n, x in some.items()}
    names = tuple(n for n in mine if n in found)
    return Buckets(
        {n: found[n] for n in names},
        mine.index.subset(names) if len(names) < len(mine) else mine.index,
        mine.mesh,
    )


def _plain(some: Buckets) -> Buckets:
    """Return the same values as Buckets: trees that are combined are of one type."""
    return Buckets(some, some.index, some.mesh)


def _merged(after: State, before: State) -> Any:
    """Return the whole state of which ``after`` is one chunk's; None if it has other memory.

    ``before``  the whole state, or that chunk's, whose buckets the update overwrote.
    """
    new, tree = optree.tree_flatten(after, is_leaf=_is_buckets, none_is_leaf=True)
    old = [x for x in optree.tree_leaves(before, is_leaf=_is_buckets) if _is_buckets(x)]
    places = {row_of(v).data_ptr(): x for x in old for v in x.values()}
    whole = []
    for x in new:
        if not _is_buckets(x):
            whole.append(x)
            continue
        found = {
            id(y): y for v in x.values() if (y := places.get(row_of(v).data_ptr())) is not None
        }
        if len(found) != 1:
            return None
        whole += found.values()
    return optree.tree_unflatten(tree, whole)
