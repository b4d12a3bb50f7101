"""What moves: named-axis collectives on local blocks, counted and differentiable."""

from shardlib.collectives.api import (
    Pending,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    broadcasts,
    each_rank,
    pbroadcast,
    pick,
    pmax,
    pmean,
    ppermute,
    preduce,
    preduce_add,
    pslice,
    psum,
    psum_scatter,
    pvary,
    reductions,
    shift,
    start,
    start_ppermutes,
    unwrap,
    wrap,
)
from shardlib.collectives.count import Event, Trace, expect_comm, trace
from shardlib.collectives.stacked import Stacked

__all__ = [
    "Event", "Pending", "Stacked", "Trace", "all_gather", "all_to_all", "axis_index", "axis_size", "broadcasts",
    "each_rank", "expect_comm", "pbroadcast", "pick", "pmax", "pmean", "ppermute", "preduce", "preduce_add",
    "pslice", "psum", "psum_scatter", "pvary", "reductions", "shift", "start", "start_ppermutes", "trace", "unwrap",
    "wrap",
]  # fmt: skip
