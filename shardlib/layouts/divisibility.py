"""Divisibility of a shape by a layout on a mesh, and the size of a block."""

import math
import re
from collections.abc import Mapping, Sequence

from shardlib.errors import UnevenSplit, UnknownAxis, similar
from shardlib.layouts.dims import WHOLE, Dim
from shardlib.layouts.orders import block, declared, uncovered

__all__ = ["block_shape", "check_axes", "check_sizes"]

Sizes = Mapping[str, int]


def check_axes(axes: Sequence[str], sizes: Sizes, text: str, op: str) -> None:
    """Raise UnknownAxis if a layout, written ``text``, names an axis that the mesh lacks."""
    for axis in axes:
        if axis in sizes:
            continue
        near = similar(axis, sizes.keys() - set(axes), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        better = re.sub(rf"\b{re.escape(axis)}\b", near[0], text) if near else "..."
        raise UnknownAxis(
            f"unknown axis {axis!r}; this mesh has {', '.join(sizes)}{hint}",
            op=op,
            operands={"layout": text},
            mesh=dict(sizes),
            fix=f"sl.Layout.parse({better!r})",
        )


def check_sizes(
    dims: Sequence[Dim], shape: Sequence[int], sizes: Sizes, text: str, op: str
) -> None:
    """Raise UnevenSplit if a dimension does not divide over the axes that split it."""
    for d, (dim, n) in enumerate(zip(dims, shape, strict=True)):
        ways = _ways(dim, n, sizes)
        length = declared(dim.order)
        held = uncovered(dim.order) if n % ways == 0 and n == length else ""
        if n % ways == 0 and not held:
            continue
        if held:
            what = f"does not fit {dim}, which holds position {held}"
            without = " ".join(map(str, (*dims[:d], WHOLE, *dims[d + 1 :])))
            fix = f"sl.shard(x, {without!r})"
        elif length is not None:
            rest = "whose shares differ" if n == length else f"written for {length}"
            what = f"does not fit {dim}, {rest}"
            without = " ".join(map(str, (*dims[:d], WHOLE, *dims[d + 1 :])))
            fix = f"sl.shard(x, {without!r})"
        else:
            over = (
                f"mesh axis {dim.axes[0]!r} (size {sizes[dim.axes[0]]}"
                if len(dim.parts) == 1
                else f"{dim} ({ways} parts"
            )
            what = f"does not divide over {over}, remainder {n % ways})"
            whole = "sl.unshard(x)" if op == "reshard" else "x"
            fix = f"sl.shard({whole}, {text!r}, pad=True)"
        raise UnevenSplit(
            f"dimension {d} of size {n} {what}",
            op=op,
            operands={"tensor": list(shape), "layout": text},
            mesh=dict(sizes),
            fix=fix,
        )


def block_shape(dims: Sequence[Dim], shape: Sequence[int], sizes: Sizes) -> tuple[int, ...]:
    """Return the shape of each rank's block; dimensions that do not divide are rounded up.

    >>> from shardlib.layouts.text import read
    >>> block_shape(read("x (3 y)")[0], (5, 18), {"x": 2, "y": 3})
    (3, 6)
    """
    out = []
    for dim, n in zip(dims, shape, strict=True):
        ranks = math.prod(sizes[a] for a in dim.axes)
        if declared(dim.order) is None:
            ways = _ways(dim, n, sizes)
            out.append(-(-n // ways) * ways // ranks)
        else:
            groups, ring = _groups(dim, sizes), math.prod(sizes[a] for a in dim.ring)
            out.append(block(dim.order, n // groups, ring) * groups * ring // ranks)
    return tuple(out)


def _groups(dim: Dim, sizes: Sizes) -> int:
    return math.prod(p if isinstance(p, int) else sizes[p] for p in dim.groups.parts)


def _ways(dim: Dim, n: int, sizes: Sizes) -> int:
    """Return the number that must divide the size; an order for one length: that length."""
    groups, ring = _groups(dim, sizes), math.prod(sizes[a] for a in dim.ring)
    if declared(dim.order) is None:
        return groups * ring * (2 if dim.order == "zigzag" else 1)
    whole = groups * ring * block(dim.order, n, ring)
    return max(1, whole) if n == whole else n + 1
