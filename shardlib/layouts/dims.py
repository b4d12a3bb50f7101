"""Token of one dimension: how it is split, the positions of each rank, and the sizes that fit.

A dimension of size n is read as digits: its parts in order (an axis counts the axis size, an
integer itself), then an unsplit rest.  A rank holds the positions whose axis digits are its
coordinates, in increasing order.  Other orders (orders.py) deal the positions of a sequence to the
ranks of the token's last axes; the parts up to the last integer are then groups, and each group is
dealt in that order.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

from shardlib.errors import UnevenSplit, UnknownAxis, meant, similar
from shardlib.layouts.orders import Run, block, dealt, declared, uncovered
from shardlib.mesh import Axes, Coord, MeshKey, Sizes, coordinates, rank_along

D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class Dim:
    """Split of one dimension: ``parts`` major first, axes (str) and unsplit factors (int).

    ``by``  the axis by whose coordinate blocks are moved on, cyclically: Cannon's skew.
    """

    parts: tuple[str | int, ...] = ()
    order: str = "contiguous"
    by: str = ""
    axes: Axes = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        axes = tuple(p for p in self.parts if isinstance(p, str))
        object.__setattr__(self, "axes", axes)

    @property
    def is_split(self) -> bool:
        return bool(self.parts)

    @property
    def is_plain(self) -> bool:
        """Whether it is split over axes alone, in contiguous blocks, or not at all."""
        return not self.is_dealt and len(self.axes) == len(self.parts)

    @property
    def is_dealt(self) -> bool:
        """Whether a rank holds other positions than those of the block at its index."""
        return self.order != "contiguous" or bool(self.by)

    def holder(self, coord: Coord, sizes: Sizes) -> Coord:
        """Return the coordinate whose block a rank holds: its own, without a skew."""
        if not self.by:
            return coord
        (axis,) = self.axes
        return {**coord, axis: (coord[axis] + coord[self.by]) % sizes[axis]}

    @property
    def ring(self) -> Axes:
        """The axes among whose ranks an order deals positions: those after the last integer."""
        return tuple(itertools.takewhile(lambda p: isinstance(p, str), reversed(self.parts)))[::-1]  # type: ignore[return-value]

    @property
    def groups(self) -> "Dim":
        """The parts before the ring's axes, as a contiguous token."""
        return Dim(self.parts[: len(self.parts) - len(self.ring)])

    def __str__(self) -> str:
        body = " ".join(map(str, self.parts))
        if self.order != "contiguous":
            name, _, given = self.order.partition("; ")
            return f"{name}({body}; {given})" if given else f"{name}({body})"
        if not self.parts:
            return "."
        return body if len(self.parts) == 1 and isinstance(self.parts[0], str) else f"({body})"


WHOLE = Dim()


class Apart(Exception):
    """Error for digits that do not make up a dimension of a view: ``digit`` is the one in two."""

    def __init__(self, digit: object = None) -> None:
        super().__init__()
        self.digit = digit


def leading(
    digits: list[D], n: int, radix: Callable[[D], int], split: Callable[[D, int], Sequence[D]]
) -> list[D]:
    """Take the digits, major first, that number ``n`` positions: a dimension of a view.

    A view of a tensor keeps its elements in order, so its dimensions are the same mixed-radix
    digits, regrouped.  The executor of views and the tracer of dimensions both regroup by this.

    ``digits``  of which those that are taken are removed.
    ``split``   splits a digit into several, the first with the radix that it is given.
    Raises: Apart if a digit is in two dimensions and has no such split, or there are too few.

    >>> row = [2, 6, 5]
    >>> leading(row, 4, int, lambda digit, major: (major, digit // major)), row
    ([2, 2], [3, 5])
    """
    taken: list[D] = []
    while n > 1:
        if not digits:
            raise Apart
        digit = digits.pop(0)
        positions = radix(digit)
        if positions and n % positions == 0:
            taken.append(digit)
            n //= positions
        elif positions and positions % n == 0:
            digits[:0] = split(digit, n)
        else:
            raise Apart(digit)
    return taken


def ring_runs(dim: Dim, n: int, sizes: Sizes, rank: int) -> tuple[Run, ...]:
    """List the runs of positions that ``rank`` of a dimension's ring holds, of ``n`` in all.

    ``n`` need not divide by the ring.
    """
    return dealt(dim.order, n, math.prod(sizes[a] for a in dim.ring))[rank]


