"""Pictures: where blocks lie, what parameters take, and what an algorithm sends, step by step."""

from shardlib.seeing.blocks import draw, visualize
from shardlib.seeing.frames import Frames, frames
from shardlib.seeing.summary import Summary, summary

__all__ = ["Frames", "Summary", "draw", "frames", "summary", "visualize"]
