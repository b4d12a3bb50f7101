"""Ring products: an all-gather before, or a scatter after, a product, one block at a time.

    ring_ag_matmul   Y = gather(X) W    X's blocks pass; each is multiplied while the next is sent
    matmul_ring_rs   Y = scatter(X W)   the sum of each block of Y passes; every rank adds its part

They are each other's backward: dX of one is the other with W^T.  The words are those of the
gather or scatter, the temporaries one block, and every transfer but the first overlaps with a
product.  This is tensor parallelism with a split sequence, decomposed.

Source: Wang et al., ASPLOS 2023 (decomposed collectives); arXiv 2205.05198 for the layout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from shardlib.collectives import axis_size, psum
from shardlib.collectives.ring import cut, joined, rotate, rotate_sum
from shardlib.cost import Cost, moving
from shardlib.ops.matmul.case import MatmulCase
from shardlib.ops.matmul.function import Axes, DimMove, Gradients
from shardlib.ops.matmul.matmul3d import Cube, gradients, movements, price
from shardlib.ops.registry import Match, algorithm
from shardlib.optional import unless_none

Ways = tuple[int, ...]  # (1,) for a ring, (1, -1) for halves that go opposite ways


def ring_ag_matmul(x: Tensor, w: Tensor, axis: str, dim: int = 0, ways: Ways = (1,)) -> Tensor:
    """Compute gather(X) W; M is ``dim``.  x [.., M/axis, .., K], w [K, N] -> [.., M, .., N]."""
    steps = [
        [block @ w for block in blocks] for blocks in rotate(x.chunk(len(ways), dim), axis, ways)
    ]
    return _braided(steps, axis, dim, ways)


def matmul_ring_rs(x: Tensor, w: Tensor, axis: str, dim: int = 0, ways: Ways = (1,)) -> Tensor:
    """Compute scatter(X W) over ``axis``.  x [.., M, .., K], w [K, N] -> [.., M/axis, .., N]."""

    def part(j: int) -> Callable[[int], Tensor]:
        return lambda back: cut(x, axis, back, dim).chunk(len(ways), dim)[j] @ w

    return torch.cat(rotate_sum([part(j) for j in range(len(ways))], axis, ways), dim)


def _braided(steps: list[list[Tensor]], axis: str, dim: int, ways: Ways) -> Tensor:
    """Join the blocks of all steps in rank order, each rank's halves next to each other."""
    halves = [joined([step[j] for step in steps], axis, dim, way) for j, way in enumerate(ways)]
    if len(halves) == 1:
        return halves[0]
    p = axis_size(axis)
    return torch.cat([h.unflatten(dim, (p, h.shape[dim] // p)) for h in halves], dim + 1).flatten(
        dim, dim + 1
    )


def _gradients(
    passing: Tensor, whole: Tensor, w: Tensor | None, axis: str, dim: int, ways: Ways
) -> tuple[Tensor | None, Tensor]:
    """Compute gather(passing) W, if W is given, and gather(passing)^T whole, in one round.

    passing [.., M/axis, .., P], whole [.., M, .., Q], w [P, N] -> [.., M, .., N], [P, Q].
    """
    steps, total = [], None
    for t, blocks in enumerate(rotate(passing.chunk(len(ways), dim), axis, ways)):
        if w is not None:
            steps.append([block @ w for block in blocks])
        for j, (block, way) in enumerate(zip(blocks, ways, strict=True)):
            mine = cut(whole, axis, way * t, dim).chunk(len(ways), dim)[j]
            term = block.flatten(0, -2).mT @ mine.flatten(0, -2)
            total = term if total is None else total.add_(term)
    assert total is not None, "a ring has a step"
    return _braided(steps, axis, dim, ways) if steps else None, total


@dataclass(frozen=True)
class RingSchedule:
    """Schedule with one gather of X's rows, or one scatter of Y's.

    ``dim``   the dimension of rows that ``axis`` splits.
    """

    form: Literal["gather", "scatter"]
    axis: str
    dim: int
    ways: Ways
    summed: Axes = ()

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute gather(X) W or scatter(X W), and keep the blocks themselves for backward."""
        local = ring_ag_matmul if self.form == "gather" else matmul_ring_rs
        y = local(x, w, self.axis, self.dim, self.ways)
        return y if bias is None else y + bias, x, w

    def gradients(
        self, dy: Tensor, x: Tensor, w: Tensor, need: tuple[bool, bool], over: tuple[Axes, Axes]
    ) -> Gradients:
        """Compute dX by the other form with W^T; dW is summed as the blocks pass."""
        axis, dim, ways = self.axis, self.dim, self.ways
        if torch.is_grad_enabled():
            # rotate has no gradient, so use two collectives
            move = (DimMove((axis,), dim),)
            cube = Cube(move, (), ()) if self.form == "gather" else Cube((), (), move)
            return gradients(dy, x, w, cube, need)
        dx = dw = None
        if self.form == "gather":
            dx = matmul_ring_rs(dy, w.mT, axis, dim, ways) if need[0] else None
            dw = _gradients(x, dy, None, axis, dim, ways)[1] if need[1] else None
        elif need[1]:
            dx, transposed = _gradients(dy, x, w.mT if need[0] else None, axis, dim, ways)
            dw = transposed.mT
        elif need[0]:
            dx = ring_ag_matmul(dy, w.mT, axis, dim, ways)
        return unless_none(psum, dx, over[0]), unless_none(psum, dw, over[1])


def _ring(case: MatmulCase, ways: Ways) -> Match | str:
    found = movements(case)
    cube, out, _, psummed = found
    rows = len(case.x.dims) - 1
    single = [m for m in (*cube.x, *cube.y) if len(m.axes) == 1 and m.dim < rows]
    if len(single) != 1 or len(cube.x) + len(cube.y) != 1 or cube.w or psummed:
        return (
            "a ring takes one gather of x's rows or one scatter of y's, over one axis, "
            "and nothing else"
        )
    if case.itemsize < 4:
        return "a sum in half precision would be rounded at every step of the ring"
    mesh = case.axes
    (axis,), dim = single[0].axes, single[0].dim
    p = mesh[axis]
    form: Literal["gather", "scatter"] = "scatter"
    passing, shape, note, at = out, case.y_shape, f"Y's sum passes over {axis}", 2
    if cube.x:
        form, passing, shape, note, at = "gather", case.x, case.x_shape, f"X passes over {axis}", 0
    if passing.local_shape(shape, mesh)[dim] % len(ways):
        return f"{passing.local_shape(shape, mesh)[dim]} rows do not make {len(ways)} halves"
    nbytes = case.bytes_of(passing, shape)
    once = moving((axis,), (p - 1) * nbytes, (p - 1) * len(ways))
    moved = [Cost()] * 3
    moved[at] = once
    forward, backward = price(case, found, moved, nbytes, shares=False)
    if len(ways) > 1:
        note += " both ways"
    return Match(out, RingSchedule(form, axis, dim, ways), forward, backward, note, gathers=True)


# ring2 sends halves in opposite directions, for full-duplex links
for _order, (_name, _ways) in enumerate({"ring": (1,), "ring2": (1, -1)}.items(), 10):
    algorithm("matmul", _name, _order)(partial(_ring, ways=_ways))
