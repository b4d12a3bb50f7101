"""Optimizers as composable pure transforms; ZeRO is one of them."""

from shardlib.optim.adafactor import adafactor
from shardlib.optim.adam8bit import adam8bit
from shardlib.optim.adaptive import adagrad, adam, adamw, rmsprop
from shardlib.optim.clip import (
    clip_by_global_norm,
    clip_by_parameter_norm,
    clip_by_value,
    global_norm,
    is_finite,
)
from shardlib.optim.combine import chain, identity, scale, scale_by_schedule
from shardlib.optim.groups import masked, partition, set_to_zero
from shardlib.optim.guard import loss_scale, skip_nonfinite
from shardlib.optim.interop import as_torch, from_torch
from shardlib.optim.lamb import lamb
from shardlib.optim.masters import ZeroState
from shardlib.optim.momentum import lion, sgd
from shardlib.optim.muon import muon
from shardlib.optim.names import load_state_dict, state_dict
from shardlib.optim.precision import Precision, mixed
from shardlib.optim.schedules import constant, cosine, joined, linear, warmup_cosine, wsd
from shardlib.optim.soap import soap
from shardlib.optim.step import Info, step
from shardlib.optim.transform import Transform
from shardlib.optim.trees import apply_updates
from shardlib.optim.wrap import averaged, ema, inject_hyperparams, multi_steps
from shardlib.optim.zero import zero

__all__ = [
    "Info", "Precision", "Transform", "ZeroState", "adafactor", "adagrad", "adam", "adam8bit",
    "adamw", "apply_updates", "as_torch", "averaged", "chain", "clip_by_global_norm",
    "clip_by_parameter_norm", "clip_by_value", "constant", "cosine", "ema", "from_torch",
    "global_norm", "identity", "inject_hyperparams", "is_finite", "joined", "lamb", "linear",
    "lion", "load_state_dict", "loss_scale", "masked", "mixed", "multi_steps", "muon",
    "partition", "rmsprop", "scale", "scale_by_schedule", "set_to_zero", "sgd",
    "skip_nonfinite", "soap", "state_dict", "step", "warmup_cosine", "wsd", "zero",
]  # fmt: skip
