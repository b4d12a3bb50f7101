"""Linear algebra: the last dimensions are a matrix or a vector, and whole; all others are rows."""

from shardlib.ops.declare import Bound, declare, last, of_kind, rows_but, slots
from shardlib.ops.dims import Labels
from shardlib.tensor import Unfit

declare("""
    linalg.vecdot(x, y, *, dim=-1)
    linalg.vander(x, *, N=None)
    pairwise_distance(x1, x2, p=2.0, eps=1e-6, keepdim=False)
    """)(last(1))
of_kind("matrices", last(2))


@declare("""
    linalg.matrix_rank(A, tol=None, hermitian=False, *, atol=None, rtol=None)
    linalg.pinv(A, rcond=None, hermitian=False, *, atol=None, rtol=None)
    """)
def _toleranced(b: Bound) -> Labels:
    """Label tolerances that are tensors by the batch's dimensions: there is one for each matrix."""
    a, *tolerances = slots(b)
    return last(2)({"A": a}) | {
        s.at: tuple(d - s.ndim - 2 for d in range(s.ndim)) for s in tolerances
    }


@declare("""
    lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True)
    linalg.lu_solve(LU, pivots, B, *, left=True, adjoint=False)
    linalg.householder_product(A, tau)
    """)
def _aligned_left(b: Bound) -> Labels:
    """Label leading dimensions rows; torch does not check that those of pivots agree."""
    found = slots(b)
    lead = found[0].ndim - 2
    if any(s.shape[:lead] != found[0].shape[:lead] or s.ndim < lead for s in found):
        raise Unfit("leading dimensions differ")
    return {s.at: rows_but(range(lead, s.ndim), s.ndim) for s in found}


@declare("""
    linalg.solve(A, B, *, left=True)
    linalg.solve_ex(A, B, *, left=True, check_errors=False)
    """)
def _solve(b: Bound) -> Labels:
    """Label all but matrices rows; B holds vectors if its shape is A's less the last dimension."""
    a, y = b["A"], b["B"]
    batch = [a.ndim - 2, y.ndim - 2]
    if y.ndim == 1 or y.shape == a.shape[:-1]:
        batch[1] = y.ndim - 1
    return {
        s.at: rows_but(range(n, s.ndim), s.ndim, -n) for s, n in zip((a, y), batch, strict=True)
    }
