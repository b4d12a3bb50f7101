"""The laws that an algorithm, an attention engine or a mask of one's own must keep, each as one
call.
"""

from shardlib.testing.attention import check_engine, check_mask, dense_attention
from shardlib.testing.matmul import check_algorithm

__all__ = ["check_algorithm", "check_engine", "check_mask", "dense_attention"]
