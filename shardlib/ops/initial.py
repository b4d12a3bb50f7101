"""Initialisation by torch.nn.init: global fan-in and fan-out, and values keyed by position.

Most of it runs torch's own code, which fills tensors in place (random.py).  This file has the
functions that would draw from each rank's generator, move data, or write single elements.
"""

import math
from typing import Any

import torch
from torch import Generator, Tensor, nn

from shardlib._compat import intercept_init, patch
from shardlib.collectives import blocks
from shardlib.kernels.bits import bits
from shardlib.ops.counter_rng import along, drawn, normal, open_unit
from shardlib.ops.padding import extended
from shardlib.ops.random import draw_into
from shardlib.opspec import Args, Func, Kwargs
from shardlib.placing import reshard
from shardlib.random import branch, next_key
from shardlib.tensor import ShardedTensor, implements, refuse_sums, replicated

_FILLS = {
    nn.init.uniform_: Tensor.uniform_,
    nn.init.normal_: Tensor.normal_,
    nn.init.constant_: Tensor.fill_,
}


@implements(*_FILLS, takes="all")
def fill(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Fill as torch.nn.init does, whose functions hand their arguments over by keyword, in order."""
    numbers = [v for k, v in kwargs.items() if k not in ("tensor", "generator")]
    named = {k: v for k, v in kwargs.items() if k == "generator"}
    with torch.no_grad():
        return _FILLS[func](kwargs["tensor"], *numbers, **named)


@implements(nn.init.kaiming_uniform_, takes="all")
def kaiming_uniform_(func: Func, args: Args, kwargs: Kwargs) -> Tensor:
    """Draw as nn.init.kaiming_uniform_."""
    return _kaiming(*args[len(kwargs) > 0 :], **kwargs)


def _kaiming(
    tensor: Tensor,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: Any = "leaky_relu",
    generator: Generator | None = None,
) -> Tensor:
    if 0 in tensor.shape:
        return tensor
    if tensor.ndim < 2:
        raise ValueError(
            "Fan in and fan out can not be computed for tensor with fewer than 2 dimensions"
        )
    if mode.lower() not in ("fan_in", "fan_out"):
        raise ValueError(f"Mode {mode} not supported, please use one of ['fan_in', 'fan_out']")
    fan = tensor.shape[1 if mode.lower() == "fan_in" else 0] * math.prod(tensor.shape[2:])
    bound = math.sqrt(3.0) * nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)
    with torch.no_grad():
        return tensor.uniform_(-bound, bound, generator=generator)


# ---------------------------------------------------------------- functions that do not dispatch on
# their argument


def trunc_normal_(
    x: ShardedTensor,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    generator: Generator | None = None,
) -> ShardedTensor:
    """Draw one number per element, by the inverse of the normal distribution between a and b.

    Unlike rejection, this draws each number once.
    """
    refuse_sums("trunc_normal_", x)
    ends = torch.tensor([(v - mean) / std for v in (a, b)], dtype=torch.float64, device="cpu")
    low, high = torch.special.ndtr(ends).tolist()
    # fp64 has few digits left near 1, so mirror an upper tail to the lower one
    flip = low > 0.5
    if flip:
        high, low = torch.special.ndtr(-ends).tolist()

    def make(h: Tensor) -> Tensor:
        z = torch.special.ndtri(open_unit(h).mul_(high - low).add_(low))
        return (z.neg_() if flip else z).mul_(std).add_(mean).clamp_(a, b)

    with torch.no_grad():
        return draw_into(x, make, generator)


def orthogonal_(
    x: ShardedTensor, gain: float = 1.0, generator: Generator | None = None
) -> ShardedTensor:
    """Factor the same whole matrix on every rank, and keep its block; it needs memory for all."""
    refuse_sums("orthogonal_", x)
    if x.ndim < 2:
        raise ValueError("Only tensors with 2 or more dimensions are supported")
    if x.numel() == 0 or x.raw.is_meta:
        return x
    rows, columns = x.shape[0], x.numel() // x.shape[0]
    key = next_key(x.mesh, generator)
    with torch.no_grad():
        from_here = replicated(x.raw.new_empty(rows, columns), x.mesh)
        flat = drawn(from_here, key, normal, torch.float64)
        flat = blocks(flat, x.mesh)[0]
        q, r = torch.linalg.qr(flat.T if rows < columns else flat)
        q = q * torch.diag(r, 0).sign()
        q = (q.T if rows < columns else q).reshape(tuple(x.shape)).mul(gain)
        _put(x, q)
    return x


def _put(x: ShardedTensor, whole: Tensor) -> None:
    """Write this rank's block of a tensor that every rank holds."""
    whole = extended(whole, x)
    x.raw.copy_(reshard(replicated(whole, x.mesh), x.sharding).raw)


def dirac_(x: ShardedTensor, groups: int = 1) -> ShardedTensor:
    """Set ones where a group's output channel is its input channel, at the kernel's centre."""
    refuse_sums("dirac_", x)
    if x.ndim not in (3, 4, 5):
        raise ValueError("Only tensors with 3, 4, or 5 dimensions are supported")
    if x.shape[0] % groups:
        raise ValueError("dim 0 must be divisible by groups")
    each = x.shape[0] // groups
    if x.raw.is_meta:
        return x
    hit = along(x, 0) % each == along(x, 1)
    for d in range(2, x.ndim):
        hit = hit & (along(x, d) == x.shape[d] // 2)
    with torch.no_grad():
        x.raw.copy_(hit)
    return x


def eye_(x: ShardedTensor) -> ShardedTensor:
    """Set ones on the diagonal of the global matrix."""
    refuse_sums("eye_", x)
    if x.ndim != 2:
        raise ValueError("Only tensors with 2 dimensions are supported")
    if not x.raw.is_meta:
        with torch.no_grad():
            x.raw.copy_(along(x, 0) == along(x, 1))
    return x


def sparse_(
    x: ShardedTensor, sparsity: float, std: float = 0.01, generator: Generator | None = None
) -> ShardedTensor:
    """Draw normal numbers, and set the share ``sparsity`` of each column's rows to zero.

    The rows with the lowest keyed numbers are zeroed.

    Each rank computes the numbers of its columns as a whole, so nothing moves.
    """
    refuse_sums("sparse_", x)
    if x.ndim != 2:
        raise ValueError("Only tensors with 2 dimensions are supported")
    with torch.no_grad():
        x.normal_(0, std, generator=generator)
        zeros, key = math.ceil(sparsity * x.shape[0]), branch(next_key(x.mesh, generator), 0)
        if zeros == 0 or x.raw.is_meta:
            return x
        every = torch.arange(x.shape[0], device=x.raw.device)
        # [ranks, m, 1] and [ranks, 1, n], or without ranks
        rows, columns = along(x, 0), along(x, 1)
        for at in range(0, columns.shape[-1], 1024):
            some = columns[..., at : at + 1024]
            # every rank draws whole columns, so all choose the same zeros; 1024 bound the memory
            numbers = bits(every[:, None] * x.shape[1] + some, key)
            most = numbers.kthvalue(zeros, -2, keepdim=True).values
            gone = bits(rows * x.shape[1] + some, key) <= most
            x.raw[..., at : at + 1024].masked_fill_(gone, 0.0)
    return x


_OURS = {
    "trunc_normal_": trunc_normal_,
    "orthogonal_": orthogonal_,
    "dirac_": dirac_,
    "eye_": eye_,
    "sparse_": sparse_,
}
patch("init", lambda: intercept_init(_OURS, frozenset({ShardedTensor})))
