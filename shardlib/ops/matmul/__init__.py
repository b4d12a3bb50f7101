"""Matrix products: torch's spellings reach the rules in choose.py."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.layouts import Layout

from shardlib.ops.matmul import oned, choose, cube, ring  # isort: skip  # rules that hold blocks only come first
from shardlib.ops.matmul.choose import product_of
from shardlib.tensor import ShardedTensor, implements

__all__ = ["addmm", "choose", "cube", "linear", "matmul", "oned", "product", "ring"]


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


@implements(torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)
def matmul(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    return product_of(*args, **kwargs)


@implements(Tensor.__rmatmul__)
def rmatmul(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    return product_of(args[1], args[0])


@implements(F.linear)
def linear(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """x @ w.T + b; w is stored (out, in)."""
    x, w, bias = (*args, *([kwargs.get("bias")] if len(args) < 3 else []))[:3]
    if isinstance(bias, ShardedTensor) and not bias.sharding.partial:
        return product_of(x, w.mT, bias=bias)
    out = product_of(x, w.mT)
    return out if bias is None else out + bias  # type: ignore[return-value]


@implements(torch.addmm, Tensor.addmm)
def addmm(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    c, a, b = args
    beta, alpha = kwargs.get("beta", 1), kwargs.get("alpha", 1)
    out = product_of(a, b)
    out = out if alpha == 1 else out * alpha
    return out + (c if beta == 1 else c * beta)
