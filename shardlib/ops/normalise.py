"""Normalisation over batches, groups and instances; that over trailing dimensions is in norm.py."""

from typing import Any

import torch
from torch import Tensor

from shardlib.dtypes import wide, wider
from shardlib.errors import BadArgument
from shardlib.memory_sharing import refuse_overlap
from shardlib.ops.declare import Bound, by_signature, declare, labelled, slots
from shardlib.ops.dims import Labels
from shardlib.ops.signatures import ArgumentSlot
from shardlib.opspec import Func
from shardlib.tensor import ShardedTensor, Unfit, call_error, typeof


@declare("""
    group_norm(input, num_groups, weight=None, bias=None, eps=1e-05, cudnn_enabled=True)
    local_response_norm(input, size, alpha=1e-4, beta=0.75, k=1.0)
    """)
def _samples(b: Bound) -> Labels:
    """Label samples rows: each is normalised independently."""
    first, *rest = slots(b)
    if first.ndim < 3 and "num_groups" not in b:
        raise Unfit("no batch")
    out: Labels = {s.at: (None,) * s.ndim for s in rest}
    return out | {first.at: ("b",) + (None,) * (first.ndim - 1)}


@declare(
    "instance_norm(input, weight=None, bias=None, running_mean=None, running_var=None, "
    "use_input_stats=True, momentum=0.1, eps=1e-05, cudnn_enabled=True)"
)
def _instances(b: Bound) -> Labels:
    """Label samples and channels rows: each channel of a sample is normalised independently."""
    x, stats = b["input"], [b["running_mean"], b["running_var"]]
    if b["use_input_stats"] and any(isinstance(s, ArgumentSlot) for s in stats):
        raise Unfit("running statistics of instances are means over the batch")
    of_channels = [(s, ("c",)) for s in (b["weight"], b["bias"], *stats)]
    return labelled((x, ("b", "c") + (None,) * (x.ndim - 2)), *of_channels)


@by_signature(
    "batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, "
    "cudnn_enabled)",
    torch.batch_norm,
)
def batch_norm(
    func: Func, x: Tensor, w: Tensor | None, b: Tensor | None,
    mean: ShardedTensor, var: ShardedTensor, training: bool, momentum: float, eps: float, _: bool,
) -> object:  # fmt: skip
    """Take statistics over the whole batch, on all ranks; update the running ones as torch does."""
    _check(x, (w, b), (mean, var), training)
    dtype, x = x.dtype, wide(x)
    dims = [0, *range(2, x.ndim)]
    shape = [1, -1, *[1] * (x.ndim - 2)]
    if training or mean is None:
        m = x.mean(dims)
        centred = x - m.view(shape)
        v = (centred * centred).mean(dims)
        if mean is not None:
            _update(mean, var, m.detach(), v.detach(), momentum, x.numel() // x.shape[1])
    else:
        m, v = mean, var
        centred = x - m.view(shape)
    out = centred * (v + eps).rsqrt().view(shape)
    out = out if w is None else out * w.view(shape)
    return (out if b is None else out + b.view(shape)).to(dtype)


def _check(x: Any, factors: tuple[Any, Any], running: tuple[Any, Any], training: bool) -> None:
    if x.ndim < 2 or not x.numel():
        raise Unfit("no batch of channels")
    if training and any(
        isinstance(t, Tensor) and not isinstance(t, ShardedTensor) for t in running
    ):
        raise Unfit("plain running statistics are written to by torch")
    if not x.is_floating_point():
        why = "only floating point is normalised"
        raise call_error(BadArgument, why, "batch_norm", "x.float()", tensor=x)
    dtypes = {x.dtype, wider(x.dtype)}
    for t in (*factors, *running):
        if t is not None and t.dtype not in dtypes:
            why = "statistics, scale and shift have the tensor's dtype"
            raise call_error(BadArgument, why, "batch_norm", tensor=x, other=t)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in running):
        why = "running statistics have no gradient, and these ask for one"
        raise call_error(
            BadArgument, why, "batch_norm", "running_mean.detach()", running_mean=running[0]
        )


def _update(
    mean: ShardedTensor, var: ShardedTensor, m: Tensor, v: Tensor, momentum: float, count: int
) -> None:
    """Move the running statistics towards those of a batch, as torch does."""
    for t in (mean, var):
        refuse_overlap(t.raw, "batch_norm", {"tensor": typeof(t)}, t.mesh)
    mean.mul_(1 - momentum).add_(m * momentum)
    # for one element this is 0 / 0, which torch does not refuse either
    var.mul_(1 - momentum).add_(v * (momentum * count) / (count - 1))
