"""Attention over a split sequence: masks, plans, and the engines that run them."""

from shardlib.ops.attention.linformer import linformer_attention
from shardlib.ops.attention.op import attention_plan, ring_attention

__all__ = ["attention_plan", "linformer_attention", "ring_attention"]
