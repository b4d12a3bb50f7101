"""Autograd function of attention: builds a job from a plan, and runs its engine on raw blocks."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import Local
from shardlib.errors import ShardError, Unsupported
from shardlib.layouts import Layout
from shardlib.mesh import bind, scope
from shardlib.ops.attention import double_backward
from shardlib.ops.attention.aligned import bias_and_sink
from shardlib.ops.attention.engine import AttentionJob, AttentionPlan
from shardlib.ops.attention.kernels import KERNELS, Kernel, pick, unfit
from shardlib.ops.attention.local import batch_and_heads
from shardlib.ops.attention.masks import Full
from shardlib.random import next_key
from shardlib.tensor import Place, ShardedTensor, call_error, vary

__all__ = ["Options", "attend"]


@dataclass(frozen=True, eq=False)
class Options:
    """Arguments of ``ring_attention`` that are not part of the plan."""

    bias: Tensor | None = None
    sink: Tensor | None = None
    dropout: float | None = None
    scale: float | None = None
    return_lse: bool = False
    kernel: str = "auto"


def attend(
    q: ShardedTensor, k: ShardedTensor, v: ShardedTensor, plan: AttentionPlan, options: Options
) -> tuple[ShardedTensor, ShardedTensor]:
    """Run a plan: (out, lse)."""
    p = _probability(options.dropout)
    bias, sink = bias_and_sink(q, k, options.bias, options.sink)
    job = AttentionJob(
        mesh=q.mesh,
        plan=plan,
        scale=q.shape[-1] ** -0.5 if options.scale is None else options.scale,
        kernel=_kernel(q, v, plan, bias, options),
        at=partial(batch_and_heads, q.sharding.resolve(4), tuple(q.padded_shape), q.mesh),
        whole=(q.shape[1], q.shape[2], k.shape[2]),
        dropout=p,
        seed=next_key(q.mesh) if p else 0,
    )
    out, lse = _Attend.apply(job, *_marked(q, k, v), bias, sink)  # type: ignore[misc]
    deferred = q.deferred | k.deferred | v.deferred
    return _like(q, out, (*q.padded_shape[:3], v.padded_shape[3]), deferred), _like(
        q, lse, tuple(q.padded_shape[:3]), deferred
    )


class _Attend(Local):
    """Raw q, k, v, bias, sink -> out, lse.  Saves the blocks, out and lse; no scores."""

    @staticmethod
    def forward(
        ctx: Any,
        job: AttentionJob,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.job = job
        region = scope().call.region
        if region is not None and (found := region.given()) is not None:
            ctx.save_for_backward(bias, sink, *found, q, k, v)
            return found
        with bind(job.mesh):
            out, lse, saved = job.plan.engine.forward(job, q, k, v, bias, sink)
        out = out.to(q.dtype)
        if region is not None:
            as_they_lie = len(saved) == 3 and saved[0] is q and saved[1] is k and saved[2] is v
            region.keep(*([out, lse] if as_they_lie else []))
        ctx.save_for_backward(bias, sink, out, lse, *saved)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        bias, sink, out, lse, *saved = ctx.saved_tensors
        job, (dout, dlse) = ctx.job, grads
        if dout is None and dlse is None:
            return (None,) * 6
        dout = torch.zeros_like(out) if dout is None else dout
        given = dout, dlse, out, lse
        if torch.is_grad_enabled():  # create_graph: the gradient must be differentiable
            _check_saved(job)
            return None, *double_backward.gradients(job, (*saved[:3], bias, sink), given)
        wants_bias = bias is not None and ctx.needs_input_grad[4]
        with bind(job.mesh):
            dq, dk, dv, dbias = job.plan.engine.backward(
                job, tuple(saved), bias, sink, given, wants_bias
            )
        dsink = _sink_gradient(sink, dout, dlse, out, lse) if ctx.needs_input_grad[5] else None
        dbias = None if dbias is None else dbias.to(bias.dtype)
        return None, *(x.to(out.dtype) for x in (dq, dk, dv)), dbias, dsink


def _sink_gradient(
    sink: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> Tensor:
    flow = -(dout.to(lse.dtype) * out).sum(-1)
    flow = flow if dlse is None else flow + dlse
    return ((sink.to(lse.dtype) - lse).exp() * flow).sum_to_size(sink.shape).to(sink.dtype)


def _check_saved(job: AttentionJob) -> None:
    if not job.plan.engine.saves_operands:
        raise Unsupported(
            "a gradient of a gradient needs the operands as they lay",
            op="ring_attention",
            mesh=job.mesh,
            fix='sl.ring_attention(q, k, v, algorithm="ring")',
        )


def _probability(dropout: float | None) -> float:
    p = dropout or 0.0
    if not isinstance(p, int | float) or not 0 <= p <= 1:
        raise ShardError(
            f"dropout is a probability, not {dropout!r}",
            op="ring_attention",
            fix="sl.ring_attention(q, k, v, dropout=0.1)",
        )
    return p


def _kernel(
    q: ShardedTensor, v: ShardedTensor, plan: AttentionPlan, bias: Tensor | None, options: Options
) -> Kernel:
    """Return the requested kernel, or the fastest that fits."""
    name, learned = options.kernel, bias is not None and bias.requires_grad
    needs_math = (
        bool(options.dropout) or learned or (options.return_lse and torch.is_grad_enabled())
    )
    biased = bias is not None or type(plan.mask) is not Full
    if name == "auto":
        return pick(q.raw, v.raw, biased, needs_math)
    if name not in KERNELS:
        raise ShardError(
            f"unknown kernel {name!r}; there are {', '.join(KERNELS)}",
            op="ring_attention",
            fix='sl.ring_attention(q, k, v, kernel="math")',
        )
    if why := unfit(name, q.raw, v.raw, biased, needs_math):
        reason = f"kernel {name!r} does not fit: {why}"
        fix = 'sl.ring_attention(q, k, v, kernel="math")'
        raise call_error(Unsupported, reason, "ring_attention", fix, q=q, v=v)
    return KERNELS[name]


def _marked(q: ShardedTensor, k: ShardedTensor, v: ShardedTensor) -> tuple[Tensor, ...]:
    """Mark raw blocks; the gradient of unsplit keys is summed over the axes that split queries."""
    split = {*q.sharding.axes, *q.deferred, *k.deferred, *v.deferred}
    return tuple(
        vary(t.raw, t.mesh, split.difference(t.sharding.axes, t.deferred)) for t in (q, k, v)
    )


def _like(
    q: ShardedTensor, raw: Tensor, size: tuple[int, ...], deferred: frozenset[str]
) -> ShardedTensor:
    layout = Layout(q.sharding.resolve(4).dims[: len(size)])
    if q.is_padded:
        true = torch.Size((*q.shape[:3], *size[3:]))
        return ShardedTensor(raw, Place(layout, torch.Size(size), q.mesh, true))
    return ShardedTensor(raw, Place(layout, torch.Size(size), q.mesh, deferred=deferred))
