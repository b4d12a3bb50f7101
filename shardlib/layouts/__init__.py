"""Layouts: values that state how tensors are split over a mesh, and their algebra."""

from shardlib.layouts.dims import Dim, axis_sizes, positions
from shardlib.layouts.families import (
    Col,
    Layout2D,
    Layout3D,
    Layout25D,
    P,
    Partial,
    Replicated,
    Row,
)
from shardlib.layouts.layout import (
    Layout,
    LayoutFamily,
    LayoutLike,
    LayoutTree,
    as_layout,
    is_layout,
    per_leaf,
    taken,
)
from shardlib.layouts.reshard import Exchange, ReshardPlan, ReshardStep
from shardlib.layouts.ring import Ring

__all__ = [
    "P", "Col", "Dim", "Exchange", "Layout", "Layout25D", "Layout2D", "Layout3D", "LayoutFamily",
    "LayoutLike", "LayoutTree", "Partial", "Replicated", "ReshardPlan", "ReshardStep", "Ring",
    "Row", "as_layout", "axis_sizes", "is_layout", "per_leaf", "positions", "taken",
]  # fmt: skip
