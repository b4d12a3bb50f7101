"""Stages 1 and 2 of ``zero``: parameters whole on every rank, their state in parts.

Gradients come as a tree, summed or pending; in whole buckets with pending sums, which a sink of
stage 1 collected; or in parts, which a sink of stage 2 has reduced already.

A step takes the gradients from any of these forms to parts (``_reduced``), and the
parameters from whole buckets to this rank's part of each (``_own``), through the inner transform,
and back to whole buckets (``_gather``).
"""

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.collectives import lead
from shardlib.dtypes import wider
from shardlib.errors import PartialEscape, axes_text
from shardlib.mesh import Mesh, bind
from shardlib.optim.buckets import Buckets, Index, Memory, State, Tree, adopt, gather, own, parts_of
from shardlib.optim.index import IndexCache, Indexed, ZeroSettings, same_index
from shardlib.optim.names import load_state_dict, state_dict
from shardlib.optim.norms import run_measured
from shardlib.optim.precision import with_master
from shardlib.optim.sink import FLYING, Sink
from shardlib.optim.transform import Step, mapped
from shardlib.optim.trees import check_gradient, is_bucketed, pieces
from shardlib.tensor import ShardedTensor, typeof


class SplitState:
    """A transform on each rank's parts of buckets, around whole parameters."""

    def __init__(self, how: ZeroSettings) -> None:
        self.how = how
        self.cache = IndexCache(how)
        self.memory = Memory()
        self.inner = with_master(how.tx, how.master, how.axes, self.memory)

    def shard(self, params: Tree) -> Tree:
        """Return the parameters, which stay whole."""
        return params

    def init(self, params: Tree) -> State:
        """Initialise the state; parameters become views of buckets.

        A copy of all parameters needs least memory here, while nothing else is alive.
        """
        at = self.cache.find(params)
        self._adopted(at, at.where)
        return self.inner.init(parts_of(at.leaves, at.where, at.mesh))

    def update(self, grads: Tree, state: State, params: Tree = None) -> tuple[Any, Any]:
        """Return updates in the parameters' layouts, and the new state."""
        self.how.check_update(params)
        at = self.cache.find(params, state)
        given = self._given(grads, at)
        with torch.no_grad():
            state, where = self._followed(given, state, at)
            with bind(at.mesh):
                parts = self._reduced(given, where, at.mesh, Memory())
            mine = parts_of(at.leaves, where, at.mesh)
            updates, state = self.how.tx.update(parts, state, mine)
            blocks = updates.whole()
        return at.unflatten(p.becomes(blocks[i]) for i, p in enumerate(at.leaves)), state

    def donate(self, grads: Tree, state: State, params: Tree, step: Step) -> State:
        """Step in place: reduce gradients, step this rank's parts, gather parameters."""
        self.how.check_state(state)
        at = self.cache.find(params, state)
        given = self._given(grads, at)
        state, where = self._followed(given, state, at)
        with bind(at.mesh):
            # bind settles transfers that an exception left posted
            parts = self._reduced(given, where, at.mesh, self.memory)
        flats, mine = self._adopted(at, where)
        state = run_measured(self.inner, parts, state, mine, step)
        mine.put_back(flats)
        # a skipped step changed no parameter
        if not step.skipped:
            self._gather(flats, mine, where, at.mesh)
            # blocks have versions of their own: backward through an older graph must raise
            torch.autograd.graph.increment_version(at.raws)
        self.memory.give(*(g.raw for g in parts.values()))
        if isinstance(given, Buckets):
            # only now: a refused step keeps its gradients
            self.memory.give(*(g.raw for g in given.values()))
        return self._reordered(state, at, where)

    # ------------------------------------------------------------ the state's buckets

    def _followed(self, given: Tree, state: State, at: Indexed) -> tuple[Any, Index]:
        """Move the state into the gradients' buckets, which may have a recorded order."""
        where = at.where
        if not isinstance(given, Buckets) or given.index is where or given.index == where:
            return state, where
        if given.index.items != where.items or not _moves(state):
            same_index(given.index, where, at.mesh)
        return self._moved(state, at, given.index), given.index

    def _reordered(self, state: State, at: Indexed, where: Index) -> State:
        """Move the state into buckets in the recorded order of gradients, of which none are kept."""
        better = self.cache.better(where)
        if better is None or not _moves(state):
            return state
        self.cache.use(better)
        # of other sizes, and as many as gradients in another order filled at once
        self.memory.clear()
        return self._moved(state, at, better)

    def _moved(self, state: State, at: Indexed, where: Index) -> State:
        """Move the state into other buckets, by name, as ``load_state_dict`` does."""
        empty = self.inner.init(parts_of(at.leaves, where, at.mesh))
        new = load_state_dict(empty, state_dict(state))
        # numbers stay, those among them that a device still decides
        return mapped(lambda x, n: n if is_bucketed(x) else x, state, new, is_leaf=is_bucketed)

    # ------------------------------------------------------------ the parameters' memory

    def _adopted(self, at: Indexed, where: Index) -> tuple[list[Tensor], Buckets]:
        """Return the buckets of which the parameters are views, and each rank's own part of them.

        Both are cached while no parameter is moved; under simulate the parts are copies.
        """
        before, found = self.cache.last.get("flats", (None, None))
        if before != (where, _addresses(at.raws)) or any(x.is_meta for x in at.raws[:1]):
            # all of address 0
            flats = adopt(at.leaves, where, at.mesh)
            found = flats, own(flats, where, at.mesh)
            # the buckets are alive, so that no address is reused
            self.cache.last["flats"] = (where, _addresses(at.raws)), found
        elif lead(at.mesh):
            found = found[0], own(found[0], where, at.mesh)
        return found

    def _gather(self, flats: list[Tensor], mine: Buckets, where: Index, mesh: Mesh) -> None:
        """Make every rank's parameters whole again."""
        dtype = self.how.gather_dtype
        if dtype is None or all(f.dtype == dtype for f in flats):
            gather(flats, where, mesh)
            return
        # gather a narrow copy, and widen it into the parameters
        narrow = [self.memory.take(f.shape, dtype, f.device) for f in flats]
        part = own(narrow, where, mesh)
        for small, p in zip(*pieces(part, mine), strict=True):
            small.copy_(p)
        part.put_back(narrow)
        gather(narrow, where, mesh)
        for flat, small in zip(flats, narrow, strict=True):
            flat.copy_(small)
        self.memory.give(*narrow)

    # ------------------------------------------------------------ gradients

    def _given(self, grads: Tree, at: Indexed) -> Tree:
        """Return the trained leaves' gradients: a list, or Buckets."""
        if isinstance(grads, Buckets):
            return grads
        given = at.given(grads)
        for p, g in zip(at.leaves, given, strict=True):
            check_gradient(p, g, "zero")
        return given

    def _reduced(self, given: Tree, where: Index, mesh: Mesh, memory: Memory) -> Buckets:
        """Return the parts of the summed gradients."""
        whole = isinstance(given, Buckets)
        if whole:
            same_index(given.index, where, mesh)
            over = {a for g in given.values() for a in g.sharding.partial}
            if not over:
                return given
            likes = [given[b.name].raw for b in where]
        else:
            over = _pending(given, self.how.cut)
            if not over:
                return parts_of(given, where, mesh, grads=True)
            likes = [g.raw for g in where.firsts(given)]
        # over these nothing is cut
        also = tuple(sorted(over - set(self.how.cut)))
        sink = self._sink(where, mesh, likes, memory, also=also)
        if whole:
            sink.begin(likes)
        else:
            _take_all(sink, given)
        return sink.finish()

    def _sink(
        self, where: Index, mesh: Mesh, like: Sequence[Tensor], memory: Memory, **more: Any
    ) -> Sink:
        """Make a sink for gradients with the dtypes of ``like``, one leaf of each bucket."""
        wire = self.how.reduce_dtype
        # a sum sent in half precision is not worth fp32 parts
        exact = wire is None or wire == torch.float32
        dtypes = [(t.dtype, wider(t.dtype) if exact else t.dtype) for t in like]
        if {t.dtype for t in like} == {wire}:
            wire = None
        return Sink(where, mesh, memory, dtypes, device=mesh.device, wire=wire, **more)

    def sink(self, params: Tree) -> Sink:
        """Make a sink: stage 1 keeps gradients whole, in fp32; stage 2 reduces them to parts."""
        at = self.cache.find(params)
        like = at.where.firsts(at.raws)
        if self.how.stage == 1:
            dtypes = [(wider(t.dtype), wider(t.dtype)) for t in like]
            device = at.mesh.device
            return Sink(at.where, at.mesh, self.memory, dtypes, device=device, to="whole")
        heard = self.cache.on_arrival(at.where, at.mesh)
        more: dict[str, Any] = {"heard": heard, "most": FLYING, "ahead": True}
        return self._sink(at.where, at.mesh, like, self.memory, **more)


