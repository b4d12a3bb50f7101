"""MatmulCase: layouts, sizes and mesh of a product Y = X W, without tensors.

Where no algorithm fits, ``cut_for`` finds slices of operands that ranks hold whole which one fits:
a row-parallel layer does this to an input that is not split.  Nothing moves forward; the gradient
of the sliced operand is gathered.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from shardlib.errors import (
    ImplicitCommunication,
    NoImplementation,
    RankMismatch,
    ShardError,
    Unsupported,
)
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Link
from shardlib.ops.registry import DoesNotFit, case_of, fitting
from shardlib.tensor import ShardedTensor, call_error, partial_escape


@dataclass(frozen=True)
class MatmulCase:
    """Y = X W of X [..., M, K] and W [K, N] (or [..., K, N]): layouts, sizes and mesh, no tensors.

    ``x``, ``w``  layouts; ``x_shape``, ``w_shape`` global sizes.
    ``mesh``      (axis, size) of each axis; ``links`` the measured costs along them.
    ``itemsize``  bytes per element.
    ``out``       the layout that Y must have, if one is required.
    ``held``      moves of X made already for another product, which are not paid for again.
    ``more``      whether another product will read X as it is; None where that is unknown, and
                  where the layouts leave X ungathered.

    >>> import shardlib as sl
    >>> case = sl.extend.MatmulCase(
    ...     x=sl.Layout.parse("x ."), w=sl.Layout.parse(". ."), x_shape=(8, 4), w_shape=(4, 6),
    ...     mesh=(("x", 2),), itemsize=4)
    >>> case.x_bytes, case.rows_by(case.w.dims[-1]), case.over(sl.Layout.parse("x ."))
    (64, Layout('x .'), ((), ('x',)))
    """

    x: Layout
    w: Layout
    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...]
    itemsize: int
    out: Layout | None = None
    links: tuple[tuple[str, Link], ...] = ()
    held: frozenset[Any] = frozenset()
    more: bool | None = None

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes and their sizes."""
        return dict(self.mesh)

    @property
    def is_skewed(self) -> bool:
        """Whether the blocks of an operand are skewed."""
        return bool(self.x.skew or self.w.skew)

    @property
    def y_shape(self) -> tuple[int, ...]:
        """Y's global shape."""
        return (*self.x_shape[:-1], self.w_shape[-1])

    @property
    def x_bytes(self) -> int:
        """Bytes of a rank's block of X."""
        return self.bytes_of(self.x, self.x_shape)

    @property
    def w_bytes(self) -> int:
        """Bytes of a rank's block of W."""
        return self.bytes_of(self.w, self.w_shape)

    def bytes_of(self, layout: Layout, shape: tuple[int, ...]) -> int:
        """Count the bytes of a rank's block of a matrix in this layout."""
        return math.prod(layout.local_shape(shape, self.axes)) * self.itemsize

    def rows_by(self, columns: Dim) -> Layout:
        """Return Y's layout with the rows of X's layout and the given columns."""
        return Layout(dims=(*self.x.dims[:-1], columns))

    def over(self, out: Layout) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """List the axes that split Y and not X, and those that split Y and not W.

        Gradients must be summed over them.
        """
        split = [a for a, n in self.mesh if n > 1 and a in out.axes]
        return tuple(a for a in split if a not in self.x.axes), tuple(
            a for a in split if a not in self.w.axes
        )

    @property
    def width(self) -> int:
        """Words of a sum per word of an operand: half precision is summed in fp32."""
        return 2 if self.itemsize == 2 else 1

    def batch(self) -> int:
        """Count the batch dimensions that both have.

        Raises: DoesNotFit, which refuses the algorithm, where they cannot be multiplied.
        """
        batch = len(self.w_shape) - 2
        if batch and (
            self.x.dims[:batch] != self.w.dims[:batch] or len(self.x_shape) != len(self.w_shape)
        ):
            raise DoesNotFit("batch dimensions lie differently")
        return batch

    def operands(self) -> dict[str, str]:
        return {
            f"{name} {list(shape)}": str(layout)
            for name, shape, layout in (("x", self.x_shape, self.x), ("w", self.w_shape, self.w))
        }

    def fix(self) -> tuple[str, type[NoImplementation]]:
        """Write the reshard of W that some algorithm would accept, or of a required result."""
        if self.out is not None:
            return f"sl.reshard(sl.matmul(x, w), {str(self.out)!r})", NoImplementation
        rows, last = self.x.dims[:-1], self.x.dims[-1]
        taken = {a for d in rows for a in d.axes} | set(last.axes)
        batch = ["."] * (len(self.w_shape) - 2)
        if last.is_split and len(self.w_shape) == 2:
            wanted = f"{last} ."
        elif self.is_skewed:
            return "sl.reshard(x, 'x y') @ sl.reshard(w, 'x y')", NoImplementation
        else:
            columns = self.w.dims[-1]
            wanted = " ".join([*batch, ".", str(columns) if not taken & set(columns.axes) else "."])
        return f"x @ sl.reshard(w, {wanted!r})", ImplicitCommunication


