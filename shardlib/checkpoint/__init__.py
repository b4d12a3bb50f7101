"""Checkpoints: directories that appear whole or not at all, and load under any layout."""

from shardlib.checkpoint.reading import load
from shardlib.checkpoint.steps import latest
from shardlib.checkpoint.writing import Saving, save

__all__ = ["Saving", "latest", "load", "save"]
