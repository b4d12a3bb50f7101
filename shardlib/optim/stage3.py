"""Stage 3 of ``zero``: parameters are parts of flat buckets, and gathered when they are read.

``apply(params, ...)`` with such ``Parts`` passes parameters without blocks to the module: the
first one that is read gathers its group's buckets, while the next group's gather is posted.
Backward of a gather packs the group's gradients and reduce-scatters them.  For a saved weight
autograd keeps only its bucket and offset, and backward gathers it again (``keep=False``), or the
gathered bucket stays (``keep=True``).  The module is not changed, and recomputed regions read
their parameters as forward did.

Source: Rajbhandari et al., arXiv 1910.02054, section 5.3 (stage 3, P_os+g+p); prefetch as Zhao et
al., arXiv 2304.11277, section 3.3.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from threading import get_ident
from typing import Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import Local, after_backward, backward_now
from shardlib.collectives import blocks, psum_scatter, storage_shape, unwrap, wrap
from shardlib.errors import PartialEscape, ShardError
from shardlib.grad import frozen
from shardlib.memory_sharing import SavedTensor, unpacked
from shardlib.mesh import Mesh, bind, drain, within
from shardlib.optim.buckets import (
    Bucket,
    Buckets,
    Index,
    Item,
    State,
    Tree,
    own_parts,
    parts_of,
    pytree_node,
)
from shardlib.optim.index import IndexCache, Indexed, ZeroSettings, changed, index_of, same_index
from shardlib.optim.norms import run_measured
from shardlib.optim.precision import with_master
from shardlib.optim.tiles import first_word
from shardlib.optim.transform import Step
from shardlib.optim.trees import other_tree
from shardlib.tensor import Facts, ShardedTensor, leaf_of, together_of, typeof


@pytree_node
class Parts(Buckets):
    """Parameters of which each rank holds its part; the parameters of ``zero(..., stage=3)``."""

    def __missing__(self, name: str) -> Any:
        """Refuse a parameter's name: the keys are buckets."""
        if name not in self.paths:
            raise KeyError(name)
        raise ShardError(
            f"parameter {name!r} lies in parts of buckets, which are gathered where they are opened",
            op="zero",
            fix="with params.opened() as whole: out = f(whole)",
        )

    @contextmanager
    def opened(self) -> Iterator[dict[str, ShardedTensor]]:
        """Yield the parameters by name, as values that are gathered when they are read."""
        reading = self._reading()
        hooks: Any = nullcontext()
        if torch.is_grad_enabled() and not self.index.keep:
            hooks = torch.autograd.graph.saved_tensors_hooks(reading.pack, unpacked)
        try:
            with hooks, within(gathers=reading):
                yield reading.values()
            reading.check()
        finally:
            reading.end_forward()

    def _reading(self) -> "Reading":
        """Return the reading of these parts: one until a backward ends, so that they are gathered once.

        Its end may not depend on the life of a graph: one rank may keep a loss that others drop,
        and an accelerator's thread frees nodes after backward has returned.
        """
        if not torch.is_grad_enabled():
            return self._new_reading()
        reading: Reading | None = self.__dict__.get("last")
        if reading is None or not reading.is_of(self):
            reading = self.__dict__["last"] = self._new_reading()
        return reading

    def _new_reading(self) -> "Reading":
        return Reading(self)


class BucketReading:
    """A bucket of a reading, and what is made of it.

    ``part``      the part that is read, and its ``version`` then.
    ``block``     the block of the module; None: the bucket is its own part.
    ``node``      the part as a node of the graph, see ``_BucketPart``, and its ``gradient``.
    ``blocks``    whether grad mode is on -> the parameters' blocks in the gathered bucket.
    ``facts``     the facts of the values in use, whose caches hold its blocks.
    """

    def __init__(self, bucket: Bucket, params: Parts) -> None:
        self.bucket = bucket
        self.part = leaf_of(params[bucket.name])
        self.version = self.part._version
        self.block: object = None
        if bucket.hops:
            self.block = first_word(params.index.items[bucket.slots[0].leaves[0]].group)
        self.index, self.mesh = params.index, params.mesh
        self.gradient: Gradient
        self.node: Tensor | None = None
        self.blocks: dict[bool, dict[int, Tensor]] = {}
        self.facts: weakref.WeakValueDictionary[int, Facts] = weakref.WeakValueDictionary()

    @property
    def is_changed(self) -> bool:
        """Whether the part was changed since it was read."""
        return self.part._version != self.version

    def reads(self, value: ShardedTensor) -> bool:
        """Return whether this value is the part that is read, unchanged."""
        return value.raw is self.part and not self.is_changed

    def input(self) -> Tensor:
        """Return the part as input of all gathers of one graph."""
        if not (self.part.requires_grad and torch.is_grad_enabled()):
            return self.part
        if self.node is None:
            self.gradient = self._new_gradient()
            self.node = _BucketPart.apply(self.part, self.gradient)  # type: ignore[assignment]
        return self.node  # type: ignore[return-value]

    def _new_gradient(self) -> "Gradient":
        return Gradient(self.index, self.bucket, self.mesh, self.part)

    def forget(self) -> None:
        """Drop the blocks, and caches derived from them, which would keep the bucket alive."""
        for facts in list(self.facts.values()):
            facts.forget()
        self.blocks.clear()


