"""Cross entropy with the classes split: the logits are never gathered.

Per row three numbers cross the wire: the maximum, the sum of exponentials and the target's
logit (the last two in one psum).

Source: arXiv 1909.08053, section 3 (vocabulary-parallel loss).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import axis_index, axis_size, pmax, psum, unwrap, wrap
from shardlib.errors import ImplicitCommunication, ShardError, Unsupported
from shardlib.layouts import Layout
from shardlib.mesh import Mesh, bind
from shardlib.placing import reshard
from shardlib.tensor import ShardedTensor, implements, lift, partial_escape, typeof

__all__ = ["cross_entropy", "mse_loss"]


class _RowLoss(torch.autograd.Function):
    """Loss of each row.  logits [R, C/axes], target [R] -> [R]; zero where ignored.

    loss = (1 - s) (lse - logit[target]) + s (lse - mean(logits))   with smoothing s.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        mesh: Mesh,
        axes: tuple[str, ...],
        ignore: int,
        smooth: float,
        classes: int,
    ) -> Tensor:
        ctx.place = mesh, axes, smooth, classes
        with bind(mesh):
            x, t = wrap(logits, mesh), wrap(target, mesh)
            x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
            padded = classes != x.shape[-1] * (axis_size(axes) if axes else 1)
            x = x.masked_fill(_padding(x, axes, classes), float("-inf")) if padded else x
            ignored = t == ignore
            here = t - (axis_index(axes) * x.shape[-1] if axes else 0)
            outside = (here < 0) | (here >= x.shape[-1]) | ignored
            here = here.masked_fill(outside, 0)
            top = x.amax(-1)
            top = pmax(top, axes) if axes else top
            shifted = x - top.unsqueeze(-1)
            picked = shifted.gather(-1, here.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0)
            flat = torch.zeros_like(top)
            if smooth:
                flat = (shifted.masked_fill(_padding(x, axes, classes), 0) if padded else shifted).sum(-1)
            exp = shifted.exp_()  # in place: logits are the largest tensors of all
            sums = torch.stack([exp.sum(-1), picked, flat], -1)
            sums = psum(sums, axes) if axes else sums
            lse = sums[..., 0].log()
            loss = lse - (1 - smooth) * sums[..., 1] - smooth / classes * sums[..., 2]
            exp /= sums[..., 0:1]
            ctx.save_for_backward(*(unwrap(t) for t in (exp, here, outside, ignored)))
            ctx.dtype = logits.dtype
            return unwrap(loss.masked_fill(ignored, 0))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        mesh, axes, smooth, classes = ctx.place
        with bind(mesh):
            softmax, here, outside, ignored = (wrap(t, mesh) for t in ctx.saved_tensors)
            g = wrap(grads[0], mesh).masked_fill(ignored, 0).unsqueeze(-1)
            hot = (~outside).unsqueeze(-1).to(softmax.dtype) * (smooth - 1) * g
            dx = softmax * g
            if smooth:
                dx -= (g * (smooth / classes)).masked_fill(_padding(softmax, axes, classes), 0)
            unwrap(dx).scatter_add_(-1, unwrap(here).unsqueeze(-1), unwrap(hot))
            return unwrap(dx.to(ctx.dtype)), None, None, None, None, None, None


def _padding(x: Tensor, axes: tuple[str, ...], classes: int) -> Tensor:
    """Which of this rank's columns lie beyond the true classes.  x [R, C/axes] -> [C/axes]."""
    place = torch.arange(x.shape[-1], device=x.device)
    return (place + axis_index(axes) * x.shape[-1] if axes else place) >= classes


@implements(F.cross_entropy)
def cross_entropy(func: Any, args: Any, kwargs: Any, classes: int | None = None) -> Tensor:
    """F.cross_entropy(logits [N, C], target [N]) with N, C or both split; ``classes`` of them are no padding."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = dict(zip(names, args, strict=False)) | kwargs
    logits, target = given["input"], given["target"]
    mesh = logits.mesh if isinstance(logits, ShardedTensor) else target.mesh
    logits, target = lift(logits, mesh, "cross_entropy"), lift(target, mesh, "cross_entropy")
    reduction, ignore = given.get("reduction", "mean"), given.get("ignore_index", -100)
    if given.get("weight") is not None or target.is_floating_point() or len(logits.size_) != 2:
        raise Unsupported(
            "sharded cross entropy takes logits [N, C] and integer targets [N], without class weights",
            op="cross_entropy",
            operands={"logits": typeof(logits), "target": typeof(target)},
            mesh=mesh,
            fix="F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1))",
        )
    if logits.sharding.partial:
        raise partial_escape("cross_entropy", logits)
    row, col = logits.sharding.resolve(2).dims
    if target.size_ != logits.size_[:1]:
        raise ShardError(
            f"{target.size_[0] if target.size_ else 'no'} targets for {logits.size_[0]} rows",
            op="cross_entropy",
            operands={"logits": typeof(logits), "target": typeof(target)},
            mesh=mesh,
            fix="F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1))",
        )
    rows = Layout(dims=(row,))
    if target.sharding != rows and not (target.sharding >> rows).bytes(tuple(target.size_), mesh):
        target = reshard(target, rows)  # cut, nothing moves
    grouped = any(isinstance(p, int) for p in col.parts) or col.order != "contiguous"
    if target.sharding.resolve(1).dims[0] != row or grouped:
        raise ImplicitCommunication(
            "logits and target are not split the same way along the rows",
            op="cross_entropy",
            operands={"logits": typeof(logits), "target": typeof(target)},
            mesh=mesh,
            fix=f"F.cross_entropy(logits, sl.reshard(target, {str(row)!r}))",
        )
    axes = tuple(a for a in col.axes if mesh.axes[a] > 1)
    smooth = float(given.get("label_smoothing", 0.0))
    raw: Any = _RowLoss.apply(logits.raw, target.raw, mesh, axes, ignore, smooth, classes or logits.size_[1])
    rows = ShardedTensor(raw, Layout(dims=(row,)), logits.size_[:1], mesh, logits.deferred)
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    with torch.no_grad():
        counted = ShardedTensor((target.raw != ignore).to(raw.dtype), rows.sharding, rows.size_, mesh).sum()
    return rows.sum() / counted


@implements(F.mse_loss)
def mse_loss(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """Mean (or sum, or none) of squared differences."""
    x, y = args[:2] if len(args) > 1 else (args[0], kwargs["target"])
    square = (x - y) * (x - y)
    reduction = kwargs.get("reduction", "mean")
    return square if reduction == "none" else square.sum() if reduction == "sum" else square.mean()
