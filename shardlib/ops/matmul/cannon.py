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
from functools import cache, partial
from itertools import product

from torch import Tensor

from shardlib.collectives import axis_size, ppermute, shift, start
from shardlib.ops.matmul.case import MatmulCase
from shardlib.ops.matmul.function import Axes, accumulator, add_product, rounded
from shardlib.ops.matmul.matmul2d import Form, Sizes2D, sizes_2d
from shardlib.ops.registry import Match, algorithm


def cannon_ab(
    a: Tensor, b: Tensor, row: str, col: str, over: Axes = (), bias: Tensor | None = None
) -> Tensor:
    """Compute C = A B.  a A(i, i+j) [M/row, K/col], b B(i+j, j) [K/row, N/col] -> [M/row, N/col]."""
    q = axis_size(row)
    c = accumulator(a, *a.shape[:-1], b.shape[-1])
    for t in range(q):
        # rank (i, j) holds A(i, i+j+t), B(i+j+t, j)
        coming = start(shift, a, col, -1) if t < q - 1 else None
        add_product(c, a, b)
        if coming is not None:
            a = coming.wait()
            b = shift(b, row, -1)
    return rounded(c, a.dtype, over, bias=bias)


def cannon_abt(c: Tensor, b: Tensor, row: str, col: str, over: Axes = ()) -> Tensor:
    """Compute A = C B^T.  c [M/row, N/col], b B(i+j, j) [K/row, N/col] -> A(i, i+j-1)."""
    q = axis_size(row)
    a = accumulator(c, *c.shape[:-1], b.shape[-2])
    for t in range(q):
        # rank (i, j) adds to A(i, i+j+t)
        add_product(a, c, b.mT)
        if t < q - 1:
            a, b = shift(a, col, -1), shift(b, row, -1)
    return rounded(a, c.dtype, over)


def cannon_atb(a: Tensor, c: Tensor, row: str, col: str, over: Axes = ()) -> Tensor:
    """Compute B = A^T C.  a A(i, i+j) [M/row, K/col], c [M/row, N/col] -> B(i+j-1, j)."""
    q = axis_size(row)
    b = accumulator(c, *a.shape[:-2], a.shape[-1], c.shape[-1])
    for t in range(q):
        # rank (i, j) adds to B(i+j+t, j)
        add_product(b, a.mT, c)
        if t < q - 1:
            b, a = shift(b, row, -1), shift(a, col, -1)
    return rounded(b, c.dtype, over)


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


# ---------------------------------------------------------------- the schedule and its registration


@dataclass(frozen=True)
class Cannon:
    """Cannon on a square grid.

    ``skewed``  the operands that are stored skewed: "a", "b" or "ab".
    """

    row: str
    col: str
    skewed: str = ""

    def multiply(
        self, form: Form, p: Tensor, q: Tensor, over: Axes = (), bias: Tensor | None = None
    ) -> Tensor:
        """Compute ab(A, B), abt(C, B) or atb(A, C)."""
        row, col = self.row, self.col
        if form == "ab":
            return cannon_ab(self._first(p, "a"), self._first(q, "b"), row, col, over, bias)
        if form == "abt":
            out = self._home(cannon_abt(p, self._first(q, "b"), row, col, over), "a", col)
        else:
            out = self._home(cannon_atb(self._first(p, "a"), q, row, col, over), "b", row)
        return out if bias is None else out + bias

    def _first(self, x: Tensor, name: str) -> Tensor:
        """Move an operand's blocks to the ranks of the first product: it is skewed from there on."""
        if name in self.skewed:
            return x
        return ppermute(x, (self.row, self.col), _pairs(f"skew {name}", axis_size(self.row)))

    def _home(self, x: Tensor, name: str, along: str) -> Tensor:
        """Move a result from the ranks of the last product to those that store it."""
        if name in self.skewed:
            return shift(x, along, -1)
        return ppermute(x, (self.row, self.col), _pairs(f"home {name}", axis_size(self.row)))

    def once(self, form: Form, name: str, q: int) -> Fraction:
        """Return the share of a matrix's blocks that moves once, besides the q-1 shifts.

        A skew or a way home moves (q-1)/q of the blocks; the last step of a skewed result all.
        """
        if name not in self.skewed:
            return Fraction(q - 1, q)
        return Fraction(q > 1 and name == _RESULT[form])

    def words(self, z: Sizes2D, form: Form) -> Fraction:
        """Count the words one rank receives; a sum in half precision is shifted in fp32."""
        q = z.shape[0]
        total = Fraction(0)
        for name, size in (("a", z.m * z.k), ("b", z.k * z.n)):
            width = z.case.width if name == _RESULT[form] else 1
            total += Fraction(size, q * q) * ((q - 1) * width + self.once(form, name, q))
        return total

    def messages(self, q: int, form: Form) -> int:
        """Count 2(q-1) shifts, and one more for each matrix that moves once."""
        return 2 * (q - 1) + sum(self.once(form, name, q) > 0 for name in "ab")


_RESULT = {"ab": "c", "abt": "a", "atb": "b"}
"""The matrix that a form computes."""


@algorithm("matmul", name="cannon", order=5, takes="skew")
def cannon(case: MatmulCase) -> Match | str:
    """Match Cannon's rotation, the only algorithm for skewed operands."""
    z = sizes_2d(case)
    q, columns = z.shape
    if q != columns:
        return f"cannon needs a square grid; {z.row}={q}, {z.col}={columns}"
    skewed = case.x.skew + case.w.skew
    if case.x.skew == "b" or case.w.skew == "a":
        return "x can be stored 'skew a' and w 'skew b', not the other way"
    if skewed and z.form != "ab":
        return "skewed operands take the Y-stationary form only"
    if skewed and z.extra:
        return "a skewed operand and rows split over further axes"
    grid = Cannon(z.row, z.col, skewed)
    words, messages = partial(grid.words, z), partial(grid.messages, q)
    return z.match(grid, words, messages, 3, False, "X and W rotate")