class Reading:
    """The parameters gathered by forwards until a backward ends, and by backwards of their graph.

    ``flat``    gathered buckets.
    ``coming``  buckets whose gather is posted.
    ``at``      number of a storage -> the bucket gathered there.
    ``seen``    the buckets in the order of first reading.
    ``done``    those whose gradients this backward has added.
    """

    def __init__(self, params: Parts) -> None:
        self.index = params.index
        self.mesh = params.mesh
        self.room = params.index.room
        self.buckets = {b.name: self._reading_of(b, params) for b in self.index}
        self.flat: dict[BucketReading, Tensor] = {}
        self.coming: dict[BucketReading, tuple[Tensor, Callable[[], object]]] = {}
        self.at: dict[int, BucketReading] = {}
        self.seen: list[BucketReading] = []
        self.done: set[BucketReading] = set()
        self.thread = get_ident()
        self.asked = -1
        self.ended = False

    def _reading_of(self, bucket: Bucket, params: Parts) -> BucketReading:
        return BucketReading(bucket, params)

    def is_of(self, params: Parts) -> bool:
        """Return whether forward may go on with it: the same parts and thread, and no backward yet."""
        if self.ended or self.thread != get_ident():
            return False
        return all(self.buckets[name].reads(x) for name, x in params.items())

    def values(self) -> dict[str, ShardedTensor]:
        """Map each path to a value without a block; reading it gathers."""
        return {item.path: x for item, x in self._values()}

    def _values(self) -> Iterator[tuple[Item, ShardedTensor]]:
        self.seen = []
        for i, (b, n) in self.index.where.items():
            item, bucket = self.index.items[i], self.index.buckets[b]
            deferred = frozenset(a for a in bucket.over if self.mesh.axes[a] > 1)
            place = item.place_in(item.layout, self.mesh, deferred)
            one, leaf = self.buckets[bucket.name], bucket.slots[n].leaves[0]
            facts = one.facts.get(leaf)
            if facts is None:
                read, grad = partial(self.read, one, leaf), one.part.requires_grad
                facts = one.facts[leaf] = Facts(read, grad=grad)
            yield item, ShardedTensor.when_read(place, item.dtype, one.part.device, facts)

    # ------------------------------------------------------------ gathering

    def read(self, one: BucketReading, leaf: int) -> Tensor:
        """Return a parameter's block, recorded by autograd."""
        mode = torch.is_grad_enabled()
        if mode not in one.blocks or one not in self.flat:
            flat = self._whole(one)
            # forward alone: recomputation in backward reads in another order
            if backward_now() == -1:
                self._note(one)
            found = _GatherBucket.apply(one.input(), self, one, flat)
            slots = one.bucket.slots
            one.blocks[mode] = {s.leaves[0]: t for s, t in zip(slots, found, strict=True)}  # type: ignore[arg-type]
        return one.blocks[mode][leaf]

    def again(self, one: BucketReading) -> Tensor:
        """Gather a bucket again, in backward, and post the gather of the one read before it."""
        if one.is_changed:
            raise ShardError(
                "parameters were changed between forward and backward, which gathers them again",
                op="apply",
                fix="loss, grads = sl.value_and_grad(f)(params)",
            )
        flat = self._whole(one)
        if one in self.seen:
            at = self.seen.index(one)
            if at and self.seen[at - 1] not in self.done:
                self._start_ahead(self.seen[at - 1])
        self._at_the_end()
        return flat

    def _note(self, one: BucketReading) -> None:
        """Record a read in forward, and post the gather of the bucket that came next last time."""
        if one.block is None:
            return
        self.seen.append(one)
        at, order = len(self.seen), self.room.order
        # prefetch only while this forward reads in the recorded order
        if order[at - 1 : at] == [one.bucket.name] and at < len(order):
            self._start_ahead(self.buckets[order[at]])

    def _start_ahead(self, one: BucketReading) -> None:
        self._start(one)

    def _part(self, one: BucketReading) -> Tensor:
        """Return the part that is gathered."""
        return one.part.detach()

    def _start(self, one: BucketReading) -> None:
        """Post a bucket's gather, once."""
        if one in self.coming or one in self.flat:
            return
        with torch.no_grad():
            shard, bucket = self._part(one), one.bucket
            if not bucket.hops:
                self.coming[one] = shard, lambda: None
                return
            flat = self.room.buffer(storage_shape(self.mesh, bucket.length), shard)
            parts = own_parts(flat, bucket.over, self.mesh)
            for part, mine in zip(parts, blocks(shard, self.mesh), strict=True):
                part.copy_(mine)
            self.coming[one] = flat, bucket.gather_later(flat, self.mesh)

    def _whole(self, one: BucketReading) -> Tensor:
        """Return a gathered bucket; keep those of its block and one other, or all with ``keep``."""
        if one not in self.flat:
            before, self.room.reading = self.room.reading(), weakref.ref(self)
            if before not in (self, None) and before.thread == self.thread and not self.index.keep:
                # of a micro-batch in flight, which backward gathers again
                before.drop_all()
            self._start(one)
            flat, finish = self.coming.pop(one)
            finish()
            self.flat[one] = flat
            # autograd saves views of the bucket, which are found by its storage
            self.at[flat.untyped_storage()._cdata] = one
            if not self.index.keep and one.block is not None:
                others = [x for x in self.flat if x.block not in (one.block, None)]
                for old in others[:-1]:
                    self._drop(old)
        return self.flat[one]

    def _drop(self, one: BucketReading) -> None:
        flat = self.flat.pop(one)
        self.at.pop(flat.untyped_storage()._cdata, None)
        one.forget()

    def drop_all(self) -> None:
        """Drop all gathered buckets."""
        for one in list(self.flat):
            self._drop(one)

    def check(self) -> None:
        """Refuse a forward that backward cannot follow."""

    def end_forward(self) -> None:
        """End forward: drop blocks, and without a graph the gathered buckets too."""
        if self.seen:
            self.room.order[:] = [one.bucket.name for one in self.seen]
        self._land()
        for one in self.buckets.values():
            one.forget()
        if not torch.is_grad_enabled():
            self.drop_all()

    def _land(self) -> None:
        """Wait for posted gathers that are not needed, before their memory is freed."""
        for _, finish in self.coming.values():
            finish()
        self.coming.clear()

    # ------------------------------------------------------------ saved weights

    def pack(self, x: Tensor) -> Any:
        """Return what stands for a saved weight, and gathers it again; other saved tensors."""
        if type(x) not in (Tensor, torch.nn.Parameter):
            # a checkpoint saves whole values
            return x
        return self.weight(x) or SavedTensor(x)

    def weight(self, x: Tensor) -> "SavedWeight | None":
        """Return what stands for a saved weight; None for another tensor."""
        one = self.at.get(x.untyped_storage()._cdata)
        return one and SavedWeight(self, one, (x.shape, x.stride(), x.storage_offset()))

    # ------------------------------------------------------------ gradients

    def take(self, one: BucketReading, grads: tuple[Tensor | None, ...]) -> Tensor | None:
        """Add the gradients of one gather; return the part of their sum if it needs a graph."""
        self.done.add(one)
        if one in self.flat and not self.index.keep:
            self._drop(one)
        self._at_the_end()
        if torch.is_grad_enabled() and any(g is not None and g.requires_grad for g in grads):
            return one.gradient.part_of(grads)
        one.gradient.add(grads)
        return None

    def _at_the_end(self) -> None:
        task = backward_now()
        if task != self.asked:
            self.asked = task
            after_backward(self.end_backward, self._forget_backward)

    def _forget_backward(self) -> None:
        """End a backward that raised: wait for its transfers, and drop their results."""
        drain()
        self.coming.clear()
        self.room.flying.clear()
        self.end_backward()

    def end_backward(self) -> None:
        """End backward: drop all gathered buckets."""
        with torch.no_grad():
            self._land()
        while self.room.flying:
            self.room.flying.pop(0)()
        self.asked = -1
        self.ended = True
        self.done.clear()
        self.drop_all()


