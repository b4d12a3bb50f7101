"""Stage 3 of ``zero`` whose parts are in host memory: each block is loaded for its computation.

Parameters, gradients and state are rows in host memory.  A part is loaded before it is gathered, and
a gradient is sent to the host when it is reduced.  The update of a chunk runs on the host, in a
thread: ``step`` computes the norm of all gradients, updates the first chunk, posts the updates of
the others, and returns; the next forward waits for each chunk where it loads it, and every other
reader of a row where it reads it.

Source: Ren et al., arXiv 2101.06840, section 4 (the update on the host); Fang et al., arXiv
2108.05818 (chunks).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from shardlib._compat import backward_now
from shardlib.collectives import holds_values
from shardlib.errors import ShardError, Unsupported
from shardlib.mesh import Mesh, within
from shardlib.optim.buckets import (
    Bucket,
    Buckets,
    Index,
    Memory,
    State,
    Tree,
    parts_of,
    pytree_node,
)
from shardlib.optim.chunk_cache import ChunkCache, Movers, TieredRoom, copied
from shardlib.optim.index import ZeroSettings
from shardlib.optim.norms import global_norm, run_measured
from shardlib.optim.precision import with_master
from shardlib.optim.stage3 import (
    BucketReading,
    Gradient,
    Parts,
    Reading,
    SplitParameters,
    matched,
    trained,
)
from shardlib.optim.transform import Step
from shardlib.tensor import Facts, ShardedTensor
from shardlib.tiers.buffers import host_memory
from shardlib.tiers.ledger import Ledger
from shardlib.tiers.mover import Mover, Ticket


@dataclass(frozen=True, eq=False)
class Tiers:
    """Memory tiers for ``zero(..., stage=3, tiers=)``, and the most bytes of a rank in each.

    ``device``  bytes for parameters, gathered buckets and gradients; what autograd saves and a
                block's gradients, until they are in their bucket, are not counted.
    ``host``    bytes for parameters, gradients and optimizer state.
    ``update``  "host": a thread updates chunks in host memory while the next forward runs.
    ``depth``   how many uses early a block is loaded, where there are bytes.
    ``rate``    bytes a second to which each direction is held on a CPU, in place of a link.

    Sizes are numbers or texts such as "8GB"; None: any number.  Transforms with the same ``Tiers``
    share its budgets; ``ledger`` has what is held.

    >>> Tiers(device="8GB", host="64GB").ledger.budget
    {'device': 8000000000, 'host': 64000000000}
    """

    device: float | str | None = None
    host: float | str | None = None
    update: Literal["host"] = "host"
    depth: int = 2
    rate: float | None = None

    def __post_init__(self) -> None:
        self.ledger  # noqa: B018  refuses sizes
        if self.update != "host":
            raise Unsupported(
                f"update={self.update!r}: chunks are updated on the host",
                op="tiers",
                fix='sl.optim.Tiers(device="8GB", update="host")',
            )
        if type(self.depth) is not int or self.depth < 0:
            raise ShardError(
                f"depth={self.depth!r} is no number of uses",
                op="tiers",
                fix="sl.optim.Tiers(depth=2)",
            )

    @cached_property
    def ledger(self) -> Ledger:
        """The bytes that each tier holds."""
        return Ledger(device=self.device, host=self.host)

    @cached_property
    def _movers(self) -> dict[torch.device, Movers]:
        return {}

    def movers(self, device: torch.device) -> Movers:
        """Return the movers of a device; threads are started at the first call."""
        if device not in self._movers:
            loads, gradients = (Mover(n, device, self.rate) for n in ("loads", "gradients"))
            updates = Mover("updates", torch.device("cpu"))
            self._movers[device] = Movers(loads, gradients, updates)
        return self._movers[device]


class RowRead:
    """Read of a row, which waits for the update of its chunk."""

    __slots__ = ("cache", "name", "row")

    def __init__(self, cache: ChunkCache, name: str, row: Tensor) -> None:
        self.cache, self.name, self.row = cache, name, row

    def __call__(self) -> Tensor:
        self.cache.wait(self.cache.chunk_of[self.name])
        return self.row

    def leaf(self) -> Tensor:
        """Return what stands for the row in a graph: its shape, on the device, without memory."""
        return self.cache.standing[self.name].expand(self.row.shape)


@pytree_node
class TieredParts(Parts):
    """Parameters of which each rank holds its part, in host memory."""

    in_tiers = True

    @property
    def cache(self) -> ChunkCache:
        """The device cache of these parameters."""
        room: Any = self.index.room
        return room.cache

    def _new_reading(self) -> Reading:
        return TieredReading(self)

    def with_values(self, values: Mapping[str, Tensor]) -> "TieredParts":
        """Return a copy with the numbers of each path replaced."""
        new = Parts(self, self.index, self.mesh).with_values(values)
        index = replace(self.index)
        cache = self.cache.like(index)
        for name, x in new.items():
            cache.keep(name, x.raw.detach())
        return parts_in(cache, index, {n: x.requires_grad for n, x in self.items()})


def parts_in(cache: ChunkCache, index: Index, asks: Mapping[str, bool]) -> TieredParts:
    """Return the parameters whose rows a cache has."""
    index.__dict__["room"] = TieredRoom(cache)
    values = {b.name: valued(cache, b, asks[b.name]) for b in index}
    return TieredParts(values, index, cache.mesh)


def valued(cache: ChunkCache, bucket: Bucket, asks: bool) -> ShardedTensor:
    """Return a parameter's row as a value that is read when no update of it is under way."""
    row = cache.rows[bucket.name]
    facts = Facts(RowRead(cache, bucket.name, row), grad=asks)
    return ShardedTensor.when_read(bucket.place(cache.mesh), row.dtype, row.device, facts)


