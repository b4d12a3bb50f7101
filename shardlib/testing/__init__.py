"""Checks for your own algorithm, attention engine, mask or layout, one call each."""

from shardlib.testing.attention import check_engine, check_mask, dense_attention
from shardlib.testing.layout import check_layout
from shardlib.testing.matmul import check_algorithm

__all__ = ["check_algorithm", "check_engine", "check_layout", "check_mask", "dense_attention"]
