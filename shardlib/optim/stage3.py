"""Stage 3 of ``zero``: parameters, gradients and state in parts; see ``Parts`` for their gathers."""

from typing import Any

import optree

from shardlib.errors import PartialEscape, ShardError
from shardlib.grad import frozen
from shardlib.optim.buckets import Buckets
from shardlib.optim.flat import parts_of
from shardlib.optim.gathered import Parts
from shardlib.optim.index import changed, index_of, same_index
from shardlib.optim.transform import Step
from shardlib.optim.zero_stage import ZeroStage
from shardlib.tensor import ShardedTensor, typeof

__all__ = ["SplitParameters"]


class SplitParameters(ZeroStage):
    """A transform on each rank's parts of buckets: parameters, gradients and state."""

    def shard(self, params: Any) -> Parts:
        """Keep only this rank's parts of the parameters; frozen ones get buckets of their own."""
        if isinstance(params, Parts):
            return params
        leaves, tree = optree.tree_flatten(params)
        held = frozen(leaves)
        asked = [isinstance(x, ShardedTensor) and x.raw.requires_grad for x in leaves]
        # detached, no leaf counts as frozen
        every = optree.tree_map(lambda x: x.detach() if any(held) else x, params)
        at = self.cache.index(every, optree.tree_leaves(every), held, tree)
        out = Parts(dict(parts_of(at.leaves, at.where, at.mesh)), at.where, at.mesh)
        for bucket in at.where:
            flags = {asked[i] for s in bucket.slots for i in s.leaves}
            out[bucket.name].raw.requires_grad_(flags == {True})
        return out

    def init(self, params: Any) -> Any:
        """Initialise the state of the trained parts."""
        return self.begin(_trained(_parted(params)))

    def updated(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """Return updates of the parts, None for frozen ones, and the new state."""
        mine, given = _matched(params, grads, state)
        updates, state = self.how.tx.update(given, state, mine)
        return params.like({n: updates.get(n) for n in params}), state

    def stepped(self, grads: Any, state: Any, params: Any, step: Step) -> Any:
        """Step the parts in place; nothing is gathered before they are read."""
        mine, given = _matched(params, grads, state)
        state = self.step_parts(given, state, mine, step)
        params.index.room.memory.give(*(g.raw for g in given.values()))
        return state

    def sink(self, params: Any) -> None:
        """Return no sink: the backward of a part's gather reduces its gradient."""
        _parted(params)


def _parted(params: Any) -> Parts:
    if not isinstance(params, Parts):
        raise ShardError(
            "stage 3 trains parts of parameters, and these are whole",
            op="zero",
            fix="params = tx.shard(params)",
        )
    return params


def _trained(params: Buckets) -> Buckets:
    """Return the buckets that are trained."""
    asked = {x.requires_grad for x in params.values()}
    if len(asked) == 1:
        return params
    held = frozen(list(params.values()))
    return params.subset(tuple(n for n, f in zip(params, held, strict=True) if not f))


def _matched(params: Any, grads: Any, state: Any) -> tuple[Buckets, Buckets]:
    """Return parameters and gradients of the trained buckets, checked to match."""
    mine = _trained(_parted(params))
    theirs = index_of(state)
    ours = mine.index.whole or mine.index
    if theirs is not None and theirs is not ours and theirs.items != ours.items:
        raise changed(theirs.items, ours.items, mine.mesh)
    if not isinstance(grads, Buckets) or not grads.keys() >= mine.keys():
        raise ShardError(
            "the gradients are another tree than the parameters",
            op="zero",
            fix="loss, grads = sl.value_and_grad(f)(params)",
        )
    if grads.index is mine.index:
        given = grads
    else:
        same_index(grads.index.whole or grads.index, ours, mine.mesh)
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
