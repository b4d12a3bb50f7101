"""Checkpoints: directories that appear whole or not at all, and load under any layout."""

from shardlib.checkpoint import dcp as dcp  # sharded tensors in torch.distributed.checkpoint
from shardlib.checkpoint.huggingface import load_hf, save_hf
from shardlib.checkpoint.reading import load
from shardlib.checkpoint.steps import latest
from shardlib.checkpoint.writing import Saving, save

__all__ = ["Saving", "latest", "load", "load_hf", "save", "save_hf"]
