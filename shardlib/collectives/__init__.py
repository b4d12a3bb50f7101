"""Collectives over named mesh axes, on local blocks: counted and differentiable."""

from shardlib.collectives.api import (
    Pending,
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    blocks,
    broadcasts,
    each_rank,
    gather_into,
    held,
    holds_values,
    lead,
    pbroadcast,
    pcast,
    pick,
    played,
    pmax,
    pmean,
    ppermute,
    preduce,
    preduce_into,
    pslice,
    psum,
    psum_scatter,
    pvary,
    reductions,
    scatter_into,
    shift,
    spans_processes,
    start,
    start_ppermutes,
    storage,
    unwrap,
    wrap,
)
from shardlib.collectives.backends.streams import Away, Moment
from shardlib.collectives.checked import check, checking, digest
from shardlib.collectives.count import Event, Trace, expect_comm, trace
from shardlib.collectives.replica_check import agreed, verify
from shardlib.collectives.simulate import Stacked
from shardlib.collectives.varying import Varies, differing, real

__all__ = [  # names for local code; the rest of the library uses the others too
    "Event", "Pending", "Stacked", "Trace", "all_gather", "all_to_all", "axis_index", "axis_size",
    "expect_comm", "pbroadcast", "pcast", "pick", "pmax", "pmean", "ppermute", "preduce", "pslice",
    "psum",
    "psum_scatter", "pvary", "shift", "start", "trace",
]  # fmt: skip
