"""AdamW on flat memory in one pass, as torch operators that write in place.

Read and written once each: a half gradient, divided by a scale (of the loss, and of clipping), the
fp32 parameter with its moments, and the parameter as a half, 28 bytes an element; with the master
kept as bfloat16 and the 16 bits that it lacks, 26.
"""

import torch
from torch import Tensor

from shardlib.kernels.active import native
from shardlib.kernels.library import call, code

__all__ = ["adamw_", "adamw_halves_", "flat"]


def flat(*tensors: Tensor | None) -> bool:
    """Say whether the kernels take these together: dense, of one device, of dtypes that they know."""
    given = [t for t in tensors if t is not None]
    if not all(t.is_contiguous() for t in given):
        return False
    return native(*(t for t in given if t.dtype != torch.int16))


def _rounded(
    lr: float, b1: float, b2: float, eps: float, decay: float, count: int
) -> tuple[float, ...]:
    """What the kernel multiplies with, each number rounded once: keep, a1, b2, a2, eps, size, root."""
    root = (1 - b2**count) ** 0.5
    return 1 - lr * decay, 1 - b1, b2, 1 - b2, eps, lr / (1 - b1**count), root


def _eager(
    g: Tensor, p: Tensor, m: Tensor, v: Tensor, scale: Tensor | None, h: tuple[float, ...]
) -> None:
    keep, a1, b2, a2, eps, size, root = h
    g = g.to(m.dtype)
    g = g if scale is None else g / scale.to(g.dtype)
    p.mul_(keep)
    m.lerp_(g, a1)
    v.mul_(b2).addcmul_(g, g, value=a2)
    p.addcdiv_(m, (v.sqrt() / root).add_(eps), value=-size)


@torch.library.custom_op("shardlib::adamw_", mutates_args=("p", "m", "v", "out"))
def adamw_(
    g: Tensor,
    p: Tensor,
    m: Tensor,
    v: Tensor,
    out: Tensor | None,
    scale: Tensor | None,
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
    count: int,
) -> None:
    """Step the fp32 parameters p and their moments; write them into ``out`` too, rounded.

    ``g``      gradients, fp32 or half, that count as divided by ``scale``, fp32 with one element.
    ``count``  steps taken, this one included.
    Source: Loshchilov and Hutter, arXiv 1711.05101.
    """
    h = _rounded(lr, b1, b2, eps, decay, count)
    wide = p.dtype == m.dtype == v.dtype == torch.float32
    beside = out is None or (out.dtype != torch.float32 and g.dtype in (out.dtype, torch.float32))
    if wide and beside and flat(g, p, m, v, out):
        kind = 0 if out is None else code(out)
        call("adamw", code(g), kind, g, p, m, v, out, p.numel(), *h, scale)
        return
    _eager(g, p, m, v, scale, h)
    if out is not None:
        out.copy_(p)


@adamw_.register_fake
def _(
    g: Tensor,
    p: Tensor,
    m: Tensor,
    v: Tensor,
    out: Tensor | None,
    scale: Tensor | None,
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
    count: int,
) -> None:
    return None


@torch.library.custom_op("shardlib::adamw_halves_", mutates_args=("p", "low", "m", "v"))
def adamw_halves_(
    g: Tensor,
    p: Tensor,
    low: Tensor,
    m: Tensor,
    v: Tensor,
    scale: Tensor | None,
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
    count: int,
) -> None:
    """The same where p is bfloat16 and ``low``, int16, what it lacks of fp32."""
    h = _rounded(lr, b1, b2, eps, decay, count)
    wide = m.dtype == v.dtype == torch.float32 and g.dtype in (torch.float32, torch.bfloat16)
    if wide and p.dtype == torch.bfloat16 and flat(g, p, low, m, v):
        call("adamw_halves", code(g), g, p, low, m, v, p.numel(), *h, scale)
        return
    full = ((p.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)
    _eager(g, full, m, v, scale, h)
    bits = full.masked_fill(full.isnan(), float("nan")).view(torch.int32)
    high = (bits + 0x8000) >> 16
    p.copy_(high.to(torch.int16).view(torch.bfloat16))
    low.copy_((bits - (high << 16)).to(torch.int16))


@adamw_halves_.register_fake
def _(
    g: Tensor,
    p: Tensor,
    low: Tensor,
    m: Tensor,
    v: Tensor,
    scale: Tensor | None,
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
    count: int,
) -> None:
    return None
