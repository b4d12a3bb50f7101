"""The matmul rules: which algorithms fit two layouts, and what each costs.

Read a product Y = X W by what splits its rows, its contraction and its columns:

    X rows  X contraction  W contraction  W columns    algorithm
    (..)    .              .              (..)         local, or column-parallel
    (..)    k              k              (..)         row-parallel: psum over k
    (.. r)  c              r              c            2D, Y-stationary as it lies (form AB)
    (.. r)  c              c              r            2D, X-stationary as it lies (form ABT)
    c       r              r              c            the same form; or, pinned by ``summa_w``, form
                                                       ATB: W-stationary, Y's rows over r, columns over c

Rows may be split over further axes, as a batch is over ``data``: W's gradient is then summed
over them inside the rule.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import Local, owned
from shardlib.collectives import unwrap, wrap
from shardlib.cost import moving
from shardlib.errors import NoRule, ShardError
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh, bind
from shardlib.ops.elementwise import elementwise
from shardlib.ops.matmul.cannon import cannon_messages, cannon_words
from shardlib.ops.matmul.case import MatmulCase, all_reduce, case, local_elements, met_over, out_layout
from shardlib.ops.matmul.once import let_go
from shardlib.ops.matmul.product import Grid, Product
from shardlib.ops.matmul.schedule import settled
from shardlib.ops.matmul.summa import Axes, summa_messages, summa_slices, summa_words
from shardlib.ops.matmul.turns import read_again
from shardlib.ops.registry import Match, algorithm, choose, fitting, remember
from shardlib.placing import reshard
from shardlib.tensor import WATCHED, ShardedTensor, is_half, lift, made_of, real_axes, total, typeof, vary

__all__ = ["product_of"]


_FORMS = {  # form -> the role each of A, B, C plays in Y = X W
    "ab": {"A": "x", "B": "w", "C": "y"},
    "abt": {"A": "y", "B": "w", "C": "x"},
    "atb": {"A": "x", "B": "y", "C": "w"},
}


def _form(case: MatmulCase, w_stays: bool) -> tuple[str, str, str] | str:
    """(form, row, col) of a 2D case, or why it is none.  ATB only where W is asked to stay."""
    xk, wk, columns = case.x.dims[-1], case.w.dims[-2], case.w.dims[-1]
    ends = (xk, wk, columns)
    if not all(len(d.axes) == 1 and d.order == "contiguous" for d in ends):
        return "a 2D product splits both operands' contraction and w's columns over one axis each"
    if len(xk.parts) > 1 or len(wk.parts) > 1:
        return "the contraction is split inside groups"
    (k1,), (k2,), (n,) = xk.axes, wk.axes, columns.axes
    rows = {a for d in case.x.dims[:-1] for a in d.axes}
    if k1 != k2 and n == k1 and k2 in rows:
        return "ab", k2, k1
    if k1 == k2 and n != k1 and n in rows:
        return ("atb", k1, n) if w_stays and case.x.dims[:-1] == (columns,) else ("abt", n, k1)
    if k1 != k2:
        return f"contraction split over {k1} in x and {k2} in w, which fits no form"
    return f"x's rows are not split over {n}"


def _grid(case: MatmulCase, w_stays: bool = False) -> "_Grid2D | str":
    batch = case.batch()
    form = _form(case, w_stays)
    if isinstance(batch, str):
        return batch
    if isinstance(form, str):
        return form
    if form[0] == "ab" and len(case.x_shape) == 2 and case.x.dims[0].parts == (form[2],):
        return "x's rows and contraction are both split over one axis"
    mesh = dict(case.mesh)
    form, row, col = form
    if form != "ab" and batch:
        return "batched products take the Y-stationary form only"
    m = math.prod(case.x.local_shape(case.x_shape, mesh)[batch:-1])
    copies = math.prod(case.x.local_shape(case.x_shape, mesh)[:batch])
    k, n = case.x_shape[-1], case.w_shape[-1]
    rows_over = col if form == "atb" else row
    m *= mesh[rows_over]
    am, ak, cn = {"ab": (m, k, n), "abt": (m, n, k), "atb": (k, m, n)}[form]
    extra = tuple(a for d in case.x.dims[:-1] for a in d.axes if a not in (row, col, *case.w.axes))
    return _Grid2D(form, row, col, mesh, batch, copies, am, ak, cn, extra, case)


@dataclass(frozen=True)
class _Grid2D:
    """The form's matrices A [m, k], B [k, n], C [m, n] on a row x col grid."""

    form: str
    row: str
    col: str
    mesh: dict[str, int]
    batch: int
    copies: int
    m: int
    k: int
    n: int
    extra: tuple[str, ...]
    case: MatmulCase

    @property
    def shape(self) -> tuple[int, int]:
        return self.mesh[self.row], self.mesh[self.col]

    def uneven(self) -> str:
        """Panels must be whole: K divides over lcm(row, col), M and N over their axes."""
        panels = math.lcm(*self.shape)
        return f"contraction {self.k} does not divide into {panels} panels" if self.k % panels else ""

    def out(self) -> Layout:
        if self.form == "atb":
            return Layout(dims=(Dim((self.row,)), self.case.w.dims[-1]))
        columns = self.case.w.dims[-1] if self.form == "ab" else Dim((self.col,))
        return out_layout(self.case, columns)

    def match(self, grid: Grid, words: Callable[[str], Fraction], messages: Callable[[str], int], blocks: int) -> Match:
        size = self.case.itemsize * self.copies
        panel = max(self.m * self.k, self.k * self.n) // (self.shape[0] * self.shape[1])
        forms = [self.form, *(f for f in _FORMS if f != self.form)]
        costs = [moving((self.row, self.col), words(f) * size, messages(f), blocks * panel * size) for f in forms]
        w_bytes = local_elements(self.case.w, self.case.w_shape, self.mesh) * self.case.itemsize
        form = self.form
        made = "ab" if form == "atb" else "atb"  # W's gradient, by
        rounded = grid.schedule == "summa" and (made, grid.stay) not in (("ab", "C"), ("atb", "B"))  # sums that travel
        backward = costs[1] + costs[2]
        backward += all_reduce(w_bytes, self.extra, self.mesh, self.case.width if rounded else 1)

        def run(x: ShardedTensor, w: ShardedTensor, over: tuple[Axes, Axes], bias: Tensor | None = None) -> Tensor:
            p = x.raw.mT if form == "atb" else x.raw
            q = w.raw.mT if form == "abt" else w.raw
            return Product.apply(form, grid, x.mesh, over, p, q, bias)  # type: ignore[return-value]

        out, note = self.out(), f"form {form.upper()}, {_stays(form, grid)}"
        return Match(out, run, costs[0], backward, note, over=met_over(self.case, out))


