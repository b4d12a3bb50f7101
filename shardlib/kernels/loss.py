"""Cross entropy of rows whose classes may be split, as torch operators.

    parts = ce_stats(logits, ...)        of one block: maximum, sum of exponentials, ...
            one all-gather by the caller
    loss, kept = ce_loss(parts, ...)
    ce_back(logits, ..., kept, grad)     or ce_back_, over the logits themselves

Backward needs the logits and 8 bytes per row more.  Sums are fp32 (fp64 for fp64 logits).
"""

from typing import Any

import torch
from torch import Tensor

from shardlib.dtypes import wider
from shardlib.kernels.active import native
from shardlib.kernels.library import call, code, dense_like

INF = float("inf")


def _dense(x: Tensor) -> bool:
    """Return whether each row is dense and rows do not overlap, as the kernels require."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1]


def _labels(target: Tensor) -> bool:
    return target.dtype == torch.int64 and target.is_contiguous()


@torch.library.custom_op("shardlib::ce_stats", mutates_args=())
def ce_stats(logits: Tensor, target: Tensor, cols: int, first: int) -> Tensor:
    """Compute the contribution of one block of logits [R, C] to the loss.

    Returns [R, 4]: maximum, sum of exp(x - maximum), the target's logit, the sum of the logits.

    ``cols``   number of its classes that are not padding.
    ``first``  the block's first class; a target outside the block counts as 0.
    """
    rows, stride = logits.shape[0], logits.stride(0)
    out = logits.new_empty(rows, 4, dtype=wider(logits.dtype))
    if _dense(logits) and _labels(target) and native(logits):
        call("ce_stats", code(logits), logits, target, out, rows, cols, stride, first)
        return out
    x = logits[:, :cols].to(out.dtype)
    if not cols:
        return out.copy_(out.new_tensor([-INF, 0, 0, 0]))
    top = x.amax(-1)
    # in a row of -inf alone, -inf - -inf is NaN
    sums = (x - top.unsqueeze(-1)).exp().masked_fill(x == -INF, 0).sum(-1)
    here = target - first
    outside = (here < 0) | (here >= cols)
    at = here.masked_fill(outside, 0).unsqueeze(-1)
    hit = x.gather(-1, at).squeeze(-1).masked_fill(outside, 0)
    return out.copy_(torch.stack([top, sums, hit, x.sum(-1)], -1))


@ce_stats.register_fake
def _(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape[0], 4, dtype=wider(logits.dtype))


@torch.library.custom_op("shardlib::ce_loss", mutates_args=())
def ce_loss(
    parts: Tensor, target: Tensor, ignore: int, smooth: float, classes: int
) -> tuple[Tensor, Tensor]:
    """Compute the loss [R] from the statistics of all blocks [p, R, 4].

    Also returns [R, 2] for backward: maximum, 1 / sum.

    It is NaN where the target is no class: checking targets first would synchronise a GPU.
    """
    p, rows, _ = parts.shape
    loss, kept = parts.new_empty(rows), parts.new_empty(rows, 2)
    if parts.is_contiguous() and _labels(target) and native(parts):
        call("ce_loss", parts, p, target, loss, kept, rows, ignore, smooth, classes)
        return loss, kept
    top = parts[..., 0].amax(0)
    share = (parts[..., 0] - top).exp().masked_fill(parts[..., 0] == -INF, 0)
    total = (parts[..., 1] * share).sum(0)
    loss = total.log() + (top - parts[..., 2].sum(0))
    if smooth:
        even = total.log() + (top - parts[..., 3].sum(0) / classes)
        loss = (1 - smooth) * loss + smooth * even
    loss = loss.masked_fill((target < 0) | (target >= classes), float("nan"))
    return loss.masked_fill(target == ignore, 0), torch.stack([top, 1 / total], -1)


@ce_loss.register_fake
def _(parts: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return parts.new_empty(parts.shape[1]), parts.new_empty(parts.shape[1], 2)


def _back_into(
    dx: Tensor, logits: Tensor, target: Tensor, kept: Tensor, grad: Tensor, *how: Any
) -> None:
    cols, first, ignore, smooth, classes = how
    if _dense(logits) and _dense(dx) and _labels(target) and native(logits):
        rows, width = logits.shape
        # autograd may expand it from one element
        grad = grad.to(torch.float32)
        # stride 0: one gradient for all rows
        step = 0 if grad.numel() == 1 else grad.stride(0)
        kept = kept.contiguous()
        call(
            "ce_back", code(logits), logits, dx, target, kept, grad, step, rows, cols, width,
            logits.stride(0), dx.stride(0), *how[1:],
        )  # fmt: skip
        return
    x = logits[:, :cols].to(wider(logits.dtype))
    hot = torch.arange(cols, device=x.device) == (target - first).unsqueeze(-1)
    soft = (x - kept[:, :1]).exp().masked_fill(x == -INF, 0) * kept[:, 1:]
    found = (soft - smooth / classes - hot * (1 - smooth)) * grad.reshape(-1, 1)
    dx[:, :cols] = found.masked_fill((target == ignore).unsqueeze(-1), 0).to(dx.dtype)
    dx[:, cols:] = 0


@torch.library.custom_op("shardlib::ce_back", mutates_args=())
def ce_back(
    logits: Tensor,
    target: Tensor,
    kept: Tensor,
    grad: Tensor,
    cols: int,
    first: int,
    ignore: int,
    smooth: float,
    classes: int,
) -> Tensor:
    """Compute the gradient of a block of logits from that of the loss: [R], or [1] for all rows.

    The gradient of padding is 0.
    """
    dx = dense_like(logits)
    _back_into(dx, logits, target, kept, grad, cols, first, ignore, smooth, classes)
    return dx


ce_back.register_fake(dense_like)


@torch.library.custom_op("shardlib::ce_back_", mutates_args=("logits",))
def ce_back_(
    logits: Tensor,
    target: Tensor,
    kept: Tensor,
    grad: Tensor,
    cols: int,
    first: int,
    ignore: int,
    smooth: float,
    classes: int,
) -> None:
    """Compute the gradient as ``ce_back`` does and overwrite the logits with it."""
    _back_into(logits, logits, target, kept, grad, cols, first, ignore, smooth, classes)


@torch.library.custom_op("shardlib::row_loss", mutates_args=())
def row_loss(
    logits: Tensor, target: Tensor, ignore: int = -100, smooth: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute the loss [R] of unsplit rows, and [R, 2] for backward; differentiable in logits."""
    classes = logits.shape[-1]
    parts = ce_stats(logits, target, classes, 0).unsqueeze(0)
    return ce_loss(parts, target, ignore, smooth, classes)


@row_loss.register_fake
def _(logits: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    n, dtype = logits.shape[0], wider(logits.dtype)
    return logits.new_empty(n, dtype=dtype), logits.new_empty(n, 2, dtype=dtype)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    logits, target, ctx.ignore, ctx.smooth = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _back(ctx, grad, _):  # type: ignore[no-untyped-def]
    logits, target, kept = ctx.saved_tensors
    classes = logits.shape[-1]
    grad = grad.contiguous()
    dx = ce_back(logits, target, kept, grad, classes, 0, ctx.ignore, ctx.smooth, classes)
    return dx, None, None, None


row_loss.register_autograd(_back, setup_context=_keep)
