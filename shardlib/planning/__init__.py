"""Plans before a run: the bytes and memory of a step, and the best mesh for a model."""

from shardlib.layouts import ReshardPlan
from shardlib.mesh import Link
from shardlib.ops.attention import attention_plan
from shardlib.pipeline.schedules import schedule
from shardlib.planning.choose import Grids, choose
from shardlib.planning.cluster import Cluster, measured, probe
from shardlib.planning.grids import Grid3, lower_bound
from shardlib.planning.plan import Plan, plan

__all__ = [
    "Cluster", "Grid3", "Grids", "Link", "Plan", "ReshardPlan", "attention_plan", "choose",
    "lower_bound", "measured", "plan", "probe", "schedule",
]  # fmt: skip
