"""Queue of weight gradients: backward in two passes, for zero bubble schedules of pipelines.

The first pass, I, computes gradients of inputs, for which the stage before waits; the second, W,
those of weights, at any later time.  Where forward runs ``within(split_backward=True)`` and I
``within(later=queue)``, the backward of a product Y = X W computes dX alone and queues dW.

Source: Qi et al., arXiv 2401.10241.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardlib.mesh import scope
from shardlib.tensor.gradients import mapped

# nodes of a weight's graph, down to its leaves; an operand with more is an activation
MOST = 12


class WeightGradients:
    """Gradients of ``leaves`` that one backward leaves for later; they are storages of weights.

    >>> w, x = (torch.ones(2).requires_grad_() for _ in range(2))
    >>> queue, y = WeightGradients([w]), 2 * w + x
    >>> (of_w, of_x), later = (f for f, _ in y.grad_fn.next_functions), lambda: torch.ones(2)
    >>> queue.put((of_w, 0), later), queue.put((of_x, 0), later)
    (True, False)
    >>> edges, grads = queue.run()
    >>> torch.autograd.backward(edges, grads, inputs=[w]), w.grad
    (None, tensor([2., 2.]))
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.leaves, self.ids = list(leaves), {id(x) for x in leaves}
        self.queued: list[tuple[GradientEdge, Callable[[], Tensor | None]]] = []

    def put(self, edge: Any, of_w: Callable[[], Tensor | None], w: Tensor | None = None) -> bool:
        """Queue ``of_w()``, the gradient of an operand; False if that is no weight of the leaves.

        ``edge``  the operand's, of ``ctx.next_functions``; ``w``  the operand, as it was saved.
        """
        edge = GradientEdge(*edge)
        if isinstance(edge.node, BackwardCFunction):
            # before torch 2.13 a Function's node lives as long as its output only
            if w is None or w.grad_fn is not edge.node:
                return False
            edge = get_gradient_edge(w)
        nodes = [edge.node]
        for node in nodes:
            leaf = getattr(node, "variable", None)
            if len(nodes) > MOST or (leaf is not None and id(leaf) not in self.ids):
                return False
            nodes += [n for n, _ in node.next_functions if n is not None and n not in nodes]
        self.queued.append((edge, of_w))
        return True

    def run(self) -> tuple[list[GradientEdge], list[Tensor]]:
        """Compute the queued gradients; return edges of the graph from which backward goes on."""
        sums: dict[Any, tuple[GradientEdge, Tensor]] = {}

        def compute(start: Tensor) -> Tensor:
            while self.queued:
                edge, of_w = self.queued.pop(0)
                at, g = edge[:2], of_w()
                if g is not None:
                    sums[at] = edge, sums[at][1] + g if at in sums else g
            return start

        start = torch.zeros((), device="cpu", requires_grad=True)
        # within a backward, in which schedules may queue callbacks
        mapped(start, compute).backward()
        return [edge for edge, _ in sums.values()], [g for _, g in sums.values()]


def queued(edge: Any, of_w: Any, w: Tensor | None = None) -> bool:
    """Queue a gradient, as ``put`` does, where the backward that runs leaves some for later."""
    later = scope().call.later
    return later is not None and not torch.is_grad_enabled() and later.put(edge, of_w, w)
