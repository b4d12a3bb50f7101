"""Attention over a split sequence: masks, plans, and the engines that carry them out."""

from shardlib.ops.attention.linformer import linformer_attention
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
from shardlib.ops.attention.op import attention_plan, ring_attention

__all__ = [
    "ALiBi", "Bias", "Causal", "Documents", "Full", "Mask", "Padding", "Prefix", "Window", "attention_plan",
    "linformer_attention", "mask_mod", "ring_attention",
]  # fmt: skip
