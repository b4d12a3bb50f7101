"""Layer and RMS normalisation over dimensions that may be split.

Each rank reduces its own part to (mean, M2); the parts are gathered once and merged by
Welford's rule, so a mean of 3000 costs no digits (E[x^2] - E[x]^2 would lose them all).

Source: Chan, Golub and LeVeque 1983 for the merge; arXiv 2104.05343, section 3.2.4 for the split.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import all_gather, axis_size, psum, unwrap, wrap
from shardlib.errors import Unsupported
from shardlib.mesh import Mesh, bind
from shardlib.tensor import ShardedTensor, implements, partial_escape, typeof

__all__ = ["layer_norm", "rms_norm"]


def _moments(x: Tensor, axes: tuple[str, ...], count: int) -> tuple[Tensor, Tensor]:
    """Mean and variance over the last dimension and ``axes``.  x [R, H/axes] -> [R, 1] each."""
    mean = x.mean(-1, keepdim=True)
    m2 = (x - mean).square().sum(-1, keepdim=True)
    if not axes:
        return mean, m2 / count
    parts = all_gather(torch.cat([mean, m2], -1).unsqueeze(0), axes, 0)  # [p, R, 2]
    means, m2s = parts[..., 0:1], parts[..., 1:2]
    mean = means.mean(0)
    spread = (means - mean).square().sum(0) * (count // axis_size(axes))
    return mean, (m2s.sum(0) + spread) / count


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps), or x / sqrt(mean(x^2) + eps), over ``width`` trailing dims."""

    @staticmethod
    def forward(
        ctx: Any, raw: Tensor, mesh: Mesh, axes: tuple[str, ...], width: int, count: int, eps: float, centre: bool
    ) -> Tensor:
        ctx.place = mesh, axes, width, count, centre
        with bind(mesh):
            x = wrap(raw, mesh)
            rows = _rows(x, width)
            rows = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
            if centre:
                mean, var = _moments(rows, axes, count)
                rows = rows - mean
            else:
                squares = rows.square().sum(-1, keepdim=True)
                var = (psum(squares, axes) if axes else squares) / count
            scale = (var + eps).rsqrt()
            out = (rows * scale).to(x.dtype).reshape(x.shape)
            ctx.save_for_backward(unwrap(out), unwrap(scale))
            return unwrap(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mesh, axes, width, count, centre = ctx.place
        normal_raw, scale_raw = ctx.saved_tensors
        with bind(mesh):
            grad = wrap(grads[0], mesh)
            scale = wrap(scale_raw, mesh)
            g = _rows(grad, width).to(scale.dtype)
            y = _rows(wrap(normal_raw, mesh), width).to(scale.dtype)
            sums = torch.cat([(g * y).sum(-1, keepdim=True), g.sum(-1, keepdim=True)], -1)
            sums = (psum(sums, axes) if axes else sums) / count
            dx = g - y * sums[..., 0:1]
            dx = (dx - sums[..., 1:2] if centre else dx) * scale
            return unwrap(dx.to(grad.dtype).reshape(grad.shape)), None, None, None, None, None, None


def _rows(x: Tensor, width: int) -> Tensor:
    """[..., *width dims] -> [R, H]."""
    return x.reshape(-1, math.prod(x.shape[x.ndim - width :]))


def _normalised(
    op: str, x: ShardedTensor, shape: Any, weight: Any, bias: Any, eps: float, centre: bool
) -> ShardedTensor:
    width = len(shape)
    if tuple(x.size_[-width:]) != tuple(shape):
        raise Unsupported(
            f"normalized_shape {list(shape)} is not the tail of the tensor's shape",
            op=op,
            operands={"tensor": typeof(x)},
            mesh=x.mesh,
            fix=f"F.{op}(x, {list(x.size_[-1:])})",
        )
    if x.sharding.partial:
        raise partial_escape(op, x)
    tokens = x.sharding.resolve(len(x.size_)).dims[-width:]
    axes = tuple(a for t in tokens for a in t.axes if x.mesh.axes[a] > 1)
    raw = _Normalise.apply(x.raw, x.mesh, axes, width, math.prod(shape), eps, centre)
    out: Any = x.like(raw)  # type: ignore[arg-type]
    if weight is not None:
        out = out * weight
    return out if bias is None else out + bias


@implements(F.layer_norm, torch.layer_norm)
def layer_norm(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """F.layer_norm with the normalised dimensions split or whole."""
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    x, shape = given["input"], tuple(given["normalized_shape"])
    return _normalised("layer_norm", x, shape, given.get("weight"), given.get("bias"), given.get("eps", 1e-5), True)


@implements(F.rms_norm, torch.rms_norm)
def rms_norm(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """F.rms_norm with the normalised dimensions split or whole."""
    names = ("input", "normalized_shape", "weight", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    x, eps = given["input"], given.get("eps")
    eps = torch.finfo(x.raw.dtype).eps if eps is None else eps
    return _normalised("rms_norm", x, tuple(given["normalized_shape"]), given.get("weight"), None, eps, False)
