"""Collectives over named mesh axes, on local blocks: counted and differentiable."""

from shardlib.collectives.backends.streams import Away, Moment
from shardlib.collectives.checked import agreed, alike, check, checking, digest, verify
from shardlib.collectives.count import Event, Trace, expect_comm, trace
from shardlib.collectives.in_place import (
    gather_into,
    preduce_into,
    reductions,
    scatter_into,
)
from shardlib.collectives.posted import Pending, broadcasts, start_ppermutes
from shardlib.collectives.simulate import Stacked, Varies
from shardlib.collectives.types import (
    block_shape,
    blocks,
    differing,
    each_rank,
    first_block,
    flat_blocks,
    held,
    holds_values,
    lead,
    played,
    real,
    spans_processes,
    storage,
    storage_shape,
    unwrap,
    wrap,
)
from shardlib.collectives.verbs import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pbroadcast,
    pcast,
    pick,
    pmax,
    pmean,
    ppermute,
    preduce,
    pslice,
    psum,
    psum_scatter,
    pvary,
    ragged_all_to_all,
    shift,
    start,
)

# names for local code; the rest of the library uses the others too
__all__ = [
    "Event", "Pending", "Stacked", "Trace", "all_gather", "all_to_all", "axis_index", "axis_size",
    "expect_comm", "pbroadcast", "pcast", "pick", "pmax", "pmean", "ppermute", "preduce", "pslice",
    "psum",
    "psum_scatter", "pvary", "shift", "start", "trace",
]  # fmt: skip
