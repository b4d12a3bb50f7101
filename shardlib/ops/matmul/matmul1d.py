"""Local products, and one-axis products with unsplit ends: Megatron's column and row parallel.

    rows         X [M, K/k], W [K/k, N]:  Y = psum(X W) over k
    columns      X [M, K], W [K, N/n]:    dX = psum(dY W^T) over n
    data         X [M/m, K], W [K, N]:    dW = psum(X^T dY) over m

Each of the three matrices is summed over the axes along which it is whole and the two others are
split; any of these sets of axes may be empty.  Half precision parts are rounded when they are sent,
and the sum once.

Source: arXiv 1909.08053, section 3.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import lead, unwrap
from shardlib.cost import summing
from shardlib.ops.matmul.case import MatmulCase
from shardlib.ops.matmul.function import Axes, Gradients, Product, partial_product, summed_product
from shardlib.ops.registry import Match, algorithm
from shardlib.recompute import once
from shardlib.tensor import ShardedTensor, Wide, local_call, real_axes, varied_wide


@dataclass(frozen=True)
class Matmul1D:
    """Local product whose Y is summed over ``summed``.

    ``wide``  fp32 accumulator to which X's gradient is added, for a node that sums it for several
              products, or None.
    """

    summed: Axes = ()
    wide: Wide | None = None

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute Y = psum(x w) + bias, and keep the blocks themselves for backward."""
        return summed_product(x, w, self.summed, bias), x, w

    def gradients(
        self, dy: Tensor, x: Tensor, w: Tensor, need: tuple[bool, bool], over: tuple[Axes, Axes]
    ) -> Gradients:
        """Compute dX = psum(dY W^T) and dW = psum(X^T dY)."""
        dx = dw = None
        if need[0] and self.wide is not None and not torch.is_grad_enabled():
            self.wide.add(unwrap(partial_product(dy, w.mT)))
        elif need[0]:
            dx = summed_product(dy, w.mT, over[0])
        if need[1]:
            if w.ndim < x.ndim:
                # leading dimensions of x are rows
                x, dy = x.flatten(0, -2), dy.flatten(0, -2)
            if w.ndim == 2 and unwrap(w).stride(-2) == 1:
                # a layer's weight, transposed: with its strides, gradients add up in one pass
                dw = summed_product(dy.mT, x, over[1]).mT
            else:
                dw = summed_product(x.mT, dy, over[1])
        return dx, dw


@algorithm("matmul", name="oned", order=0)
def oned(case: MatmulCase) -> Match | str:
    """Match a contraction not split, or split alike in both: a local product, and a psum."""
    # refuses batches that lie differently
    case.batch()
    mesh = case.axes
    xk, wk, columns = case.x.dims[-1], case.w.dims[-2], case.w.dims[-1]
    if xk != wk:
        return f"contraction split {xk} in x and {wk} in w"
    row_axes = {a for d in case.x.dims[:-1] for a in d.axes}
    both = set(columns.axes) & (row_axes | set(xk.axes))
    if both:
        return f"{', '.join(sorted(both))} splits w's columns and x"
    out = case.rows_by(columns)
    forward = summing(case.bytes_of(out, case.y_shape), xk.axes, mesh)
    over = case.over(out)
    # X's gradient is summed with another product's
    held = ("vary", over[0]) in case.held
    backward = summing(case.x_bytes, () if held else columns.axes, mesh)
    backward += summing(case.w_bytes, tuple(row_axes - set(case.w.axes)), mesh)
    kinds = (xk, "row-parallel"), (columns, "column-parallel")
    kind = next((name for dim, name in kinds if dim.is_split), "local")
    summed = tuple(a for a in mesh if a in xk.axes and mesh[a] > 1)
    adds = not summed and len(case.w_shape) == 2
    run, local = Matmul1D(summed), not summed
    call = partial(_called, xk.axes)
    return Match(out, run, forward, backward, kind, adds=adds, local=local, call=call)


def _called(
    split: Axes,
    x: ShardedTensor,
    w: ShardedTensor,
    over: tuple[Axes, Axes],
    bias: Tensor | None = None,
    torchs: bool = True,
) -> Tensor:
    """Multiply as torch does, or sum X's gradient once for all products that read it.

    ``split``   axes over which the contraction is split.
    ``torchs``  whether torch's own product may do it all, with its gradients.
    """
    axes, (met, wide) = real_axes(x.mesh, split), varied_wide(x, over[0])
    if torchs and not (axes or over[1] or wide is not None):
        if bias is None:
            return once(lambda: local_call(torch.matmul, x.mesh, met, w.raw))
        if not lead(x.mesh):
            return once(lambda: F.linear(met, w.raw.mT, bias))
    return Product.apply(Matmul1D(axes, wide), x.mesh, ((), over[1]), met, w.raw, bias)  # type: ignore[return-value]
