"""Layer norm and RMS norm of rows that may be split, as torch operators.

        parts = norm_stats(x, centre)              of one block: mean and M2, or the sum of squares
                one collective by the caller
        mean, scale = norm_settle(parts, ...)      mean (none for RMS) and 1 / deviation
        y = norm_apply(x, w, b, mean, scale)
        sums = norm_back_sums(x, g, w, ...)        one psum by the caller
        dx = norm_back(x, g, w, ..., sums, ...)
        norm_columns(x, g, ...)                    gradients of weight and shift

Statistics are fp32 (fp64 of fp64); halves are rounded once, at the end.
"""

import torch
from torch import Tensor

from shardlib.dtypes import wide, wider
from shardlib.kernels.active import native
from shardlib.kernels.library import call, code, dense_like

# threads that fill an H100: 132 SMs, 4 blocks of 256 each
_LANES = 132 * 4 * 256


def serves(x: Tensor, w: Tensor | None, b: Tensor | None, g: Tensor | None = None) -> bool:
    """Return whether the kernels take rows x [R, C], dense, with factors [C] of dtypes they mix.

    ``g``  the gradient of rows like x, which is contiguous.
    """
    if x.stride(1) != 1 or x.stride(0) < x.shape[1]:
        return False
    if g is not None and not (g.is_contiguous() and g.dtype == x.dtype):
        return False
    return _mixed(x, [t for t in (w, b) if t is not None]) and native(x, w, b)


def _mixed(x: Tensor, factors: list[Tensor]) -> bool:
    """Return whether factors have one dtype, which the kernels mix with that of the rows."""
    dtypes = {t.dtype for t in factors}
    one = len(dtypes) < 2 and dtypes <= {x.dtype, torch.float32}
    return one and all(t.is_contiguous() for t in factors)


def _factor(x: Tensor, w: Tensor | None, b: Tensor | None = None) -> int:
    """Return the number of the factors' dtype; that of x without factors."""
    (found, *_) = (t for t in (w, b, x) if t is not None)
    return code(found)


def _weighted(x: Tensor, w: Tensor | None) -> Tensor:
    """Return x times its factors, in the dtype of sums."""
    return wide(x) if w is None else wide(x) * wide(w)


@torch.library.custom_op("shardlib::norm_stats", mutates_args=())
def norm_stats(x: Tensor, centre: bool) -> Tensor:
    """Compute the statistics of the rows of a block [R, C].

    Returns [R, 2], mean and summed squared distance from it; or [R, 1], the sum of squares.
    """
    if serves(x, None, None):
        out = x.new_empty(len(x), 1 + centre, dtype=torch.float32)
        call("norm_stats", code(x), centre, x, out, *x.shape, x.stride(0))
        return out
    x = wide(x)
    if not centre:
        return x.square().sum(-1, keepdim=True)
    mean = x.mean(-1, keepdim=True)
    return torch.cat([mean, (x - mean).square().sum(-1, keepdim=True)], -1)


@norm_stats.register_fake
def _(x: Tensor, centre: bool) -> Tensor:
    return x.new_empty(x.shape[0], 1 + centre, dtype=wider(x.dtype))


@torch.library.custom_op("shardlib::norm_settle", mutates_args=())
def norm_settle(parts: Tensor, centre: bool, each: int, eps: float) -> tuple[Tensor, Tensor]:
    """Compute mean and scale [R, 1] of rows from the statistics of their parts [p, R, 2 or 1].

    Each part has ``each`` columns; the mean is empty for RMS norm.

    Source: the merge is Chan, Golub and LeVeque 1983.
    """
    p, rows, _ = parts.shape
    if parts.is_contiguous() and native(parts):
        mean, scale = parts.new_empty(rows * int(centre), 1), parts.new_empty(rows, 1)
        call("norm_settle", parts, p, mean, scale, rows, each, eps)
        return mean, scale
    if not centre:
        return parts.new_empty(0, 1), (parts.sum(0) / (p * each) + eps).rsqrt()
    mean = parts[..., 0:1].mean(0)
    m2 = parts[..., 1:2].sum(0) + (parts[..., 0:1] - mean).square().sum(0) * each
    return mean, (m2 / (p * each) + eps).rsqrt()


@norm_settle.register_fake
def _(parts: Tensor, centre: bool, *_: object) -> tuple[Tensor, Tensor]:
    rows = parts.shape[1]
    return parts.new_empty(rows * int(centre), 1), parts.new_empty(rows, 1)


