"""Cross entropy with the classes split: the logits are never gathered.

Per row three numbers cross the wire: the maximum, the sum of exponentials and the target's
logit (the last two in one psum).

Source: arXiv 1909.08053, section 3 (vocabulary-parallel loss).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import Local
from shardlib.collectives import axis_index, axis_size, pmax, psum, unwrap, wrap
from shardlib.errors import ImplicitCommunication, ShardError, Unsupported
from shardlib.layouts import Layout
from shardlib.mesh import Mesh, bind
from shardlib.placing import reshard
from shardlib.tensor import ShardedTensor, is_half, lift, partial_escape, total, typeof, vary

__all__ = ["cross_entropy"]


class _RowLoss(Local):
    """Loss of each row, and softmax.  logits [R, C/axes], target [R] -> [R], [R, C/axes]; zero where ignored.

    Softmax is what backward saves; as an output it has a graph, so backward can be differentiated again.

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
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
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
            return unwrap(loss.masked_fill(ignored, 0)), unwrap(exp)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        mesh, axes, smooth, classes = ctx.place
        if torch.is_grad_enabled() or grads[0] is None or grads[1] is not None:
            return _row_gradient(ctx, *grads), None, None, None, None, None, None
        with bind(mesh):
            softmax, here, outside, ignored = (wrap(t, mesh) for t in ctx.saved_tensors)
            g = wrap(grads[0], mesh).masked_fill(ignored, 0).unsqueeze(-1)
            hot = (~outside).unsqueeze(-1).to(softmax.dtype) * (smooth - 1) * g
            dx = softmax * g
            if smooth:
                dx -= (g * (smooth / classes)).masked_fill(_padding(softmax, axes, classes), 0)
            unwrap(dx).scatter_add_(-1, unwrap(here).unsqueeze(-1), unwrap(hot))
            return unwrap(dx.to(ctx.dtype)), None, None, None, None, None, None


def _row_gradient(ctx: Any, g: Tensor | None, g_softmax: Tensor | None) -> Tensor:
    """The logits' gradient on raw blocks, out of operations that can be differentiated again."""
    mesh, axes, smooth, classes = ctx.place
    p, here, outside, ignored = ctx.saved_tensors
    dx: Any = 0
    if g is not None:
        g = vary(g.masked_fill(ignored, 0), mesh, axes).unsqueeze(-1)
        hot = torch.zeros_like(p).scatter_(-1, here.unsqueeze(-1), (~outside).unsqueeze(-1).to(p.dtype))
        even = torch.full_like(p, smooth / classes)
        if smooth:
            with bind(mesh):
                even = unwrap(wrap(even, mesh).masked_fill(_padding(wrap(p, mesh), axes, classes), 0))
        dx = (p - (1 - smooth) * hot - even) * g
    if g_softmax is not None:
        mean = total((p * g_softmax).sum(-1, keepdim=True), mesh, axes)
        dx = dx + p * (g_softmax - vary(mean, mesh, axes))
    return dx.to(ctx.dtype)


class _WholeRowLoss(Local):
    """The same where each rank holds all classes: logits [R, C], target [R] -> [R].

    A few rows at a time: beside the logits and their gradient nothing of their size is made, and of each row only
    its maximum and its sum of exponentials are kept.  Half precision is fp32 within.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore: int, smooth: float) -> Tensor:
        wide = torch.float32 if is_half(logits) else logits.dtype
        ignored = target == ignore
        here = target.masked_fill(ignored, 0).unsqueeze(-1)
        top = logits.amax(-1, keepdim=True).to(wide)
        sums, means = [], []
        for part, t in _some_rows(logits, top):
            shifted = _less(part, t)
            if smooth:
                means.append(shifted.mean(-1))
            sums.append(shifted.exp_().sum(-1, keepdim=True))
        total = sums[0] if len(sums) == 1 else torch.cat(sums)
        loss = (total.log() - (logits.gather(-1, here).to(wide) - top) * (1 - smooth)).squeeze(-1)
        if smooth:
            loss -= torch.cat(means) * smooth
        ctx.save_for_backward(logits, top, total, here, ignored)
        ctx.smooth = smooth
        return loss.masked_fill_(ignored, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, top, total, here, ignored = ctx.saved_tensors
        if torch.is_grad_enabled():  # its own gradient is wanted: torch's operators have one
            wide = logits.to(total.dtype)
            rows = F.cross_entropy(wide, here.squeeze(-1), label_smoothing=ctx.smooth, reduction="none")
            dx = torch.autograd.grad(rows, logits, grads[0].masked_fill(ignored, 0).to(wide.dtype), create_graph=True)
            return dx[0], None, None, None
        g = grads[0].masked_fill(ignored, 0).unsqueeze(-1)
        dx = torch.empty_like(logits)
        for part, into, t, s, gs, h, to in _some_rows(logits, dx, top, g / total, g, here, g * (ctx.smooth - 1)):
            e = _less(part, t, into)
            e.exp_().mul_(s)
            if ctx.smooth:
                e -= gs * (ctx.smooth / logits.shape[-1])
            e.scatter_add_(-1, h, to)
            if e is not into:
                into.copy_(e)
        return dx, None, None, None


def _less(x: Tensor, t: Tensor, into: Tensor | None = None) -> Tensor:
    """x - t in t's dtype; ``into`` may be written to.  Mixing dtypes in one kernel is slow on a CPU."""
    if x.dtype != t.dtype:
        return x.to(t.dtype).sub_(t)
    return torch.sub(x, t, out=into)


def _some_rows(x: Tensor, *more: Tensor) -> Any:
    """x and tensors with as many rows, cut into parts that a cache holds (on a GPU: that fill it)."""
    part = (1 << 18 if x.device.type == "cpu" else 1 << 26) // max(x.shape[-1], 1) or 1
    if x.is_meta or part >= len(x):
        return [(x, *more)]
    return zip(*(t.split(part) for t in (x, *more)), strict=True)


def _padding(x: Tensor, axes: tuple[str, ...], classes: int) -> Tensor:
    """Which of this rank's columns lie beyond the true classes.  x [R, C/axes] -> [C/axes]."""
    place = torch.arange(x.shape[-1], device=x.device)
    return (place + axis_index(axes) * x.shape[-1] if axes else place) >= classes


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
    raw: Any
    if axes or (classes or logits.size_[1]) != logits.size_[1]:
        raw, _ = _RowLoss.apply(logits.raw, target.raw, mesh, axes, ignore, smooth, classes or logits.size_[1])
    else:
        flat = logits.raw.flatten(0, -2), target.raw.flatten()  # every rank's rows
        if flat[0].numel() > 1 << 16 or is_half(flat[0]):
            raw = _WholeRowLoss.apply(*flat, ignore, smooth)
        else:  # too small to be worth cutting
            raw = F.cross_entropy(*flat, ignore_index=ignore, label_smoothing=smooth, reduction="none")
        raw = raw.view(target.raw.shape)
    rows = ShardedTensor(raw, Layout(dims=(row,)), logits.size_[:1], mesh, logits.deferred)
    if reduction == "none":
        return rows
    if reduction == "sum":
        return rows.sum()
    with torch.no_grad():
        counted = ShardedTensor((target.raw != ignore).to(raw.dtype), rows.sharding, rows.size_, mesh).sum()
    return rows.sum() / counted
