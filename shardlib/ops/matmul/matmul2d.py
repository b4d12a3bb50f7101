"""2D products: the forms of SUMMA and Cannon, their common schedule, and the layouts that fit.

Three matrices A [M, K], B [K, N], C [M, N] are in blocks on a (row, col) grid.  Each of three forms
computes one of them from the others, and the gradients of one form are the other two:

    AB    C = A B        ABT   A = C B^T        ATB   B = A^T C

The form of Y = X W follows from the axes that split its rows, contraction and columns:

    X rows  X contraction  W contraction  W columns    form
    (.. r)  c              r              c            AB: Y is stationary
    (.. r)  c              c              r            ABT: X is stationary
    c       r              r              c            ABT as well; ATB, W-stationary with Y's rows
                                                       over r and columns over c, where W must
                                                       stay

Rows may be split over further axes, as a batch is over ``data``: W's gradient is then summed over
them.  Only the blocks are saved for backward.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from shardlib.collectives import unwrap, wrap
from shardlib.cost import moving, summing
from shardlib.layouts import Dim, Layout
from shardlib.mesh import current_mesh
from shardlib.ops.matmul.case import MatmulCase
from shardlib.ops.matmul.function import NOWHERE, Axes, Gradients, Product
from shardlib.ops.registry import DoesNotFit, Match

Form = Literal["ab", "abt", "atb"]

# the role each of A, B, C plays in Y = X W
ROLES: dict[Form, dict[str, str]] = {
    "ab": {"A": "x", "B": "w", "C": "y"},
    "abt": {"A": "y", "B": "w", "C": "x"},
    "atb": {"A": "x", "B": "y", "C": "w"},
}


class ProductGrid(Protocol):
    """Protocol of SUMMA and Cannon on a row x col grid."""

    def multiply(self, form: Form, p: Tensor, q: Tensor, over: Axes, bias: Tensor | None) -> Tensor:
        """Compute ab(A, B), abt(C, B) or atb(A, C), summed over further axes.

        A bias is added before the result is rounded.
        """
        ...


@dataclass(frozen=True)
class Product2D:
    """Y = X W in one of the forms, as a schedule.

    ``batch``  leading dimensions that both operands share; X's others are rows.
    """

    form: Form
    grid: ProductGrid
    batch: int = 0
    summed: Axes = ()

    def forward(self, x: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Compute Y [.., M, N] of x [.., M, K] and w [K, N]; x and w are saved for backward."""
        rows = self._rows(x)
        y = self.grid.multiply(self.form, *_turned(self.form, rows, w), (), bias)
        return (y if rows is x else y.reshape(*x.shape[:-1], y.shape[-1])), x, w

    def gradients(
        self, dy: Tensor, x: Tensor, w: Tensor, need: tuple[bool, bool], over: tuple[Axes, Axes]
    ) -> Gradients:
        """Compute dX = dY W^T and dW = X^T dY, by the other two forms."""
        multiply = self._recorded if torch.is_grad_enabled() else self.grid.multiply
        rows, dy = self._rows(x), self._rows(dy)

        def of(i: int, form: Form, p: Tensor, q: Tensor, turned: bool = False) -> Tensor | None:
            if not need[i]:
                return None
            out = multiply(form, p, q, over[i], None)
            return out.mT if turned else out

        if self.form == "ab":
            dx, dw = of(0, "abt", dy, w), of(1, "atb", rows, dy)
        elif self.form == "abt":
            dx, dw = of(0, "ab", dy, w.mT), of(1, "atb", dy, rows, turned=True)
        else:
            dx, dw = of(0, "abt", w, dy, turned=True), of(1, "ab", rows.mT, dy)
        return (dx if dx is None or rows is x else dx.reshape(x.shape)), dw

    def _rows(self, x: Tensor) -> Tensor:
        """Flatten the dimensions of rows to one: [batch, M, K]."""
        if x.ndim <= 2 + self.batch:
            return x
        return x.reshape(*x.shape[: self.batch], -1, x.shape[-1])

    def _recorded(
        self, form: Form, p: Tensor, q: Tensor, over: Axes, bias: Tensor | None
    ) -> Tensor:
        """Compute the same as a product of its own, so that it can be differentiated."""
        mesh, schedule = current_mesh(), replace(self, form=form)
        x, w = _turned(form, p, q)
        return wrap(Product.apply(schedule, mesh, NOWHERE, unwrap(x), unwrap(w), bias), mesh)  # type: ignore[arg-type]


