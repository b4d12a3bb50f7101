"""Pictures: blocks per rank, bytes of parameters, transfers of algorithms, timelines of steps."""

from shardlib.seeing.blocks import draw, visualize
from shardlib.seeing.canvas import style
from shardlib.seeing.frames import Frames, frames
from shardlib.seeing.pipelines import step_chart
from shardlib.seeing.plans import PlanChart
from shardlib.seeing.summary import Summary, summary
from shardlib.seeing.timeline import Timeline, merged, timeline

__all__ = [
    "Frames", "PlanChart", "Summary", "Timeline", "draw", "frames", "merged", "step_chart", "style", "summary",
    "timeline", "visualize",
]  # fmt: skip
