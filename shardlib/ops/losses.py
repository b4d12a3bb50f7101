"""Losses of torch.nn.functional: the rows' losses where the rows lie (reduction "none"), then our own sum or mean."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.errors import Unsupported
from shardlib.ops.dims import Unfit, rows_call
from shardlib.ops.loss import cross_entropy as _split_classes
from shardlib.ops.signatures import binder
from shardlib.tensor import implements

__all__ = ["LOSSES"]

LOSSES: list[str] = []

_EACH = """
    l1_loss(input, target, size_average=None, reduce=None, reduction='mean', weight=None)
    mse_loss(input, target, size_average=None, reduce=None, reduction='mean', weight=None)
    smooth_l1_loss(input, target, size_average=None, reduce=None, reduction='mean', beta=1.0)
    huber_loss(input, target, reduction='mean', delta=1.0, weight=None)
    binary_cross_entropy(input, target, weight=None, size_average=None, reduce=None, reduction='mean')
    binary_cross_entropy_with_logits(input, target, weight=None, size_average=None, reduce=None, reduction='mean', pos_weight=None)
    kl_div(input, target, size_average=None, reduce=None, reduction='mean', log_target=False)
    poisson_nll_loss(input, target, log_input=True, full=False, size_average=None, eps=1e-8, reduce=None, reduction='mean')
    soft_margin_loss(input, target, size_average=None, reduce=None, reduction='mean')
    hinge_embedding_loss(input, target, margin=1.0, size_average=None, reduce=None, reduction='mean')
    margin_ranking_loss(input1, input2, target, margin=0, size_average=None, reduce=None, reduction='mean')
    gaussian_nll_loss(input, target, var, full=False, eps=1e-6, reduction='mean')
"""  # elements are rows
_ROWS = """
    cosine_embedding_loss(input1, input2, target, margin=0, size_average=None, reduce=None, reduction='mean')
    multi_margin_loss(input, target, p=1, margin=1.0, weight=None, size_average=None, reduce=None, reduction='mean')
    multilabel_margin_loss(input, target, size_average=None, reduce=None, reduction='mean')
    multilabel_soft_margin_loss(input, target, weight=None, size_average=None, reduce=None, reduction='mean')
    triplet_margin_loss(anchor, positive, negative, margin=1.0, p=2, eps=1e-6, swap=False, size_average=None, reduce=None, reduction='mean')
"""  # the first dimension is rows


def _how(given: dict[str, Any]) -> str:
    """The reduction; torch's older two flags come first."""
    average, reduce = given.pop("size_average", None), given.pop("reduce", None)
    reduction = given.pop("reduction")
    if average is not None or reduce is not None:
        return ("mean" if average in (None, True) else "sum") if reduce in (None, True) else "none"
    return reduction


def _elements(a: Any, k: Any) -> Any:
    slots = [s for s in (*a, *k.values()) if hasattr(s, "at")]
    return {s.at: tuple(d - s.ndim for d in range(s.ndim)) for s in slots}


def _first(a: Any, k: Any) -> Any:
    slots = [s for n, s in k.items() if hasattr(s, "at")]
    if slots[0].ndim < 2:
        raise Unfit("one row")
    weight = k.get("weight")
    return {s.at: (None if s is weight else "n",) + (None,) * (s.ndim - 1) if s.ndim else () for s in slots}


def _reduced(out: Any, how: str, given: dict[str, Any]) -> Any:
    if how == "none":
        return out
    if how == "sum":
        return out.sum()
    if how == "batchmean":
        x = given["input"]
        return out.sum() / (x.shape[0] if x.ndim else 1)
    if how != "mean":
        raise TypeError(how)
    return out.mean()