def _turned(form: Form, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Transpose the operand that a form takes transposed."""
    return (p.mT if form == "atb" else p), (q.mT if form == "abt" else q)


# ---------------------------------------------------------------- which layouts fit


def _form(case: MatmulCase, w_stays: bool) -> tuple[Form, str, str]:
    """Return (form, row, col) of a 2D case; ATB only if W should stay.  Raises: DoesNotFit."""
    xk, wk, columns = case.x.dims[-1], case.w.dims[-2], case.w.dims[-1]
    ends = (xk, wk, columns)
    if not all(len(d.axes) == 1 and d.order == "contiguous" for d in ends):
        raise DoesNotFit(
            "a 2D product splits both operands' contraction and w's columns over one axis each"
        )
    if len(xk.parts) > 1 or len(wk.parts) > 1:
        raise DoesNotFit("the contraction is split inside groups")
    k_of_x, k_of_w, n = xk.axes[0], wk.axes[0], columns.axes[0]
    rows = {a for d in case.x.dims[:-1] for a in d.axes}
    if k_of_x != k_of_w and n == k_of_x and k_of_w in rows:
        return "ab", k_of_w, k_of_x
    if k_of_x == k_of_w and n != k_of_x and n in rows:
        if len(columns.parts) > 1:
            raise DoesNotFit("w's columns lie in groups, and y's would lie otherwise")
        w_may_stay = w_stays and case.x.dims[:-1] == (columns,)
        return ("atb", k_of_x, n) if w_may_stay else ("abt", n, k_of_x)
    if k_of_x != k_of_w:
        raise DoesNotFit(
            f"contraction split over {k_of_x} in x and {k_of_w} in w, which fits no form"
        )
    raise DoesNotFit(f"x's rows are not split over {n}")


@dataclass(frozen=True)
class Sizes2D:
    """Sizes of the form's matrices A [m, k], B [k, n], C [m, n] on a row x col grid.

    ``copies``  number of products of these sizes on a rank, along batch dimensions.
    ``extra``   further axes that split X's rows.
    """

    form: Form
    row: str
    col: str
    mesh: dict[str, int]
    batch: int
    copies: int
    m: int
    k: int
    n: int
    extra: Axes
    case: MatmulCase

    @property
    def shape(self) -> tuple[int, int]:
        """Ranks per column and per row of the grid."""
        return self.mesh[self.row], self.mesh[self.col]

    def out(self) -> Layout:
        """Return Y's layout."""
        if self.form == "atb":
            return Layout(dims=(Dim((self.row,)), self.case.w.dims[-1]))
        columns = self.case.w.dims[-1] if self.form == "ab" else Dim((self.col,))
        return self.case.rows_by(columns)

    def match(
        self,
        grid: ProductGrid,
        words: Callable[[Form], Fraction],
        messages: Callable[[Form], int],
        blocks: int,
        rounded: bool,
        note: str,
    ) -> Match:
        """Price forward and both gradients.

        ``blocks``   number of temporary blocks at the peak.
        ``rounded``  parts of half precision were rounded when they were sent inside, so their sum
                     over further axes is sent in fp32.
        """
        size = self.case.itemsize * self.copies
        panel = max(self.m * self.k, self.k * self.n) // (self.shape[0] * self.shape[1])
        forms: list[Form] = [self.form, *(f for f in ROLES if f != self.form)]
        costs = [
            moving((self.row, self.col), words(f) * size, messages(f), blocks * panel * size)
            for f in forms
        ]
        backward = costs[1] + costs[2]
        backward += summing(
            self.case.w_bytes, self.extra, self.mesh, self.case.width if rounded else 1
        )
        return Match(
            self.out(),
            Product2D(self.form, grid, self.batch),
            costs[0],
            backward,
            f"form {self.form.upper()}, {note}",
        )


def sizes_2d(case: MatmulCase, w_stays: bool = False) -> Sizes2D:
    """Describe a case as a 2D product.  Raises: DoesNotFit where it is none."""
    batch = case.batch()
    form, row, col = _form(case, w_stays)
    if form == "ab" and len(case.x_shape) == 2 and case.x.dims[0].parts == (col,):
        raise DoesNotFit("x's rows and contraction are both split over one axis")
    if form != "ab" and batch:
        raise DoesNotFit("batched products take the Y-stationary form only")
    mesh = case.axes
    local = case.x.local_shape(case.x_shape, mesh)
    m = math.prod(local[batch:-1]) * mesh[col if form == "atb" else row]
    k, n = case.x_shape[-1], case.w_shape[-1]
    sizes: dict[Any, tuple[int, int, int]] = {"ab": (m, k, n), "abt": (m, n, k), "atb": (k, m, n)}
    extra = tuple(a for d in case.x.dims[:-1] for a in d.axes if a not in (row, col, *case.w.axes))
    return Sizes2D(form, row, col, mesh, batch, math.prod(local[:batch]), *sizes[form], extra, case)
