"""Extremes along one dimension and their positions: max, argmax, topk, kthvalue.

Where the dimension is split each rank finds the best elements of its block; only these and their
positions are gathered, and the best of them are chosen.  Blocks need not be in order, so ties are
broken by position.
"""

import math
from typing import Any

import torch
from torch import Tensor

from shardlib.collectives import flat_blocks
from shardlib.layouts import Dim, Layout
from shardlib.ops import counter_rng
from shardlib.ops.declare import along
from shardlib.ops.dims import rows_call
from shardlib.ops.each_rank import FlatCall, each
from shardlib.ops.padding import beside, neutral, the_dim
from shardlib.ops.reduce import extreme
from shardlib.ops.signatures import binder, dim_of
from shardlib.opspec import Args, Func, Kwargs
from shardlib.placing import reshard
from shardlib.tensor import Place, ShardedTensor, implements, real_axes

_MAX = binder("""
    max(input)
    max(input, dim: int, keepdim: bool = False)
    max(input, other: tensor)
""")


_OF = {
    "max": (torch.maximum, torch.amax, torch.return_types.max),
    "min": (torch.minimum, torch.amin, torch.return_types.min),
}
"""The extreme of two tensors, that along dimensions, and the type of values and positions."""


def _extreme_of_elements(run: Func, func: Func, args: Args, kwargs: Kwargs) -> object:
    """Take the extreme of an operand with padding, of which none is chosen."""
    given = _MAX(*args, **kwargs)
    if "other" in given:
        return run(func, args, kwargs)
    if "dim" not in given:
        return neutral(run, func, args, kwargs)
    return beside(the_dim(_MAX))(run, func, args, kwargs)


