"""Attention engines: each file ends with its engine's registration; import order has no effect."""

from shardlib.ops.attention.engines.allgather import AllGather, Canonical
from shardlib.ops.attention.engines.ring import BothWays, DoubleRing, Halo, OneWay, PassQ
from shardlib.ops.attention.engines.rsa import RSA
from shardlib.ops.attention.engines.ulysses import Ulysses

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
]