class SavedWeight(NamedTuple):
    """A weight that autograd saved: its place in a bucket, which is gathered again."""

    reading: Reading
    bucket: BucketReading
    where: tuple[Any, ...]

    def back(self) -> Tensor:
        """Return the weight."""
        return self.reading.again(self.bucket).as_strided(*self.where)


class Gradient:
    """The gradient of a bucket's part: all gathers of a graph add to it, and it is reduced once."""

    def __init__(self, index: Index, bucket: Bucket, mesh: Mesh, part: Tensor) -> None:
        self.index, self.bucket, self.mesh = index, bucket, mesh
        self.like = part.detach().new_empty(0)
        self.flat: Tensor | None = None
        self.task = -1

    def add(self, grads: tuple[Tensor | None, ...]) -> None:
        """Add the gradients of one gather."""
        with torch.no_grad():
            if self.flat is None:
                self.flat = self._memory(self.bucket.length)
            # discard what a backward that raised has left here
            first, self.task = self.task != backward_now(), backward_now()
            for slot, g in zip(self.bucket.slots, grads, strict=True):
                place = slot.of(self.flat)
                if g is None and first:
                    place.zero_()
                elif g is not None and first:
                    place.copy_(g)
                elif g is not None:
                    place.add_(g)
            for start, stop in self.bucket.gaps:
                self.flat[..., start:stop] = 0

    def post(self) -> Callable[[], Tensor] | None:
        """Post the reduction if this backward added gradients; at most two are in transit."""
        flat, room = self.flat, self.index.room
        if flat is None or self.task != backward_now():
            return None
        self.flat, self.task = None, -1
        with torch.no_grad():
            out = self._memory(self.bucket.part_length) if self.bucket.hops else flat
            later = self.bucket.scatter(flat, out, self.mesh, room.memory)
            work = [(flat, out, later)]

            @cache
            def finish() -> Any:
                # memory that is given back is not kept by what keeps this function
                flat, out, later = work.pop()
                with torch.no_grad():
                    later()
                if out is not flat:
                    room.memory.give(flat)
                del flat, later
                return self._landed(out)

            room.flying.append(finish)
            while len(room.flying) > 2:
                room.flying.pop(0)()
        return finish

    def _landed(self, out: Tensor) -> Any:
        """Return the gradient's part when its sum is complete."""
        return out

    def returned(self, finish: Callable[[], Tensor]) -> Tensor:
        """Return the part to autograd, which adds to it or runs hooks on it."""
        return finish()

    def part_of(self, grads: tuple[Tensor | None, ...]) -> Tensor:
        """Return the part of these gradients' sum, differentiable again."""
        rows = []
        slots = self.bucket.slots
        ends = [*(s.offset for s in slots[1:]), self.bucket.length]
        for slot, end, g in zip(slots, ends, grads, strict=True):
            shape = storage_shape(self.mesh, slot.length)
            found = self.like.new_zeros(shape) if g is None else g.reshape(shape)
            rows.append(F.pad(found, (0, end - slot.offset - slot.length)))
        with bind(self.mesh):
            whole = wrap(torch.cat(rows, -1), self.mesh)
            return unwrap(psum_scatter(whole, self.bucket.over, 0))

    def _memory(self, n: int) -> Tensor:
        memory, like = self.index.room.memory, self.like
        return memory.take(storage_shape(self.mesh, n), like.dtype, like.device)