def _normal(x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return (wide(x) - mean if mean.numel() else wide(x)) * scale


@torch.library.custom_op("shardlib::norm_apply", mutates_args=())
def norm_apply(
    x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, scale: Tensor
) -> Tensor:
    """Compute (x - mean) * scale * w + b of dense rows [R, C]."""
    if serves(x, w, b):
        y = dense_like(x)
        kinds = (code(x), _factor(x, w, b))
        call("norm_apply", *kinds, x, y, w, b, mean, scale, *x.shape, x.stride(0))
        return y
    y = _weighted(_normal(x, mean, scale), w)
    if b is not None:
        y = y + wide(b)
    return y.to(x.dtype).contiguous()


norm_apply.register_fake(dense_like)


@torch.library.custom_op("shardlib::norm_back_sums", mutates_args=())
def norm_back_sums(x: Tensor, g: Tensor, w: Tensor | None, mean: Tensor, scale: Tensor) -> Tensor:
    """Compute, for each row, the sums [R, 2] of g w y and of g w, where y is the normalised row."""
    if serves(x, w, None, g):
        out = x.new_empty(len(x), 2, dtype=torch.float32)
        kinds = code(x), _factor(x, w)
        call("norm_back_sums", *kinds, x, g, w, mean, scale, out, *x.shape, x.stride(0))
        return out
    g = _weighted(g, w)
    both = (g * _normal(x, mean, scale)).sum(-1, keepdim=True), g.sum(-1, keepdim=True)
    return torch.cat(both, -1)


@norm_back_sums.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], 2, dtype=wider(x.dtype))


@torch.library.custom_op("shardlib::norm_back", mutates_args=())
def norm_back(
    x: Tensor, g: Tensor, w: Tensor | None, mean: Tensor, scale: Tensor, sums: Tensor, count: int
) -> Tensor:
    """Compute the gradient of x from the sums over all parts of its rows.

    ``count``  number of columns of all parts together.
    """
    if serves(x, w, None, g):
        dx = dense_like(g)
        kinds = (code(x), _factor(x, w))
        given = (x, g, dx, w, mean, scale, sums.contiguous())
        call("norm_back", *kinds, *given, count, *x.shape, x.stride(0))
        return dx
    g = _weighted(g, w)
    dx = g - _normal(x, mean, scale) * (sums[:, :1] / count)
    dx = (dx - sums[:, 1:] / count if mean.numel() else dx) * scale
    return dx.to(x.dtype).contiguous()


norm_back.register_fake(dense_like)


@torch.library.custom_op("shardlib::norm_columns", mutates_args=())
def norm_columns(x: Tensor, g: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Compute the gradients [2, C] of weight and shift, summed over the rows."""
    rows, cols = x.shape
    if serves(x, None, None, g):
        # two passes: sums of row chunks, enough to fill a GPU, then the sum of these
        pack = 16 // x.element_size()
        chunks = max(1, min(-(-rows // 16), _LANES * pack // max(cols, 1)))
        chunk = max(1, -(-rows // chunks))
        work = x.new_empty(-(-rows // chunk), 2, cols, dtype=torch.float32)
        out = x.new_zeros(2, cols, dtype=torch.float32)
        given = (x, g, mean, scale, work, out)
        call("norm_columns", code(x), *given, rows, cols, x.stride(0), chunk)
        return out
    g = wide(g)
    return torch.stack([(g * _normal(x, mean, scale)).sum(0), g.sum(0)])


@norm_columns.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(2, x.shape[1], dtype=wider(x.dtype))


# ---------------------------------------------------------------- unsplit rows, differentiable


@torch.library.custom_op("shardlib::row_norm", mutates_args=())
def row_norm(
    x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, centre: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute layer norm (``centre``) or RMS norm of unsplit rows; differentiable.

    Also returns mean and scale, which backward needs.
    """
    mean, scale = norm_settle(norm_stats(x, centre).unsqueeze(0), centre, x.shape[1], eps)
    return norm_apply(x, w, b, mean, scale), mean, scale


@row_norm.register_fake
def _(
    x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, centre: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, dtype = x.shape[0], wider(x.dtype)
    mean = x.new_empty(rows * int(centre), 1, dtype=dtype)
    return dense_like(x), mean, x.new_empty(rows, 1, dtype=dtype)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, w, b, _, _ = inputs
    ctx.save_for_backward(x, w, b, output[1], output[2])
    ctx.mark_non_differentiable(output[1], output[2])


def _back(ctx, g, *_):  # type: ignore[no-untyped-def]
    x, w, b, mean, scale = ctx.saved_tensors
    g = g.contiguous()
    sums = norm_back_sums(x, g, w, mean, scale)
    dx = norm_back(x, g, w, mean, scale, sums, x.shape[1])
    if w is None and b is None:
        return dx, None, None, None, None
    found = zip((w, b), norm_columns(x, g, mean, scale), strict=True)
    factors = [None if t is None else its.to(t.dtype) for t, its in found]
    return dx, *factors, None, None


row_norm.register_autograd(_back, setup_context=_keep)
