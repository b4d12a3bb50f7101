"""Rules: importing this package fills the table that ShardedTensor dispatches on."""

from shardlib.ops import dropout, elementwise, embedding, loss, matmul, norm, padding, reduce, sdpa, views

__all__ = ["dropout", "elementwise", "embedding", "loss", "matmul", "norm", "padding", "reduce", "sdpa", "views"]
