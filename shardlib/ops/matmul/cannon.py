"""Cannon: multiply two square-gridded matrices by neighbour shifts alone.

A [M, K] and B [K, N] are split over (row, col) of a q x q grid.  Skewed, rank (i, j) holds
A(i, i+j) and B(i+j, j); each of q steps multiplies, then moves A one rank left and B one up.
The two transposed forms shift an accumulator in place of the operand that they compute:

    AB    C = A B      A and B are shifted
    ABT   A = C B^T    B and the accumulator of A are shifted     (dA = dC B^T)
    ATB   B = A^T C    A and the accumulator of B are shifted     (dB = A^T dC)

Operands stored pre-skewed (layouts ``x y skew a`` and ``x y skew b``) save the first move, and
their gradients are skewed too.  At most three blocks of temporaries are alive at once: A's next
block is received during the product, B's after it.

Source: Cannon 1969.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import product

from torch import Tensor

from shardlib.collectives import axis_size, ppermute, shift, start
from shardlib.ops.matmul.case import MatmulCase
from shardlib.ops.matmul.function import Axes, accumulator, add_product, rounded
from shardlib.ops.matmul.matmul2d import Form, sizes_2d
from shardlib.ops.registry import Match, algorithm


def cannon_ab(
    a: Tensor,
    b: Tensor,
    row: str,
    col: str,
    skewed: tuple[bool, bool],
    over: Axes = (),
    bias: Tensor | None = None,
) -> Tensor:
    """Compute C = A B.  a [M/row, K/col], b [K/row, N/col] -> [M/row, N/col]."""
    q = axis_size(row)
    a = a if skewed[0] else ppermute(a, (row, col), _pairs("skew a", q))
    b = b if skewed[1] else ppermute(b, (row, col), _pairs("skew b", q))
    c = accumulator(a, *a.shape[:-1], b.shape[-1])
    for t in range(q):  # rank (i, j) holds A(i, i+j+t), B(i+j+t, j)
        coming = start(shift, a, col, -1) if t < q - 1 else None
        add_product(c, a, b)
        if coming is not None:
            a = coming.wait()
            b = shift(b, row, -1)
    return rounded(c, a.dtype, over, bias=bias)


def cannon_abt(
    c: Tensor, b: Tensor, row: str, col: str, skewed: tuple[bool, bool], over: Axes = ()
) -> Tensor:
    """Compute A = C B^T.  c [M/row, N/col], b [K/row, N/col] -> [M/row, K/col]."""
    q = axis_size(row)
    b = b if skewed[1] else ppermute(b, (row, col), _pairs("skew b", q))
    a = accumulator(c, *c.shape[:-1], b.shape[-2])
    for t in range(q):  # rank (i, j) adds to A(i, i+j+t)
        add_product(a, c, b.mT)
        if t < q - 1:
            a, b = shift(a, col, -1), shift(b, row, -1)
    a = rounded(a, c.dtype, over)
    return shift(a, col, -1) if skewed[0] else ppermute(a, (row, col), _pairs("home a", q))


def cannon_atb(
    a: Tensor, c: Tensor, row: str, col: str, skewed: tuple[bool, bool], over: Axes = ()
) -> Tensor:
    """Compute B = A^T C.  a [M/row, K/col], c [M/row, N/col] -> [K/row, N/col]."""
    q = axis_size(row)
    a = a if skewed[0] else ppermute(a, (row, col), _pairs("skew a", q))
    b = accumulator(c, *a.shape[:-2], a.shape[-1], c.shape[-1])
    for t in range(q):  # rank (i, j) adds to B(i+j+t, j)
        add_product(b, a.mT, c)
        if t < q - 1:
            b, a = shift(b, row, -1), shift(a, col, -1)
    b = rounded(b, c.dtype, over)
    return shift(b, row, -1) if skewed[1] else ppermute(b, (row, col), _pairs("home b", q))


@cache
def _pairs(way: str, q: int) -> list[tuple[int, int]]:
    """List the source and the destination of each block (i, j) of a q x q grid.

    Skewed, rank (i, j) holds A(i, i+j) and B(i+j, j).  After the last step a rank holds A(i, i+j-1)
    or B(i+j-1, j), which goes to (i, i+j-1) or to (i+j-1, j).
    """
    return [
        (i * q + j, rows % q * q + columns % q)
        for i, j in product(range(q), repeat=2)
        for rows, columns in [_WAYS[way](i, j)]
    ]


_WAYS: dict[str, Callable[[int, int], tuple[int, int]]] = {
    "skew a": lambda i, j: (i, j - i),
    "skew b": lambda i, j: (i - j, j),
    "home a": lambda i, j: (i, i + j - 1),
    "home b": lambda i, j: (i + j - 1, j),
}


def cannon_words(
    form: str, m: int, k: int, n: int, q: int, skewed: tuple[bool, bool], width: int = 1
) -> Fraction:
    """Count the words one rank receives: q-1 shifts of A and B, and each skew or way home.

    A skew or a way home moves (q-1)/q of the blocks; a skewed result's last step moves all.
    ``width``  words per word of a shifted sum: 2 where half precision is summed in fp32.
    """
    words = Fraction(0)
    for size, pre, is_result in zip((m * k, k * n), skewed, _MADE[form], strict=True):
        last = Fraction(q > 1) if pre and is_result else Fraction(0) if pre else Fraction(q - 1, q)
        words += Fraction(size, q * q) * ((q - 1) * (width if is_result else 1) + last)
    return words


def cannon_messages(form: str, q: int, skewed: tuple[bool, bool]) -> int:
    """Count 2(q-1) shifts, and one more for each skew, way home or last shift."""
    moved = sum(not pre or is_result for pre, is_result in zip(skewed, _MADE[form], strict=True))
    return 2 * (q - 1) + moved if q > 1 else 0


_MADE = {"ab": (False, False), "abt": (True, False), "atb": (False, True)}
"""Whether a form computes A, and B."""


# ---------------------------------------------------------------- the schedule and its registration


@dataclass(frozen=True)
class Cannon:
    """Cannon on a square grid.

    ``skewed``  whether A and B are stored skewed.
    """

    row: str
    col: str
    skewed: tuple[bool, bool] = (False, False)

    def multiply(
        self, form: Form, p: Tensor, q: Tensor, over: Axes = (), bias: Tensor | None = None
    ) -> Tensor:
        """Compute ab(A, B), abt(C, B) or atb(A, C)."""
        if form == "ab":
            return cannon_ab(p, q, self.row, self.col, self.skewed, over, bias)
        local = cannon_abt if form == "abt" else cannon_atb
        out = local(p, q, self.row, self.col, self.skewed, over)
        return out if bias is None else out + bias


@algorithm("matmul", name="cannon", order=5, takes="skew")
def cannon(case: MatmulCase) -> Match | str:
    """Match Cannon's rotation, the only algorithm for skewed operands."""
    z = sizes_2d(case)
    q, col = z.shape
    if q != col:
        return f"cannon needs a square grid; {z.row}={q}, {z.col}={col}"
    skewed = (case.x.skew == "a", case.w.skew == "b")
    if (case.x.skew, case.w.skew) != ("a" if skewed[0] else "", "b" if skewed[1] else ""):
        return "x can be stored 'skew a' and w 'skew b', not the other way"
    if any(skewed) and z.form != "ab":
        return "skewed operands take the Y-stationary form only"
    if any(skewed) and z.extra:
        return "a skewed operand and rows split over further axes"
    return z.match(
        Cannon(z.row, z.col, skewed),
        lambda form: cannon_words(form, z.m, z.k, z.n, q, skewed, case.width),
        lambda form: cannon_messages(form, q, skewed),
        3,
        False,
        "X and W rotate",
    )
