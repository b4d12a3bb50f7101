"""NVIDIA's apex behind the same operations, where it is installed and chosen by name.

Its version has always been "0.1", so it is recognised by its features: its folders, the functions
of ``amp_C``, and their results.  At its first use on a device each function runs once on drawn
numbers and is compared with torch's formula; one that raises or differs is not used again, with a
warning.  The registry has another package of this name, tools for a web framework: it is
recognised by its files, never imported, and named in a warning.

apex is no dependency, and is not imported before it is chosen.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.kernels.active import chosen
from shardlib.kernels.adamw import AdamStep, Row

# of NVIDIA's package
_FOLDERS = ("multi_tensor_apply", "normalization", "optimizers")
FEATURES = {
    "adam": ("amp_C", "multi_tensor_adam"),
    "lamb": ("amp_C", "multi_tensor_lamb"),
    "l2norm": ("amp_C", "multi_tensor_l2norm"),
    "layer_norm": ("apex.normalization.fused_layer_norm", "fused_layer_norm_affine"),
    "rms_norm": ("apex.normalization.fused_layer_norm", "fused_rms_norm_affine"),
}
"""Functions of apex that are used: feature -> (module, function)."""


class Probe(NamedTuple):
    """The package installed under the name apex, found without running it.

    ``kind``  "nvidia", "other" or "none".
    ``why``   a sentence for ``info`` and warnings.
    """

    kind: str
    why: str


@cache
def probe() -> Probe:
    """Look for apex on disk without importing it."""
    try:
        spec = importlib.util.find_spec("apex")
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return Probe("none", "not installed")
    places = [Path(p) for p in spec.submodule_search_locations or ()]
    if not any((p / folder).is_dir() for p in places for folder in _FOLDERS):
        name = "the module apex"
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            name = f"the package apex {importlib.metadata.version('apex')}"
        return Probe("other", f"{name} is not NVIDIA's: {spec.origin or places}")
    why = "NVIDIA's"
    if importlib.util.find_spec("amp_C") is None:
        why += ", built without its extensions (APEX_CPP_EXT, APEX_CUDA_EXT)"
    return Probe("nvidia", why)


def apex(feature: str, like: Tensor) -> Callable[..., Any] | None:
    """Return one of apex's functions, in this module's form, if it is chosen and passed its check.

    ``like``  a tensor of the device and dtype that it will run on.
    """
    if chosen() != "apex":
        return None
    return _checked(feature, like.device, like.dtype)


@cache
def _checked(feature: str, device: torch.device, dtype: torch.dtype) -> Callable[..., Any] | None:
    found = probe()
    if found.kind != "nvidia":
        _warn_once(found)
        return None
    module, name = FEATURES[feature]
    run, wanted = _FORMS[feature]
    head, wrong = f"apex has no {feature}", f"{module} lacks {name}"
    try:
        if callable(getattr(importlib.import_module(module), name, None)):
            head = f"apex's {feature} is not used for {dtype} on {device}"
            wrong = _differs(feature, run, wanted, device, dtype)
    except ImportError as e:
        wrong = str(e)
    except Exception as e:
        # whatever an extension that was built for another torch raises
        wrong = f"it raises {type(e).__name__}: {e}"
    if wrong:
        warnings.warn(f"{head}: {wrong}", stacklevel=2)
        return None
    return run


@cache
def _warn_once(found: Probe) -> None:
    text = "backend='apex', and apex is not installed; torch's run"
    if found.kind == "other":
        text = (
            f"backend='apex' wants NVIDIA's apex, and {found.why}; torch's operations run. "
            "NVIDIA's is built from github.com/NVIDIA/apex, and is on no registry"
        )
    warnings.warn(text, stacklevel=2)


def _differs(
    feature: str, run: Callable[..., Any], wanted: Any, device: torch.device, dtype: torch.dtype
) -> str:
    """Run both on 1,024 drawn numbers; return how they differ, or "" if they agree."""
    drawn = torch.Generator().manual_seed(0)
    x, y, m, v = (
        torch.rand(8, 128, generator=drawn, device="cpu").to(device, dtype) for _ in range(4)
    )
    mine, theirs = (_results(feature, f, [t.clone() for t in (x, y, m, v)]) for f in (run, wanted))
    room = max(1e-4, 4 * torch.finfo(dtype).eps)
    for a, b in zip(mine, theirs, strict=True):
        one, two = a.detach().double(), b.detach().double()
        off = (one - two).abs().max() / two.abs().max().clamp(min=1e-12)
        if not bool(off <= room):
            return f"it is off by {float(off):.1e} of torch's"
    return ""


def _results(feature: str, run: Callable[..., Any], given: list[Tensor]) -> list[Tensor]:
    """Run one implementation; return all that it computes, the gradients of a norm too."""
    if feature in ("adam", "lamb"):
        run(*([t] for t in given), AdamStep(1e-2, 0.9, 0.99, 1e-6, 0.1, 3))
        return given[1:]
    if feature == "l2norm":
        return [run(given)]
    x, *affine = (given[0].requires_grad_(), *(t[0].requires_grad_() for t in given[1:3]))
    affine = affine[: 2 if feature == "layer_norm" else 1]
    out = run(x, (128,), *affine, 1e-5)
    return [out, *torch.autograd.grad(out.float().pow(2).sum(), [x, *affine])]


# ---------------------------------------------------------------- apex's functions


def _multi(name: str, lists: Sequence[Row], *args: Any) -> Any:
    """Call one of amp_C's functions over lists of tensors, through apex's own launcher."""
    launch = importlib.import_module("apex.multi_tensor_apply").multi_tensor_applier
    function = getattr(importlib.import_module("amp_C"), name)
    overflow = torch.zeros(1, dtype=torch.int, device=lists[0][0].device)
    return launch(function, overflow, [list(row) for row in lists], *args)


def _adam(g: Row, p: Row, m: Row, v: Row, h: AdamStep) -> None:
    """Step with decoupled decay and corrected moments: apex's modes 1 and 1."""
    _multi("multi_tensor_adam", (g, p, m, v), h.lr, h.b1, h.b2, h.eps, h.count, 1, 1, h.decay)


