"""Local products, and those of one axis whose ends are whole: Megatron's columns and rows.

    rows         X [M, K/k], W [K/k, N]:  Y = psum(X W) over k
    columns      X [M, K], W [K, N/n]:    dX = psum(dY W^T) over n
    data         X [M/m, K], W [K, N]:    dW = psum(X^T dY) over m

Each of the three matrices is summed over the axes along which it is whole and the two others are
not; any of the sums may be over nothing.  Half precision parts are rounded as they travel, and the
sum once.

Source: arXiv 1909.08053, section 3.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import Local
from shardlib.collectives import unwrap, wrap
from shardlib.mesh import Mesh, bind
from shardlib.ops.matmul.case import MatmulCase, all_reduce, local_elements, met_over, out_layout
from shardlib.ops.matmul.schedule import product as wide_product
from shardlib.ops.matmul.schedule import summed
from shardlib.ops.registry import Match, algorithm
from shardlib.tensor import ShardedTensor, Wide, local_call, real_axes, total, varied_wide, vary

__all__ = ["oned"]

Axes = tuple[str, ...]


class Product1(Local):
    """apply(axes, mesh, over, x, w, bias) on raw blocks: Y summed over ``axes``, x's and w's gradients over ``over``.

    ``bias``  added before Y is rounded, or None; its gradient is not computed here.
    ``wide``  where x's gradient is added in fp32, for the node that sums it, or None.
    """

    @staticmethod
    def forward(
        ctx: Any, axes: Axes, mesh: Mesh, over: tuple[Axes, Axes], x: Tensor, w: Tensor, bias: Any,
        wide: Wide | None = None,
    ) -> Tensor:  # fmt: skip
        ctx.axes, ctx.mesh, ctx.over, ctx.wide = axes, mesh, over, wide
        ctx.save_for_backward(x, w)
        return _product(x, w, axes, mesh, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, w), dy, mesh, over = ctx.saved_tensors, grads[0], ctx.mesh, ctx.over
        need_x, need_w = ctx.needs_input_grad[3:5]
        product = _product
        if torch.is_grad_enabled():  # a gradient of the gradient will be asked for
            x, w, dy = vary(x, mesh, over[0]), vary(w, mesh, over[1]), vary(dy, mesh, ctx.axes)
            product = _differentiable
        dx = None
        if need_x and ctx.wide is not None and product is _product:
            with bind(mesh):
                ctx.wide.add(unwrap(wide_product(wrap(dy, mesh), wrap(w, mesh).mT)))
        elif need_x:
            dx = product(dy, w.mT, over[0], mesh)
        if w.ndim < x.ndim and need_w:  # leading dimensions of x are rows
            x, dy = (t.flatten(1 if mesh.kind == "stacked" else 0, -2) for t in (x, dy))
        dw = product(x.mT, dy, over[1], mesh) if need_w else None
        return None, None, None, dx, dw, None, None


def _product(a: Tensor, b: Tensor, over: Axes, mesh: Mesh, bias: Tensor | None = None) -> Tensor:
    with bind(mesh):
        return unwrap(summed(wrap(a, mesh), wrap(b, mesh), over, None if bias is None else wrap(bias, mesh)))


def _differentiable(a: Tensor, b: Tensor, over: Axes, mesh: Mesh) -> Tensor:
    return total(local_call(torch.matmul, mesh, (a, b), {}), mesh, over)


@algorithm("matmul", name="oned", order=0)
def oned(case: MatmulCase) -> Match | str:
    """No split contraction: local.  One split the same way in both: a local product and a psum."""
    if case.x.skew or case.w.skew:
        return "an operand is skewed"
    batch = case.batch()
    if isinstance(batch, str):
        return batch
    mesh = dict(case.mesh)
    xk, wk, columns = case.x.dims[-1], case.w.dims[-2], case.w.dims[-1]
    if xk != wk:
        return f"contraction split {xk} in x and {wk} in w"
    row_axes = {a for d in case.x.dims[:-1] for a in d.axes}
    both = set(columns.axes) & (row_axes | set(xk.axes))
    if both:
        return f"{', '.join(sorted(both))} splits w's columns and x"
    out = out_layout(case, columns)
    bytes_y = local_elements(out, (*case.x_shape[:-1], case.w_shape[-1]), mesh) * case.itemsize
    bytes_x = local_elements(case.x, case.x_shape, mesh) * case.itemsize
    bytes_w = local_elements(case.w, case.w_shape, mesh) * case.itemsize
    forward = all_reduce(bytes_y, xk.axes, mesh)
    over = met_over(case, out)
    held = ("vary", over[0]) in case.held  # X's gradient is summed with another product's
    backward = all_reduce(bytes_x, () if held else columns.axes, mesh)
    backward += all_reduce(bytes_w, tuple(row_axes - set(case.w.axes)), mesh)
    kind = "row-parallel" if xk.is_split else "column-parallel" if columns.is_split else "local"

    def run(x: ShardedTensor, w: ShardedTensor, over: tuple[Axes, Axes], bias: Tensor | None = None) -> Tensor:
        axes, (met, wide) = real_axes(x.mesh, xk.axes), varied_wide(x, over[0])
        if not (axes or over[1] or wide is not None):
            if bias is None:
                return local_call(torch.matmul, x.mesh, (met, w.raw), {})
            if x.mesh.kind != "stacked":
                return F.linear(met, w.raw.mT, bias)
        return Product1.apply(axes, x.mesh, ((), over[1]), met, w.raw, bias, wide)  # type: ignore[return-value]

    return Match(out, run, forward, backward, kind, False, over, adds=not xk.is_split and len(case.w_shape) == 2)
