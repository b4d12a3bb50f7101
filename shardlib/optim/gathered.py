"""Parameters that live as parts of flat buckets, and are gathered while they are read.

``apply(params, ...)`` of such ``Buckets`` hands the module parameters that have no block yet: the
first one that is read gathers its group's buckets, while the next group is already on its way.
Backward of a gather packs the group's gradients and reduce-scatters them.  What autograd saves of a
gathered weight is a note of where it stood, and backward gathers it again (``keep=False``), or the
gathered bucket stays (``keep=True``).  The module is not touched, and regions that are recomputed
read their parameters as forward did.

Source: Rajbhandari et al., arXiv 1910.02054, section 5.3 (stage 3, P_os+g+p); prefetch as Zhao et
al., arXiv 2304.11277, section 3.3.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import Local, after_backward, backward_now
from shardlib.collectives import lead
from shardlib.errors import ShardError
from shardlib.optim.buckets import Bucket, Buckets, Item, register
from shardlib.optim.flat import gather_later, own_parts, scatter, slot_of, stack
from shardlib.optim.memory import Room
from shardlib.tensor import Place, ShardedTensor

__all__ = ["Parts", "Reading", "place_of"]


class Parts(Buckets):
    """Parameters of which each rank holds its part; what ``zero(..., stage=3)`` trains."""

    def __missing__(self, name: str) -> Any:
        """Refuse a parameter's name: these are buckets."""
        if name not in self.paths:
            raise KeyError(name)
        raise ShardError(
            f"parameter {name!r} lies in parts of buckets, which are gathered where they are opened",
            op="zero",
            fix="with params.opened() as whole: out = f(whole)",
        )

    @contextmanager
    def opened(self) -> Iterator[dict[str, ShardedTensor]]:
        """Return the parameters by name, as values that are gathered when they are read."""
        reading = Reading(self)
        hooks: Any = nullcontext()
        if torch.is_grad_enabled() and not self.index.keep:
            hooks = torch.autograd.graph.saved_tensors_hooks(reading.pack, reading.unpack)
        try:
            with hooks:
                yield reading.values()
        finally:
            reading.end_forward()


register(Parts)


def place_of(item: Item, params: Buckets, deferred: frozenset[str]) -> Place:
    """Return the place of a parameter of buckets when it is whole."""
    true = None if item.whole == item.tiled else torch.Size(item.whole)
    return Place(item.layout, torch.Size(item.tiled), params.mesh, true, deferred)