def _stays(form: str, grid: Grid) -> str:
    return f"{_FORMS[form][grid.stay].upper()} stays" if grid.schedule == "summa" else "X and W rotate"


def _summa(case: MatmulCase, role: str | None) -> Match | str:
    g = _grid(case, role == "w")
    if isinstance(g, str):
        return g
    if case.x.skew or case.w.skew:
        return "an operand is skewed"
    row, col = g.shape
    if g.uneven():
        return g.uneven()
    stays = [s for s in "CAB" if s == "C" or (row == col and not g.batch and g.m % row == 0 and g.n % row == 0)]
    if role is not None:
        stays = [s for s in stays if _FORMS[g.form][s] == role]
        if not stays:
            return f"keeping {role.upper()} still needs a block transpose, so a square grid; this is {row} x {col}"
    stay = min(stays, key=lambda s: (summa_words(g.m, g.k, g.n, row, col, s), s != "C"))
    words = summa_words(g.m, g.k, g.n, row, col, stay)
    slices = 1
    if case.links:  # measured: then panels are cut for them
        met = [link for axis, link in case.links if axis in (g.row, g.col)]
        seconds = max(k.beta for k in met) * float(words) * case.itemsize * g.copies
        slices = summa_slices(seconds, max(k.alpha for k in met), (g.m, g.k, g.n), math.lcm(row, col))
    return g.match(
        Grid("summa", g.row, g.col, stay, batch=g.batch, slices=slices),
        lambda form: words,
        lambda form: summa_messages(row, col, stay, slices),
        4,
    )


@algorithm("matmul", name="summa", order=1)
def summa(case: MatmulCase) -> Match | str:
    """SUMMA with whichever matrix moves the fewest words by staying."""
    return _summa(case, None)


@algorithm("matmul", name="summa_y", order=2)
def summa_y(case: MatmulCase) -> Match | str:
    """SUMMA, Y-stationary."""
    return _summa(case, "y")


@algorithm("matmul", name="summa_x", order=3)
def summa_x(case: MatmulCase) -> Match | str:
    """SUMMA, X-stationary."""
    return _summa(case, "x")


