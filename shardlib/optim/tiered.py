"""Stage 3 of ``zero`` whose parts are in host memory: each block is loaded for its computation.

Parameters, gradients and state are rows in host memory.  A part is loaded before it is gathered, and
a gradient is sent to the host when it is reduced.  The update of a chunk runs on the host, in a
thread: ``step`` computes the norm of all gradients, updates the first chunk, posts the updates of
the others, and returns; the next forward waits for each chunk where it loads it, and every other
reader of a row where it reads it.  Or it runs on the device, where that forward, or whoever reads a
row, has it there.

Source: Ren et al., arXiv 2101.06840, section 4 (the update on the host); Fang et al., arXiv
2108.05818 (chunks).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from shardlib._compat import backward_now
from shardlib.errors import ShardError, Unsupported
from shardlib.optim.buckets import Bucket, Index, pytree_node
from shardlib.optim.chunk_cache import ChunkCache
from shardlib.optim.stage3 import BucketReading, Gradient, Parts, Reading
from shardlib.optim.tiered_room import Movers
from shardlib.optim.tiles import joined, joined_place
from shardlib.tensor import Facts, ShardedTensor
from shardlib.tensor.place import Place
from shardlib.tiers.ledger import Ledger, tier_bytes
from shardlib.tiers.mover import SMALL, Mover, copied
from shardlib.tiers.rows import TierRow


@dataclass(frozen=True, eq=False)
class Tiers:
    """Memory tiers for ``zero(..., stage=3, tiers=)``, and the most bytes of a rank in each.

    ``device``  bytes for parameters, gathered buckets, gradients, and state that is updated there;
                what autograd saves and a block's gradients, until they are in their bucket, are
                not counted.
    ``host``    bytes for parameters, gradients, optimizer state, and what ``remat="host"`` saves.
    ``activations``  bytes of ``host`` that are left for what ``remat="host"`` saves, and for sums of
                micro-batches in fp32, where parameters and state lie on a disk too.
    ``disk``    a directory for the parameters and the state that ``host`` does not hold.
    ``durable`` all of them are on the disk too, as of the last completed step.
    ``resume``  take up the durable run that is in ``disk``, if one is.
    ``update``  "host": a thread updates chunks in host memory while the next forward runs; "device":
                each is updated there when the next forward reads it, or by ``value_and_step`` when
                backward has its gradient, and its state is brought for that, and sent back.
    ``depth``   how many uses early a block is loaded, where there are bytes; None: as measured in
                the first steps, of links and computation.
    ``rate``    bytes a second to which each direction is held on a CPU, in place of a link.

    Sizes are numbers or texts such as "8GB"; None: any number.  Transforms with the same ``Tiers``
    share its budgets; ``ledger`` has what is held.

    >>> Tiers(device="8GB", host="64GB").ledger.budget
    {'device': 8000000000, 'host': 64000000000}
    """

    device: float | str | None = None
    host: float | str | None = None
    disk: str | os.PathLike[str] | None = None
    durable: bool = False
    resume: bool = False
    update: Literal["host", "device"] = "host"
    depth: int | None = None
    rate: float | None = None
    activations: float | str | None = None

    def __post_init__(self) -> None:
        _ = self.ledger, self.left_over  # refuses sizes
        if self.update not in ("host", "device"):
            raise Unsupported(
                f"update={self.update!r}: chunks are updated on the host, or on the device",
                op="tiers",
                fix='sl.optim.Tiers(device="8GB", update="host")',
            )
        if (self.resume and not self.durable) or (self.durable and self.disk is None):
            raise ShardError(
                "what is taken up is a durable run, and it lies on a disk",
                op="tiers",
                fix="sl.optim.Tiers(disk=path, durable=True, resume=True)",
            )
        if self.depth is not None and (type(self.depth) is not int or self.depth < 0):
            raise ShardError(
                f"depth={self.depth!r} is no number of uses",
                op="tiers",
                fix="sl.optim.Tiers(depth=2)",
            )

    @cached_property
    def ledger(self) -> Ledger:
        """The bytes that each tier holds."""
        more = {} if self.disk is None else {"disk": None}
        return Ledger(device=self.device, host=self.host, **more)

    @property
    def left_over(self) -> int:
        """The bytes of the host that its rows leave for saved activations."""
        return tier_bytes("activations", self.activations) or 0

    @cached_property
    def _movers(self) -> dict[torch.device, Movers]:
        return {}

    def movers(self, device: torch.device) -> Movers:
        """Return the movers of a device; threads are started at the first call."""
        if device not in self._movers:
            names = "loads", "gradients"
            loads, gradients = (Mover(n, device, self.rate, SMALL) for n in names)
            updates = Mover("updates", torch.device("cpu"))
            self._movers[device] = Movers(loads, gradients, updates)
        return self._movers[device]


class RowRead:
    """Read of a row, which waits for the update of its chunk."""

    __slots__ = ("cache", "name", "row")

    def __init__(self, cache: ChunkCache, name: str, row: TierRow) -> None:
        self.cache, self.name, self.row = cache, name, row

    def __call__(self) -> Tensor:
        self.cache.wait(self.cache.chunk_of[self.name])
        return self.cache.store.value(self.row)

    def fill(self, value: Tensor) -> None:
        """Replace the row's bytes."""
        self.cache.wait(self.cache.chunk_of[self.name])
        self.cache.store.fill(self.row, lambda row: row.copy_(value))

    @property
    def since(self) -> Callable[[], None] | None:
        """Return a check that no step was made since, where rows are read from a disk when asked for."""
        cache, steps = self.cache, self.cache.steps
        if cache.store.disk is None:
            return None

        def check() -> None:
            if cache.steps != steps:
                raise ShardError(
                    "these values lie on a disk, and a step has changed them since state_dict",
                    op="tiers",
                    mesh=cache.mesh,
                    fix="kept = sl.optim.state_dict(state)",
                )

        return check

    def gradient(self, dtype: torch.dtype) -> Tensor:
        """Return memory for the row's gradient."""
        return self.cache.gradient_row(self.row.shape, dtype)

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
        return room

    def _new_reading(self) -> Reading:
        return TieredReading(self, self.cache)

    @property
    def generation(self) -> int:
        """The number of completed steps of a durable run, when the last one is on the disk."""
        for chunk in list(self.cache.due):
            self.cache.wait(chunk)
        return self.cache.store.wait()


