"""Ring attention by a chosen engine, and attention that is linear in the sequence.

``sl.ring_attention`` takes an engine as its ``algorithm``: ``algorithm=sl.attention.DoubleRing(2)``.
Without one it compares the price of all, as ``sl.why("attention", q, k, v)`` shows.
"""

from shardlib.ops.attention.engines import (
    RSA,
    AllGather,
    BothWays,
    Canonical,
    DoubleRing,
    Halo,
    OneWay,
    PassQ,
    Ulysses,
)
from shardlib.ops.attention.linformer import linformer_attention

__all__ = [
    "RSA",
    "AllGather",
    "BothWays",
    "Canonical",
    "DoubleRing",
    "Halo",
    "OneWay",
    "PassQ",
    "Ulysses",
    "linformer_attention",
]