def _enter(line: str, labels: Any) -> None:
    name = line.partition("(")[0]
    func, bind = getattr(F, name), binder(line)

    def rule(f: Any, args: Any, kwargs: Any) -> Any:
        given = bind(*args, **kwargs)
        how = _how(given)
        if name == "gaussian_nll_loss" and not isinstance(given["var"], Tensor):
            raise TypeError("var")
        out = rows_call(func, (), given | {"reduction": "none"}, labels)
        if how == "batchmean" and name != "kl_div":
            raise TypeError(how)
        return _reduced(out, how, given)

    implements(func)(rule)
    LOSSES.append(name)


for _line in _EACH.strip().splitlines():
    _enter(_line.strip(), _elements)
for _line in _ROWS.strip().splitlines():
    _enter(_line.strip(), _first)

_NLL = binder(
    "nll_loss(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean')"
)
_CE = binder(
    "cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', "
    "label_smoothing=0.0)"
)


def _classes(a: Any, k: Any) -> Any:
    """input (N, C, d...), target (N, d...) or like input; the classes are whole."""
    x, t, w = k["input"], k["target"], k.get("weight")
    lead = 1 if x.ndim > 1 else 0
    mine = tuple(None if d == lead else ("r", d) for d in range(x.ndim))
    out = {x.at: mine, t.at: mine if t.ndim == x.ndim else tuple(m for m in mine if m is not None)}
    if hasattr(w, "at"):
        out[w.at] = (None,)
    return out


def _weighed(func: Any, given: dict[str, Any], how: str) -> Any:
    out = rows_call(func, (), given | {"reduction": "none"}, _classes)
    if how != "mean":
        return _reduced(out, how, given)
    x, t = given["input"], given["target"]
    if t.is_floating_point():
        return out.sum() / (x.numel() // x.shape[1 if x.ndim > 1 else 0])
    weight = given["weight"]
    kept = t != given["ignore_index"]
    if weight is None:
        return out.sum() / kept.sum()
    ones = torch.full_like(x.detach(), -1.0)
    count = rows_call(F.nll_loss, (), {"input": ones, "target": t, "weight": weight.detach(),
                                       "ignore_index": given["ignore_index"], "reduction": "none"}, _classes)  # fmt: skip
    return out.sum() / count.sum()


@implements(F.nll_loss)
def nll_loss(func: Any, args: Any, kwargs: Any) -> Any:
    given = _NLL(*args, **kwargs)
    return _weighed(F.nll_loss, given, _how(given))


@implements(F.cross_entropy)
def cross_entropy(func: Any, args: Any, kwargs: Any) -> Any:
    """Split classes have their own rule (loss.py); whole ones run torch's on the rows."""
    given = _CE(*args, **kwargs)
    how = _how(given)
    x, t = given["input"], given["target"]
    if isinstance(x, Tensor) and x.ndim == 2 and given["weight"] is None and not t.is_floating_point():
        try:
            return _split_classes(func, (), given | {"reduction": how})
        except Unsupported:
            pass
    return _weighed(F.cross_entropy, given, how)


_NORM = binder("batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)")


@implements(torch.batch_norm)
def batch_norm(func: Any, args: Any, kwargs: Any) -> Any:
    """Statistics over the whole batch, whoever holds it; the running ones are updated as torch does."""
    g = _NORM(*args, **kwargs)
    x, w, b, mean, var = g["input"], g["weight"], g["bias"], g["running_mean"], g["running_var"]
    dims = [0, *range(2, x.ndim)]
    shape = [1, -1, *[1] * (x.ndim - 2)]
    if g["training"] or mean is None:
        count = x.numel() // x.shape[1]
        m = x.mean(dims)
        centred = x - m.view(shape)
        v = (centred * centred).mean(dims)
        if mean is not None:
            mean.mul_(1 - g["momentum"]).add_(m.detach() * g["momentum"])
            var.mul_(1 - g["momentum"]).add_(v.detach() * (g["momentum"] * count / (count - 1)))
    else:
        m, v = mean, var
        centred = x - m.view(shape)
    out = centred * (v + g["eps"]).rsqrt().view(shape)
    out = out if w is None else out * w.view(shape)
    return out if b is None else out + b.view(shape)
