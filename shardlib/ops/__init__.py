"""Implementations: importing this package fills ShardedTensor's table; the order means nothing."""

from shardlib.ops import (
    along,
    candidates,
    composite,
    contract,
    create,
    dropout,
    elementwise,
    embedding,
    fallback,
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
    views,
)

__all__ = [
    "along", "candidates", "composite", "contract", "create", "dropout", "elementwise",
    "embedding", "fallback", "foreach", "index", "initial", "linear_loss", "loss", "matmul",
    "matrix", "metadata", "norm", "normalise", "padding", "random", "recurrent", "reduce", "sdpa",
    "space", "views",
]  # fmt: skip
