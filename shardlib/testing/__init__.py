"""The laws that an algorithm, an engine, a mask or a layout of one's own keeps, each as one call."""

from shardlib.testing.attention import check_engine, check_mask, dense_attention
from shardlib.testing.layout import check_layout
from shardlib.testing.matmul import check_algorithm

__all__ = ["check_algorithm", "check_engine", "check_layout", "check_mask", "dense_attention"]
