"""Masks of attention in global positions: ``Causal() & Documents(borders)``, or your own.

``sl.ring_attention`` and ``F.scaled_dot_product_attention`` accept them; ``&`` joins two.
"""

from shardlib.ops.attention.masks import (
    ALiBi,
    Bias,
    Causal,
    Documents,
    Full,
    Mask,
    Padding,
    Prefix,
    Window,
)
from shardlib.ops.attention.masks import MaskMod as mask_mod

__all__ = [
    "ALiBi",
    "Bias",
    "Causal",
    "Documents",
    "Full",
    "Mask",
    "Padding",
    "Prefix",
    "Window",
    "mask_mod",
]
