"""Checkpoints: directories that appear complete or not at all, and load under any layout."""

# sharded tensors in torch.distributed.checkpoint
from shardlib.checkpoint import dcp as dcp
from shardlib.checkpoint.converting import from_hf, reshard, to_hf
from shardlib.checkpoint.huggingface import load_hf, save_hf
from shardlib.checkpoint.reading import load
from shardlib.checkpoint.steps import About, Saved, describe, latest, steps, verify
from shardlib.checkpoint.writing import Saving, save

__all__ = [
    "About",
    "Saved",
    "Saving",
    "describe",
    "from_hf",
    "latest",
    "load",
    "load_hf",
    "reshard",
    "save",
    "save_hf",
    "steps",
    "to_hf",
    "verify",
]
