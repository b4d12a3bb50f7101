"""Loss functions: torch's own per row on local blocks, then our sum or mean.

The losses of torch.nn.functional are run with reduction "none" as declared here, and reduced by the
library's own operators.  Cross entropy with split classes has its own algorithm: the logits are
never gathered, and three numbers per row are communicated, the maximum, the sum of exponentials and
the target's logit (the last two in one psum).

Source: arXiv 1909.08053, section 3 (vocabulary-parallel loss).
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import Ctx, Grads, Local, l1_weight
from shardlib.collectives.types import blocks, played, storage, unwrap, wrap
from shardlib.collectives.verbs import all_gather, axis_index, axis_size, pmax, psum
from shardlib.dtypes import HALF, is_half, wide, wider
from shardlib.errors import BadArgument, ImplicitCommunication, ShardError, Unsupported
from shardlib.kernels import active
from shardlib.kernels.loss import ce_back, ce_back_, ce_loss, ce_stats
from shardlib.layouts import Layout
from shardlib.layouts.dims import without_ones
from shardlib.mesh import Mesh, bind, rank_along
from shardlib.ops.declare import Bound, labelled, last, rows, rows_but, slots
from shardlib.ops.dims import Labels, rows_call
from shardlib.ops.fallback import is_whole
from shardlib.ops.id_bounds import in_range
from shardlib.ops.padding import cuts_padding
from shardlib.ops.signatures import binder
from shardlib.opspec import Args, Func, Kwargs, lines
from shardlib.placing import reshard
from shardlib.tensor import raw_of, refuse_sums
from shardlib.tensor.gradients import real_axes, total, vary
from shardlib.tensor.lifting import lifted
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import (
    ShardedTensor,
    Unfit,
    blockwise,
    call_error,
    has_padding,
    implements,
)


class _Classes(NamedTuple):
    """Cross entropy of rows whose ``count`` true classes ``axes`` split, by F.cross_entropy's names.

    The columns beyond the true classes are padding.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    count: int
    ignore: int
    smooth: float

    def fill(self, x: Tensor, value: float) -> Tensor:
        """Fill this rank's columns beyond the true classes.  x [R, C/axes]."""
        if self.count == x.shape[-1] * axis_size(self.axes):
            return x
        place = torch.arange(x.shape[-1], device=x.device) + axis_index(self.axes) * x.shape[-1]
        return x.masked_fill(place >= self.count, value)


