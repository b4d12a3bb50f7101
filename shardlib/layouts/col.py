"""Column layout: the last dimension split over one axis (or several, major first)."""

from shardlib.layouts.dims import Dim
from shardlib.layouts.layout import Layout

__all__ = ["Col"]


def Col(*axes: str) -> Layout:
    """Split the last dimension of the tensor as stored.

    >>> Col("y")
    Layout('... y')
    """
    return Layout((Dim(axes),), ellipsis=0)
