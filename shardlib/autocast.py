"""torch.autocast for sharded values: operands are cast to the dtypes that torch casts them to.

Implementations run with autocast off: their blocks have the dtype that torch's operator would
compute in, and computation inside one (a sum in fp32, an accumulator) is not cast again.
The lists are those of torch's page "Automatic Mixed Precision", CPU and CUDA apart; other
accelerators use CUDA's, as in torch.  float64 is never cast.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.mesh import accelerator, scope, within

__all__ = ["COMPOSITE", "cast", "casting"]

_OWNERS = (torch, Tensor, F, torch.linalg, torch.fft, torch.special)

_LOWER = """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc bmm mm baddbmm
    addmm addbmm linear matmul scaled_dot_product_attention chain_matmul multi_dot vecdot mv addmv
    addr prelu __matmul__ __rmatmul__
"""
_CPU_ONLY_LOWER = "vecdot"
_ACCELERATOR_ONLY_LOWER = "chain_matmul multi_dot mv addmv addr prelu"
_LOSSES = """
    mse_loss cosine_embedding_loss nll_loss hinge_embedding_loss poisson_nll_loss smooth_l1_loss
    cross_entropy l1_loss huber_loss margin_ranking_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss ctc_loss kl_div multilabel_margin_loss binary_cross_entropy_with_logits
"""
_WIDE = {
    "cpu": _LOSSES + """binary_cross_entropy avg_pool3d polar prod quantile nanquantile stft cdist
        trace view_as_complex cholesky cholesky_inverse inverse pinverse fft ifft rfft irfft""",
    "accelerator": _LOSSES + """__pow__ __rdiv__ __rpow__ __rtruediv__ acos asin cosh cumprod cumsum dist
        erfinv exp expm1 group_norm layer_norm rms_norm log log10 log1p log2 logsumexp log_softmax norm vector_norm
        matrix_norm normalize pow prod reciprocal renorm rsqrt sinh softmin softmax softplus sum tan
        cosine_similarity cdist pdist erfc ord std var""",
}  # fmt: skip
_WIDEST = {
    "cpu": "cat stack concat concatenate index_copy",
    "accelerator": "addcdiv addcmul atan2 bilinear cross dot grid_sample index_put scatter_add tensordot "
    "vdot cat stack",
}

COMPOSITE: set[Any] = {torch.einsum, torch.tensordot, torch.inner, Tensor.inner}
"""Functions that torch composes of others, as their implementations
here do: those others are cast one by one.
"""

DECLARED: set[Any] = set()
"""Functions that torch runs on the blocks, where it casts them itself."""


def _named(names: str) -> set[Any]:
    return {f for n in names.split() for o in _OWNERS if (f := getattr(o, n, None)) is not None}


def _table(device: str) -> dict[Any, str]:
    others = set((_ACCELERATOR_ONLY_LOWER if device == "cpu" else _CPU_ONLY_LOWER).split())
    lower = " ".join(n for n in _LOWER.split() if n not in others)
    wide = _WIDE["cpu" if device == "cpu" else "accelerator"]
    widest = _WIDEST["cpu" if device == "cpu" else "accelerator"]
    return (
        dict.fromkeys(_named(lower), "lower") | dict.fromkeys(_named(wide), "wide")
        | dict.fromkeys(_named(widest), "widest")
    )  # fmt: skip


_POLICY: dict[str, dict[Any, str]] = {}


@contextmanager
def _off(device: str) -> Iterator[None]:
    torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, True)


@contextmanager
def _on(device: str) -> Iterator[None]:
    torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)


def casting(func: Any) -> AbstractContextManager[Any]:
    """Set autocast as the caller has it while torch, or its Python body, runs on the blocks.

    The steps before and after it (cut, gather, stack, sum) are not cast.
    """
    casts = scope().casts
    return nullcontext() if casts is None or casts[1] is not func else _on(casts[0])


def cast(implementation: Any, func: Any, args: Any, kwargs: Any, known: bool = True) -> Any:
    """Call the implementation with operands cast as torch's autocast casts them on their device.

    ``known``  the function has an implementation here; else torch runs it, or its Python body.
    """
    device = _device((args, kwargs))
    if not torch.is_autocast_enabled(device):
        return implementation(func, args, kwargs)
    policy = _POLICY.get(device)
    if policy is None:
        policy = _POLICY[device] = _table(device)
    how = policy.get(func)
    if how is None and func in COMPOSITE:
        return implementation(func, args, kwargs)
    if how is None and (not known or func in DECLARED):
        with _off(device), within(casts=(device, func)):
            return implementation(func, args, kwargs)
    dtype = None
    if how == "lower":
        dtype = torch.get_autocast_dtype(device)
    elif how == "wide":
        given = kwargs.get("dtype")
        dtype = None if given is not None else torch.float32
    elif how == "widest":
        found = {x.dtype for x in _tensors((args, kwargs)) if x.is_floating_point()}
        dtype = torch.float32 if torch.float32 in found and len(found) > 1 else None
    with _off(device):
        if dtype is not None:
            args, kwargs = _to(args, dtype), _to(kwargs, dtype)
        return implementation(func, args, kwargs)


def _device(tree: Any) -> str:
    found = _tensors(tree)
    device = found[0].device.type if found else "meta"
    if device == "meta":  # recorded ranks: take the device whose autocast is on
        here = accelerator()
        return "cpu" if here is None or torch.is_autocast_enabled("cpu") else here.type
    return device


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [x for item in tree for x in _tensors(item)] if isinstance(tree, tuple | list) else []


def _to(tree: Any, dtype: torch.dtype) -> Any:
    if isinstance(tree, Tensor):
        eligible = tree.is_floating_point() and tree.dtype not in (torch.float64, dtype)
        return tree.to(dtype) if eligible else tree
    if isinstance(tree, dict):
        return {k: _to(v, dtype) for k, v in tree.items()}
    return type(tree)(_to(v, dtype) for v in tree) if type(tree) in (tuple, list) else tree
