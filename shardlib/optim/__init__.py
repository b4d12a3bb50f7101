"""Optimizers as composable pure transforms; ZeRO is one of them."""

from shardlib.optim.transforms import (
    Transform,
    adam,
    adamw,
    apply_updates,
    chain,
    clip_by_global_norm,
    global_norm,
    identity,
    lion,
    masked,
    scale,
    scale_by_schedule,
    set_to_zero,
    sgd,
)
from shardlib.optim.zero import zero

__all__ = [
    "Transform", "adam", "adamw", "apply_updates", "chain", "clip_by_global_norm", "global_norm",
    "identity", "lion", "masked", "scale", "scale_by_schedule", "set_to_zero", "sgd", "zero",
]  # fmt: skip
