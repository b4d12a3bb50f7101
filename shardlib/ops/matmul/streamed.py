"""SUMMA whose X is whole already: only W's panels travel.

Where several products read one X in 2D blocks, X is gathered once for all of them (once.py), and each W still
passes in panels, so that no weight is gathered whole:

    x [M, K], w [K/row, N/col]:  Y = sum over r of x[:, r] w_r, w_r from its owner along row
    dX[:, r] = dY w_r^T          summed over col with the other products' (once.py)
    dW                           x[:, r]^T dY, added up at w_r's owner
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import Local
from shardlib.collectives import axis_size, broadcasts, reductions, unwrap, wrap
from shardlib.cost import Cost, moving
from shardlib.mesh import Mesh, bind
from shardlib.ops.matmul.case import MatmulCase, all_reduce, local_elements, met_over
from shardlib.ops.matmul.cube import Cube, _gathers, gradients, movements
from shardlib.ops.matmul.once import Again, gathered
from shardlib.ops.matmul.schedule import Move, accumulator, add_product, ahead, product, settled
from shardlib.ops.registry import Match, algorithm
from shardlib.tensor import ShardedTensor, is_half, made_of, total, vary

__all__ = ["streamed"]

Axes = tuple[str, ...]


def _panels(w: Tensor, axis: str) -> Any:
    send = broadcasts(axis)
    return (panel for (panel,) in ahead(lambda k: (send(w, k),), axis_size(axis)))


class Streamed(Local):
    """apply(axis, mesh, over_w, once, x, w, bias) on raw blocks; x [.., K] is whole, ``once`` as in Product3."""

    @staticmethod
    def forward(
        ctx: Any, axis: str, mesh: Mesh, over: Axes, once: tuple[Again, Tensor], x: Tensor, w: Tensor, bias: Any
    ) -> Tensor:
        ctx.place, ctx.again = (axis, mesh, over), once[0]
        once[0].readers += 1
        ctx.save_for_backward(once[1], w)
        with bind(mesh):
            wide, mine = wrap(x, mesh), wrap(w, mesh)
            rows = wide.reshape(-1, wide.shape[-1])
            y = accumulator(rows, rows.shape[0], mine.shape[-1])
            for part, panel in zip(rows.chunk(axis_size(axis), -1), _panels(mine, axis), strict=True):
                add_product(y, part, panel)
            y = settled(y, mine.dtype, (), bias=None if bias is None else wrap(bias, mesh))
            return unwrap(y.reshape(*wide.shape[:-1], y.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (axis, mesh, over), again, (block, w) = ctx.place, ctx.again, ctx.saved_tensors
        need = ctx.needs_input_grad[4:6]
        x = again.gather(block) if need[1] else None
        if torch.is_grad_enabled():  # a gradient of the gradient will be asked for: the same, W gathered
            with bind(mesh):
                cube = Cube((), (Move((axis,), 0),), ())
                first = block if x is None else x
                ends = (wrap(t, mesh) for t in (grads[0], first, vary(w, mesh, over)))
                both = [None if g is None else unwrap(g) for g in gradients(*ends, cube, need)]  # type: ignore[call-arg]
            return None, None, None, None, both[0], None if both[1] is None else total(both[1], mesh, over), None
        dx = dw = None
        with bind(mesh):
            dy, mine = wrap(grads[0], mesh), wrap(w, mesh)
            rows = dy.reshape(-1, dy.shape[-1])
            if need[0]:
                dx = torch.cat([product(rows, panel.mT) for panel in _panels(mine, axis)], -1)
                dx = unwrap(dx.reshape(*dy.shape[:-1], dx.shape[-1]))
            if x is not None:
                wide = wrap(x, mesh)
                dw, add = accumulator(mine, *mine.shape), reductions(axis, mine.dtype)
                parts = wide.reshape(-1, wide.shape[-1]).chunk(axis_size(axis), -1)
                done: Callable[[], object] = lambda: None  # noqa: E731
                for k, part in enumerate(parts):
                    here = product(part.mT, rows)
                    done()
                    done = add(dw, here, k)
                done()
                dw = unwrap(settled(dw, mine.dtype, over, True))
        if dx is not None and is_half(w):
            again.sum.add(dx)
            dx = None
        return None, None, None, None, dx, dw, None


@algorithm("matmul", name="streamed", order=12)
def streamed(case: MatmulCase) -> Match | str:
    """SUMMA whose X is gathered once for several products."""
    found = movements(case)
    if isinstance(found, str):
        return found
    cube, out, _, psummed = found
    last = len(case.x.dims) - 1
    if cube.y or psummed or [(len(m.axes), m.dim) for m in (*cube.x, *cube.w)] != [(1, last), (1, 0)]:
        return "X's and W's contraction are not split over one axis each"
    over, mesh = met_over(case, out), dict(case.mesh)
    held = ("gather", cube.x, over[0]) in case.held
    again = ("again", cube.x, over[0]) in case.held
    if not held and not case.more:
        return "no other product is known to read this X"
    x, w = (local_elements(a, s, mesh) * case.itemsize for a, s in ((case.x, case.x_shape), (case.w, case.w_shape)))
    (axis,) = cube.w[0].axes
    p = mesh[axis]
    move_x, wide_x = _gathers(x, cube.x, mesh)
    panels = moving((axis,), (p - 1) * w, p * (p > 1))
    forward = (Cost() if held else move_x) + panels
    backward = panels + panels + all_reduce(w, over[1], mesh, case.width)
    backward += Cost() if held else move_x + all_reduce(x, over[0], mesh, case.width)
    backward += Cost() if again else move_x
    temporary = 0 if held else wide_x - x
    forward, backward = (replace(c, memory=temporary + 2 * w) for c in (forward, backward))

    def run(x: ShardedTensor, w: ShardedTensor, over: tuple[Axes, Axes], bias: Tensor | None = None) -> Tensor:
        wide, once = gathered(x, cube.x, over[0])
        made_of(x)["again", cube.x, over[0]] = None
        return Streamed.apply(axis, x.mesh, over[1], (once, x.raw), wide, w.raw, bias)  # type: ignore[return-value]

    note = "X gathered once, W's panels pass"
    return Match(out, run, forward, backward, note, True, over, temporary, temporary)