@implements(torch.max, Tensor.max, torch.min, Tensor.min, padding=_extreme_of_elements)
def max_or_min(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Take the extreme of all elements, or along a dimension with its positions.

    Of two tensors, take the elementwise extreme.
    """
    given = _MAX(*args, **kwargs)
    of_two, along_dims, named = _OF[func.__name__]
    if "other" in given:
        return of_two(*given.values())
    if "dim" not in given:
        return extreme(along_dims, given["input"], None, False, nans=True)
    x, dim, keepdim = given.values()
    if not _is_split(x, dim):
        return rows_call(func, args, kwargs, lambda a, k: along(_MAX(*a, **k)))
    values, where = _candidates(lambda block, d: func(block, d, True), x, dim % x.ndim)
    return named(_kept(_first_of(func.__name__, values, where, dim % x.ndim), dim, keepdim))


def _kept(found: tuple[Tensor, Tensor], dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Return values and positions, without the dimension of one unless it is kept."""
    if keepdim:
        return found
    values, where = found
    return values.squeeze(dim), where.squeeze(dim)


_ARG = binder("argmax(input, dim: int = None, keepdim: bool = False)")


@implements(torch.argmax, Tensor.argmax, torch.argmin, Tensor.argmin, padding=beside(the_dim(_ARG)))
def arg_extreme(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Return the position of the first extreme; without ``dim``, in the flattened tensor."""
    x, dim, keepdim = _ARG(*args, **kwargs).values()
    if dim is not None and _is_split(x, dim):
        return getattr(torch, func.__name__[3:])(x.detach(), dim, keepdim).indices
    if dim is not None or not _is_split(x, None):
        return rows_call(func, args, kwargs, lambda a, k: along(_ARG(*a, **k)))
    out = _first_of(func.__name__[3:], *_one_each(func, x.detach()), 0)[1]
    return out.reshape([1] * x.ndim if keepdim else ())


_TOPK = binder("topk(input, k: int, dim: int = -1, largest: bool = True, sorted: bool = True)")
_KTH = binder("kthvalue(input, k: int, dim: int = -1, keepdim: bool = False)")


@implements(torch.topk, Tensor.topk, padding=beside(the_dim(_TOPK)))
def topk(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Find the best k along a dimension among the best k of each block.

    torch does not specify which of equal values are taken.
    """
    x, k, dim, largest, ordered = _TOPK(*args, **kwargs).values()
    if not _is_split(x, dim) or not 0 < k < _block(x, dim):
        return rows_call(func, args, kwargs, lambda a, k: along(_TOPK(*a, **k)))
    return torch.return_types.topk(best(x, k, dim % x.ndim, largest, ordered))


def best(
    x: ShardedTensor, k: int, dim: int, largest: bool = True, ordered: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the best k along a split dimension, and their positions in the tensor."""

    def here(block: Tensor, d: int) -> tuple[Tensor, Tensor]:
        return torch.topk(block, min(k, block.shape[d]), d, largest)

    values, where = _candidates(here, x, dim)
    values, at = torch.topk(values, k, dim, largest, ordered)
    return values, where.gather(dim, at)


@implements(torch.kthvalue, Tensor.kthvalue, padding=beside(the_dim(_KTH)))
def kthvalue(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Find the k-th smallest along a dimension among the k smallest of each block."""
    x, k, dim, keepdim = _KTH(*args, **kwargs).values()
    if not _is_split(x, dim) or not 0 < k < _block(x, dim):
        return rows_call(func, args, kwargs, lambda a, k: along(_KTH(*a, **k)))
    values, where = _candidates(lambda block, d: torch.topk(block, k, d, False), x, dim % x.ndim)
    values, at = torch.kthvalue(values, k, dim, True)
    return torch.return_types.kthvalue(_kept((values, where.gather(dim, at)), dim, keepdim))


def _is_split(x: ShardedTensor, dim: int | None) -> bool:
    """Check whether ``dim`` (None: any dimension) of a non-empty tensor is split over ranks."""
    ndim = len(x.padded_shape)
    if dim is not None:
        dim = dim_of(dim, ndim, "max")
    tokens = x.sharding.resolve(ndim).dims
    axes = x.sharding.axes if dim is None or not ndim else tokens[dim].axes
    return bool(real_axes(x.mesh, axes)) and 0 not in x.padded_shape and not x.sharding.partial


def _block(x: ShardedTensor, dim: int) -> int:
    return x.sharding.local_shape(tuple(x.padded_shape), x.mesh)[dim]


def _positions(x: ShardedTensor) -> list[Tensor]:
    """List, per dimension, the positions of this rank's block: [n] (simulated: [ranks, n])."""
    return [flat_blocks(counter_rng.along(x, d), x.mesh) for d in range(len(x.padded_shape))]


def _candidates(best: Any, x: ShardedTensor, d: int) -> tuple[Tensor, Tensor]:
    """Gather each block's best along dimension ``d`` and their positions in the tensor.

    Both are whole along ``d``.
    """

    def here(block: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        values, at = best(block, d)
        return values, places.to(at.device)[at]

    raw, where = each(FlatCall.of(here, x.raw, _positions(x)[d]), x.mesh)
    dims = list(x.dims)
    dims[d] = Dim(dims[d].axes)
    size = list(x.padded_shape)
    size[d] = raw.shape[d - len(size)] * x.mesh.axis_size(dims[d].axes)
    split, whole = Layout(tuple(dims)), Layout((*dims[:d], Dim(), *dims[d + 1 :]))
    values = x.becomes(raw, split, torch.Size(size))
    return reshard(values, whole), reshard(
        ShardedTensor(where, Place(split, torch.Size(size), x.mesh)), whole
    )


def _one_each(func: Func, x: ShardedTensor) -> tuple[Tensor, Tensor]:
    """Return every rank's extreme and its position in the flattened tensor: [ranks] each."""
    strides = [math.prod(x.padded_shape[d + 1 :]) for d in range(len(x.padded_shape))]

    def here(block: Tensor, *places: Tensor) -> tuple[Tensor, Tensor]:
        at = func(block)
        spots = torch.unravel_index(at, block.shape)
        place = sum(p.to(at.device)[i] * s for p, i, s in zip(places, spots, strides, strict=True))
        return block.flatten()[at].reshape(1), torch.as_tensor(place).reshape(1)

    raw, where = each(FlatCall.of(here, x.raw, *_positions(x)), x.mesh)
    axes = real_axes(x.mesh, x.sharding.axes)
    lies, size = Layout((Dim(axes),)), torch.Size([x.mesh.axis_size(axes)])
    return tuple(reshard(ShardedTensor(t, Place(lies, size, x.mesh)), ".") for t in (raw, where))  # type: ignore[return-value]


def _first_of(extreme: str, values: Tensor, where: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Return the extreme along ``d`` and its first position; NaN precedes all, as in torch."""
    known = values.detach()
    best = known == _OF[extreme][1](known, d, True)
    if values.dtype.is_floating_point:
        best = best | known.isnan()
    at = torch.where(best, where, torch.iinfo(where.dtype).max).argmin(d, True)
    return values.gather(d, at), where.gather(d, at)
