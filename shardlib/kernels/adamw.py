"""AdamW in one pass over any number of tensors, as torch operators that write in place.

Per element it reads and writes once: a half gradient, divided by a scale (of the loss, and of
clipping), the fp32 parameter with its moments, and the parameter as a half: 28 bytes; with the
master kept as bfloat16 and the 16 bits that it lacks, 26.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardlib.kernels.active import native
from shardlib.kernels.library import call, code

Row = Sequence[Tensor]


class AdamStep(NamedTuple):
    """Hyperparameters of a step; ``count``  steps taken, this one included."""

    lr: float
    b1: float
    b2: float
    eps: float
    decay: float
    count: int


def steppable(g: Row, p: Row, m: Row, v: Row, out: Row = ()) -> bool:
    """Return whether the kernel takes these: dense, each list of one dtype, p and its moments fp32.

    Gradients and the rounded copies ``out`` are fp32 or half; if both are half, of one dtype.
    """
    grads, halves = _dtypes(g), _dtypes(out)
    if _dtypes(p, m, v) != {torch.float32} or len(grads) != 1 or torch.float32 in halves:
        return False
    if len(grads | halves) - (torch.float32 in grads) > 1:
        return False
    return _contiguous(g, p, m, v, out) and native(g[0], *out[:1])


def _dtypes(*rows: Row) -> set[torch.dtype]:
    return {t.dtype for row in rows for t in row}


def _contiguous(*rows: Row) -> bool:
    return all(t.is_contiguous() for row in rows for t in row)


def _flat(*rows: Row) -> list[Tensor | None]:
    """List the pointers of all tensors, up to five per parameter, parameter by parameter."""
    return [row[i] if row else None for i in range(len(rows[0])) for row in rows]


def _rounded(h: Sequence[float]) -> tuple[float, ...]:
    """Compute the kernel's factors, each rounded once: keep, a1, b2, a2, eps, size, root."""
    lr, b1, b2, eps, decay, count = h
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
    g: Sequence[Tensor],
    p: Sequence[Tensor],
    m: Sequence[Tensor],
    v: Sequence[Tensor],
    out: Sequence[Tensor],
    scale: Tensor | None,
    hyper: Sequence[float],
) -> None:
    """Step the fp32 parameters p and their moments in place; write p into ``out`` too, rounded.

    ``g``      gradients, fp32 or half, that count as divided by ``scale``, fp32 with one element.
    ``out``    as many halves, or none.
    ``hyper``  an ``AdamStep``.
    Source: Loshchilov and Hutter, arXiv 1711.05101.
    """
    h = _rounded(hyper)
    if g and steppable(g, p, m, v, out):
        kind = code(out[0]) if out else 0
        rows = _flat(g, p, m, v, out)
        call("adamw", code(g[0]), kind, len(g), [t.numel() for t in g], rows, *h, scale)
        return
    for i, row in enumerate(zip(g, p, m, v, strict=True)):
        _eager(*row, scale, h)
        if out:
            out[i].copy_(p[i])


@torch.library.custom_op("shardlib::adamw_halves_", mutates_args=("p", "low", "m", "v"))
def adamw_halves_(
    g: Sequence[Tensor],
    p: Sequence[Tensor],
    low: Sequence[Tensor],
    m: Sequence[Tensor],
    v: Sequence[Tensor],
    scale: Tensor | None,
    hyper: Sequence[float],
) -> None:
    """Step bfloat16 parameters p in place; ``low``, int16, holds the bits that p lacks of fp32."""
    h = _rounded(hyper)
    kinds = _dtypes(m, v), _dtypes(p)
    fits = kinds == ({torch.float32}, {torch.bfloat16})
    fits = fits and _dtypes(g) in ({torch.float32}, {torch.bfloat16})
    if fits and _contiguous(g, p, low, m, v) and native(g[0]):
        rows = _flat(g, p, low, m, v)
        call("adamw_halves", code(g[0]), len(g), [t.numel() for t in g], rows, *h, scale)
        return
    for one, high, less, first, second in zip(g, p, low, m, v, strict=True):
        full = ((high.view(torch.int16).to(torch.int32) << 16) + less).view(torch.float32)
        _eager(one, full, first, second, scale, h)
        # the canonical NaN: adding 0x8000 to others can overflow into the sign
        bits = full.masked_fill(full.isnan(), float("nan")).view(torch.int32)
        upper = (bits + 0x8000) >> 16
        high.copy_(upper.to(torch.int16).view(torch.bfloat16))
        # the rounded half plus a signed 16-bit remainder are exactly the fp32 bits
        less.copy_((bits - (upper << 16)).to(torch.int16))