def _lamb(g: Row, p: Row, m: Row, v: Row, h: AdamStep) -> None:
    """Step with a norm of 0 and a bound of 1, which clips nothing; trust ratio everywhere."""
    norm = torch.zeros(1, device=p[0].device)
    rates = h.lr, h.b1, h.b2, h.eps, h.count
    _multi("multi_tensor_lamb", (g, p, m, v), *rates, 1, h.decay, 1, 1, norm, 1.0, True)


def _l2norm(tensors: Row) -> Tensor:
    """Compute the norm of each tensor."""
    return _multi("multi_tensor_l2norm", (tensors,), True)[1]


def _norm(
    kind: str, x: Tensor, shape: tuple[int, ...], factors: Sequence[Tensor], eps: float
) -> Tensor | None:
    """Normalise rows by apex; None where apex has no function for these dtypes."""
    norms = importlib.import_module("apex.normalization.fused_layer_norm")
    if not factors:
        return getattr(norms, f"fused_{kind}_norm")(x, shape, eps)
    dtypes = {t.dtype for t in factors}
    if dtypes == {x.dtype}:
        return getattr(norms, f"fused_{kind}_norm_affine")(x, *factors, shape, eps)
    if dtypes != {torch.float32}:
        return None
    run = getattr(norms, f"mixed_dtype_fused_{kind}_norm_affine")
    # its result has the parameters' dtype
    return run(x, *factors, shape, eps).to(x.dtype)


def _layer_norm(
    x: Tensor, shape: tuple[int, ...], w: Tensor | None, b: Tensor | None, eps: float
) -> Tensor | None:
    factors = [t for t in (w, b) if t is not None]
    return None if len(factors) == 1 else _norm("layer", x, shape, factors, eps)


def _rms_norm(x: Tensor, shape: tuple[int, ...], w: Tensor | None, eps: float) -> Tensor | None:
    return _norm("rms", x, shape, [t for t in (w,) if t is not None], eps)


# ---------------------------------------------------------------- torch's formulas of the same


def _direction(g: Tensor, p: Tensor, m: Tensor, v: Tensor, h: AdamStep) -> Tensor:
    m.lerp_(g, 1 - h.b1)
    v.mul_(h.b2).addcmul_(g, g, value=1 - h.b2)
    root = (v / (1 - h.b2**h.count)).sqrt() + h.eps
    return (m / (1 - h.b1**h.count)) / root + h.decay * p


def _torchs_adam(g: Row, p: Row, m: Row, v: Row, h: AdamStep) -> None:
    for row in zip(g, p, m, v, strict=True):
        row[1].sub_(_direction(*row, h), alpha=h.lr)


def _torchs_lamb(g: Row, p: Row, m: Row, v: Row, h: AdamStep) -> None:
    for row in zip(g, p, m, v, strict=True):
        step = _direction(*row, h)
        row[1].sub_(step * (row[1].norm() / step.norm()), alpha=h.lr)


def _torchs_l2norm(tensors: Row) -> Tensor:
    return torch.stack([t.norm(dtype=torch.float32) for t in tensors])


_FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "adam": (_adam, _torchs_adam),
    "lamb": (_lamb, _torchs_lamb),
    "l2norm": (_l2norm, _torchs_l2norm),
    "layer_norm": (_layer_norm, F.layer_norm),
    "rms_norm": (_rms_norm, F.rms_norm),
}
