"""Layouts: values that state how tensors are split over a mesh, and their algebra."""

from shardlib.layouts.block2d import Layout2D
from shardlib.layouts.col import Col
from shardlib.layouts.cube3d import Layout3D
from shardlib.layouts.depth25d import Layout25D
from shardlib.layouts.dims import Dim, axis_sizes, positions
from shardlib.layouts.exchange import Exchange
from shardlib.layouts.layout import Layout, LayoutFamily, LayoutLike, taken
from shardlib.layouts.layout_like import LayoutTree, as_layout, is_layout, per_leaf
from shardlib.layouts.partition import P
from shardlib.layouts.replicated import Partial, Replicated
from shardlib.layouts.reshard import ReshardPlan, ReshardStep
from shardlib.layouts.ring import Ring
from shardlib.layouts.row import Row

__all__ = [
    "Col", "Dim", "Exchange", "Layout", "Layout2D", "Layout3D", "Layout25D", "LayoutFamily",
    "LayoutLike", "LayoutTree", "P", "Partial", "Replicated", "ReshardPlan", "Ring", "Row", "ReshardStep",
    "as_layout", "axis_sizes", "is_layout", "per_leaf", "positions", "taken",
]  # fmt: skip
