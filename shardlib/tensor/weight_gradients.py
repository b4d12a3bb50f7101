"""Queue of weight gradients: backward in two passes, for zero bubble schedules of pipelines.

The first pass, I, computes gradients of inputs, for which the stage before waits; the second, W,
those of weights, at any later time.  Where forward runs ``within(split_backward=True)`` and I
``within(later=queue)``, the backward of a product Y = X W computes dX alone and queues dW.

Source: Qi et al., arXiv 2401.10241.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

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


class WeightForm(NamedTuple):
    """Form of W, of which its gradient depends on no value; a gathered W is freed before it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, w: Tensor) -> "WeightForm":
        """Return the form of W."""
        return cls(tuple(w.shape), w.stride(), w.dtype)

    def zeros(self, like: Tensor) -> Tensor:
        """Return zeros of this form, in which one dimension has memory: that of stride 1."""
        ones = [int(s == 1) for s in self.strides]
        length = sum(n * s for n, s in zip(self.shape, ones, strict=True)) or 1
        return like.new_zeros(length, dtype=self.dtype).as_strided(self.shape, ones)


def queued(edge: Any, of_w: Any, w: Tensor | None = None) -> bool:
    """Queue a gradient, as ``put`` does, where the backward that runs leaves some for later."""
    later = scope().call.later
    return later is not None and not torch.is_grad_enabled() and later.put(edge, of_w, w)


# torch's products: the dimensions of W, and their arguments in order with the operand that each is
_PRODUCTS: dict[str, tuple[int, dict[str, str]]] = {
    "linear": (2, {"input": "x", "weight": "w", "bias": "b"}),
    "matmul": (2, {"input": "x", "other": "w"}),
    "__matmul__": (2, {"input": "x", "other": "w"}),
    "mm": (2, {"input": "x", "mat2": "w"}),
    "bmm": (3, {"input": "x", "mat2": "w"}),
    "addmm": (2, {"input": "b", "mat1": "x", "mat2": "w"}),
    "baddbmm": (3, {"input": "b", "batch1": "x", "batch2": "w"}),
    "_grouped_mm": (3, {"input": "x", "mat2": "w", "offs": "offs"}),
}


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
        dims, operands = _PRODUCTS.get(getattr(func, "__name__", ""), (0, {}))
        if not dims or len(args) > len(operands) or any_autocast() or saved_hooks() != self.hooks:
            return func(*args, **(kwargs or {}))
        given = dict(zip(operands, args, strict=False)) | (kwargs or {})
        found = {operands.get(k, k): v for k, v in given.items() if v is not None}
        x, w = found.get("x"), found.get("w")
        factors = _is_factor(x) and x.ndim >= 2 and _is_factor(w) and w.ndim == dims
        if not (factors and found.keys() <= set(operands.values())):
            return func(*args, **(kwargs or {}))
        rest = found.get("b"), found.get("offs")
        return _Product.apply(func, tuple(operands.values()), x, w, *rest)


def _is_factor(x: Any) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.requires_grad


class _Product(Local):
    """apply(func, order, x, w, b, offs): ``func`` of those that are given, in this order.

    Y = X W + B, for ``F.linear`` X W^T + B; with ``offs``, of the groups of rows that end there.
    """

    @staticmethod
    def forward(ctx: Ctx, func: Func, order: Sequence[str], *operands: Tensor | None) -> Tensor:
        x, w, b, offs = operands
        ctx.multiply = torch.matmul if offs is None else partial(func, offs=offs)
        ctx.turned, ctx.addend = func is F.linear, None if b is None else b.shape
        ctx.save_for_backward(x, w)
        given: dict[str, Any] = dict(zip(("x", "w", "b", "offs"), operands, strict=True))
        return func(*[given[k] for k in order if given[k] is not None])

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> Grads:
        (x, w), dy = ctx.saved_tensors, grads[0]
        dx = ctx.multiply(dy, w.conj() if ctx.turned else w.mH)
        dw = None
        of_w = partial(_of_weight, ctx.multiply, ctx.turned, w.ndim)
        if not queued(ctx.next_functions[1], partial(of_w, x.detach(), dy), w):
            dw = of_w(x, dy)
        db = dy.sum_to_size(ctx.addend) if ctx.needs_input_grad[4] else None
        return None, None, dx, dw, db, None


def _of_weight(multiply: Func, turned: bool, dims: int, x: Tensor, dy: Tensor) -> Tensor:
    """Return dW = X^H dY, or its transpose, in the memory format of W."""
    if dims == 2:
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
    return multiply(dy.mT, x.conj()) if turned else multiply(x.mH, dy)
