"""Queue of weight gradients: backward in two passes, for zero bubble schedules of pipelines.

The first pass, I, computes gradients of inputs, for which the stage before waits; the second, W,
those of weights, at any later time.  Where forward runs ``within(split_backward=True)`` and I
``within(later=queue)``, the backward of a product Y = X W computes dX alone and queues dW.

Source: Qi et al., arXiv 2401.10241.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from shardlib._compat import Ctx, Grads, Local, any_autocast, saved_hooks
from shardlib.mesh import scope
from shardlib.opspec import Args, Func, Kwargs
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


# torch's products and their operands in order: X, the weight W and a bias
_PRODUCTS = {
    "linear": "xwb", "matmul": "xw", "__matmul__": "xw", "mm": "xw", "addmm": "bxw",
    "_grouped_mm": "xw",
}  # fmt: skip


class SplitProducts(TorchFunctionMode):
    """Mode in which products of plain activations and weights have a backward in two passes.

    Regions of torch.utils.checkpoint that begin inside have torch's products, as they are
    recomputed outside of the mode, and save the same tensors again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hooks = saved_hooks()

    def __torch_function__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        operands = _PRODUCTS.get(name, "")
        if len(args) not in range(2, len(operands) + 1) or any_autocast():
            return func(*args, **(kwargs or {}))
        given = {k: v for k, v in (kwargs or {}).items() if v is not None}
        bias = given.pop("bias", None)
        x, w, bias = ({"b": bias, **dict(zip(operands, args, strict=False))}.get(k) for k in "xwb")
        grouped = name == "_grouped_mm"
        plain = given.keys() <= ({"offs"} if grouped else set())
        factors = _is_factor(x) and x.ndim >= 2 and _is_factor(w) and w.ndim == 2 + grouped
        if not (plain and factors) or saved_hooks() != self.hooks:
            return func(*args, **(kwargs or {}))
        multiply = partial(func, **given) if grouped else torch.matmul
        return _Product.apply(multiply, name == "linear", x, w, bias)


def _is_factor(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


class _Product(Local):
    """apply(multiply, turned, x, w, bias=None): the product of rows and a matrix, or of groups.

    ``turned``  whether W is given as its transpose, as for ``F.linear``.
    """

    @staticmethod
    def forward(
        ctx: Ctx, multiply: Func, turned: bool, x: Tensor, w: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        ctx.how = multiply, turned, None if bias is None else bias.shape
        ctx.save_for_backward(x, w)
        if turned:
            return F.linear(x, w, bias)
        return multiply(x, w) if bias is None else torch.addmm(bias, x, w)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> Grads:
        (multiply, turned, bias), (x, w), dy = ctx.how, ctx.saved_tensors, grads[0]
        of_w = partial(_of_weight, multiply, turned, x.detach(), dy)
        dw = None
        if not queued(ctx.next_functions[1], of_w, w):
            dw = _of_weight(multiply, turned, x, dy)
        dbias = dy.sum_to_size(bias) if ctx.needs_input_grad[4:] == (True,) else None
        return None, None, multiply(dy, w.conj() if turned else w.mH), dw, dbias


def _of_weight(multiply: Func, turned: bool, x: Tensor, dy: Tensor) -> Tensor:
    """Return dW, in the memory format of W."""
    if multiply is torch.matmul:
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
    return multiply(dy.mT, x.conj()) if turned else multiply(x.mH, dy)
