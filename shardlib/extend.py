"""Interface for authors of algorithms, engines and masks; see ``docs/writing_an_algorithm.md``.

An *operator* has one implementation and, for matmul and attention, several *algorithms*.  Each
checks a case and returns a ``Match`` (the result's layout, its price, a function that runs) or a
sentence with the reason why it does not fit.  An algorithm of matmul runs a ``Schedule``; one of
attention is an ``Engine``: it makes plans, lists their communication, and runs them.

``operator`` declares an operator of torch.library by one record, an ``OpSpec``.  ``schedule``
registers a schedule of pipelines: a function that lists the actions of each rank.
"""

from shardlib.cost import Cost, moving, summing
from shardlib.layouts import LayoutFamily
from shardlib.layouts.orders import Run
from shardlib.ops.attention.case import AttentionCase
from shardlib.ops.attention.engine import (
    AttentionJob,
    AttentionMove,
    AttentionPlan,
    Engine,
    Moves,
    register_engine,
)
from shardlib.ops.attention.local import (
    LocalQueries,
    add_sink,
    gathered,
    local_queries,
    positions,
    scattered,
    started,
    sums_like,
    viewed,
)
from shardlib.ops.attention.masks import At, Mask, Relation
from shardlib.ops.declare import operator
from shardlib.ops.matmul.case import MatmulCase
from shardlib.ops.matmul.function import Schedule
from shardlib.ops.registry import Match, algorithm, remove
from shardlib.opspec import OpSpec
from shardlib.pipeline.schedules import register as schedule

__all__ = [
    "At", "AttentionCase", "AttentionJob", "AttentionMove", "AttentionPlan", "Cost", "Engine",
    "LayoutFamily", "LocalQueries", "Mask", "Match", "MatmulCase", "Moves", "OpSpec", "Relation",
    "Run", "Schedule", "add_sink", "algorithm", "gathered", "local_queries", "moving", "operator",
    "positions", "register_engine", "remove", "scattered", "schedule", "started", "summing", "sums_like",
    "viewed",
]  # fmt: skip
