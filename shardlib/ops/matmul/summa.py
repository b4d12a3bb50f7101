"""SUMMA: multiply two 2D-blocked matrices by broadcasting one K panel at a time.

A [M, K] and B [K, N] are split over (row, col).  Step k sends A's panel along each mesh row and B's
panel along each mesh column; no rank ever holds a whole operand, and the panels of step k+1, and
the sums of step k-1, are sent while step k is multiplied.  Three forms, each the others' backward:

    AB    C = A B      C stays (Y-stationary)    dA = ABT(dC, B)   dB = ATB(A, dC)
    ABT   A = C B^T    C stays (X-stationary)    dC = AB(dA, B)    dB = ATB(dA, C)
    ATB   B = A^T C    C stays (W-stationary)    dA = ABT(C, dB)   dC = AB(A, dB)

Each form moves A and B once and keeps C where it is; ``over`` are further axes over which its
result is summed, and ``bias`` is added to it.  On a square grid a block transpose (``swap``) turns
one form into another, so that any of the three can be stationary: the largest should.

Source: van de Geijn and Watts 1997; used for Transformers in arXiv 2104.05343 (algorithms 1-3).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from torch import Tensor

from shardlib.collectives import axis_size, broadcasts, ppermute, reductions
from shardlib.dtypes import wider
from shardlib.ops.matmul.case import MatmulCase
from shardlib.ops.matmul.function import (
    Axes,
    Panels,
    ahead,
    cut,
    nothing,
    panels,
    partial_product,
    plus_product,
    rounded,
)
from shardlib.ops.matmul.matmul2d import ROLES, Form, sizes_2d
from shardlib.ops.registry import Match, algorithm

Bias = Tensor | None


def summa_ab(
    a: Tensor, b: Tensor, row: str, col: str, cuts: Panels, over: Axes = (), bias: Bias = None
) -> Tensor:
    """Compute C = A B, C stationary.  a [M/row, K/col], b [K/row, N/col] -> [M/row, N/col]."""
    (_, of_a, of_b), (steps, skipped) = cuts, cuts.rounds()
    a_cut, b_cut = cut(a, -1, of_a), cut(b, -2, of_b)
    send_a, send_b = broadcasts(col, a_cut[0]), broadcasts(row, b_cut[0])
    c: Tensor | None = None
    sent = ((send_a(a_cut[i], owns_a), send_b(b_cut[j], owns_b)) for owns_a, i, owns_b, j in steps)
    for a_k, b_k in ahead(sent, skipped):  # [M/row, K/n], [K/n, N/col]
        c = plus_product(c, a_k.wait(), b_k.wait())
    assert c is not None, "there is a panel"
    return rounded(c, a.dtype, over, bias=bias)


def summa_abt(
    c: Tensor, b: Tensor, row: str, col: str, cuts: Panels, over: Axes = (), bias: Bias = None
) -> Tensor:
    """Compute A = C B^T, C stationary.  c [M/row, N/col], b [K/row, N/col] -> [M/row, K/col]."""
    (_, of_a, of_b), (steps, skipped) = cuts, cuts.rounds()
    more = bool(over) or bias is not None
    a = _result(c, more, *c.shape[:-1], b.shape[-2] // of_b * of_a)
    a_cut, b_cut = cut(a, -1, of_a), cut(b, -2, of_b)  # a_cut: views into a
    send_b, sum_into = broadcasts(row, b_cut[0]), reductions(col, a_cut[0], c.dtype)
    arriving = ahead((send_b(b_cut[j], owner) for _, _, owner, j in steps), skipped)
    added = nothing
    for (owner, i, _, _), b_k in zip(steps, arriving, strict=True):
        part = partial_product(c, b_k.wait().mT)  # [M/row, N/col] [K/n, N/col]^T
        # the part before this one was sent meanwhile
        added()
        added = sum_into(a_cut[i], part, owner)
    added()
    return rounded(a, c.dtype, over, True, bias) if more else a


def summa_atb(
    a: Tensor, c: Tensor, row: str, col: str, cuts: Panels, over: Axes = (), bias: Bias = None
) -> Tensor:
    """Compute B = A^T C, C stationary.  a [M/row, K/col], c [M/row, N/col] -> [K/row, N/col]."""
    (_, of_a, of_b), (steps, skipped) = cuts, cuts.rounds()
    more = bool(over) or bias is not None
    b = _result(c, more, *a.shape[:-2], a.shape[-1] // of_a * of_b, c.shape[-1])
    a_cut, b_cut = cut(a, -1, of_a), cut(b, -2, of_b)  # b_cut: views into b
    send_a, sum_into = broadcasts(col, a_cut[0]), reductions(row, b_cut[0], c.dtype)
    arriving = ahead((send_a(a_cut[i], owner) for owner, i, _, _ in steps), skipped)
    added = nothing
    for (_, _, owner, j), a_k in zip(steps, arriving, strict=True):
        part = partial_product(a_k.wait().mT, c)  # [M/row, K/n]^T [M/row, N/col]
        added()
        added = sum_into(b_cut[j], part, owner)
    added()
    return rounded(b, c.dtype, over, True, bias) if more else b


def _result(like: Tensor, more: bool, *shape: int) -> Tensor:
    """Return a buffer; fp32 for half precision where the result is summed further."""
    return like.new_empty(shape, dtype=wider(like.dtype)) if more else like.new_empty(shape)


def swap(x: Tensor, row: str, col: str) -> Tensor:
    """Block transpose on a square grid: x [P/row, Q/col] -> [Q/row, P/col]."""
    q = axis_size(row)
    return ppermute(x.mT, (row, col), [(i * q + j, j * q + i) for i in range(q) for j in range(q)])


def summa_words(m: int, k: int, n: int, row: int, col: int, stay: str = "C") -> Fraction:
    """Count the words one rank receives in any of the three forms; A [m, k], B [k, n], C [m, n].

    A moves over ``col`` and B over ``row``; C is stationary.  Keeping A or B stationary instead
    (square grids) costs a block transpose of the other one.
    """
    a, b, c = m * k, k * n, m * n
    if stay == "C":
        return Fraction((col - 1) * a + (row - 1) * b, row * col)
    swapped, moved = (b, b + c) if stay == "A" else (a, a + c)
    return Fraction((row - 1) * moved, row * col) + Fraction(swapped * (row - 1), row * row * row)


def summa_messages(row: int, col: int, stay: str = "C", slices: int = 1) -> int:
    """Count one per panel and axis that moves anything, and one for a block transpose."""
    return math.lcm(row, col) * slices * ((row > 1) + (col > 1)) + (stay != "C" and row > 1)


def summa_slices(
    seconds: float, alpha: float, sizes: Sequence[int], panels: int, narrowest: int = 128
) -> int:
    """Count the slices of a panel, so that the first transfer, which nothing hides, is short.

    ``seconds``  of all transfers; s slices cost (s-1) ``alpha`` more per panel and leave 1/s of the
                 first one exposed, so s = sqrt(seconds / alpha); no slice is narrower than
                 ``narrowest``, all are equal.

    Source: arXiv 2104.05343 has one panel per rank; slices as in MeshSlice (ISCA 2025).

    >>> [summa_slices(0.01, 1e-4, (n, n, n), panels=2) for n in (4096, 512)]
    [8, 2]
    """
    most = math.isqrt(int(seconds / alpha)) if alpha > 0 else min(sizes)
    fits = [
        s
        for s in range(1, most + 1)
        if all(n % (panels * s) == 0 and n >= panels * s * narrowest for n in sizes)
    ]
    return max(fits, default=1)


# ---------------------------------------------------------------- the schedule and its registration


@dataclass(frozen=True)
class Summa:
    """SUMMA on a row x col grid.

    ``cuts``  the panels of K, and their owners.
    ``stay``  the stationary matrix: "A", "B" or "C".
    """

    row: str
    col: str
    cuts: Panels
    stay: str = "C"

    def multiply(
        self, form: Form, p: Tensor, q: Tensor, over: Axes = (), bias: Bias = None
    ) -> Tensor:
        """Compute ab(A, B), abt(C, B) or atb(A, C)."""
        if bias is not None and (form, self.stay) in _SWAPPED:
            return self.multiply(form, p, q, over) + bias
        return _FORMS[form, self.stay](p, q, self.row, self.col, self.cuts, over, bias)


# results that are transposed after they are rounded
_SWAPPED = (("abt", "B"), ("atb", "A"))

_FORMS: dict[tuple[str, str], Callable[..., Tensor]] = {
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


def _summa(case: MatmulCase, role: str | None) -> Match | str:
    """Match SUMMA with X, W or Y stationary, or the one for which the fewest words move."""
    z = sizes_2d(case, role == "w")
    row, col = z.shape
    if z.k % math.lcm(row, col):
        return f"contraction {z.k} does not divide into {math.lcm(row, col)} panels"
    square = row == col and not z.batch and z.m % row == 0 and z.n % row == 0
    stays = [s for s in "CAB" if (s == "C" or square) and role in (None, ROLES[z.form][s])]
    if not stays:
        return (
            f"keeping {str(role).upper()} still needs a block transpose, so a square grid; "
            f"this is {row} x {col}"
        )
    stay = min(stays, key=lambda s: (summa_words(z.m, z.k, z.n, row, col, s), s != "C"))
    words = summa_words(z.m, z.k, z.n, row, col, stay)
    slices = 1
    if case.links:
        # panels are sliced for the measured latency and bandwidth
        met = [link for axis, link in case.links if axis in (z.row, z.col)]
        seconds = max(k.beta for k in met) * float(words) * case.itemsize * z.copies
        slices = summa_slices(
            seconds, max(k.alpha for k in met), (z.m, z.k, z.n), math.lcm(row, col)
        )
    # dW's parts are sent in half precision, unless it is stationary in its form
    travels = ("ab" if z.form == "atb" else "atb", stay) not in (("ab", "C"), ("atb", "B"))
    return z.match(
        Summa(z.row, z.col, panels(row, col, slices), stay),
        lambda form: words,
        lambda form: summa_messages(row, col, stay, slices),
        4,
        travels,
        f"{ROLES[z.form][stay].upper()} stays",
    )


# without a role, the stationary matrix is the one for which the fewest words move
for _order, _role in enumerate((None, "y", "x", "w"), 1):
    _name = f"summa_{_role}" if _role else "summa"
    algorithm("matmul", _name, _order)(partial(_summa, role=_role))