def without_ones(dim: Dim, sizes: Sizes) -> Dim:
    """Return the token without axes of one rank; a whole dimension if no axis is left.

    >>> print(without_ones(Dim(("x", 2, "y")), {"x": 1, "y": 4}))
    (2 y)
    """
    parts = tuple(p for p in dim.parts if isinstance(p, int) or sizes[p] > 1)
    return Dim(parts, dim.order) if any(isinstance(p, str) for p in parts) else WHOLE


def positions(dim: Dim, n: int, sizes: Sizes, coord: Coord) -> Sequence[int]:
    """Return the positions of a dimension of size n that a rank holds, in the rank's own order.

    Groups and contiguous dimensions must divide; a sequence in another order may have any length.
    """
    if dim.order != "contiguous":
        return _dealt_positions(dim, n, sizes, coord)
    # a position has one digit per part (mixed radix): an axis fixes its digit, an integer does not
    radices = [radix_of(p, sizes) for p in dim.parts]
    stride = n - n % math.prod(radices)
    start, offsets = 0, [0]
    for part, radix in zip(dim.parts, radices, strict=True):
        stride //= radix
        if isinstance(part, str):
            start += coord[part] * stride
        else:
            offsets = [o + digit * stride for o in offsets for digit in range(radix)]
    if offsets == [0]:
        return range(start, start + stride)
    return [start + o + k for o in offsets for k in range(stride)]


def radix_of(part: str | int, sizes: Sizes) -> int:
    return part if isinstance(part, int) else sizes[part]


def _dealt_positions(dim: Dim, n: int, sizes: Sizes, coord: Coord) -> Sequence[int]:
    """List the positions of a rank in another order: those of its ring, in each group."""
    groups, rank = dim.groups, rank_along(dim.ring, coord, sizes)
    each = n // _groups(dim, sizes)
    held = [i for run in ring_runs(dim, each, sizes, rank) for i in run.positions]
    starts = [0]
    if groups.parts:
        starts = [s for s in positions(groups, n, sizes, coord) if s % each == 0]
    return [start + i for start in starts for i in held]


def joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join ranges (start, stop) of positions where one ends at the start of the next.

    >>> joined([(0, 2), (2, 4), (6, 8)])
    ((0, 4), (6, 8))
    """
    out: list[tuple[int, int]] = []
    for a, b in ranges:
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        elif b > a:
            out.append((a, b))
    return tuple(out)


def said(axes: Sequence[str], held: Sequence[Sequence[tuple[int, int]]], n: int) -> Dim:
    """Return the token under which rank r of p along ``axes`` holds the ranges ``held[r]``.

    The ranges are of n positions.

    >>> print(said(("x",), [[(0, 2), (4, 6)], [(2, 4), (6, 8)]], 8))
    (2 x)
    >>> print(said(("x",), [[(0, 4), (8, 9)], [(4, 8), (9, 10)]], 10))
    runs(x; 0:4 8:9 | 4:8 9:10)
    """
    p, want = len(held), [joined(ranges) for ranges in held]
    for groups in sorted({1, len(want[0])}):
        each, left = divmod(n, groups * p)
        blocks = [[g * p + r for g in range(groups)] for r in range(p)]
        even = [joined((b * each, (b + 1) * each) for b in mine) for mine in blocks]
        if not left and want == even:
            return Dim((groups, *axes) if groups > 1 else tuple(axes))
    return Dim(
        tuple(axes), "runs; " + " | ".join(" ".join(f"{a}:{b}" for a, b in mine) for mine in want)
    )


@lru_cache(maxsize=4096)
def cut(dim: Dim, n: int, mesh: MeshKey, start: int, stop: int) -> tuple[slice, Dim] | None:
    """Return the slice every rank takes for positions start to stop, and the token of the result.

    None if the slice differs from rank to rank.

    Used for outputs of a fused weight with unequal parts: each rank holds a share of every part.

    >>> fused = Dim(("x",), "runs; 0:4 8:9 | 4:8 9:10")
    >>> cut(fused, 10, (("x", 2),), 0, 8), cut(fused, 10, (("x", 2),), 0, 6)
    ((slice(0, 4, None), Dim(parts=('x',), order='contiguous', by='')), None)
    """
    sizes = dict(mesh)
    taken, held = set(), []
    for coord in coordinates({a: sizes[a] for a in dim.axes}):
        mine = positions(dim, n, sizes, coord)
        at = [i for i, k in enumerate(mine) if start <= k < stop]
        if not at or at[-1] - at[0] != len(at) - 1:
            return None
        taken.add((at[0], at[-1] + 1))
        held.append([(mine[i] - start, mine[i] - start + 1) for i in at])
    if len(taken) != 1:
        return None
    (a, b), length = taken.pop(), stop - start
    if (b - a) * len(held) != length:
        return None
    return slice(a, b), said(dim.axes, held, length)


# ---------------------------------------------------------------- divisibility, and the size of a block


def check_axes(axes: Sequence[str], sizes: Sizes, text: str, op: str) -> None:
    """Raise UnknownAxis if a layout, written ``text``, names an axis that the mesh lacks."""
    for axis in axes:
        if axis in sizes:
            continue
        near = similar(axis, sizes.keys() - set(axes), 1)
        better = re.sub(rf"\b{re.escape(axis)}\b", near[0], text) if near else "..."
        why = f"unknown axis {axis!r}; this mesh has {', '.join(sizes)}{meant(near)}"
        fix = f"sl.Layout.parse({better!r})"
        raise UnknownAxis(why, op=op, operands={"layout": text}, mesh=dict(sizes), fix=fix)


def check_sizes(
    dims: Sequence[Dim], shape: Sequence[int], sizes: Sizes, text: str, op: str
) -> None:
    """Raise UnevenSplit if a dimension does not divide over the axes that split it."""
    for d, (dim, n) in enumerate(zip(dims, shape, strict=True)):
        ways, length = _ways(dim, n, sizes), declared(dim.order)
        held = uncovered(dim.order) if n % ways == 0 and n == length else ""
        if n % ways == 0 and not held:
            continue
        without = " ".join(map(str, (*dims[:d], WHOLE, *dims[d + 1 :])))
        fix = f"sl.shard(x, {without!r})"
        if held:
            what = f"does not fit {dim}, which holds position {held}"
        elif length is not None:
            rest = "whose shares differ" if n == length else f"written for {length}"
            what = f"does not fit {dim}, {rest}"
        else:
            what = f"does not divide over {_over(dim, ways, sizes)}, remainder {n % ways})"
            whole = "sl.unshard(x)" if op == "reshard" else "x"
            fix = f"sl.shard({whole}, {text!r}, pad=True)"
        why = f"dimension {d} of size {n} {what}"
        given = {"tensor": list(shape), "layout": text}
        raise UnevenSplit(why, op=op, operands=given, mesh=dict(sizes), fix=fix)


def _over(dim: Dim, ways: int, sizes: Sizes) -> str:
    if len(dim.parts) == 1:
        return f"mesh axis {dim.axes[0]!r} (size {sizes[dim.axes[0]]}"
    return f"{dim} ({ways} parts"


def block_shape(dims: Sequence[Dim], shape: Sequence[int], sizes: Sizes) -> tuple[int, ...]:
    """Return the shape of each rank's block; dimensions that do not divide are rounded up.

    >>> from shardlib.layouts.text import read
    >>> block_shape(read("x (3 y)")[0], (5, 18), {"x": 2, "y": 3})
    (3, 6)
    """
    out = []
    for dim, n in zip(dims, shape, strict=True):
        groups, ring = _groups(dim, sizes), math.prod(sizes[a] for a in dim.ring)
        ranks = math.prod(sizes[a] for a in dim.axes)
        out.append(block(dim.order, -(-n // groups), ring) * groups * ring // ranks)
    return tuple(out)


def _groups(dim: Dim, sizes: Sizes) -> int:
    return math.prod(radix_of(p, sizes) for p in dim.groups.parts)


def _ways(dim: Dim, n: int, sizes: Sizes) -> int:
    """Return the number that must divide the size; an order for one length: that length."""
    groups, ring = _groups(dim, sizes), math.prod(sizes[a] for a in dim.ring)
    if declared(dim.order) is None:
        return groups * ring * (2 if dim.order == "zigzag" else 1)
    whole = groups * ring * block(dim.order, n, ring)
    return max(1, whole) if n == whole else n + 1
