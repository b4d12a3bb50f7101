"""Ring layout: a sequence dimension split over one axis or several, in one of five orders.

``positions`` is the only source of the positions of a rank's tokens: rotary embeddings, masks,
label shifts and loss weights read it.

Source: Li et al., arXiv 2105.13120; the orders are those of orders.py.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shardlib.errors import LayoutSyntax
from shardlib.layouts.dims import Dim
from shardlib.layouts.layout import Layout
from shardlib.layouts.orders import ORDERS, Run, block, dealt, uncovered
from shardlib.mesh import Axis, axes_of


@dataclass(frozen=True)
class Ring:
    """Sequence layout: dimension ``dim`` split over ``axis`` in an order that is part of its value.

    ``axis``      a mesh axis, or several, major first.
    ``schedule``  contiguous, zigzag, striped; documents, each in zigzag order, with their borders
                  in ``cu_seqlens``; or the ranges of positions that each rank is to hold.

    >>> Ring("s").layout, Ring("s", schedule="zigzag").layout
    (Layout('. s ...'), Layout('. zigzag(s) ...'))
    >>> Ring("s", schedule="zigzag").positions(0, 8, 2)
    [0, 1, 6, 7]
    >>> [Ring("s", schedule="striped").positions(r, 5, 2) for r in range(2)]
    [[0, 2, 4], [1, 3]]
    >>> Ring("s", schedule="documents", cu_seqlens=(0, 5, 8)).layout
    Layout('. documents(s; 0 5 8) ...')
    >>> Ring("s", schedule=([range(0, 2), range(6, 8)], [range(2, 6)])).layout
    Layout('. runs(s; 0:2 6:8 | 2:6) ...')
    """

    axis: Axis
    dim: int = 1
    schedule: str | Sequence[Sequence[range]] = "contiguous"
    cu_seqlens: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.axis, str):
            object.__setattr__(self, "axis", tuple(self.axis))
        if self.cu_seqlens is not None:
            object.__setattr__(self, "cu_seqlens", tuple(int(n) for n in self.cu_seqlens))
        if not isinstance(self.schedule, str):
            object.__setattr__(self, "schedule", tuple(tuple(rank) for rank in self.schedule))
        _ = self.order  # raises LayoutSyntax

    @property
    def order(self) -> str:
        """The order as written in a layout's text.  Raises: LayoutSyntax."""
        if not isinstance(self.schedule, str):
            return _runs_order(self.schedule)
        if self.schedule not in ORDERS[:4]:
            raise _wrong(
                f"unknown schedule {self.schedule!r}; there are {', '.join(ORDERS[:4])}, or ranges "
                "per rank",
                f"sl.Ring({self.axis!r}, schedule='zigzag')",
            )
        if (self.schedule == "documents") != (self.cu_seqlens is not None):
            why = "documents, and they alone, need their borders"
            fix = f"sl.Ring({self.axis!r}, schedule='documents', cu_seqlens=(0, 5, 8))"
            raise _wrong(why, fix)
        if self.cu_seqlens is None:
            return self.schedule
        return "documents; " + " ".join(map(str, _borders(self)))

    @property
    def layout(self) -> Layout:
        dims = (*[Dim()] * self.dim, Dim(axes_of(self.axis), self.order))
        return Layout(dims, ellipsis=len(dims))

    def runs(self, rank: int, length: int, size: int) -> tuple[Run, ...]:
        """Return the (start, stride, length) runs that ``rank`` of ``size`` holds.

        ``length`` may be any, also shorter than the ring.
        """
        return dealt(self.order, length, size)[rank]

    def positions(self, rank: int, length: int, size: int) -> list[int]:
        """List the global positions held by ``rank`` of ``size``, in the rank's own order."""
        return [i for run in self.runs(rank, length, size) for i in run.positions]

    def block(self, length: int, size: int) -> int:
        """Count the positions of each rank's block.

        It is more than a rank holds where the length does not divide.
        """
        return block(self.order, length, size)


def _runs_order(schedule: Sequence[Sequence[range]]) -> str:
    """Write the order that gives each rank these ranges.  Raises: LayoutSyntax."""
    rows = ((f"{r.start}:{r.stop}:{r.step}".removesuffix(":1") for r in rank) for rank in schedule)
    order = "runs; " + " | ".join(" ".join(row) or "0:0" for row in rows)
    if wrong := uncovered(order):
        why = f"the ranges hold position {wrong}"
        fix = "sl.Ring('s', schedule=([range(0, 2), range(6, 8)], [range(2, 6)]))"
        raise _wrong(why, fix)
    return order


def _wrong(why: str, fix: str) -> LayoutSyntax:
    return LayoutSyntax(why, op="Ring", fix=fix)


def _borders(ring: Ring) -> list[int]:
    """Return the borders of the documents.  Raises: LayoutSyntax."""
    borders = list(ring.cu_seqlens or ())
    if borders[:1] != [0] or any(a > b for a, b in itertools.pairwise(borders)) or len(borders) < 2:
        better = tuple(sorted({0, 1, *map(abs, borders)}))
        why = f"borders of documents start at 0 and rise, not {borders}"
        fix = f"sl.Ring({ring.axis!r}, schedule='documents', cu_seqlens={better})"
        raise _wrong(why, fix)
    return borders