def row_of(x: ShardedTensor) -> Tensor:
    """Return the block of a value without waiting for an update of it."""
    read = x.facts and x.facts.read
    return read.row if isinstance(read, RowRead) else x.raw


# ---------------------------------------------------------------- reading


class TieredGradient(Gradient):
    """The gradient of a bucket, which is sent to a row of the host when it is reduced."""

    def __init__(self, cache: ChunkCache, room: TieredRoom, *of: Any) -> None:
        super().__init__(*of)
        self.cache, self.room = cache, room
        self.away: Tensor | None = None

    def add(self, grads: tuple[Tensor | None, ...]) -> None:
        """Add the gradients of one gather."""
        away, self.away = self.away, None
        if self.flat is None:
            self.room.settle(1 if self.cache.ahead else 0)
            if away is not None and self.task == backward_now():
                self.flat = self._memory(self.bucket.length)
                self.cache.movers.loads.submit(partial(copied, [(self.flat, away)])).wait()
        if self in self.room.partial:
            self.room.partial.remove(self)
        super().add(grads)
        self.room.partial.append(self)

    def leave(self) -> None:
        """Send what was added so far to the host, until more is added."""
        assert self.flat is not None
        self.away = self.cache.gradients.take(self.flat.shape, self.flat.dtype)
        self.cache.movers.gradients.submit(partial(copied, [(self.away, self.flat)])).wait()
        self.room.memory.give(self.flat)
        self.flat = None

    def post(self) -> Any:
        """Post the reduction and the copy to the host; return the wait for the row."""
        if self in self.room.partial:
            self.room.partial.remove(self)
        finish: Any = super().post()
        if finish is None:
            return None

        def arrived() -> Tensor:
            ticket, row = finish()
            ticket.on_host()
            return row

        return arrived

    def _landed(self, out: Tensor) -> Any:
        return self.room.send(self.bucket.name, out)

    def returned(self, finish: Any) -> Tensor:
        """Refuse to return a row of the host to autograd."""
        raise ShardError(
            "the gradients of parameters in memory tiers are in host memory, where autograd adds "
            "nothing to them and runs no hooks",
            op="tiers",
            mesh=self.mesh,
            fix="loss, grads = sl.value_and_grad(f)(params)",
        )


