"""SUMMA with a gathered X: only W's panels are sent.

Where several products read one X in 2D blocks, X is gathered once for all of them (shared_gather.py), and
each W is still sent in panels, so that no weight is gathered whole:

    x [M, K], w [K/row, N/col]:  Y = sum over r of x[:, r] w_r, w_r from its owner along row
    dX[:, r] = dY w_r^T          summed over col with the other products' (shared_gather.py)
    dW                           x[:, r]^T dY, added up at w_r's owner
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardlib.collectives import axis_size, broadcasts, reductions
from shardlib.cost import Cost, moving
from shardlib.dtypes import wider
from shardlib.ops.matmul.case import MatmulCase
from shardlib.ops.matmul.function import (
    Axes,
    DimMove,
    Gradients,
    Product,
    accumulator,
    add_product,
    ahead,
    nothing,
    partial_product,
    rounded,
)
from shardlib.ops.matmul.matmul3d import (
    Cube,
    gradients,
    movements,
    price,
    price_of_gather,
    shared_gather,
)
from shardlib.ops.matmul.shared_gather import ReadsShared, gathered
from shardlib.ops.registry import Match, algorithm
from shardlib.tensor import ShardedTensor


def _panels(w: Tensor, axis: str) -> Iterator[Tensor]:
    send = broadcasts(axis, w)
    return (panel.wait() for panel in ahead(send(w, k) for k in range(axis_size(axis))))


@dataclass(frozen=True)
class Streamed(ReadsShared):
    """Product with a whole X, of which each rank sends its part of W."""

    axis: str
    summed: Axes = ()
    saves_blocks: ClassVar[bool] = True

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute Y of X [.., K] and W [K/axis, N], and keep the blocks for backward."""
        rows = x.reshape(-1, x.shape[-1])
        y = accumulator(rows, rows.shape[0], w.shape[-1])
        for part, panel in zip(
            rows.chunk(axis_size(self.axis), -1), _panels(w, self.axis), strict=True
        ):
            add_product(y, part, panel)
        y = rounded(y, w.dtype, bias=bias).reshape(*x.shape[:-1], w.shape[-1])
        return y, *self.blocks(x, w)

    def gradients(
        self, dy: Tensor, x: Tensor, w: Tensor, need: tuple[bool, bool], over: tuple[Axes, Axes]
    ) -> Gradients:
        """Compute dX of this product alone, whole; dW [K/axis, N] is summed at its owner."""
        x = self.whole(x, need[1])
        if torch.is_grad_enabled():
            # differentiable: gather W instead of sending panels
            return gradients(dy, x, w, Cube((), (DimMove((self.axis,), 0),), ()), need)
        dx, rows = None, dy.reshape(-1, dy.shape[-1])
        if need[0]:
            dx = torch.cat([partial_product(rows, panel.mT) for panel in _panels(w, self.axis)], -1)
            dx = dx.reshape(*dy.shape[:-1], dx.shape[-1])
        dw = self._of_w(x, rows, w, over[1]) if need[1] else None
        return self.left(dx), dw

    def _of_w(self, x: Tensor, dy: Tensor, w: Tensor, over: Axes) -> Tensor:
        dw = w.new_empty(w.shape, dtype=wider(w.dtype))
        sum_into = reductions(self.axis, dw, w.dtype)
        added = nothing
        for k, part in enumerate(x.reshape(-1, x.shape[-1]).chunk(axis_size(self.axis), -1)):
            here = partial_product(part.mT, dy)
            # the part before this one was sent meanwhile
            added()
            added = sum_into(dw, here, k)
        added()
        return rounded(dw, w.dtype, over, True)


@algorithm("matmul", name="streamed", order=12)
def streamed(case: MatmulCase) -> Match | str:
    """Match SUMMA whose X is gathered once for several products."""
    found = movements(case)
    cube, out, _, psummed = found
    last = len(case.x.dims) - 1
    if (
        cube.y
        or psummed
        or [(len(m.axes), m.dim) for m in (*cube.x, *cube.w)] != [(1, last), (1, 0)]
    ):
        return "X's and W's contraction are not split over one axis each"
    held, _ = shared_gather(case, found)
    if not held and not case.more:
        return "no other product is known to read this X"
    w = case.w_bytes
    (axis,) = cube.w[0].axes
    p = case.axes[axis]
    gather, wide_x = price_of_gather(case.x_bytes, cube.x, case.axes)
    panels = moving((axis,), (p - 1) * w, p if p > 1 else 0)
    temporary = 2 * w
    if not held:
        temporary += wide_x - case.x_bytes
    forward, backward = price(case, found, [gather, panels, Cost()], temporary)

    def call(
        x: ShardedTensor, w: ShardedTensor, over: tuple[Axes, Axes], bias: Tensor | None = None
    ) -> Tensor:
        """Gather X for all products that read it, and multiply."""
        whole, shared = gathered(x, cube.x, over[0])
        schedule = Streamed(axis, **shared)
        return Product.apply(schedule, x.mesh, ((), over[1]), whole, w.raw, bias)  # type: ignore[return-value]

    return Match(
        out,
        Streamed(axis),
        forward,
        backward,
        "X gathered once, W's panels pass",
        gathers=True,
        gathered=temporary,
        shared=temporary,
        call=call,
    )
