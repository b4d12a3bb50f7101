"""Ring layout: a sequence dimension split over one axis, in one of three orders.

``positions`` is the one source of where a rank's tokens stand: rotary embeddings, masks, label
shifts and loss weights read it.

Source: Li et al., arXiv 2105.13120; zigzag and striped orders balance causal attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardlib.errors import LayoutSyntax
from shardlib.layouts.base import Layout
from shardlib.layouts.dims import Dim, positions

__all__ = ["Ring"]


@dataclass(frozen=True)
class Ring:
    """Dimension ``dim`` split over ``axis``; the order is part of the layout's value.

    >>> Ring("s").layout, Ring("s", schedule="zigzag").layout
    (Layout('. s ...'), Layout('. zigzag(s) ...'))
    >>> Ring("s", schedule="zigzag").positions(0, 8, 2)
    [0, 1, 6, 7]
    >>> [list(Ring("s", schedule="striped").positions(r, 5, 2)) for r in range(2)]
    [[0, 2, 4], [1, 3]]
    """

    axis: str
    dim: int = 1
    schedule: str = "contiguous"

    def __post_init__(self) -> None:
        if self.schedule not in ("contiguous", "zigzag", "striped"):
            raise LayoutSyntax(
                f"unknown schedule {self.schedule!r}; there are contiguous, zigzag, striped",
                op="Ring",
                fix=f"sl.Ring({self.axis!r}, schedule='zigzag')",
            )

    @property
    def layout(self) -> Layout:
        dims = (*[Dim()] * self.dim, Dim((self.axis,), self.schedule))
        return Layout(dims, ellipsis=len(dims))

    def positions(self, rank: int, length: int, size: int) -> Sequence[int]:
        """Global positions held by ``rank`` of ``size``, for any length: also shorter than the ring."""
        if self.schedule == "contiguous":
            return range(length * rank // size, length * (rank + 1) // size)
        return positions(Dim((self.axis,), self.schedule), length, {self.axis: size}, {self.axis: rank})