class TieredBucket(BucketReading):
    """A bucket of a reading whose part is in host memory."""

    def __init__(self, bucket: Bucket, params: TieredParts) -> None:
        super().__init__(bucket, params)
        # of a frozen value, which is read as it is
        self.given = params[bucket.name].facts
        self.cache, self.steps = params.cache, params.cache.steps
        self.room: Any = params.index.room
        # what is not gathered is dropped too
        self.block = self.cache.block_of[self.cache.chunk_of[bucket.name]]
        ours = self.cache.standing[bucket.name].untyped_storage()._cdata
        if self.part.untyped_storage()._cdata != ours:
            raise ShardError(
                "these parts were computed from those in memory tiers, or are differentiated again, "
                "and are in none",
                op="tiers",
                mesh=self.mesh,
                fix="params = sl.optim.load_state_dict(params, sl.optim.state_dict(changed))",
            )

    @property
    def is_changed(self) -> bool:
        """Whether a step was made since."""
        return self.cache.steps != self.steps

    def reads(self, value: ShardedTensor) -> bool:
        """Return whether this value is the part that is read, unchanged."""
        same = value.raw is self.part if value.is_stored else value.facts is self.given
        return same and not self.is_changed

    def _new_gradient(self) -> Gradient:
        return TieredGradient(self.cache, self.room, self.index, self.bucket, self.mesh, self.part)


class TieredReading(Reading):
    """A reading whose parts are loaded before they are gathered."""

    def __init__(self, params: TieredParts) -> None:
        self.cache = params.cache
        super().__init__(params)

    def _reading_of(self, bucket: Bucket, params: Any) -> BucketReading:
        return TieredBucket(bucket, params)

    def _part(self, one: BucketReading) -> Tensor:
        return self.cache.read(one.bucket.name)

    def _start_ahead(self, one: BucketReading) -> None:
        # a part that is not gathered is loaded ahead by the cache
        if self.cache.ahead and one.bucket.hops:
            self._start(one)

    def _whole(self, one: BucketReading) -> Tensor:
        if one not in self.flat:
            # the cache may give the memory of these to another block
            for old in [x for x in self.flat if x.block != one.block]:
                self._drop(old)
        return super()._whole(one)

    def take(self, one: BucketReading, grads: tuple[Tensor | None, ...]) -> Tensor | None:
        """Add the gradients of one gather."""
        if torch.is_grad_enabled() and any(g is not None and g.requires_grad for g in grads):
            raise Unsupported(
                "gradients of parameters in memory tiers are not differentiated again",
                op="tiers",
                mesh=self.mesh,
                fix="tx = sl.optim.zero(tx, axis='data', stage=3)",
            )
        return super().take(one, grads)

    def _forget_backward(self) -> None:
        super()._forget_backward()
        room: Any = self.room
        room.forget()

    def end_backward(self) -> None:
        """End backward: drop all gathered buckets, and wait for gradients on their way."""
        super().end_backward()
        room: Any = self.room
        room.settle(0)


# ---------------------------------------------------------------- the step


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
        self.every, self.ids = every, tuple(map(id, grads.values()))

    def __contains__(self, key: object) -> bool:
        p, *ids = key  # type: ignore[misc]
        if tuple(ids) == self.ids:
            self[key] = (), self.every.of(p)
        elif not super().__contains__(key):
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
        jobs = [] if step.skipped else [(n, _taken(n, given, state, mine)) for n in rest]
        tickets: dict[str, Ticket | None] = {cache.chunk_of[first[0]]: None}
        for names, trees in jobs:
            job = partial(self._update, norms, trees, replace(begun))
            tickets[cache.chunk_of[names[0]]] = cache.movers.updates.submit(job)
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
        job = partial(by._update, norms, trees, step if not tickets else replace(step))
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
