"""Ring products: a gather before, or a scatter after, a product, taken one block at a time.

    ring_ag_matmul   Y = gather(X) W    X's blocks pass by; each is multiplied while the next travels
    matmul_ring_rs   Y = scatter(X W)   the sum of each block of Y passes by, and every rank adds its part

They are each other's backward: dX of one is the other with W^T.  The words are those of the
gather or scatter, the temporaries one block, and every transfer but the first has a product to hide
behind.  This is tensor parallelism with a split sequence, decomposed.

Source: Wang et al., ASPLOS 2023 (decomposed collectives); arXiv 2205.05198 for the layout.
"""

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from shardlib.collectives import unwrap, wrap
from shardlib.collectives.ring import cut, joined, rotate, rotate_sum
from shardlib.mesh import Mesh, bind
from shardlib.ops.matmul.case import MatmulCase, all_reduce, local_elements, met_over
from shardlib.ops.matmul.cube import Cube, Move, gradients, movements
from shardlib.ops.registry import Cost, Match, moving, rule
from shardlib.tensor import ShardedTensor

__all__ = ["matmul_ring_rs", "ring_ag_matmul"]


def ring_ag_matmul(x: Tensor, w: Tensor, axis: str, dim: int = 0) -> Tensor:
    """gather(X) W.  x [.., M/axis, .., K], w [K, N] -> [.., M, .., N]; M is dimension ``dim``."""
    return joined([block @ w for block in rotate(x, axis)], axis, dim)


def matmul_ring_rs(x: Tensor, w: Tensor, axis: str, dim: int = 0) -> Tensor:
    """scatter(X W).  x [.., M, .., K], w [K, N] -> [.., M/axis, .., N], summed over ``axis``."""
    return rotate_sum(lambda back: cut(x, axis, back, dim) @ w, axis)


def _weight_gradient(passing: Tensor, whole: Tensor, axis: str, dim: int) -> Tensor:
    """gather(passing)^T whole, as blocks pass.  [.., M/axis, .., P], [.., M, .., Q] -> [P, Q]."""
    terms = (_rows(b).mT @ _rows(cut(whole, axis, back, dim)) for back, b in enumerate(rotate(passing, axis)))
    total = next(terms)
    for term in terms:
        total = total.add_(term)
    return total


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class RingProduct(torch.autograd.Function):
    """apply(form, axis, dim, mesh, x, w) on raw blocks; ``form`` is gather or scatter."""

    @staticmethod
    def forward(ctx: Any, form: str, axis: str, dim: int, mesh: Mesh, x: Tensor, w: Tensor) -> Tensor:
        ctx.place = form, axis, dim, mesh
        ctx.save_for_backward(x, w)
        f = ring_ag_matmul if form == "gather" else matmul_ring_rs
        with bind(mesh):
            return unwrap(f(wrap(x, mesh), wrap(w, mesh), axis, dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        form, axis, dim, mesh = ctx.place
        need = ctx.needs_input_grad[4:]
        with bind(mesh):
            x, w, dy = (wrap(t, mesh) for t in (*ctx.saved_tensors, grads[0]))
            if torch.is_grad_enabled():  # a gradient of the gradient will be asked for: the same in two collectives
                move = (Move((axis,), dim),)
                dx, dw = gradients(dy, x, w, Cube(move, (), ()) if form == "gather" else Cube((), (), move), need)
            elif form == "gather":
                dx = matmul_ring_rs(dy, w.mT, axis, dim) if need[0] else None
                dw = _weight_gradient(x, dy, axis, dim) if need[1] else None
            else:
                dx, dw = _both(dy, x, w, axis, dim, need)
        return None, None, None, None, *(None if g is None else unwrap(g) for g in (dx, dw))


def _both(dy: Tensor, x: Tensor, w: Tensor, axis: str, dim: int, need: tuple[bool, bool]) -> tuple[Any, Any]:
    """dX = gather(dY) W^T and dW = X^T gather(dY), as dY's blocks pass once."""
    blocks, dw = [], None
    for back, block in enumerate(rotate(dy, axis)):
        if need[0]:
            blocks.append(block @ w.mT)
        if need[1]:
            term = _rows(cut(x, axis, back, dim)).mT @ _rows(block)
            dw = term if dw is None else dw.add_(term)
    return joined(blocks, axis, dim) if need[0] else None, dw


@rule("matmul", name="ring")
def ring(case: MatmulCase) -> Match | str:
    """One gather of X's rows, or one scatter of Y's, over one axis."""
    found = movements(case)
    if isinstance(found, str):
        return found
    cube, out, _, psummed = found
    rows = len(case.x.dims) - 1
    single = [m for m in (*cube.x, *cube.y) if len(m.axes) == 1 and m.dim < rows]
    if len(single) != 1 or len(cube.x) + len(cube.y) != 1 or cube.w or psummed:
        return "a ring takes one gather of x's rows or one scatter of y's, over one axis, and nothing else"
    if case.itemsize < 4:
        return "a sum in half precision would be rounded at every step of the ring"
    mesh = dict(case.mesh)
    (axis,), dim = single[0].axes, single[0].dim
    p, form = mesh[axis], "gather" if cube.x else "scatter"
    x = local_elements(case.x, case.x_shape, mesh) * case.itemsize
    y = local_elements(out, (*case.x_shape[:-1], case.w_shape[-1]), mesh) * case.itemsize
    once = moving((axis,), (p - 1) * (x if cube.x else y), p - 1, Fraction(x if cube.x else y))
    over = met_over(case, out)
    w_bytes = local_elements(case.w, case.w_shape, mesh) * case.itemsize
    backward = once + (once if cube.x else Cost()) + all_reduce(x, over[0], mesh) + all_reduce(w_bytes, over[1], mesh)
    note = f"X passes over {axis}" if cube.x else f"Y's sum passes over {axis}"

    def run(x: ShardedTensor, w: ShardedTensor, x_raw: Tensor, w_raw: Tensor) -> Tensor:
        return RingProduct.apply(form, axis, dim, x.mesh, x_raw, w_raw)  # type: ignore[return-value]

    return Match(out, run, once, backward, note, over)
