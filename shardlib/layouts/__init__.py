"""Layouts: values that state how tensors are split over a mesh, and their algebra."""

from shardlib.layouts.dims import Dim, positions
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
