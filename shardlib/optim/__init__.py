"""Optimizers as composable pure transforms; ZeRO is one of them."""

from shardlib.optim.adaptive import adam, adamw
from shardlib.optim.clip import clip_by_global_norm, global_norm
from shardlib.optim.combine import chain, identity, masked, scale, scale_by_schedule, set_to_zero
from shardlib.optim.momentum import lion, sgd
from shardlib.optim.schedules import constant, cosine, joined, linear, warmup_cosine, wsd
from shardlib.optim.transform import Transform
from shardlib.optim.trees import apply_updates
from shardlib.optim.zero import zero

__all__ = [
    "Transform", "adam", "adamw", "apply_updates", "chain", "clip_by_global_norm", "constant",
    "cosine", "global_norm", "identity", "joined", "linear", "lion", "masked", "scale",
    "scale_by_schedule", "set_to_zero", "sgd", "warmup_cosine", "wsd", "zero",
]  # fmt: skip
