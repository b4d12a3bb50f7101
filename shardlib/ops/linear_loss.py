"""Linear layer fused with cross entropy: logits are computed for a few rows at a time.

The logits [tokens, classes] are the largest tensor of a language model.  Here a rank's rows are
taken in chunks.  For each chunk the logits, the loss and at once the gradients are computed and
added up, and the logits are freed.  Nothing is computed twice, and the only memory besides the
gradients is one chunk of logits.  Each chunk's product and loss are the library's own, so the
classes may be split (one psum of three numbers per row) and the features too.

Per rank and step, besides the traffic of the product: the gradients of weight and bias are summed
over the axes that split the tokens once, in backward, not once per chunk.

Source: the gradient in forward is Hsu et al., arXiv 2410.10989 (Liger), section 3.2; split classes
are arXiv 1909.08053, section 3.
"""

import itertools
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import Ctx, Grads, Local
from shardlib.collectives import block_shape, storage_shape
from shardlib.dtypes import wide, wider
from shardlib.errors import BadArgument, ShardError, Unsupported
from shardlib.layouts import Dim, Layout
from shardlib.ops.loss import by_kernels, rows_given_up
from shardlib.ops.padding import filled
from shardlib.placing import reshard, shard
from shardlib.tensor.gradients import real_axes, total, vary
from shardlib.tensor.lifting import promoting, replicated
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import ShardedTensor, call_error
from shardlib.tensor.weight_gradients import queued


def linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    chunks: int = 8,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute ``F.cross_entropy(F.linear(input, weight, bias), target)`` in chunks of the rows.

    Shapes: input [..., features], weight [classes, features], bias [classes], target [...] of
    integers; the result is a scalar.  ``target`` is split as the rows are; a plain one is sharded
    so.
    ``chunks``     number of parts into which a rank's rows are cut; memory of logits is
                   rows * classes / chunks.
    ``reduction``  "mean" over the targets that are not ``ignore_index``, or "sum".
    Moves: as ``F.linear`` and ``F.cross_entropy`` for these layouts; a weight that is split
           over axes of the tokens is gathered once.
    Raises: BadArgument for another reduction, ShardError if targets are split otherwise than the
            rows, Unsupported for a second derivative.

    >>> import torch, shardlib as sl; import torch.nn.functional as F
    >>> x, w, t = torch.randn(6, 4), torch.randn(10, 4), torch.tensor([1, 9, -100, 0, 3, 3])
    >>> with sl.simulate(data=2, vocab=2):
    ...     rows, table = sl.shard(x, "data ."), sl.shard(w, "vocab .")
    ...     loss = sl.linear_cross_entropy(rows, table, t, chunks=3)
    >>> torch.allclose(sl.unshard(loss), F.cross_entropy(x @ w.T, t))
    True
    """
    _check(input, weight, target, reduction, chunks)
    factors = [weight] if bias is None else [weight, bias]
    given = [t for t in (input, *factors, target) if isinstance(t, ShardedTensor)]
    how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "none"}
    if not given:
        rows, labels = input.reshape(-1, input.shape[-1]), target.reshape(-1)
        scale = _scale(labels, ignore_index, reduction)
        losses = partial(_plain_losses, how)
        return _LinearLoss.apply(rows, labels, scale, chunks, losses, *factors)
    mesh = given[0].mesh
    x, *sharded = (replicated(t, mesh) for t in (input, *factors))
    axes = Layout(x.dims[:-1]).axes
    labels = filled(_labels(x, target), ignore_index)
    x, *sharded = _met(filled(x, 0), sharded, axes)
    rows, flat = _flat(x, axes, 1), _flat(labels, axes, 0)
    raws = [vary(t.raw, mesh, {*axes}.difference(t.sharding.axes, t.deferred)) for t in sharded]
    scale = _scale(flat.raw, ignore_index, reduction, lambda n: total(n, mesh, axes))
    losses = partial(_losses, how, rows.place, [_deferring(t, axes) for t in sharded])
    summed: Any = _LinearLoss.apply(rows.raw, flat.raw, scale, chunks, losses, *raws)
    deferred = frozenset().union(*(t.deferred for t in (x, *sharded)))
    out, left = total(summed, mesh, axes), deferred - {*axes, *sharded[0].sharding.axes}
    return ShardedTensor(out, Place(Layout(), torch.Size(), mesh, deferred=left))


def _labels(x: ShardedTensor, target: Tensor) -> ShardedTensor:
    """Return the targets, split as the rows are.  Raises: ShardError if they are split otherwise."""
    tokens = x.dims[:-1]
    if not isinstance(target, ShardedTensor):
        target = shard(target, Layout(tokens), x.mesh, pad=x.is_padded)
    if target.dims != tokens or target.sharding.partial or x.sharding.partial:
        why = "targets lie otherwise than the rows of the input"
        fix = f"sl.reshard(target, {str(Layout(tokens))!r})"
        raise call_error(ShardError, why, "linear_cross_entropy", fix, input=x, target=target)
    return target


def _check(x: Tensor, w: Tensor, target: Tensor, reduction: str, chunks: int) -> None:
    wrong = None
    if reduction not in ("mean", "sum"):
        wrong = f"a reduction is 'mean' or 'sum', not {reduction!r}", 'reduction="mean"'
    elif not isinstance(chunks, int) or chunks < 1:
        wrong = f"chunks is a number of parts, not {chunks!r}", "chunks=8"
    elif w.ndim != 2 or x.ndim < 2 or x.shape[-1] != w.shape[-1]:
        wrong = "an input [..., features] and a weight [classes, features] are taken", "chunks=8"
    elif target.shape != x.shape[:-1] or target.is_floating_point():
        wrong = "targets are the classes' numbers, one for each row", "chunks=8"
    if wrong is not None:
        why, fix = wrong[0], f"sl.linear_cross_entropy(x, weight, target, {wrong[1]})"
        op = "linear_cross_entropy"
        raise call_error(BadArgument, why, op, fix, x=x, weight=w, target=target)


def _met(
    x: ShardedTensor, factors: list[ShardedTensor], axes: tuple[str, ...]
) -> list[ShardedTensor]:
    """Return the operands, gathered so that no chunk's product moves a block of them again.

    Where the weight is split over axes that split the tokens (as FSDP's and 2D blocks are), or the
    features over axes that split the classes, both are gathered here, once for all chunks.
    """
    w = factors[0]
    classes = Dim(tuple(p for p in w.dims[0].parts if p not in axes), w.dims[0].order)
    if not ({*axes} & {*w.sharding.axes} or {*x.dims[-1].axes} & {*classes.axes}):
        return [x, *factors]
    wanted = (*x.dims[:-1], Dim()), (classes, Dim()), (classes,)
    return [reshard(t, Layout(dims)) for t, dims in zip((x, *factors), wanted, strict=False)]


def _flat(x: ShardedTensor, axes: tuple[str, ...], features: int) -> ShardedTensor:
    """Flatten a rank's rows to one dimension; their order does not matter to their sum."""
    raw = x.raw.reshape(storage_shape(x.mesh, -1, *x.raw.shape[x.raw.ndim - features :]))
    dims = (Dim(axes), *x.dims[len(x.dims) - features :])
    count = block_shape(raw, x.mesh)[0] * x.mesh.axis_size(axes)
    shape = torch.Size((count, *x.padded_shape[len(x.padded_shape) - features :]))
    return ShardedTensor(raw, Place(Layout(dims), shape, x.mesh, deferred=x.deferred))


def _deferring(t: ShardedTensor, axes: tuple[str, ...]) -> Place:
    """Return the place of a weight whose gradient is summed over ``axes`` once, for all chunks."""
    further = real_axes(t.mesh, {*axes}.difference(t.sharding.axes))
    return t.place._replace(deferred=t.deferred | {*further})


def _scale(
    labels: Tensor, ignore: int, reduction: str, over: Callable[[Tensor], Tensor] = lambda n: n
) -> Tensor:
    """Return the factor of each row's loss, per rank; ``over`` sums the ranks' counts of rows."""
    if reduction == "sum":
        return labels.new_ones((), dtype=torch.float64)
    return over((labels != ignore).sum(-1)).double().reciprocal()


class _LinearLoss(Local):
    """Sum of the rows' losses times ``scale``.

    apply(rows, labels, scale, chunks, losses, weight[, bias]); ``losses`` computes each row's loss
    of rows and labels, by the weight and the bias.
    """

    @staticmethod
    def forward(
        ctx: Ctx,
        rows: Tensor,
        labels: Tensor,
        scale: Tensor,
        chunks: int,
        losses: Callable[..., Tensor],
        *factors: Tensor,
    ) -> Tensor:
        wants = [ctx.needs_input_grad[0], *ctx.needs_input_grad[5:]]
        needed = list(itertools.compress(itertools.count(), wants))
        fixed = [t.detach().requires_grad_(n) for t, n in zip(factors, wants[1:], strict=True)]
        grads: list[Any] = [torch.empty_like(rows) if wants[0] else None, *[None] * len(fixed)]
        outs = grads[0] if wants[0] else rows
        # [.., n, features], [.., n], [.., n, features]
        parts = (t.tensor_split(chunks, d) for t, d in ((rows, -2), (labels, -1), (outs, -2)))
        found = [rows.new_zeros(rows.shape[:-2])]
        for part, classes, out in zip(*parts, strict=True):
            if not classes.shape[-1]:
                continue
            operands = part.detach().requires_grad_(wants[0]), *fixed
            with torch.enable_grad():
                each = losses(operands[0], classes, *fixed)
            weights = scale.to(each.dtype).unsqueeze(-1).expand_as(each)
            found.append((each.detach() * weights).sum(-1, dtype=wider(each.dtype)))
            if needed:
                asked = list(itertools.compress(operands, wants))
                made = torch.autograd.grad(each, asked, weights)
                _add_gradients(grads, out, dict(zip(needed, made, strict=True)))
        if len(found) == 1:
            # no rows: torch's mean over nothing is NaN, and its sum is zero
            found.append(found[0] * scale.to(rows.dtype))
        ctx.dtypes = [t.dtype for t in (rows, *factors)]
        ctx.save_for_backward(*grads)
        return reduce(torch.add, found[1:]).to(rows.dtype)

    @staticmethod
    def backward(ctx: Ctx, *g: Tensor) -> Grads:
        if torch.is_grad_enabled():
            raise Unsupported(
                "its gradients are computed in forward and have no gradient themselves, as those "
                "of F.cross_entropy(F.linear(...)) have",
                op="linear_cross_entropy",
                fix="sl.value_and_grad(loss)(params)",
            )
        out: list[Any] = [None] * len(ctx.dtypes)
        for i, (grad, dtype) in enumerate(zip(ctx.saved_tensors, ctx.dtypes, strict=True)):
            if grad is not None:
                scaled = partial(_scaled, grad, g[0], dtype)
                # rows, labels and scale are tensors before the weight
                out[i] = None if i and queued(ctx.next_functions[i + 2], scaled) else scaled()
        return out[0], None, None, None, None, *out[1:]


def _scaled(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return (grad * factor.reshape(*factor.shape, *[1] * (grad.ndim - factor.ndim))).to(dtype)


def _add_gradients(grads: list[Any], out: Tensor, found: dict[int, Tensor]) -> None:
    """Add a chunk's gradients: the rows' to its part of theirs, others in fp32 at least."""
    for i, g in found.items():
        if i == 0:
            out.copy_(g)
        elif grads[i] is None:
            grads[i] = wide(g)
        else:
            grads[i] += g


def _plain_losses(how: dict[str, Any], rows: Tensor, labels: Tensor, *fixed: Tensor) -> Tensor:
    """Compute the loss of each row of a chunk of plain tensors."""
    return F.cross_entropy(F.linear(rows, *fixed), labels, **how)


def _losses(
    how: dict[str, Any],
    of_rows: Place,
    places: list[Place],
    rows: Tensor,
    labels: Tensor,
    *fixed: Tensor,
) -> Tensor:
    """Compute the loss of each row of a chunk, on raw blocks."""
    mesh, axes = of_rows.mesh, of_rows.layout.dims[0].axes
    count = rows.shape[-2] * mesh.axis_size(axes)
    size = torch.Size((count, of_rows.shape[-1]))
    x = ShardedTensor(rows, of_rows.becomes(of_rows.layout, size))
    t = ShardedTensor(labels, Place(Layout((Dim(axes),)), torch.Size([count]), mesh))
    w, b, *_ = (*map(ShardedTensor, fixed, places), None)
    with promoting():
        logits: Any = F.linear(x, w, b)
        if by_kernels(logits.raw):
            each = rows_given_up(logits, t, how["ignore_index"], how["label_smoothing"])
        else:
            each = F.cross_entropy(logits, t, **how)
    return each.raw
