"""Implementations: importing this package fills ShardedTensor's table; the order means nothing."""

from shardlib.ops import (
    along,
    candidates,
    contract,
    create,
    dropout,
    elementwise,
    embedding,
    foreach,
    index,
    initial,
    linear_loss,
    loss,
    matmul,
    matrix,
    metadata,
    norm,
    normalise,
    padding,
    random,
    recurrent,
    reduce,
    sdpa,
    space,
    spelled,
    views,
    whole,
)

__all__ = [
    "along", "candidates", "contract", "create", "dropout", "elementwise", "embedding", "foreach",
    "index", "initial", "linear_loss", "loss", "matmul", "matrix", "metadata", "norm", "normalise",
    "padding", "random", "recurrent", "reduce", "sdpa", "space", "spelled", "views", "whole",
]  # fmt: skip