class Reading:
    """The parameters that one forward, and its backward, have gathered.

    ``now``      bucket name -> the parts that are read.
    ``flat``     buckets that are gathered.
    ``blocks``   bucket name -> the parameters' blocks in it, as autograd knows them.
    ``coming``   buckets on their way.
    ``seen``     the buckets in the order of first reading.
    ``uses``     how often forward gathered each.
    ``filling``  gradients of which some are to come.
    """

    def __init__(self, params: Parts) -> None:
        self.params = params
        self.index = params.index
        self.mesh = params.mesh
        self.room: Room = params.index.room
        self.now = {name: x.raw for name, x in params.items()}
        self.versions = {name: x.raw._version for name, x in params.items()}
        self.buckets = {b.name: b for b in self.index.buckets}
        self.flat: dict[str, Tensor] = {}
        self.blocks: dict[str, dict[int, Tensor]] = {}
        self.coming: dict[str, tuple[Tensor, Callable[[], object]]] = {}
        self.at: dict[int, str] = {}
        self.uses: dict[str, int] = {}
        self.seen: list[str] = []
        self.done: set[str] = set()
        self.flying: list[Callable[[], object]] = []
        self.filling: dict[str, Filling] = {}
        self.posted: set[str] = set()
        self.asked = -1

    def values(self) -> dict[str, ShardedTensor]:
        """Map each path to a value without a block; reading it gathers."""
        deferred = frozenset(a for a in self.index.axes if self.mesh.axes[a] > 1)
        out = {}
        for i, (b, slot) in self.index.where.items():
            item, bucket = self.index.items[i], self.index.buckets[b]
            place = place_of(item, self.params, deferred)
            out[item.path] = ShardedTensor.when_read(
                place,
                item.dtype,
                self.now[bucket.name].device,
                lambda name=bucket.name, leaf=slot.leaves[0]: self.read(name, leaf),
            )
        return out

    # ------------------------------------------------------------ gathering

    def read(self, name: str, leaf: int) -> Tensor:
        """Return a parameter's block, recorded by autograd."""
        if name not in self.blocks or name not in self.flat:
            flat = self._whole(name)
            if backward_now() == -1:
                self._note(name)
                if torch.is_grad_enabled():
                    self.uses[name] = self.uses.get(name, 0) + 1
            found = _Gather.apply(self.now[name], self, name, flat)
            slots = self.buckets[name].slots
            self.blocks[name] = {s.leaves[0]: t for s, t in zip(slots, found, strict=True)}  # type: ignore[arg-type]
        return self.blocks[name][leaf]

    def again(self, name: str) -> Tensor:
        """Gather a bucket once more, in backward, and start the one that was read before it."""
        if self.now[name]._version != self.versions[name]:
            raise ShardError(
                "parameters were changed between forward and backward, which gathers them again",
                op="apply",
                fix="loss, grads = sl.value_and_grad(f)(params)",
            )
        flat = self._whole(name)
        if name in self.seen:
            at = self.seen.index(name)
            if at and self.seen[at - 1] not in self.done:
                self._start(self.seen[at - 1])
                self._at_the_end()
        return flat

    def _note(self, name: str) -> None:
        """Start, in forward, the bucket that came next the last time."""
        self.seen.append(name)
        at, order = len(self.seen), self.room.order
        if order[at - 1 : at] == [name] and at < len(order):
            self._start(order[at])

    def _start(self, name: str) -> None:
        """Post a bucket's gather, once."""
        if name in self.coming or name in self.flat:
            return
        with torch.no_grad():
            shard = self.now[name].detach()
            flat = self.room.buffer((*stack(self.mesh), self.buckets[name].length), shard)
            parts = own_parts(flat, self.index, self.mesh)
            for part, mine in zip(parts, shard if lead(self.mesh) else [shard], strict=True):
                part.copy_(mine)
            self.coming[name] = flat, gather_later(flat, self.mesh, self.index.hops)

    def _whole(self, name: str) -> Tensor:
        """Return a gathered bucket; at most one other stays, unless all are to stay."""
        if name not in self.flat:
            self._start(name)
            flat, finish = self.coming.pop(name)
            finish()
            self.flat[name] = flat
            self.at[flat.untyped_storage()._cdata] = name
            if not self.index.keep:
                for old in list(self.flat)[:-2]:
                    self._drop(old)
        return self.flat[name]

    def _drop(self, name: str) -> None:
        flat = self.flat.pop(name)
        self.at.pop(flat.untyped_storage()._cdata, None)
        self.blocks.pop(name, None)

    def end_forward(self) -> None:
        """End forward: nothing is read in it any more."""
        if self.seen:
            self.room.order[:] = self.seen
        self._land()
        self.blocks.clear()
        if not torch.is_grad_enabled():
            for name in list(self.flat):
                self._drop(name)

    def _land(self) -> None:
        """Wait for what was started and is not needed, before its memory goes."""
        for _, finish in self.coming.values():
            finish()
        self.coming.clear()

    # ------------------------------------------------------------ saved weights

    def pack(self, x: Tensor) -> Any:
        """Return what autograd keeps of a saved tensor: of a gathered weight, where it stood."""
        if type(x) not in (Tensor, torch.nn.Parameter):  # a checkpoint saves whole values
            return x
        name = self.at.get(x.untyped_storage()._cdata)
        return x if name is None else (name, x.shape, x.stride(), x.storage_offset())

    def unpack(self, kept: Any) -> Tensor:
        """Return the tensor that ``pack`` kept; a weight's bucket is gathered for it."""
        if isinstance(kept, Tensor):
            return kept
        name, *where = kept
        return self.again(name).as_strided(*where)

    # ------------------------------------------------------------ gradients

    def reduce(self, name: str, grads: tuple[Tensor | None, ...]) -> Tensor | None:
        """Return this rank's part of a bucket's summed gradient; it is filled as backward ends.

        What forward gathered twice, as a tied embedding, is summed when both have come: the first
        call gives the part, the others nothing.
        """
        with torch.no_grad():
            self.done.add(name)
            if name in self.flat and not self.index.keep:
                self._drop(name)
            now, first = self.filling.get(name), name not in self.filling
            if now is None:
                now = self.filling[name] = self._fill(name)
            _pack(now.flat, self.buckets[name], grads, add=not first)
            now.left -= 1
            if name in self.posted:  # a graph that runs twice: autograd adds to what it has at once
                return self._finished(name)
            self._at_the_end()
            if now.left <= 0:
                self._post(name)
            return now.out if first else None

    def _fill(self, name: str) -> "Filling":
        bucket = self.buckets[name]
        shard = self.now[name]
        memory = self.room.memory
        flat = memory.take((*stack(self.mesh), bucket.length), shard.dtype, shard.device)
        out = memory.take(shard.shape, shard.dtype, shard.device)
        return Filling(flat, out, self.uses.get(name, 1))

    def _post(self, name: str) -> None:
        """Post the sum of a bucket's gradient; at most two are on their way."""
        now, memory = self.filling.pop(name), self.room.memory
        self.posted.add(name)
        later = scatter(now.flat, now.out, self.mesh, self.index.hops, memory)

        def finish() -> None:
            later()
            memory.give(now.flat)

        self.flying.append(finish)
        while len(self.flying) > 2:
            self.flying.pop(0)()

    def _finished(self, name: str) -> Tensor:
        now = self.filling[name]
        self._post(name)
        while self.flying:
            self.flying.pop(0)()
        out = now.out.clone()
        self.room.memory.give(now.out)
        return out

    def _at_the_end(self) -> None:
        task = backward_now()
        if task != self.asked:
            self.asked = task
            after_backward(self.end_backward)

    def end_backward(self) -> None:
        """End backward: all gradients have arrived, and nothing gathered stays."""
        with torch.no_grad():
            for name in list(self.filling):  # of which some uses were not differentiated
                self._post(name)
            for finish in self.flying:
                finish()
        self.flying.clear()
        self._land()
        self.asked = -1
        self.done.clear()
        self.posted.clear()
        for name in list(self.flat):
            self._drop(name)


@dataclass
class Filling:
    """A bucket's gradient, the part of its sum, and how many uses are still to give theirs."""

    flat: Tensor
    out: Tensor
    left: int


def _pack(flat: Tensor, bucket: Bucket, grads: tuple[Tensor | None, ...], add: bool) -> None:
    for slot, g in zip(bucket.slots, grads, strict=True):
        place = slot_of(flat, slot.offset, slot.shape)
        if g is None:
            if not add:
                place.zero_()
        elif add:
            place.add_(g)
        else:
            place.copy_(g)
    for start, stop in bucket.gaps:
        flat[..., start:stop] = 0


class _Gather(Local):
    """A bucket's part to the blocks of its parameters; backward reduces their gradients.

    One function of many results: a slice of the gathered vector for each would make a vector of
    zeros for each in backward.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, reading: Reading, name: str, flat: Tensor) -> Any:
        ctx.reading, ctx.name = reading, name
        ctx.set_materialize_grads(False)
        slots = reading.buckets[name].slots
        return tuple(slot_of(flat, s.offset, s.shape) for s in slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return ctx.reading.reduce(ctx.name, grads), None, None, None
