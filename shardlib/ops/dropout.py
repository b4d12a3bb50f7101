"""Dropout of every kind; a key and global positions decide which elements, or channels, drop.

The mask is the same under every layout and number of ranks (random.py).  Backward needs one saved
byte per element, or per channel.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import block_shape, blocks, storage, storage_shape
from shardlib.errors import ShardError
from shardlib.kernels import active
from shardlib.kernels.bits import signed
from shardlib.kernels.dropout import dropout as by_kernel
from shardlib.layouts import Dim, Layout
from shardlib.ops.counter_rng import Maker, drawn, kept, places, then, unit
from shardlib.ops.declare import by_signature
from shardlib.ops.signatures import binder
from shardlib.opspec import Args, Func, Kwargs
from shardlib.random import next_key
from shardlib.tensor import ShardedTensor, call_error, implements, mapped


def _dropped(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Drop elements, and scale those that are kept so that the mean stays; the mask is saved."""
    return (x * keep).mul_(1 / (1 - p) if p < 1 else 0.0)


_FORMS = """
    dropout(input, p=0.5, training=True, inplace=False)
    dropout(input, p=0.5, train=True)
"""
_bind = binder(_FORMS)
# F.alpha_dropout's default
_bind_off = binder(_FORMS.replace("training=True", "training=False"))


def _checked(name: str, func: Func, x: Any, p: float) -> None:
    if not isinstance(p, int | float) or not 0 <= p <= 1:
        why = f"dropout probability has to be between 0 and 1, but got {p}"
        raise call_error(ShardError, why, name, f"F.{name}(x, 0.5)", input=x)
    if not (x.is_floating_point() or x.is_complex()):
        # raises torch's own error
        func(torch.ones(2, dtype=x.dtype, device="cpu"), p, True)


def _keep(x: ShardedTensor, make: Maker, dtype: torch.dtype, features: bool) -> Tensor:
    """Draw raw numbers for each element, or for each [sample, channel] with ones beyond."""
    key = next_key(x.mesh)
    if not features:
        return drawn(x, key, make, dtype)
    layout = Layout((*x.dims[:2], *[Dim()] * (len(x.padded_shape) - 2)))
    ones = [1] * (x.ndim - 2)
    local = (*block_shape(x.raw, x.mesh)[:2], *ones)
    block = x.raw.new_empty(storage_shape(x.mesh, *local), dtype=dtype)
    size, tiled = (torch.Size((*s[:2], *ones)) for s in (x.shape, x.padded_shape))
    place = x.place.becomes(layout, size, tiled)
    return drawn(ShardedTensor(block, place), key, make, dtype)


def _saturated(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Apply alpha dropout: dropped elements get SELU's lowest value; mean and variance are kept."""
    # -alpha is the limit of SELU at minus infinity; a and the shift restore mean 0 and variance 1
    # (Klambauer et al., arXiv 1706.02515, section "New Dropout Technique")
    alpha = 1.7580993408473766
    a = (alpha**2 * p + 1) ** -0.5 * (1 - p) ** -0.5 if p < 1 else 0.0
    noise = keep.to(x.dtype)
    return x * (noise * a) + (noise - 1).mul_(alpha * a).add_(alpha * a * p)


@implements(
    F.dropout, torch.dropout, torch.dropout_, F.alpha_dropout, torch.alpha_dropout,
    torch.alpha_dropout_, F.feature_alpha_dropout, torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_, torch.feature_dropout, torch.feature_dropout_,
    takes="padding skew",
)  # fmt: skip
def dropout(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Drop elements, or channels where the name begins with "feature"."""
    off = func in (F.alpha_dropout, F.feature_alpha_dropout)
    b = (_bind_off if off else _bind)(*args, **kwargs)
    x, p = b["input"], b["p"]
    inplace = b.get("inplace", False) or func.__name__.endswith("_")
    name = func.__name__.rstrip("_")
    features, alpha = name.startswith("feature"), "alpha" in name
    _checked(name, func, x, p)
    if not b.get("training", b.get("train")) or p == 0 or x.numel() == 0:
        return x
    if features and len(x.padded_shape) < 2:
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
    dropped = None if features or alpha or inplace else _by_kernel(x, p)
    if dropped is not None:
        return x.becomes(dropped)
    keep = _keep(x, kept(p), torch.bool, features)
    drop = _saturated if alpha else _dropped
    return _returned(x, drop(x.raw, keep, p), inplace)


def _by_kernel(x: ShardedTensor, p: float) -> Tensor | None:
    """Drop elements by a kernel, if there is one for this block."""
    if (x.raw.is_cpu and not active.cpu) or not active.native(x.raw):
        return None
    where = places(x)
    if where is None:
        return None
    mesh, key = x.mesh, signed(next_key(x.mesh))

    def run(raw: Tensor) -> Tensor:
        made = [
            by_kernel(block.contiguous(), at.start, at.step, at.table, key, p)
            for block, at in zip(blocks(raw, mesh), where, strict=True)
        ]
        return storage(made, mesh)

    def drop(raw: Tensor) -> Tensor:
        # backward recomputes the mask
        return mapped(raw, drop, run)

    return drop(x.raw)


def _returned(x: ShardedTensor, raw: Tensor, inplace: bool) -> ShardedTensor:
    """Return the result, written to the tensor if it is changed in place."""
    if not inplace:
        return x.becomes(raw)
    x.raw.copy_(raw)
    return x


@by_signature("native_dropout(input, p, train)", torch.native_dropout, takes="padding skew")
def native_dropout(func: Func, x: ShardedTensor, p: float, train: bool | None) -> object:
    """Return (output, mask)."""
    _checked("dropout", F.dropout, x, p)
    if train is False:
        return x.becomes(x.raw * 1), x.becomes(torch.ones_like(x.raw, dtype=torch.bool))
    keep = _keep(x, kept(p), torch.bool, False)
    return x.becomes(_dropped(x.raw, keep, p)), x.becomes(keep)


_rrelu = binder(
    "rrelu(input, lower=0.125, upper=0.3333333333333333, training=False, inplace=False)\n"
    "rrelu(input, lower=0.125, upper=0.3333333333333333, training=False, "
    "generator=None)"
)


@implements(F.rrelu, torch.rrelu, torch.rrelu_, takes="padding skew")
def rrelu(func: Func, args: Args, kwargs: Kwargs) -> ShardedTensor:
    """Draw a leaky slope between lower and upper: one per element in training, else their mean."""
    b = _rrelu(*args, **kwargs)
    x, low, high = b["input"], b["lower"], b["upper"]
    if low > high:
        raise RuntimeError(
            f"Lower bound should be less than or equal to the upper bound, but got {low} and {high}"
        )
    if b["training"]:
        key = next_key(x.mesh, b.get("generator"))
        slope: Any = drawn(
            x, key, then(unit(x.dtype), lambda u: u.mul_(high - low).add_(low)), x.dtype
        )
    else:
        slope = (low + high) / 2
    raw = torch.where(x.raw > 0, x.raw, x.raw * slope)
    return _returned(x, raw, b.get("inplace") or func is torch.rrelu_)