def parts_in(cache: ChunkCache, index: Index, asks: Mapping[str, bool]) -> TieredParts:
    """Return the parameters whose rows a cache has."""
    index.__dict__["room"] = cache
    rows = ((b, cache.rows[b.name]) for b in index)
    values = {
        b.name: valued(cache, b.name, row, b.place(cache.mesh), asks[b.name]) for b, row in rows
    }
    return TieredParts(values, index, cache.mesh)


def valued(
    cache: ChunkCache, name: str, row: TierRow, place: Place, asks: bool = False
) -> ShardedTensor:
    """Return a row of a bucket as a value that is read when no update of it is under way."""
    facts = Facts(RowRead(cache, name, row), grad=asks)
    device = torch.device("cpu")
    if row.memory is not None:
        device = row.memory.device
    return ShardedTensor.when_read(place, row.dtype, device, facts)


def row_of(x: ShardedTensor) -> TierRow | None:
    """Return the row that a value is read from; None for other values."""
    read = x.facts and x.facts.read
    return read.row if isinstance(read, RowRead) else None


# ---------------------------------------------------------------- reading


class TieredGradient(Gradient):
    """The gradient of a bucket, which is sent to a row of the host when it is reduced."""

    def __init__(self, cache: ChunkCache, *of: Any) -> None:
        super().__init__(*of)
        self.cache = cache
        self.away: Tensor | None = None

    def add(self, grads: tuple[Tensor | None, ...]) -> None:
        """Add the gradients of one gather."""
        away, self.away = self.away, None
        if self.flat is None:
            self.cache.settle(int(self.cache.ahead))
            if away is not None and self.task == backward_now():
                self.flat = self._memory(self.bucket.length)
                self.cache.movers.loads.submit(partial(copied, [(self.flat, away)])).wait()
        if self in self.cache.partial:
            self.cache.partial.remove(self)
        super().add(grads)
        self.cache.partial.append(self)

    def leave(self) -> None:
        """Send what was added so far to the host, until more is added."""
        assert self.flat is not None
        self.away = self.cache.gradients.take(self.flat.shape, self.flat.dtype)
        self.cache.movers.gradients.submit(partial(copied, [(self.away, self.flat)])).wait()
        self.flat = None

    def post(self) -> Any:
        """Post the reduction and the copy to the host; return the wait for the row."""
        if self in self.cache.partial:
            self.cache.partial.remove(self)
        finish: Any = super().post()
        if finish is None:
            return None
        cache = self.cache
        there = cache.here and cache.eager is not None
        if not self.bucket.hops or (there and not cache.ahead):
            # nothing is summed, or no other block's is made before it is used: it is sent at once
            self.cache.flying.remove(finish)
            finish()

        def arrived() -> Tensor:
            ticket, row = finish()
            if ticket is not None:
                ticket.on_host()
            return row

        return arrived

    def _landed(self, out: Tensor) -> Any:
        return self.cache.send(self.bucket.name, out)

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
        same = value.facts is self.given
        if value.is_stored:
            same = value.raw is self.part
        return same and not self.is_changed

    def _new_gradient(self) -> Gradient:
        return TieredGradient(self.cache, self.index, self.bucket, self.mesh, self.part)