@algorithm("matmul", name="summa_w", order=4)
def summa_w(case: MatmulCase) -> Match | str:
    """SUMMA, W-stationary."""
    return _summa(case, "w")


@algorithm("matmul", name="cannon", order=5)
def cannon(case: MatmulCase) -> Match | str:
    """Cannon's rotation; the only rule for skewed operands."""
    g = _grid(case)
    if isinstance(g, str):
        return g
    row, col = g.shape
    if row != col:
        return f"cannon needs a square grid; {g.row}={row}, {g.col}={col}"
    skewed = (case.x.skew == "a", case.w.skew == "b")
    if (case.x.skew, case.w.skew) != ("a" if skewed[0] else "", "b" if skewed[1] else ""):
        return "x can be stored 'skew a' and w 'skew b', not the other way"
    if any(skewed) and g.form != "ab":
        return "skewed operands take the Y-stationary form only"
    if any(skewed) and g.extra:
        return "a skewed operand and rows split over further axes"
    return g.match(
        Grid("cannon", g.row, g.col, skewed=skewed, batch=g.batch),
        lambda form: cannon_words(form, g.m, g.k, g.n, row, skewed, case.width),
        lambda form: cannon_messages(form, row, skewed),
        3,
    )


def product_of(x: Any, w: Any, out: Layout | str | None = None, bias: ShardedTensor | None = None) -> ShardedTensor:
    """x @ w by the cheapest or the pinned rule; ``out`` is the layout the result must have.

    ``bias`` [N] is added; in half precision before the result is rounded, where it lies as the columns do.
    """
    if not (type(x) is type(w) is ShardedTensor and x.mesh is w.mesh):
        mesh = x.mesh if isinstance(x, ShardedTensor) else w.mesh
        x, w = lift(x, mesh, "matmul"), lift(w, mesh, "matmul")
    mesh = x.mesh
    if x.folded and (w.yields or any(isinstance(p, int) for p in x.sharding.dims[0].parts)):
        unfolded = x.view(
            *x.folded, x.size_[-1]
        )  # the weight's rule speaks of these dimensions, and groups of rows too
        return product_of(unfolded, w, out, bias).view(x.size_[0], w.size_[-1])  # type: ignore[return-value]
    if x.raw.dtype != w.raw.dtype:
        raise ShardError(
            "operands have different dtypes",
            op="matmul",
            operands={"x": typeof(x), "w": typeof(w)},
            mesh=mesh,
            fix="x @ w.to(x.dtype)",
        )
    asked = out is not None
    out = out or w.yields
    more = read_again(x)
    held = _NOTHING if x.moved is None else frozenset(made_of(x))
    key = (x.sharding, w.sharding, x.size_, w.size_, x.raw.dtype, out, held, more)
    cut = mesh.plans.get((_cut, key)) if mesh.plans else None
    if cut is not None:
        return product_of(reshard(x, cut[0]), reshard(w, cut[1]), cut[2], bias)
    try:
        match = choose("matmul", key, lambda: case(x, w, out, held, more), mesh)
    except NoRule:
        made = case(x, w, out)
        cut = _cut(made) or (None if asked or made.out is None else _whole_rows(made))
        if cut is None:
            raise
        remember(mesh.plans, (_cut, key), cut)
        return product_of(reshard(x, cut[0]), reshard(w, cut[1]), cut[2], bias)
    if WATCHED.by is not None:
        WATCHED.by.chose(match)
    out, deferred = match.out, x.deferred
    over_x, over_w = match.over
    if x.deferred or w.deferred:
        deferred = (x.deferred | w.deferred) - set(out.axes)
        meets = {*out.axes, *deferred}
        over_x = tuple(meets.difference(x.sharding.axes, x.deferred))
        over_w = tuple(meets.difference(w.sharding.axes, w.deferred))
    over = (real_axes(mesh, over_x), real_axes(mesh, over_w)) if over_x or over_w else _NOWHERE
    late = bias is not None and not _in_place(bias, x, out, match)
    if bias is None or late:
        raw = match.run(x, w, over, None)
    else:
        met = real_axes(mesh, {*out.axes, *deferred}.difference(bias.sharding.axes))
        if match.adds and mesh.kind != "stacked" and not over[1] and not (over[0] and is_half(x.raw)):
            raw = match.run(x, w, over, vary(bias.raw, mesh, met))  # torch's own function, which gives its gradient
        else:
            raw = match.run(x, w, over, bias.raw.detach())
            raw = _Biased.apply(raw, bias.raw, mesh, met) if bias.raw.requires_grad else raw
    raw = owned(raw)
    if more is False:
        let_go(x)
    y = ShardedTensor(raw, out, torch.Size((*x.size_[:-1], w.size_[-1])), mesh, deferred)
    return elementwise(torch.add, (y, bias), {}) if late else y


