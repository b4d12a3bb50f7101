"""Spatial operators: batches, and independent channels, are rows; positions, weights are whole."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from shardlib.ops.declare import Bound, declare, labelled, leading, slots
from shardlib.ops.dims import Labels, rows_call
from shardlib.ops.signatures import binder
from shardlib.opspec import Args, Func, Kwargs, homes
from shardlib.tensor import TABLE, Unfit, implements


def _planes(k: int) -> Callable[[Bound], Labels]:
    """Label samples and channels rows, with or without a batch; ``k`` spatial dimensions."""

    def labels(b: Bound) -> Labels:
        if not k + 1 <= b["input"].ndim <= k + 2:
            raise Unfit("dimensions")
        return leading(k, "indices")(b | {"indices": b.get("indices")})

    return labels


_PLANES = """
    max_pool{k}d(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False)
    max_pool{k}d_with_indices(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False)
    avg_pool{k}d(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None)
    adaptive_avg_pool{k}d(input, output_size)
    adaptive_max_pool{k}d(input, output_size, return_indices=False)
    adaptive_max_pool{k}d_with_indices(input, output_size, return_indices=False)
    max_unpool{k}d(input, indices, kernel_size, stride=None, padding=0, output_size=None)
    lp_pool{k}d(input, norm_type, kernel_size, stride=None, ceil_mode=False)
    replication_pad{k}d(input, padding)
    reflection_pad{k}d(input, padding)
"""
for _k in (1, 2, 3):
    declare(_PLANES.format(k=_k))(_planes(_k))


def _convolved(k: int, transposed: bool = False) -> Callable[[Bound], Labels]:
    """Label samples rows, and filters unless channels are grouped; channels and space are whole."""

    def labels(b: Bound) -> Labels:
        x, w, bias = b["input"], b["weight"], b["bias"]
        samples, space = ("b",) * (x.ndim - k - 1), (None,) * k
        filters = "o" if b["groups"] == 1 else None
        of_w = (None, filters) if transposed else (filters, None)
        return labelled((x, (*samples, None, *space)), (w, (*of_w, *space)), (bias, (filters,)))

    return labels


_CONVOLUTION = "conv{k}d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1)"
_TRANSPOSED = (
    "conv_transpose{k}d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, "
    "dilation=1)"
)
for _k in (1, 2, 3):
    declare(_CONVOLUTION.format(k=_k))(_convolved(_k))
    declare(_TRANSPOSED.format(k=_k))(_convolved(_k, transposed=True))


def _depthwise(k: int) -> None:
    """Declare convolutions of one filter per channel: a block of filters has its own channels."""
    name = f"conv{k}d"
    plain = getattr(F, name)
    usual, bind = TABLE[plain], binder(_CONVOLUTION.format(k=k))
    # the implementation below replaces the declared one, and calls it for other convolutions
    for func in homes(name):
        del TABLE[func]

    def apart(
        x: Tensor,
        w: Tensor,
        bias: Tensor | None,
        stride: int | Sequence[int],
        padding: int | Sequence[int] | str,
        dilation: int | Sequence[int],
        groups: int,
    ) -> Tensor:
        # ``groups`` counts all channels; a block has as many groups as filters
        return plain(x, w, bias, stride, padding, dilation, w.shape[0])

    def labels(args: Args, kwargs: Kwargs) -> Labels:
        x, w, bias, *_ = args
        samples, space = ("b",) * (x.ndim - k - 1), (None,) * k
        return labelled((x, (*samples, "c", *space)), (w, ("c", None, *space)), (bias, ("c",)))

    def implementation(func: Func, args: Args, kwargs: Kwargs) -> object:
        x, w, bias, stride, padding, dilation, groups = bind(*args, **kwargs).values()
        channels = x.shape[-k - 1 : -k]
        if groups == 1 or w.shape[1:2] != (1,) or not channels == w.shape[:1] == (groups,):
            return usual(func, args, kwargs)
        return rows_call(apart, (x, w, bias, stride, padding, dilation, groups), {}, labels)

    apart.__name__ = name
    implements(*homes(name), takes="all")(implementation)


for _k in (1, 2, 3):
    _depthwise(_k)

declare("""
    upsample_nearest1d(input, output_size, scales=None)
    _upsample_nearest_exact1d(input, output_size, scales=None)
    upsample_linear1d(input, output_size, align_corners, scales=None)
    """)(leading(1))
declare("""
    upsample_nearest2d(input, output_size, scales_h=None, scales_w=None)
    _upsample_nearest_exact2d(input, output_size, scales_h=None, scales_w=None)
    _upsample_bilinear2d_aa(input, output_size, align_corners, scales_h=None, scales_w=None)
    _upsample_bicubic2d_aa(input, output_size, align_corners, scales_h=None, scales_w=None)
    upsample_bilinear2d(input, output_size, align_corners, scales_h=None, scales_w=None)
    upsample_bicubic2d(input, output_size, align_corners, scales_h=None, scales_w=None)
    """)(leading(2))
declare("""
    upsample_nearest3d(input, output_size, scales_d=None, scales_h=None, scales_w=None)
    _upsample_nearest_exact3d(input, output_size, scales_d=None, scales_h=None, scales_w=None)
    upsample_trilinear3d(input, output_size, align_corners, scales_d=None, scales_h=None, scales_w=None)
    """)(leading(3))
declare("""
    pixel_shuffle(input, upscale_factor)
    pixel_unshuffle(input, downscale_factor)
    """)(leading(3))


@declare("""
    grid_sample(input, grid, mode='bilinear', padding_mode='zeros', align_corners=None)
    grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners)
    grid_sampler_2d(input, grid, interpolation_mode, padding_mode, align_corners)
    grid_sampler_3d(input, grid, interpolation_mode, padding_mode, align_corners)
    im2col(input, kernel_size, dilation, padding, stride)
    col2im(input, output_size, kernel_size, dilation, padding, stride)
    channel_shuffle(input, groups)
    bilinear(input1, input2, weight, bias=None)
    """)
def _samples(b: Bound) -> Labels:
    """Label the first dimension of the input, grid and input2 rows; other operands are whole."""
    first, *rest = slots(b)
    alike = [s for s in rest if s in (b.get("grid"), b.get("input2"))]
    out: Labels = {s.at: (None,) * s.ndim for s in rest}
    return out | {s.at: ("b",) + (None,) * (s.ndim - 1) for s in (first, *alike)}
