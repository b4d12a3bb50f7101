"""Plans before a run: the bytes and memory of a step, and the best mesh for a model."""

from shardlib.cost import lower_bound
from shardlib.layouts import ReshardPlan
from shardlib.mesh import Link
from shardlib.ops.attention import attention_plan
from shardlib.pipeline.schedules import schedule
from shardlib.planning.cluster import Cluster, measured, probe
from shardlib.planning.plan import Plan, choose, plan

__all__ = [
    "Cluster", "Link", "Plan", "ReshardPlan", "attention_plan", "choose",
    "lower_bound", "measured", "plan", "probe", "schedule",
]  # fmt: skip
