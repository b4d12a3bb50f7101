"""One 2D-blocked product as an autograd function, closed under differentiation.

Three matrices A [M, K], B [K, N], C [M, N] lie in blocks on a (row, col) grid; each of the
three forms (AB gives C, ABT gives A, ATB gives B) is computed by SUMMA or Cannon, and the
gradients of one form are the other two.  Only the blocks are saved for backward.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import Local
from shardlib.collectives import unwrap, wrap
from shardlib.mesh import Mesh, bind
from shardlib.ops.matmul.cannon import cannon_ab, cannon_abt, cannon_atb
from shardlib.ops.matmul.summa import Axes, Bias, summa_ab, summa_abt, summa_atb, swap
from shardlib.tensor import total, vary

__all__ = ["Grid", "Product"]


@dataclass(frozen=True)
class Grid:
    """Where and how a product runs.

    ``stay``    the matrix SUMMA keeps still: "A", "B" or "C".
    ``skewed``  Cannon: whether A and B are stored skewed.
    ``batch``   leading dimensions that both operands share; others are rows of the first.
    ``slices``  of a panel of SUMMA.
    """

    schedule: str
    row: str
    col: str
    stay: str = "C"
    skewed: tuple[bool, bool] = (False, False)
    batch: int = 0
    slices: int = 1


class Product(Local):
    """apply(form, grid, mesh, over, p, q, bias) on raw blocks: ab(A, B), abt(C, B) or atb(A, C).

    ``over``  the axes over which the gradients of p and of q are summed besides.
    ``bias``  added before the result is rounded; its gradient is not computed here.
    """

    @staticmethod
    def forward(
        ctx: Any, form: str, grid: Grid, mesh: Mesh, over: tuple[Axes, Axes], p: Tensor, q: Tensor, bias: Bias
    ) -> Tensor:
        ctx.form, ctx.grid, ctx.mesh, ctx.over = form, grid, mesh, over
        ctx.save_for_backward(p, q)
        return _run(form, grid, mesh, p, q, (), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (p, q), g, form, at, product = ctx.saved_tensors, grads[0], ctx.form, (ctx.grid, ctx.mesh), _run
        need_p, need_q = ctx.needs_input_grad[4:6]
        over_p, over_q = ctx.over
        if torch.is_grad_enabled():  # a gradient of the gradient will be asked for
            p, q, product = vary(p, ctx.mesh, over_p), vary(q, ctx.mesh, over_q), _recorded
        dp = dq = None
        if form == "ab":  # C = A B
            dp = product("abt", *at, g, q, over_p) if need_p else None
            dq = product("atb", *at, p, g, over_q) if need_q else None
        elif form == "abt":  # A = C B^T
            dp = product("ab", *at, g, q, over_p) if need_p else None
            dq = product("atb", *at, g, p, over_q) if need_q else None
        else:  # B = A^T C
            dp = product("abt", *at, q, g, over_p) if need_p else None
            dq = product("ab", *at, p, g, over_q) if need_q else None
        return None, None, None, None, dp, dq, None


def _recorded(form: str, grid: Grid, mesh: Mesh, a: Tensor, b: Tensor, over: Axes) -> Tensor:
    return total(Product.apply(form, grid, mesh, ((), ()), a, b, None), mesh, over)  # type: ignore[arg-type]


def _run(form: str, grid: Grid, mesh: Mesh, p: Tensor, q: Tensor, over: Axes = (), bias: Bias = None) -> Tensor:
    with bind(mesh):
        if mesh.kind != "stacked":
            return _local(form, grid, p, q, over, bias)
        bias = None if bias is None else wrap(bias, mesh)
        return unwrap(_local(form, grid, wrap(p, mesh), wrap(q, mesh), over, bias))


def _local(form: str, grid: Grid, p: Tensor, q: Tensor, over: Axes, bias: Bias) -> Tensor:
    """Fold leading dimensions that are only rows, multiply, unfold."""
    if p.ndim == q.ndim == 2:
        return _multiply(form, grid, p, q, over, bias)
    lead = p.shape[:-1]
    if p.ndim > 2 + grid.batch:
        p = p.reshape(*lead[: grid.batch], -1, p.shape[-1])
    if q.ndim > 2 + grid.batch:
        q = q.reshape(*lead[: grid.batch], -1, q.shape[-1])
    out = _multiply(form, grid, p, q, over, bias)
    return out if form == "atb" or len(lead) == out.ndim - 1 else out.reshape(*lead, out.shape[-1])


def _multiply(form: str, grid: Grid, p: Tensor, q: Tensor, over: Axes, bias: Bias) -> Tensor:
    row, col, cannon = grid.row, grid.col, grid.schedule == "cannon"
    if bias is not None and (form != "ab" if cannon else (form, grid.stay) in _MOVED):
        return _multiply(form, grid, p, q, over, None) + bias
    if not cannon:
        return _SUMMA[form, grid.stay](p, q, row, col, grid.slices, over, bias)
    if bias is None:
        return _CANNON[form](p, q, row, col, grid.skewed, over)
    return cannon_ab(p, q, row, col, grid.skewed, over, bias)


_MOVED = (("abt", "B"), ("atb", "A"))  # results that change places once they are rounded
_CANNON = {"ab": cannon_ab, "abt": cannon_abt, "atb": cannon_atb}
_SUMMA = {
    ("ab", "C"): summa_ab,
    ("abt", "C"): summa_abt,
    ("atb", "C"): summa_atb,
    ("ab", "A"): lambda a, b, row, col, *how: summa_abt(a, swap(b, row, col), row, col, *how),
    ("ab", "B"): lambda a, b, row, col, *how: summa_atb(swap(a, row, col), b, row, col, *how),
    ("abt", "A"): lambda c, b, row, col, *how: summa_ab(c, swap(b, row, col), row, col, *how),
    ("abt", "B"): lambda c, b, row, col, *how: swap(summa_abt(b, c, row, col, *how), row, col),
    ("atb", "A"): lambda a, c, row, col, *how: swap(summa_atb(c, a, row, col, *how), row, col),
    ("atb", "B"): lambda a, c, row, col, *how: summa_ab(swap(a, row, col), c, row, col, *how),
}
