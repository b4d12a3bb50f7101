"""Stages 1 and 2 of ``zero``: parameters whole on every rank, their state in parts.

A step takes the gradients from their tree or whole buckets to parts (``reduced``), and the
parameters from whole buckets to this rank's part of each (``own``), through the inner transform,
and back to whole buckets (``_gather``).
"""

from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.collectives import all_gather, lead, unwrap, wrap
from shardlib.mesh import Mesh, bind
from shardlib.optim.buckets import Buckets, Index, unflatten
from shardlib.optim.clip import global_norm
from shardlib.optim.flat import adopt, gather, own, parts_of, put_back
from shardlib.optim.index import Indexed
from shardlib.optim.later import mapped
from shardlib.optim.memory import Memory
from shardlib.optim.names import load_state_dict, state_dict
from shardlib.optim.reduction import given_to, reduced, same_index, sink_for
from shardlib.optim.sink import Sink
from shardlib.optim.transform import Step
from shardlib.optim.trees import wide
from shardlib.optim.zero_stage import ZeroStage

__all__ = ["SplitState"]


class SplitState(ZeroStage):
    """A transform on each rank's parts of buckets, around whole parameters."""

    def init(self, params: Any) -> Any:
        """Initialise the state; parameters become views of buckets.

        A copy of all parameters needs least memory here, while nothing else is alive.
        """
        at = self.cache.find(params)
        self._adopted(at, at.where)
        return self.begin(parts_of(at.leaves, at.where, at.mesh))

    def updated(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """Return updates in the parameters' layouts, and the new state."""
        at = self.cache.find(params, state)
        given = given_to(grads, at)
        with torch.no_grad():
            state, where = self._followed(given, state, at)
            with bind(at.mesh):
                parts = reduced(given, where, at.mesh, self.how, Memory())
            mine = parts_of(at.leaves, where, at.mesh)
            updates, state = self.how.tx.update(parts, state, mine)
            blocks: dict[int, Tensor] = {}
            with bind(at.mesh):
                for bucket in where:
                    whole = wrap(updates[bucket.name].raw, at.mesh)
                    whole = all_gather(whole, bucket.over, 0) if bucket.over else whole
                    blocks.update(unflatten(whole, bucket))
        return at.filled(p.becomes(unwrap(blocks[i])) for i, p in enumerate(at.leaves)), state

    def stepped(self, grads: Any, state: Any, params: Any, step: Step) -> Any:
        """Step in place: reduce gradients, step this rank's parts, gather parameters."""
        at = self.cache.find(params, state)
        given = given_to(grads, at)
        state, where = self._followed(given, state, at)
        with bind(at.mesh):  # bind settles transfers that an exception left posted
            parts = reduced(given, where, at.mesh, self.how, self.memory)
        if step.ask:
            step.norm = global_norm(parts)
        flats = self._adopted(at, where)
        mine = self._own(flats, where, at.mesh)
        state = self.step_parts(parts, state, mine, step)
        put_back(flats, mine)
        # a skipped step changed no parameter
        if not step.skipped:
            self._gather(flats, mine, where, at.mesh)
            # blocks have versions of their own: backward through an older graph must raise
            torch.autograd.graph.increment_version(at.raws)
        self.memory.give(*(g.raw for g in parts.values()))
        if isinstance(given, Buckets):  # only now: a refused step keeps its gradients
            self.memory.give(*(g.raw for g in given.values()))
        return self._reordered(state, at, where)

    # ------------------------------------------------------------ the state's buckets

    def _followed(self, given: Any, state: Any, at: Indexed) -> tuple[Any, Index]:
        """Move the state into the gradients' buckets, which may have a recorded order."""
        where = at.where
        if not isinstance(given, Buckets) or given.index is where or given.index == where:
            return state, where
        if given.index.items != where.items or not _moves(state):
            same_index(given.index, where, at.mesh)
        return self._moved(state, at, given.index), given.index

    def _reordered(self, state: Any, at: Indexed, where: Index) -> Any:
        """Move the state into buckets in the recorded order of gradients, of which none are kept."""
        better = self.cache.better(where)
        if better is None or not _moves(state):
            return state
        self.cache.use(better)
        return self._moved(state, at, better)

    def _moved(self, state: Any, at: Indexed, where: Index) -> Any:
        """Move the state into other buckets, by name, as ``load_state_dict`` does."""
        empty = self.begin(parts_of(at.leaves, where, at.mesh))
        new = load_state_dict(empty, state_dict(state))

        def bucketed(x: Any) -> bool:
            return isinstance(x, Buckets)

        # numbers stay, those among them that a device still decides
        return mapped(lambda x, n: n if bucketed(x) else x, state, new, is_leaf=bucketed)

    # ------------------------------------------------------------ the parameters' memory

    def _adopted(self, at: Indexed, where: Index) -> list[Tensor]:
        """Return the buckets of which the parameters are views, cached while none is moved."""
        if at.raws[0].is_meta:  # where all addresses are 0
            return adopt(at.leaves, where, at.mesh)
        before, flats = self.cache.last.get("flats", (None, None))
        if before != (where, [x.data_ptr() for x in at.raws]):
            flats = adopt(at.leaves, where, at.mesh)
            # the buckets are alive, so that no address is reused
            self.cache.last["flats"] = (where, [x.data_ptr() for x in at.raws]), flats
        return flats

    def _own(self, flats: list[Tensor], where: Index, mesh: Mesh) -> Buckets:
        """Return each rank's own part of the parameters; copies under simulate."""
        if lead(mesh):
            return own(flats, where, mesh)
        key = where, [f.data_ptr() for f in flats]
        return self.cache.kept("own", key, lambda: own(flats, where, mesh))

    def _gather(self, flats: list[Tensor], mine: Buckets, where: Index, mesh: Mesh) -> None:
        """Make every rank's parameters whole again."""
        dtype = self.how.gather_dtype
        if dtype is None or all(f.dtype == dtype for f in flats):
            gather(flats, where, mesh)
            return
        # gather a narrow copy, and widen it into the parameters
        narrow = [self.memory.take(f.shape, dtype, f.device) for f in flats]
        part = own(narrow, where, mesh)
        for small, p in zip(part.pieces, mine.pieces, strict=True):
            small.copy_(p)
        put_back(narrow, part)
        gather(narrow, where, mesh)
        for small, whole in zip(narrow, flats, strict=True):
            whole.copy_(small)
        self.memory.give(*narrow)

    # ------------------------------------------------------------ gradients during backward

    def sink(self, params: Any) -> Sink:
        """Make a sink: stage 1 keeps gradients whole, in fp32; stage 2 reduces them to parts."""
        at = self.cache.find(params)
        like = [at.raws[b.slots[0].leaves[0]] for b in at.where]
        if self.how.stage == 1:
            dtypes = [(wide(t.dtype), wide(t.dtype)) for t in like]
            device = like[0].device
            return Sink(at.where, at.mesh, self.memory, dtypes, device=device, to="pending")
        heard = self.cache.on_arrival(at.where, at.mesh)
        # four in transit: on slow links backward must not wait for them
        more: dict[str, Any] = {"heard": heard, "most": 4, "ahead": True}
        return sink_for(self.how, at.where, at.mesh, like, self.memory, **more)


def _moves(state: Any) -> bool:
    """Return whether every tensor of the state is stored in element-wise buckets.

    It can then be re-bucketed.
    """
    every = optree.tree_leaves(state, is_leaf=lambda x: isinstance(x, Buckets))
    return all(
        all(x[b.name].raw.shape[-1] * b.ways == b.length for b in x.index)
        if isinstance(x, Buckets)
        else not isinstance(x, Tensor) or x.numel() == 1
        for x in every
    )
