"""Factory methods of a sharded tensor: new_zeros and others, which read only its metadata."""

import torch
from torch import Tensor

from shardlib._compat import unseen
from shardlib.collectives import storage_shape
from shardlib.layouts import Dim, Layout
from shardlib.ops.declare import Bound, declare, slots
from shardlib.ops.dims import Labels
from shardlib.opspec import Args, Func, Kwargs
from shardlib.tensor import Place, ShardedTensor, implements, replicated


@implements(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor, takes="all")
def new(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Return the same value on every rank."""
    x = args[0]
    return replicated(func(x.raw.new_empty(0), *args[1:], **kwargs), x.mesh)


@implements(Tensor.new_empty)
def new_empty(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Return an empty tensor; its dimensions of the same size as ``x``'s are split alike.

    Such a tensor is usually a buffer for blocks of ``x``.
    """
    x = args[0]
    with unseen():
        whole = func(torch.empty(0, dtype=x.dtype, device="meta"), *args[1:], **kwargs)
    if type(x) is not ShardedTensor or whole.ndim != x.ndim:
        return new(func, args, kwargs)
    dims = x.sharding.resolve(x.ndim).dims
    layout = Layout(
        tuple(
            t if n == m else Dim()
            for t, n, m in zip(dims, whole.shape, x.padded_shape, strict=True)
        )
    )
    local = layout.local_shape(tuple(whole.shape), x.mesh)
    raw = torch.empty(
        storage_shape(x.mesh, *local),
        dtype=whole.dtype,
        device=x.raw.device,
        requires_grad=whole.requires_grad,
    )
    return ShardedTensor(raw, Place(layout, whole.shape, x.mesh))


@declare("meshgrid(*tensors: tensor, indexing=None)")
def _grid(b: Bound) -> Labels:
    """Label each operand differently: each has one dimension of the result."""
    return {s.at: (k,) * s.ndim for k, s in enumerate(slots(b["tensors"]))}
