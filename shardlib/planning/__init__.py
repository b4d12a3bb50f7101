"""Plans before a run: the bytes and memory of a step, and the best mesh for a model."""

from shardlib.layouts import ReshardPlan
from shardlib.mesh import Link
from shardlib.ops.attention import attention_plan
from shardlib.pipeline.schedules import schedule
from shardlib.planning.choose import choose
from shardlib.planning.cluster import Cluster, measured, probe
from shardlib.planning.grids import Grid3, lower_bound
from shardlib.planning.joint import LayoutPlan, plan_layouts
from shardlib.planning.plan import Plan, plan

__all__ = [
    "Cluster", "Grid3", "LayoutPlan", "Link", "Plan", "ReshardPlan", "attention_plan", "choose",
    "lower_bound", "measured", "plan", "plan_layouts", "probe", "schedule",
]  # fmt: skip
