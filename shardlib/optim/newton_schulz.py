"""Newton-Schulz iteration: the nearest orthogonal matrix, by matrix products alone.

X <- a X + (b A + c A A) X with A = X X^T, five times from X = G / |G|: singular values approach 1,
singular vectors do not change.

Source: Jordan et al., Muon (2024), kellerjordan.github.io/posts/muon; the coefficients are those of
torch.optim.Muon.
"""

import torch
from torch import Tensor

from shardlib.optim.norms import totals
from shardlib.placing import reshard
from shardlib.tensor import ShardedTensor

__all__ = ["COEFFICIENTS", "Coefficients", "flops", "on_blocks", "orthogonal"]

Coefficients = tuple[float, float, float]

# steepest at 0, so that small singular values grow fast; they end near 1, not at 1
COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)


def orthogonal(
    x: Tensor, coefficients: Coefficients = COEFFICIENTS, steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """Orthogonalise unsharded matrices, each of a batch on its own.

    Shapes: x [..., m, n] -> [..., m, n].

    >>> orthogonal(torch.diag(torch.tensor([3.0, 2.0]))).diagonal().round(decimals=2)
    tensor([1.1200, 0.6800])
    """
    if not x.numel():
        return x
    a, b, c = coefficients
    # X X^T is smaller with the short side first
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x).reshape(-1, min(x.shape[-2:]), max(x.shape[-2:]))
    y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    out = y.reshape(x.mT.shape if tall else x.shape)
    return out.mT if tall else out


def on_blocks(
    x: ShardedTensor,
    coefficients: Coefficients = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
) -> ShardedTensor:
    """Orthogonalise a matrix in its layout, with sharded products: no rank holds it whole.

    Shapes: x [m, n], in any layout -> the same.
    """
    a, b, c = coefficients
    place = x.place
    tall = x.shape[0] > x.shape[1]
    (found,) = totals([x])
    assert found[0] is not None, "a matrix has a norm"
    y = x.with_padding
    y = y.becomes(y.raw / found[0].sqrt().clamp(min=eps).to(y.raw.device, y.raw.dtype))
    if tall:
        y = y.mT
    for _ in range(steps):
        gram = _summed(y @ y.mT)
        mixed = gram * b + _as(_summed(gram @ gram), gram) * c
        y = y * a + _as(_summed(mixed @ y), y)
    y = y.mT if tall else y
    return ShardedTensor(reshard(y, place.layout).raw.contiguous(), place)


def _summed(x: Tensor) -> ShardedTensor:
    """Return the product with its pending sum completed, in its own layout."""
    assert isinstance(x, ShardedTensor), "a product of sharded matrices is one"
    return reshard(x, x.sharding.bare) if x.sharding.partial else x


def _as(x: ShardedTensor, other: Tensor) -> ShardedTensor:
    assert isinstance(other, ShardedTensor), "a product of sharded matrices is one"
    return x if x.sharding == other.sharding else reshard(x, other.sharding)


def flops(m: int, n: int, steps: int = 5) -> int:
    """Count the flops for one matrix.

    >>> flops(2, 3)
    320
    """
    m, n = min(m, n), max(m, n)
    # per step: two products of 2 m m n flops, one of 2 m^3
    return steps * (4 * m * m * n + 2 * m**3)
