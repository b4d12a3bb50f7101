"""Slicing of operands that ranks hold whole, where an algorithm fits the slices.

A row-parallel layer does this to an input that is not split.  Nothing moves forward; the gradient
of the sliced operand is gathered.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from shardlib.layouts import Dim, Layout
from shardlib.ops.matmul.case import MatmulCase
from shardlib.ops.registry import fitting

__all__ = ["cut_for", "whole_rows"]


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
    if len(case.w_shape) != 2 or x.skew or w.skew:
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
