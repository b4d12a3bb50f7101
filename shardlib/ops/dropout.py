"""Dropout whose mask is a function of the element's global index.

The same elements drop under every layout and every number of ranks: a counter hash of
(seed, global linear index) is compared with p.  The seed is one draw from torch's CPU
generator, so ``torch.manual_seed`` and activation checkpointing behave as usual.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import Local
from shardlib.mesh import Mesh
from shardlib.tensor import ShardedTensor, implements, partial_escape

__all__ = ["dropout", "global_index", "keep_mask"]


def global_index(x: ShardedTensor) -> Tensor:
    """Raw int64 block of the elements' linear indices in the global tensor."""
    mesh, shape = x.mesh, tuple(x.size_)
    layout = x.sharding.resolve(len(shape))
    coords = _coordinates(mesh)
    stride, parts = 1, []
    for d in range(len(shape) - 1, -1, -1):
        table = [list(layout.indices(shape, mesh, c)[d]) for c in coords]
        index = torch.tensor(table, device=x.raw.device) * stride  # [ranks, n_d]
        parts.append(index.reshape(len(coords), *([1] * d), -1, *([1] * (len(shape) - 1 - d))))
        stride *= shape[d]
    total = sum(parts) if parts else torch.zeros(len(coords), dtype=torch.int64, device=x.raw.device)
    return total if mesh.kind == "stacked" else total[0]  # type: ignore[index, return-value]


def _coordinates(mesh: Mesh) -> list[dict[str, int]]:
    if mesh.kind == "dist":
        return [dict(mesh.coord or {})]
    if mesh.kind == "record":
        return [dict.fromkeys(mesh.names, 0)]
    grid = torch.cartesian_prod(*[torch.arange(n) for n in mesh.sizes]).reshape(-1, len(mesh.sizes))
    return [dict(zip(mesh.names, row, strict=True)) for row in grid.tolist()]


def keep_mask(index: Tensor, seed: int, p: float) -> Tensor:
    """True with probability 1 - p, independently per index: a 64-bit mix (splitmix64) of seed + index.

    Source: Steele, Lea and Flood 2014, the finaliser of SplittableRandom.
    """
    out = torch.empty(index.shape, dtype=torch.bool, device=index.device)
    bar = int(p * (1 << 53))
    index, flat = index.reshape(-1), out.reshape(-1)
    step = 1 << 15 if index.device.type == "cpu" else max(index.numel(), 1)  # what a cache holds
    for at in range(0, index.numel(), step):
        x = index[at : at + step] * -7046029254386353131  # 0x9E3779B97F4A7C15
        x += seed
        x ^= (x >> 30).bitwise_and_(0x3FFFFFFFF)
        x *= -4658895280553007687  # 0xBF58476D1CE4E5B9
        x ^= (x >> 27).bitwise_and_(0x1FFFFFFFFF)
        x *= -7723592293110705685  # 0x94D049BB133111EB
        x ^= (x >> 31).bitwise_and_(0x1FFFFFFFF)
        torch.ge(x.bitwise_and_((1 << 53) - 1), bar, out=flat[at : at + step])
    return out


class _Drop(Local):
    """apply(x, keep, scale): x * scale where kept; only which are kept is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.keep, ctx.scale = keep, scale
        return (x * keep).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Drop.apply(grads[0], ctx.keep, ctx.scale), None, None


@implements(F.dropout, torch.dropout)
def dropout(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """F.dropout, the same draw for every layout."""
    names = ("input", "p", "training", "inplace")
    given = {"p": 0.5, "training": True} | dict(zip(names, args, strict=False)) | kwargs
    x, p = given["input"], given.get("p", 0.5)
    if not given.get("training", given.get("train", True)) or p == 0:
        return x
    if x.sharding.partial:
        raise partial_escape("dropout", x)
    seed = int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64))
    if x.mesh.kind == "record":
        return x.like(x.raw * 1)
    keep = keep_mask(global_index(x), seed, p)
    return x.like(_Drop.apply(x.raw, keep, 1 / (1 - p) if p < 1 else 0.0))
