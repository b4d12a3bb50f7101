"""Matrix products: torch's spellings reach the rules in choose.py."""

from torch import Tensor

from shardlib.layouts import Layout
from shardlib.ops.matmul import choose, cube, oned, ring, streamed
from shardlib.ops.matmul.choose import product_of
from shardlib.tensor import ShardedTensor

__all__ = ["choose", "cube", "oned", "product", "ring", "streamed"]


def product(x: Tensor, w: Tensor, out: Layout | str | None = None) -> ShardedTensor:
    """X @ W, where the result must lie as ``out`` says; the layouts of X, W and Y decide which axis moves what.

    Shapes: x [..., M, K], w [K, N] -> [..., M, N].
    Raises: NoRule listing every algorithm and why it does not give that layout.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(tp=2):
    ...     x, w = sl.shard(torch.ones(4, 8), ". tp"), sl.shard(torch.ones(8, 6), "tp .")
    ...     sl.typeof(x @ w), sl.typeof(sl.matmul(x, w, out="tp ."))
    ('f32[4, 6]', 'f32[4@tp, 6]')
    """
    return product_of(x, w, out)
