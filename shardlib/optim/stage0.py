"""Stage 0 of ``zero``: nothing is split; gradients are summed in buckets during backward (DDP)."""

from collections.abc import Callable
from typing import Any

import optree
from torch import Tensor

from shardlib.grad import frozen
from shardlib.optim.memory import Memory
from shardlib.optim.sink import Summed
from shardlib.optim.transform import Transform
from shardlib.optim.zero_stage import ZeroSettings
from shardlib.tensor import ShardedTensor

__all__ = ["SummedGradients"]


class SummedGradients:
    """Gradients summed on every rank, in the parameters' tree and layouts."""

    def __init__(self, how: ZeroSettings) -> None:
        self.how = how
        self.cache = how.indices()

    def transform(self) -> Transform:
        """Return the inner transform with this sink."""
        return self.how.tx._replace(sink=self.sink)

    def sink(self, params: Any) -> Summed:
        """Make a sink for one backward's gradients."""
        at = self.cache.find(params)
        like = [at.raws[b.slots[0].leaves[0]] for b in at.where]
        return Summed(
            at.where,
            at.mesh,
            Memory(),
            [(t.dtype, t.dtype) for t in like],
            device=like[0].device,
            heard=self.cache.on_arrival(at.where, at.mesh, at_once=True),
            tree=_tree_of(params, at.leaves),
        )


def _tree_of(params: Any, leaves: list[Any]) -> Callable[[list[Tensor]], Any]:
    """Return a function that builds the tree of gradients from the trained leaves' blocks."""
    every, tree = optree.tree_flatten(params)
    held = frozen(every)

    def made(blocks: list[Tensor]) -> Any:
        found = iter(
            ShardedTensor(raw, p.place._replace(deferred=frozenset(), out_layout=None))
            for raw, p in zip(blocks, leaves, strict=True)
        )
        return optree.tree_unflatten(tree, [None if f else next(found) for f in held])

    return made
