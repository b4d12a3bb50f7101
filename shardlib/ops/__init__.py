"""Rules: importing this package fills the table that ShardedTensor dispatches on."""

from shardlib.ops import conv, dropout, elementwise, embedding, loss, matmul, norm, padding, reduce, sdpa, views

__all__ = [
    "conv", "dropout", "elementwise", "embedding", "loss", "matmul", "norm", "padding", "reduce", "sdpa", "views",
]  # fmt: skip