_NOWHERE: tuple[Axes, Axes] = ((), ())
_NOTHING: frozenset[Any] = frozenset()


def _whole_rows(case: MatmulCase) -> tuple[Layout, Layout, Layout] | None:
    """Where rows that a weight's rule takes to be split are whole, as those of another weight: they stay so."""
    if case.out is None or any(d.is_split for d in case.x.dims[:-1]):
        return None
    out = Layout((*case.x.dims[:-1], case.out.dims[-1]))
    return (case.x, case.w, out) if fitting("matmul", replace(case, out=out)) is not None else None


def _cut(case: MatmulCase) -> tuple[Layout, Layout, Layout | None] | None:
    """Layouts of X and W that an algorithm fits and that cut what each rank holds whole, so that nothing moves.

    As a row-parallel layer does to an input that is not split.  The cut value's gradient is gathered in turn, and
    counts: the cheapest wins.
    """
    mesh, found = dict(case.mesh), []
    for x, w in _cuts(case, mesh):
        match = fitting("matmul", replace(case, x=x, w=w))
        if match is not None:
            back = (x >> case.x).bytes(case.x_shape, mesh) + (w >> case.w).bytes(case.w_shape, mesh)
            found.append((match.cost.bytes + back * case.itemsize, len(found), x, w))
    return (*min(found)[2:], case.out) if found else None


def _cuts(case: MatmulCase, mesh: dict[str, int]) -> Iterator[tuple[Layout, Layout]]:
    """X's contraction cut as W's, or W's as X's; and besides, X's rows over an axis that splits W alone."""
    x, w = case.x, case.w
    if len(case.w_shape) != 2 or x.skew or w.skew:
        return

    def divides(n: int, dim: Dim) -> bool:
        return n % math.prod(mesh[a] for a in dim.axes) == 0

    firsts = [x]
    theirs = w.dims[-2]
    if not x.dims[-1].is_split and theirs.order == "contiguous" and not any(isinstance(p, int) for p in theirs.parts):
        for count in range(1, len(theirs.parts) + 1):
            token = Dim(theirs.parts[:count])
            if not set(token.axes) & set(x.axes) and divides(case.x_shape[-1], token):
                firsts.append(Layout((*x.dims[:-1], token)))
    for first in firsts:
        if first is not x:
            yield first, w
        for axis in w.axes:
            for d, n in enumerate(case.x_shape[:-1]):
                if axis not in first.axes and not first.dims[d].is_split and n > 1 and divides(n, Dim((axis,))):
                    yield Layout((*first.dims[:d], Dim((axis,)), *first.dims[d + 1 :])), w
    mine = x.dims[-1]
    if mine.is_split and not w.dims[-2].is_split and not set(mine.axes) & set(w.axes):
        yield x, Layout((mine, w.dims[-1]))


def _in_place(bias: ShardedTensor, x: ShardedTensor, out: Layout, match: Match) -> bool:
    """May the rule add this bias: before a half precision result is rounded, or by torch's own function?"""
    able = is_half(x.raw) or (match.adds and x.mesh.kind != "stacked")
    alike = bias.raw.dtype == x.raw.dtype and len(bias.size_) == 1 and bias.sharding.dims == out.dims[-1:]
    return able and alike and not bias.deferred


class _Biased(Local):
    """apply(y, bias, mesh, axes): y, which holds the bias already; the bias's gradient is summed over ``axes``."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
        ctx.place = mesh, axes, bias.dtype
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mesh, axes, dtype = ctx.place
        if torch.is_grad_enabled():
            g = grads[0].flatten(1 if mesh.kind == "stacked" else 0, -2)
            g = g.float() if is_half(g) else g
            return grads[0], total(g.sum(-2), mesh, axes, dtype), None, None
        with bind(mesh):
            g = wrap(grads[0], mesh)
            rows = g.flatten(0, -2)
            if axes and is_half(grads[0]):  # in fp32, a few rows at a time, until it travels
                rows = torch.stack([part.float().sum(0) for part in rows.split(512)]).sum(0)
                rows = settled(rows, dtype, axes)
            else:  # torch's own sum is fp32 within
                rows = settled(rows.sum(0), dtype, axes)
            return grads[0], unwrap(rows), None, None