@lru_cache(maxsize=4096)
def _checked(x: tuple[int, ...], w: tuple[int, ...], x_layout: Layout, w_layout: Layout) -> None:
    if len(x) < 2 or len(w) < 2:
        why = "a sharded product takes matrices; add a dimension to a vector"
        fix = "(x * w).sum()"
        if len(x) > 1:
            fix = "(x @ w.unsqueeze(-1)).squeeze(-1)"
        elif len(w) > 1:
            fix = "(x.unsqueeze(0) @ w).squeeze(-2)"
        raise call_error(RankMismatch, why, "matmul", fix, x=str(list(x)), w=str(list(w)))
    if x[-1] != w[-2]:
        raise ShardError(
            f"contraction sizes differ: {x[-1]} and {w[-2]}",
            op="matmul",
            operands={f"x {list(x)}": str(x_layout), f"w {list(w)}": str(w_layout)},
            fix=_fitting(x, w),
        )


def _fitting(x: tuple[int, ...], w: tuple[int, ...]) -> str:
    """Return the product of these shapes, one or both transposed, that exists; else a hint."""
    if x[-1] == w[-1]:
        return "x @ w.mT"
    if x[-2] == w[-2]:
        return "x.mT @ w"
    return "x.mT @ w.mT" if x[-2] == w[-1] else ""


@case_of("matmul")
def case(
    x: ShardedTensor,
    w: ShardedTensor,
    out: Layout | str | None = None,
    held: frozenset[Any] = frozenset(),
    more: bool | None = None,
) -> MatmulCase:
    """Describe two operands; ``out`` is the layout Y must have, if any."""
    for value in (x, w):
        if value.sharding.partial:
            raise partial_escape("matmul", value)
    _checked(x.padded_shape, w.padded_shape, x.sharding, w.sharding)
    if out is not None:
        out = Layout.parse(str(out)).resolve(len(x.padded_shape))
        if out.partial:
            why = (
                f"no product is left pending, as out={str(out)!r} asks: its algorithm ends the sum"
            )
            raise call_error(
                Unsupported, why, "matmul", f"sl.matmul(x, w, out={str(out.bare)!r})", x=x, w=w
            )
        out.check((*x.padded_shape[:-1], w.padded_shape[-1]), x.mesh, op="matmul")
    return MatmulCase(
        x.sharding,
        w.sharding,
        tuple(x.padded_shape),
        tuple(w.padded_shape),
        tuple(x.mesh.axes.items()),
        x.raw.element_size(),
        out,
        tuple(x.mesh.links.items()),
        held,
        more,
    )


def whole_rows(case: MatmulCase) -> tuple[Layout, Layout, Layout] | None:
    """Return layouts with whole rows of Y, if X's are whole, though a rule splits them; or None."""
    if case.out is None or any(d.is_split for d in case.x.dims[:-1]):
        return None
    out = Layout((*case.x.dims[:-1], case.out.dims[-1]))
    return (case.x, case.w, out) if fitting("matmul", replace(case, out=out)) is not None else None


def cut_for(case: MatmulCase) -> tuple[Layout, Layout, Layout | None] | None:
    """Find layouts of X and W that an algorithm fits and that slice whole operands.

    Nothing moves forward.

    The gradient of a sliced operand is gathered, which counts: the cheapest choice is returned.
    """
    mesh, found = dict(case.mesh), []
    for x, w in _cuts(case, mesh):
        match = fitting("matmul", replace(case, x=x, w=w))
        if match is not None:
            back = (x >> case.x).bytes(case.x_shape, mesh) + (w >> case.w).bytes(case.w_shape, mesh)
            found.append((match.cost.bytes + back * case.itemsize, len(found), x, w))
    return (*min(found)[2:], case.out) if found else None


def _cuts(case: MatmulCase, mesh: dict[str, int]) -> Iterator[tuple[Layout, Layout]]:
    """Yield X sliced like W's contraction, or W like X's; also X's rows over an axis of W alone."""
    x, w = case.x, case.w
    if len(case.w_shape) != 2 or case.is_skewed:
        return

    def divides(n: int, dim: Dim) -> bool:
        return n % math.prod(mesh[a] for a in dim.axes) == 0

    for first in (x, *_cut_contractions(case, divides)):
        if first is not x:
            yield first, w
        for axis, d in itertools.product(w.axes, range(len(case.x_shape) - 1)):
            rows, n = first.dims[d], case.x_shape[d]
            free = axis not in first.axes and not rows.is_split
            if free and n > 1 and divides(n, Dim((axis,))):
                yield Layout((*first.dims[:d], Dim((axis,)), *first.dims[d + 1 :])), w
    mine = x.dims[-1]
    if mine.is_split and not w.dims[-2].is_split and not set(mine.axes) & set(w.axes):
        yield x, Layout((mine, w.dims[-1]))


def _cut_contractions(case: MatmulCase, divides: Callable[[int, Dim], bool]) -> Iterator[Layout]:
    """Yield X's layout with its whole contraction split as W's is, over its first axes or all."""
    x, theirs = case.x, case.w.dims[-2]
    if x.dims[-1].is_split or theirs.order != "contiguous" or len(theirs.axes) < len(theirs.parts):
        return
    for count in range(1, len(theirs.parts) + 1):
        token = Dim(theirs.parts[:count])
        if not set(token.axes) & set(x.axes) and divides(case.x_shape[-1], token):
            yield Layout((*x.dims[:-1], token))
