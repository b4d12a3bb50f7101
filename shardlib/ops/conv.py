"""Convolution of patches: a matrix product over their pixels, local where batch and filters are split.

Source: Dosovitskiy et al., arXiv 2010.11929, section 3.1 (patch embedding).
"""

from typing import Any

import torch
import torch.nn.functional as F

from shardlib.errors import ImplicitCommunication
from shardlib.layouts import Layout
from shardlib.tensor import ShardedTensor, implements, lift, local_call, partial_escape, typeof, vary

__all__ = ["conv2d"]


@implements(F.conv2d, torch.conv2d)
def conv2d(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """x [B, C, H, W], weight [O, C, h, w], bias [O]: B and O may be split, over other axes; the rest is whole."""
    given = (
        dict(zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args, strict=False)) | kwargs
    )
    x, w, bias = given.pop("input"), given.pop("weight"), given.pop("bias", None)
    mesh = next(t.mesh for t in (x, w, bias) if isinstance(t, ShardedTensor))
    x, w = lift(x, mesh, "conv2d"), lift(w, mesh, "conv2d")
    bias = None if bias is None else lift(bias, mesh, "conv2d")
    for value in (v for v in (x, w, bias) if v is not None):
        if value.sharding.partial:
            raise partial_escape("conv2d", value)
    (batch, *of_x), (filters, *of_w) = x.sharding.resolve(4).dims, w.sharding.resolve(4).dims
    alike = bias is None or bias.sharding.resolve(1).dims[0] == filters
    grouped = given.get("groups", 1) != 1 and filters.is_split
    if any(d.is_split for d in (*of_x, *of_w)) or set(batch.axes) & set(filters.axes) or not alike or grouped:
        raise ImplicitCommunication(
            "a convolution is local where x is split by batch, and weight and bias by filters, over other axes",
            op="conv2d",
            operands={"x": typeof(x), "weight": typeof(w)} | ({} if bias is None else {"bias": typeof(bias)}),
            mesh=mesh,
            fix="F.conv2d(*(sl.reshard(t, '...') for t in (x, weight, bias)))",
        )
    out = Layout(dims=(batch, filters, *of_x[1:]))
    operands = [v for v in (x, w, bias) if v is not None]
    deferred = frozenset(a for v in operands for a in v.deferred) - set(out.axes)
    meets = {*out.axes, *deferred}
    raws = [vary(v.raw, mesh, meets.difference(v.sharding.axes, v.deferred)) for v in operands]
    raw = local_call(func, mesh, tuple(raws), given)
    local = raw.shape[1:] if mesh.kind == "stacked" else raw.shape
    return ShardedTensor(raw, out, torch.Size((x.size_[0], w.size_[0], *local[2:])), mesh, deferred)
