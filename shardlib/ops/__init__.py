"""Rules: importing this package fills the table that ShardedTensor dispatches on."""

from shardlib.ops import (
    contract,
    conv,
    dropout,
    elementwise,
    embedding,
    loss,
    losses,
    matmul,
    norm,
    padding,
    reduce,
    sdpa,
    table,
    views,
    whole,
)

__all__ = [
    "contract", "conv", "dropout", "elementwise", "embedding", "loss", "losses", "matmul", "norm", "padding", "reduce",
    "sdpa", "table", "views", "whole",
]  # fmt: skip
