"""Row layout: the first dimension split over one axis (or several, major first)."""

from shardlib.layouts.dims import Dim
from shardlib.layouts.layout import Layout

__all__ = ["Row"]


def Row(*axes: str) -> Layout:
    """Split the first dimension of the tensor as stored.

    >>> Row("x"), Row("d", "x")
    (Layout('x ...'), Layout('(d x) ...'))
    """
    return Layout((Dim(axes),), ellipsis=1)