class ChunkReading(Reading):
    """A reading that keeps the buckets of one block gathered, as a cache of chunks has bytes for."""

    def __init__(self, params: Parts, cache: ChunkCache) -> None:
        self.cache = cache
        super().__init__(params)
        self.room.activations.begin()

    def values(self) -> dict[str, ShardedTensor]:
        """Map each path to a value without a block; one that is cut has the values of its tiles."""
        found = ((item.path, item.first, x) for item, x in self._values())
        return joined(found, self._table)

    def _table(self, path: str, tiles: Sequence[ShardedTensor]) -> ShardedTensor:
        facts = Facts(partial(self._refuse_whole, path), grad=tiles[0].requires_grad)
        facts.tiles = tuple(tiles)
        how = tiles[0].dtype, tiles[0].device, facts
        return ShardedTensor.when_read(joined_place(tiles), *how)

    def _refuse_whole(self, path: str) -> Tensor:
        raise Unsupported(
            f"the device does not hold parameter {path!r} whole: it is read in tiles of rows, which "
            "F.embedding and F.linear take",
            op="tiers",
            mesh=self.mesh,
            fix=f"sl.optim.Tiers(device={self.cache.whole})",
        )

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


class TieredReading(ChunkReading):
    """A reading whose parts are loaded before they are gathered."""

    def _reading_of(self, bucket: Bucket, params: Any) -> BucketReading:
        return TieredBucket(bucket, params)

    def _part(self, one: BucketReading) -> Tensor:
        return self.cache.read(one.bucket.name)

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

    def check(self) -> None:
        """Refuse a forward whose saved activations the host does not hold."""
        self.cache.activations.check()

    def end_forward(self) -> None:
        """End forward, also one that raised."""
        super().end_forward()
        self.cache.activations.missing = 0

    def _forget_backward(self) -> None:
        super()._forget_backward()
        self.cache.forget()

    def end_backward(self) -> None:
        """End backward: drop all gathered buckets, and wait for gradients on their way."""
        super().end_backward()
        self.cache.activations.settle()
        self.cache.settle(0)
