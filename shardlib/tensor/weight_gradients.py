"""Queue of weight gradients: backward in two passes, for zero bubble schedules of pipelines.

The first pass, I, computes the gradients of inputs, which the stage before waits for; the second,
W, those of weights, at any later time.  Where forward runs ``within(split_backward=True)`` and I
``within(later=queue)``, the backward of a product Y = X W computes dX and queues dW.

Source: Qi et al., arXiv 2401.10241, section 2.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from shardlib._compat import Ctx, Grads, Local
from shardlib.mesh import scope

OfW = Callable[[], Tensor | None]

OPERATIONS = 12
"""Most nodes between a product and the leaves of its weight; what has more is an activation."""


class WeightGradients:
    """Gradients of weights that one backward leaves for later; ``leaves``: the weights' storages.

    >>> import shardlib as sl
    >>> from shardlib.mesh import within
    >>> with sl.simulate(x=2):
    ...     x, w = (sl.shard(torch.ones(2, 2), "x .").requires_grad_() for _ in range(2))
    ...     queue, leaves = WeightGradients([w.raw]), [x.raw, w.raw]
    ...     with within(split_backward=True):
    ...         loss = sl.unshard((x @ w).sum())
    ...     with within(later=queue):
    ...         found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    ...     (of_w,) = queue.run()
    >>> found[1] is None, of_w.tolist()  # each rank's block
    (True, [[[2.0, 2.0]], [[2.0, 2.0]]])
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.leaves = list(leaves)
        self.ids = {id(x) for x in leaves}
        self.queued: deque[tuple[GradientEdge, OfW]] = deque()

    def put(self, edge: tuple[Node | None, int], of_w: OfW, w: Tensor | None = None) -> bool:
        """Queue ``of_w()``, the gradient of an operand; False if that is no weight of the leaves.

        ``edge``  the operand's, of ``ctx.next_functions``.
        ``w``     the operand as it was saved: a Function's node is alive as long as its output,
                  not as long as its Python object.
        """
        node, number = edge
        lives = not isinstance(node, BackwardCFunction) or (w is not None and w.grad_fn is node)
        if node is None or not lives or not self._is_weight(node):
            return False
        self.queued.append((GradientEdge(node, number, cast(Any, w)), of_w))
        return True

    def _is_weight(self, node: Node) -> bool:
        """Check whether a value is computed from the leaves alone, by few operations."""
        nodes = [node]
        for at in nodes:
            leaf = getattr(at, "variable", None)
            if len(nodes) > OPERATIONS or not (leaf is None or id(leaf) in self.ids):
                return False
            nodes += [n for n, _ in at.next_functions if n is not None and n not in nodes]
        return True

    def run(self) -> list[Tensor | None]:
        """Compute the queued gradients; return the sum for each leaf, or None."""
        edges: dict[tuple[Node, int], GradientEdge] = {}
        sums: dict[tuple[Node, int], Tensor] = {}

        def compute() -> None:
            while self.queued:
                edge, of_w = self.queued.popleft()
                if (g := of_w()) is not None:
                    at = edge.node, edge.output_nr
                    edges[at], sums[at] = edge, sums[at] + g if at in sums else g

        start = torch.zeros((), device="cpu", requires_grad=True)
        torch.autograd.backward(_InBackward.apply(start, compute))
        if not sums:
            return [None] * len(self.leaves)
        given = list(edges.values()), self.leaves, list(sums.values())
        return list(torch.autograd.grad(*given, allow_unused=True))


class _InBackward(Local):
    """apply(start, compute): call ``compute`` in backward, where a schedule may queue callbacks."""

    @staticmethod
    def forward(ctx: Ctx, start: Tensor, compute: Callable[[], None]) -> Tensor:
        ctx.compute = compute
        return start.clone()

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> Grads:
        ctx.compute()
        return None, None


def queued(ctx: Any, at: int, of_w: OfW, w: Tensor | None = None) -> bool:
    """Queue the gradient of a Function's tensor number ``at``, where backward leaves it for later."""
    later = scope().call.later
    allowed = later is not None and not torch.is_grad_enabled()
    return allowed and later.put(ctx.next_functions[at], of_w, w)