class _RowLoss(Local):
    """Loss of each row, and softmax: logits [R, C/axes], target [R] -> [R], [R, C/axes].

    apply(logits, target, classes).  The loss is zero where ignored.

    Softmax is saved for backward; it is an output, so that it has a graph and backward can be
    differentiated again.

    loss = (1 - s) (lse - logit[target]) + s (lse - mean(logits))   with smoothing s.
    """

    @staticmethod
    def forward(
        ctx: Ctx, logits: Tensor, target: Tensor, classes: _Classes
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.classes, ctx.dtype = classes, logits.dtype
        mesh, axes, count, ignore, smooth = classes
        with bind(mesh):
            x, t = classes.fill(wide(wrap(logits, mesh)), float("-inf")), wrap(target, mesh)
            ignored = t == ignore
            here = t - axis_index(axes) * x.shape[-1]
            outside = (here < 0) | (here >= x.shape[-1]) | ignored
            here = here.masked_fill(outside, 0)
            top = pmax(x.amax(-1), axes)
            shifted = x - top.unsqueeze(-1)
            picked = shifted.gather(-1, here.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0)
            flat = torch.zeros_like(top)
            if smooth:
                flat = classes.fill(shifted, 0).sum(-1)
            # in place: logits are the largest tensors of all
            exp = shifted.exp_()
            sums = psum(torch.stack([exp.sum(-1), picked, flat], -1), axes)
            lse = sums[..., 0].log()
            loss = lse - (1 - smooth) * sums[..., 1] - smooth / count * sums[..., 2]
            exp /= sums[..., 0:1]
            ctx.save_for_backward(*(unwrap(t) for t in (exp, here, outside, ignored)))
            return unwrap(loss.masked_fill(ignored, 0)), unwrap(exp)

    @staticmethod
    def backward(ctx: Ctx, *grads: Any) -> Grads:
        mesh, _, count, _, smooth = classes = ctx.classes
        if torch.is_grad_enabled() or grads[0] is None or grads[1] is not None:
            return _row_gradient(ctx, *grads), None, None
        with bind(mesh):
            softmax, here, outside, ignored = (wrap(t, mesh) for t in ctx.saved_tensors)
            g = wrap(grads[0], mesh).masked_fill(ignored, 0).unsqueeze(-1)
            hot = (~outside).unsqueeze(-1).to(softmax.dtype) * (smooth - 1) * g
            dx = softmax * g
            if smooth:
                dx -= classes.fill((g * (smooth / count)).expand_as(dx), 0)
            unwrap(dx).scatter_add_(-1, unwrap(here).unsqueeze(-1), unwrap(hot))
            return unwrap(dx.to(ctx.dtype)), None, None


def _row_gradient(ctx: Ctx, g: Tensor | None, g_softmax: Tensor | None) -> Tensor:
    """Return the logits' gradient on raw blocks, by operations that can be differentiated again."""
    mesh, axes, count, _, smooth = classes = ctx.classes
    p, here, outside, ignored = ctx.saved_tensors
    dx: Any = 0
    if g is not None:
        g = vary(g.masked_fill(ignored, 0), mesh, axes).unsqueeze(-1)
        hot = torch.zeros_like(p).scatter_(
            -1, here.unsqueeze(-1), (~outside).unsqueeze(-1).to(p.dtype)
        )
        with bind(mesh):
            even = unwrap(classes.fill(wrap(torch.full_like(p, smooth / count), mesh), 0))
        dx = (p - (1 - smooth) * hot - even) * g
    if g_softmax is not None:
        mean = total((p * g_softmax).sum(-1, keepdim=True), mesh, axes)
        dx = dx + p * (g_softmax - vary(mean, mesh, axes))
    return dx.to(ctx.dtype)


class _KernelLoss(Local):
    """Loss by kernels around one all-gather of four numbers per row; its result is [R] in fp32.

    apply(logits, target, classes, given_up).

    The logits are saved, and no softmax; if they are ``given_up``, they are overwritten by their
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Ctx, logits: Tensor, target: Tensor, classes: _Classes, given_up: bool
    ) -> Tensor:
        mesh, axes, count, ignore, smooth = classes
        every = _class_blocks(logits, target, classes)
        raw = storage([ce_stats(*block).unsqueeze(0) for block in every], mesh)
        with bind(mesh):
            raw = unwrap(all_gather(wrap(raw, mesh), axes, 0))
        found = [
            ce_loss(parts, t, ignore, smooth, count)
            for parts, (_, t, *_) in zip(blocks(raw, mesh), every, strict=True)
        ]
        loss, kept = (storage(list(row), mesh) for row in zip(*found, strict=True))
        ctx.save_for_backward(logits, target, kept)
        ctx.classes, ctx.given_up = classes, given_up
        return loss

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> Grads:
        mesh, _, count, ignore, smooth = classes = ctx.classes
        logits, target, kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            # create_graph: the eager form is differentiable again
            rows, _ = _RowLoss.apply(logits, target, classes)
            g = grads[0].to(rows.dtype)
            return *torch.autograd.grad(rows, logits, g, create_graph=True), None, None, None
        every = zip(
            _class_blocks(logits, target, classes),
            blocks(kept, mesh),
            blocks(grads[0], mesh),
            strict=True,
        )
        run = ce_back_ if ctx.given_up else ce_back
        made = [
            run(x, t, k, g, cols, first, ignore, smooth, count)
            for (x, t, cols, first), k, g in every
        ]
        return logits if ctx.given_up else storage(made, mesh), None, None, None


def _class_blocks(
    logits: Tensor, target: Tensor, classes: _Classes
) -> list[tuple[Tensor, Tensor, int, int]]:
    """List, per rank here: logits, target, the number of its true classes, its first class."""
    mesh, size = classes.mesh, logits.shape[-1]
    out = []
    for x, t, c in zip(blocks(logits, mesh), blocks(target, mesh), played(mesh), strict=True):
        first = rank_along(classes.axes, c, mesh.axes) * size
        out.append((x, t.long().contiguous(), max(0, min(classes.count - first, size)), first))
    return out


class _WholeRowLoss(Local):
    """Loss where each rank holds all classes: logits [R, C], target [R] -> [R].

    It takes a few rows at a time, and recomputes the softmax in backward: besides the logits and
    their gradient nothing of their size is allocated.  Half precision is computed in fp32.
    """

    @staticmethod
    def forward(ctx: Ctx, logits: Tensor, target: Tensor, ignore: int, smooth: float) -> Tensor:
        ignored = target == ignore
        here = target.masked_fill(ignored, 0).unsqueeze(-1)
        losses = []
        for part, at in _some_rows(logits, here):
            log_p = torch.log_softmax(part, -1, dtype=wider(logits.dtype))
            row = log_p.gather(-1, at) * (smooth - 1)
            losses.append(row - log_p.mean(-1, keepdim=True) * smooth if smooth else row)
        loss = losses[0] if len(losses) == 1 else torch.cat(losses)
        ctx.save_for_backward(logits, here, ignored)
        ctx.smooth = smooth
        return loss.squeeze(-1).masked_fill_(ignored, 0)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> Grads:
        logits, here, ignored = ctx.saved_tensors
        dtype = wider(logits.dtype)
        if torch.is_grad_enabled():
            # create_graph: torch's operators are differentiable again
            x = logits.to(dtype)
            rows = F.cross_entropy(
                x, here.squeeze(-1), label_smoothing=ctx.smooth, reduction="none"
            )
            g = grads[0].masked_fill(ignored, 0).to(dtype)
            return *torch.autograd.grad(rows, logits, g, create_graph=True), None, None, None
        g = grads[0].masked_fill(ignored, 0).unsqueeze(-1)
        # with smoothing s: softmax - (1 - s) onehot - s / classes, times the cotangent
        dx = torch.empty_like(logits)
        for part, into, gs, at in _some_rows(logits, dx, g, here):
            narrow = part.dtype != dtype
            p = torch.softmax(part, -1, dtype=dtype, out=None if narrow else into).mul_(gs)
            if ctx.smooth:
                p -= gs * (ctx.smooth / logits.shape[-1])
            p.scatter_add_(-1, at, gs * (ctx.smooth - 1))
            if narrow:
                into.copy_(p)
        return dx, None, None, None


def _some_rows(x: Tensor, *more: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Cut x, and tensors with as many rows, into parts that fit a cache (that fill a GPU)."""
    part = (1 << 18 if x.device.type == "cpu" else 1 << 26) // max(x.shape[-1], 1) or 1
    if x.is_meta or part >= len(x):
        return [(x, *more)]
    return zip(*(t.split(part) for t in (x, *more)), strict=True)


def _split_cross_entropy(given: dict[str, Any], given_up: bool = False) -> ShardedTensor:
    """Compute F.cross_entropy(logits [N, C], target [N]) where N, C or both are split.

    ``given``  its arguments by name, weight and deprecated ones apart.
    """
    logits, target = lifted("cross_entropy", given["input"], given["target"])
    # the columns beyond are padding
    classes = logits.shape[-1]
    reduction, of_logits, of_target = given["reduction"], logits.place, target.place
    mesh, shape = of_logits.mesh, of_logits.shape
    key = of_logits.layout, shape, of_target.layout, of_target.shape
    plan = mesh.memo("loss", key, lambda: _planned(logits, target))
    if plan.brought:
        target = reshard(target, plan.rows)  # a slice: nothing moves
    ignore, smooth = given["ignore_index"], float(given["label_smoothing"])
    x: Any = logits.raw
    scalar = Place(Layout(), torch.Size(()), mesh, deferred=of_logits.deferred)
    whole = x.ndim == 2 and classes == x.shape[-1] and not (plan.over or plan.axes)
    if whole and reduction != "none" and not _is_large(x) and not by_kernels(x):
        raw: Any = F.cross_entropy(
            x, target.raw, ignore_index=ignore, label_smoothing=smooth, reduction=reduction
        )
        return ShardedTensor(raw, scalar)
    of_rows = _Classes(mesh, plan.axes, classes, ignore, smooth)
    raw = _row_losses(x, target.raw, of_rows, given_up)
    if reduction == "none":
        rows = Place(plan.rows, shape[:1], mesh, deferred=of_logits.deferred)
        return ShardedTensor(raw.to(x.dtype), rows)
    if reduction == "mean":
        raw = _Mean.apply(raw, target.raw, ignore, mesh, plan.over)
    else:
        raw = total(raw.sum(-1, dtype=wider(raw.dtype)), mesh, plan.over)
    return ShardedTensor(raw.to(x.dtype), scalar)


def by_kernels(x: Tensor) -> bool:
    """Check whether kernels compute the losses of rows of logits."""
    return (not x.is_cpu or active.cpu) and active.native(x)


def _row_losses(x: Tensor, target: Tensor, classes: _Classes, given_up: bool) -> Tensor:
    """Compute the loss of each row; under simulate of all ranks' rows at once."""
    if by_kernels(x):
        return _KernelLoss.apply(x, target, classes, given_up)
    if classes.axes or classes.count != x.shape[-1]:
        return _RowLoss.apply(x, target, classes)[0]
    ignore, smooth = classes.ignore, classes.smooth
    flat = x.flatten(0, -2), target.flatten()
    if _is_large(x):
        raw: Any = _WholeRowLoss.apply(*flat, ignore, smooth)
    else:
        raw = F.cross_entropy(*flat, ignore_index=ignore, label_smoothing=smooth, reduction="none")
    return raw if raw.ndim == target.ndim else raw.view(target.shape)


def _is_large(x: Tensor) -> bool:
    """Check whether logits are taken in chunks; of smaller ones chunks would only cost time."""
    return x.numel() > (1 << 22 if is_half(x) else 1 << 16)


class _LossPlan(NamedTuple):
    """Axes of logits and target.

    ``axes``     that split the classes, major first, and ``over`` those that split the rows.
    ``brought``  whether the target is resharded to the layout ``rows``.
    """

    axes: tuple[str, ...]
    over: tuple[str, ...]
    rows: Layout
    brought: bool


def _unsupported(logits: ShardedTensor, target: ShardedTensor) -> Unsupported:
    why = "sharded cross entropy takes logits [N, C] and integer targets [N], without class weights"
    fix = "F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1))"
    return call_error(Unsupported, why, "cross_entropy", fix, logits=logits, target=target)


def _planned(logits: ShardedTensor, target: ShardedTensor) -> _LossPlan:
    mesh = logits.mesh
    if len(logits.padded_shape) != 2:
        raise _unsupported(logits, target)
    refuse_sums("cross_entropy", logits, target)
    if target.padded_shape != logits.padded_shape[:1]:
        raise _miscounted(logits, target)
    row, col = logits.sharding.resolve(2).dims
    rows = Layout(dims=(row,))
    mine, size = target.sharding.resolve(1), tuple(target.padded_shape)
    brought = mine != rows and not (mine >> rows).bytes(size, mesh)
    if not (brought or mine.dims[0] == row) or not col.is_plain:
        why = "logits and target are not split the same way along the rows"
        fix = f"F.cross_entropy(logits, sl.reshard(target, {str(row)!r}))"
        raise call_error(
            ImplicitCommunication, why, "cross_entropy", fix, logits=logits, target=target
        )
    axes = without_ones(col, mesh.axes).axes  # major first
    return _LossPlan(axes, real_axes(mesh, row.axes), rows, brought)


def _miscounted(logits: ShardedTensor, target: ShardedTensor) -> ShardError:
    """Return the error for more or fewer targets than rows."""
    count, rows = target.shape.numel(), logits.shape[0]
    given = target.padded_shape[0] if target.padded_shape else "no"
    why = f"{given} targets for {logits.padded_shape[0]} rows"
    few = min(count, rows)
    fix = f"F.cross_entropy(logits[:{few}], target.view(-1)[:{few}])"
    if count == rows:
        fix = "F.cross_entropy(logits, target.view(-1))"
    return call_error(ShardError, why, "cross_entropy", fix, logits=logits, target=target)


class _Mean(Local):
    """apply(losses, target, ignore, mesh, axes): their mean; sum and count share one psum."""

    @staticmethod
    def forward(
        ctx: Ctx, raw: Tensor, target: Tensor, ignore: int, mesh: Mesh, axes: tuple[str, ...]
    ) -> Tensor:
        part, count = raw.sum(-1, dtype=wider(raw.dtype)), (target != ignore).sum(-1)
        if axes:
            part, count = total(torch.stack([part, count.to(part.dtype)], -1), mesh, axes).unbind(
                -1
            )
        ctx.place = mesh, axes, raw.shape, raw.dtype
        ctx.save_for_backward(count)
        return part / count

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> Grads:
        mesh, axes, shape, dtype = ctx.place
        each = (vary(grads[0], mesh, axes) / ctx.saved_tensors[0]).to(dtype)
        return each.unsqueeze(-1).expand(shape), None, None, None, None


# ---------------------------------------------------------------- losses of rows, reduced


_FURTHER = {F.kl_div: "batchmean"}
"""Reductions that one function has besides the common ones."""


def _how(func: Func, given: dict[str, Any]) -> str:
    """Return the reduction; torch's older two flags take precedence."""
    flags = given.pop("size_average", None), given.pop("reduce", None)
    reduction = given.pop("reduction")
    if flags != (None, None):
        average, reduce = (flag is None or flag for flag in flags)
        if not reduce:
            return "none"
        return "mean" if average else "sum"
    if reduction not in ("none", "mean", "sum", _FURTHER.get(func, "mean")):
        raise BadArgument(f"{reduction} is not a valid value for reduction", op=func.__name__)
    return reduction


def _of_rows(
    given: Bound,
    how: str,
    losses: Callable[[Bound], Any],
    own: Callable[[Place], Any] | None = None,
) -> Any:
    """Compute the losses of rows and reduce them: those of half precision in fp32, rounded once.

    ``own``  torch's own loss, with its place; it serves where every rank has all rows.
    """
    # torch computes with an integer operand in another dtype, but for a target
    read = [
        v
        for k, v in given.items()
        if isinstance(v, Tensor) and (k != "target" or v.is_floating_point())
    ]
    (dtype, *others) = {v.dtype for v in read}
    half = dtype in HALF and not others and how != "none"
    if own is not None and not half and how in ("mean", "sum"):
        place = _whole_loss(given)
        if place is not None:
            return own(place)
    if half:
        given = {k: v.float() if getattr(v, "dtype", 0) == dtype else v for k, v in given.items()}
    out = _REDUCED[how](losses(given | {"reduction": "none"}), given)
    return out.to(dtype) if half else out


_REDUCED: dict[str, Callable[[Any, Bound], Any]] = {
    "none": lambda out, given: out,
    "sum": lambda out, given: out.sum(),
    "mean": lambda out, given: out.mean(),
    "batchmean": lambda out, given: out.sum() / given["input"].shape[:1].numel(),
    "by weights": lambda out, given: out.sum() / given["weight"].sum(),
    "by classes": lambda out, given: out.sum() / _class_count(given),
}


def _losses(text: str) -> Callable[[Callable[[Bound], Labels]], Callable[[Bound], Labels]]:
    """Implement the losses of a table by labels: torch's own on the rows, reduced by ours."""

    def enter(labels: Callable[[Bound], Labels]) -> Callable[[Bound], Labels]:
        takes = "padding sums" if labels is rows else "sums"
        for name, signature in lines(text).items():
            implements(getattr(F, name), takes=takes)(partial(_row_loss, binder(signature), labels))
        return labels

    return enter


def _row_loss(
    bind: Callable[..., Bound],
    labels: Callable[[Bound], Labels],
    func: Func,
    args: Args,
    kwargs: Kwargs,
) -> object:
    given = bind(*args, **kwargs)
    if func is F.l1_loss and given["weight"] is None and (w := l1_weight()) is not None:
        # dispatch again, so that a refusal or the fallback also has the weight
        return ShardedTensor.__torch_function__(func, (), (), given | {"weight": w})
    how = _how(func, given)
    if how == "mean" and func in (F.mse_loss, F.l1_loss) and isinstance(given["weight"], Tensor):
        # the other losses divide by the number of elements
        how = "by weights"
    losses = partial(rows_call, func, (), labels=lambda a, k: labels(k))
    return _of_rows(given, how, losses, partial(blockwise, func, args, kwargs) if args else None)


def _whole_loss(given: Bound) -> Place | None:
    """Return the place of the loss of operands whose blocks are the whole values, else None."""
    read = [v for v in given.values() if isinstance(v, Tensor)]
    ours = [v for v in read if isinstance(v, ShardedTensor)]
    kinds = {(v.mesh, v.deferred) for v in ours}
    if len(ours) < len(read) or len(kinds) > 1:
        return None
    if not all(is_whole(v) and v.raw.shape == v.shape for v in ours):
        return None
    ((mesh, deferred),) = kinds
    return Place(Layout(), torch.Size(), mesh, deferred=deferred)


_losses("""
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
    """)(rows)


_losses(
    "multilabel_soft_margin_loss(input, target, weight=None, size_average=None, reduce=None, reduction='mean')"
)(last(1))


@_losses("""
    cosine_embedding_loss(input1, input2, target, margin=0, size_average=None, reduce=None, reduction='mean')
    multi_margin_loss(input, target, p=1, margin=1.0, weight=None, size_average=None, reduce=None, reduction='mean')
    multilabel_margin_loss(input, target, size_average=None, reduce=None, reduction='mean')
    triplet_margin_loss(anchor, positive, negative, margin=1.0, p=2, eps=1e-6, swap=False, size_average=None, reduce=None, reduction='mean')
    """)
def _samples(b: Bound) -> Labels:
    """Label the first dimension rows; weights are per class, and classes are whole."""
    found = slots(b)
    weight = b.get("weight")
    if found[0].ndim < 2:
        raise Unfit("one row")
    if any(s.ndim not in (0, 1, found[0].ndim) for s in found):
        raise Unfit("operands that broadcast")
    samples = {s.at: rows_but(range(1, s.ndim), s.ndim) for s in found}
    return samples | {w.at: (None,) * w.ndim for w in slots(weight)}


_NLL = binder(
    "nll_loss(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, "
    "reduction='mean')"
)
_CROSS_ENTROPY = binder(
    "cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, "
    "reduction='mean', "
    "label_smoothing=0.0)"
)


def _classes(args: Args, k: Kwargs) -> Labels:
    """Label input (N, C, d...) and target (N, d...) or like input; the classes are whole."""
    x, t, weight = k["input"], k["target"], k.get("weight")
    of_classes = min(1, x.ndim - 1)
    of_x = of_t = rows_but({of_classes}, x.ndim)
    if t.ndim != x.ndim:
        of_t = (*of_x[:of_classes], *of_x[of_classes + 1 :])
    return labelled((x, of_x), (t, of_t), (weight, (None,)))


def _by_class(func: Func, given: dict[str, Any], how: str) -> object:
    """Compute nll_loss or cross_entropy by torch's own on the rows, whose classes are whole."""
    if how == "mean":
        how = "by classes"
    return _of_rows(given, how, partial(rows_call, func, (), labels=_classes))


def _class_count(given: dict[str, Any]) -> int | Tensor:
    """Count the rows; of targets that are classes, sum the weights of those not ignored."""
    x, t, weight = given["input"], given["target"], given["weight"]
    if t.is_floating_point():
        return x.numel() // x.shape[min(1, x.ndim - 1)]
    ignore = given["ignore_index"]
    if weight is None:
        return (t != ignore).sum()
    ones = torch.full_like(x.detach(), -1.0)
    counted = {"input": ones, "target": t, "weight": weight.detach(), "ignore_index": ignore}
    return rows_call(F.nll_loss, (), counted | {"reduction": "none"}, _classes).sum()


def _checked(given: Bound) -> str:
    """Check the arguments as torch does and return the reduction."""
    x, t, smooth = given["input"], given["target"], given["label_smoothing"]
    whole_numbers = not t.is_floating_point()
    if whole_numbers and t.dtype not in (torch.int64, torch.uint8):
        why = f"targets are int64 or uint8, not {t.dtype}"
        fix = "F.cross_entropy(logits, target.long())"
        raise call_error(BadArgument, why, "cross_entropy", fix, logits=x, target=t)
    if not x.is_floating_point():
        why = f"logits are floating point, not {x.dtype}"
        raise call_error(BadArgument, why, "cross_entropy", logits=x, target=t)
    if not 0.0 <= smooth <= 1.0:
        raise BadArgument(
            f"label_smoothing must be between 0.0 and 1.0. Got: {smooth}", op="cross_entropy"
        )
    if whole_numbers:
        _check_targets(x, t, given["ignore_index"])
    return _how(F.cross_entropy, given)


def _check_targets(x: Tensor, t: Tensor, ignore: int) -> None:
    """Refuse targets that are no class, where torch's own kernel would not."""
    if not isinstance(x, ShardedTensor) or x.ndim < 2:
        return
    if x.dims[1].is_split or x.shape[1] != x.padded_shape[1]:
        in_range(raw_of(t), x.shape[1], "cross_entropy", "target", ignore)


def rows_given_up(logits: ShardedTensor, target: Tensor, ignore: int, smooth: float) -> Tensor:
    """Compute F.cross_entropy of each row, by kernels, for logits that nothing else uses.

    The logits are overwritten by their gradient.
    """
    given = _CROSS_ENTROPY(logits, target, ignore_index=ignore, label_smoothing=smooth)
    _checked(given)
    return _split_cross_entropy(given | {"reduction": "none"}, given_up=True)


@implements(F.nll_loss)
def nll_loss(func: Func, args: Args, kwargs: Kwargs) -> object:
    given = _NLL(*args, **kwargs)
    return _by_class(func, given, _how(func, given))


def _padded_classes(run: Func, func: Func, args: Args, kwargs: Kwargs) -> object:
    """Refuse padding but in the classes; the implementation ignores columns beyond the true ones."""
    x, target, *_ = _CROSS_ENTROPY(*args, **kwargs).values()
    if has_padding((target,)):
        raise Unfit("a padded target")
    if x.shape[:-1] != x.padded_shape[:-1]:
        raise cuts_padding("cross_entropy of padded rows", func, x)
    return run(func, args, kwargs)


@implements(F.cross_entropy, padding=_padded_classes)
def cross_entropy(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Compute the loss of integer targets by the algorithm above, others by torch's on the rows."""
    given = _CROSS_ENTROPY(*args, **kwargs)
    how = _checked(given)
    x, t = given["input"], given["target"]
    if (
        isinstance(x, Tensor)
        and x.ndim == 2
        and given["weight"] is None
        and not t.is_floating_point()
    ):
        try:
            return _split_cross_entropy(given | {"reduction": how})
        except Unsupported:
            pass
    return _by_class(func, given, how)
