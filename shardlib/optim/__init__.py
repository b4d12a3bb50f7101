"""Optimizers as composable pure transforms; ZeRO is one of them."""

from shardlib.optim.adafactor import adafactor
from shardlib.optim.adaptive import adagrad, adam, adam8bit, adamw, lamb, lion, rmsprop, sgd
from shardlib.optim.combine import (
    averaged,
    chain,
    ema,
    identity,
    inject_hyperparams,
    multi_steps,
    scale,
    scale_by_schedule,
)
from shardlib.optim.groups import masked, partition, set_to_zero
from shardlib.optim.interop import as_torch, from_torch
from shardlib.optim.muon import muon
from shardlib.optim.names import load_state_dict, state_dict
from shardlib.optim.norms import (
    clip_by_global_norm,
    clip_by_parameter_norm,
    clip_by_value,
    global_norm,
    is_finite,
    loss_scale,
    skip_nonfinite,
)
from shardlib.optim.precision import Precision, ZeroState, mixed
from shardlib.optim.schedules import constant, cosine, joined, linear, warmup_cosine, wsd
from shardlib.optim.soap import soap
from shardlib.optim.step import Info, apply_updates, step, value_and_step
from shardlib.optim.tiered import Tiers
from shardlib.optim.transform import Transform
from shardlib.optim.zero import zero

__all__ = [
    "Info", "Precision", "Tiers", "Transform", "ZeroState", "adafactor", "adagrad", "adam", "adam8bit",
    "adamw", "apply_updates", "as_torch", "averaged", "chain", "clip_by_global_norm",
    "clip_by_parameter_norm", "clip_by_value", "constant", "cosine", "ema", "from_torch",
    "global_norm", "identity", "inject_hyperparams", "is_finite", "joined", "lamb", "linear",
    "lion", "load_state_dict", "loss_scale", "masked", "mixed", "multi_steps", "muon",
    "partition", "rmsprop", "scale", "scale_by_schedule", "set_to_zero", "sgd",
    "skip_nonfinite", "soap", "state_dict", "step", "value_and_step", "warmup_cosine", "wsd", "zero",
]  # fmt: skip