def _take_all(sink: Sink, given: Sequence[ShardedTensor]) -> None:
    """Give a sink the gradients of all leaves, in the order of its buckets."""
    for bucket in sink.index:
        for slot in bucket.slots:
            for i in slot.leaves:
                sink.take(i, given[i].raw)


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))


def _moves(state: State) -> bool:
    """Return whether every tensor of the state is stored in element-wise buckets.

    It can then be re-bucketed.
    """
    every = optree.tree_leaves(state, is_leaf=is_bucketed)
    return all(
        all(x[b.name].raw.shape[-1] * b.ways == b.length for b in x.index)
        if isinstance(x, Buckets)
        else not isinstance(x, Tensor) or x.numel() == 1
        for x in every
    )


def _pending(grads: list[Any], axes: tuple[str, ...]) -> set[str]:
    """Return the axes over which gradients are pending.

    Each gradient must be pending over all of them, without those that split its leaf, and ``axes``
    must be among them; or none may be pending.
    """
    every = {a for g in grads if isinstance(g, ShardedTensor) for a in g.sharding.partial}
    if not every:
        return every
    asked = every | set(axes)
    odd = next((g for g in grads if asked - set(g.sharding.axes) != set(g.sharding.partial)), None)
    if odd is None:
        return asked
    raise PartialEscape(
        f"every gradient must be pending over {axes_text(axes)}, or none pending at all",
        op="zero",
        operands={"gradient": typeof(odd)},
        mesh=odd.mesh,
        fix=f"sl.value_and_grad(loss, pending={axes_text(axes)})",
    )