class _BucketPart(Local):
    """Identity on a bucket's part, whose backward runs after all gathers have added gradients."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, gradient: Gradient) -> Tensor:
        ctx.gradient, ctx.leaf = gradient, together_of(part)
        ctx.set_materialize_grads(False)
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (more,), leaf = grads, ctx.leaf
        finish = ctx.gradient.post()
        if finish is None:
            return more, None
        if more is None and leaf is not None and leaf[0].takes(leaf[1]):
            leaf[0].owe(leaf[1], finish)
            return None, None
        part = ctx.gradient.returned(finish)
        if more is not None:
            part = more + part
        return part, None


class _GatherBucket(Local):
    """From a bucket's part to the blocks of its parameters; backward adds their gradients.

    It is one function with many results: with one slice per result, the backward of each would make
    a vector of zeros.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, reading: Reading, one: BucketReading, flat: Tensor) -> Any:
        ctx.reading, ctx.one = reading, one
        ctx.set_materialize_grads(False)
        return tuple(s.of(flat) for s in one.bucket.slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return ctx.reading.take(ctx.one, grads), None, None, None


# ---------------------------------------------------------------- the step


class SplitParameters:
    """A transform on each rank's parts of buckets: parameters, gradients and state."""

    def __init__(self, how: ZeroSettings) -> None:
        self.how = how
        self.cache = IndexCache(how)
        self.inner = with_master(how.tx, how.master, how.axes)

    def shard(self, params: Tree) -> Parts:
        """Keep only this rank's parts of the parameters; frozen ones get buckets of their own."""
        if isinstance(params, Parts):
            return params
        at, asks = self.placed(params)
        out = Parts(dict(parts_of(at.leaves, at.where, at.mesh)), at.where, at.mesh)
        for name, asked in asks.items():
            out[name].raw.requires_grad_(asked)
        return out

    def placed(self, params: Tree) -> tuple[Indexed, dict[str, bool]]:
        """Return the parameters with their index, and whether each bucket requires grad."""
        leaves, tree = optree.tree_flatten(params)
        held = frozen(leaves)
        at = self.cache.index(params, leaves, held, tree)
        asked = [x.requires_grad for x in at.raws]
        rows = ((b.name, {asked[i] for s in b.slots for i in s.leaves}) for b in at.where)
        return at, {name: flags == {True} for name, flags in rows}

    def init(self, params: Tree) -> State:
        """Initialise the state of the trained parts."""
        return self.inner.init(trained(_parted(params)))

    def update(self, grads: Tree, state: State, params: Tree = None) -> tuple[Any, Any]:
        """Return updates of the parts, None for frozen ones, and the new state."""
        self.how.check_update(params)
        mine, given = matched(params, grads, state)
        updates, state = self.inner.update(given, state, mine)
        return params.like({n: updates.get(n) for n in params}), state

    def donate(self, grads: Tree, state: State, params: Tree, step: Step) -> State:
        """Step the parts in place; nothing is gathered before they are read."""
        self.how.check_state(state)
        mine, given = matched(params, grads, state)
        state = run_measured(self.inner, given, state, mine, step)
        params.index.room.memory.give(*(g.raw for g in given.values()))
        return state

    def sink(self, params: Tree) -> None:
        """Return no sink: the backward of a part's gather reduces its gradient."""
        _parted(params)


def _parted(params: Tree) -> Parts:
    if not isinstance(params, Parts):
        raise ShardError(
            "stage 3 trains parts of parameters, and these are whole",
            op="zero",
            fix="params = tx.shard(params)",
        )
    return params


def trained(params: Buckets) -> Buckets:
    """Return the buckets that are trained."""
    held = frozen(list(params.values()))
    if not any(held):
        return params
    return params.subset(tuple(n for n, f in zip(params, held, strict=True) if not f))


def matched(params: Tree, grads: Tree, state: State) -> tuple[Buckets, Buckets]:
    """Return parameters and gradients of the trained buckets, checked to match."""
    mine = trained(_parted(params))
    theirs = index_of(state)
    ours = mine.index.all
    if theirs is not None and theirs is not ours and theirs.items != ours.items:
        raise changed(theirs.items, ours.items, mine.mesh)
    if not isinstance(grads, Buckets) or not grads.keys() >= mine.keys():
        raise other_tree("zero")
    if grads.index is mine.index:
        given = grads
    else:
        same_index(grads.index.all, ours, mine.mesh)
        given = mine.like({n: grads[n] for n in mine})
    _refuse_pending(given)
    return mine, given


def _refuse_pending(grads: Buckets) -> None:
    odd = next((g for g in grads.values() if g.place.layout.partial), None)
    if odd is not None:
        raise PartialEscape(
            "the gradient of a part is summed already, and this one is pending",
            op="zero",
            operands={"gradient": typeof(odd)},
            mesh=odd.mesh,
            fix="loss, grads = sl.value_and_grad(f)(params)",
        )
