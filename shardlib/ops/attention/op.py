"""``ring_attention``: check the operands, choose a plan, run its engine in an autograd function."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar, Unpack, cast, overload

import torch
from torch import Tensor

from shardlib._compat import Local
from shardlib.collectives import storage
from shardlib.errors import ShardError, Unsupported
from shardlib.layouts import Layout, LayoutLike
from shardlib.mesh import bind, scope
from shardlib.ops.attention.case import (
    Operands,
    attention_case,
    bias_and_sink,
    case_of_values,
    check,
    entered,
    length,
)
from shardlib.ops.attention.engine import AttentionJob, AttentionPlan, Engine, Given, planned
from shardlib.ops.attention.engines import Canonical
from shardlib.ops.attention.kernels import (
    KERNELS,
    Kernel,
    ScorePiece,
    pick,
    settled,
    unfit,
    without_keys,
)
from shardlib.ops.attention.local import (
    LocalQueries,
    add_sink,
    batch_and_heads,
    gathered,
    local_queries,
)
from shardlib.ops.attention.masks import At, Full, Mask, as_mask
from shardlib.ops.registry import Match
from shardlib.optional import unless_none
from shardlib.random import next_key
from shardlib.tensor import Place, ShardedTensor, call_error, heard, real_axes, vary


@dataclass(frozen=True, eq=False)
class Options:
    """Arguments of ``ring_attention`` that are not part of the plan."""

    bias: Tensor | None = None
    sink: Tensor | None = None
    dropout: float | None = None
    scale: float | None = None
    return_lse: bool = False
    kernel: str = "auto"


class _AttentionCall(NamedTuple):
    """All of a call that its operands' places decide, kept with the mesh.

    ``met``         for q, k and v, the axes over which its gradient is summed.
    ``at``          a rank's coordinate -> the global batch entries and heads of its block.
    ``out``, ``lse``  the places of the results.
    """

    match: Match
    met: tuple[tuple[str, ...], ...]
    at: Callable[[dict[str, int]], At]
    out: Place
    lse: Place


def _call_of(
    q: ShardedTensor,
    k: ShardedTensor,
    v: ShardedTensor,
    mask: Mask,
    algorithm: str | Engine,
    biased: bool,
) -> _AttentionCall:
    """Check and plan a call, or look up an equal one."""
    dtypes = q.raw.dtype, k.raw.dtype, v.raw.dtype
    key = q.place, k.place, v.place, dtypes, mask, algorithm, biased, scope().policy

    def make() -> _AttentionCall:
        check(q, k, v)
        match = planned(case_of_values(q, k, v, mask, biased=biased), algorithm)
        layout = q.sharding.resolve(4)
        split = {*q.sharding.axes, *q.deferred, *k.deferred, *v.deferred}
        met = [real_axes(t.mesh, split.difference(t.sharding.axes, t.deferred)) for t in (q, k, v)]
        at = partial(batch_and_heads, layout, tuple(q.padded_shape), q.mesh)
        deferred = q.deferred | k.deferred | v.deferred
        width = v.padded_shape[3]
        size, tiled = (torch.Size((*s[:3], width)) for s in (q.shape, q.padded_shape))
        out = Place(Layout(layout.dims), size, q.mesh, tiled, deferred)
        lse = Place(Layout(layout.dims[:3]), size[:3], q.mesh, tiled[:3], deferred)
        return _AttentionCall(match, tuple(met), at, out, lse)

    return q.mesh.memo("attention", key, make)


def _run(
    q: ShardedTensor, k: ShardedTensor, v: ShardedTensor, call: _AttentionCall, options: Options
) -> tuple[ShardedTensor, ShardedTensor]:
    """Run a call's plan: (out, lse)."""
    plan: AttentionPlan = call.match.run
    p = _probability(options.dropout)
    bias, sink = bias_and_sink(q, k, options.bias, options.sink)
    job = AttentionJob(
        mesh=q.mesh,
        plan=plan,
        scale=q.shape[-1] ** -0.5 if options.scale is None else options.scale,
        kernel=_kernel(q, v, plan, bias, options),
        at=call.at,
        whole=(q.shape[1], q.shape[2], k.shape[2]),
        dropout=p,
        seed=next_key(q.mesh) if p else 0,
    )
    # the gradient of unsplit keys is summed over the axes that split queries
    blocks = [vary(t.raw, q.mesh, axes) for t, axes in zip((q, k, v), call.met, strict=True)]
    out, lse = _Attend.apply(job, *blocks, bias, sink)  # type: ignore[misc]
    return ShardedTensor(out, call.out), ShardedTensor(lse, call.lse)


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
        if torch.is_grad_enabled():
            # create_graph: the gradient must be differentiable
            _check_saved(job)
            return None, *second_gradients(job, (*saved[:3], bias, sink), given)
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
        why = f"dropout is a probability, not {dropout!r}"
        raise ShardError(why, op="ring_attention", fix="sl.ring_attention(q, k, v, dropout=0.1)")
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
        return pick(q.raw, v.raw, biased, needs_math, q.mesh.device_type)
    fix = 'sl.ring_attention(q, k, v, kernel="math")'
    if name not in KERNELS:
        why = f"unknown kernel {name!r}; there are {', '.join(KERNELS)}"
        raise ShardError(why, op="ring_attention", fix=fix)
    if why := unfit(name, q.raw, v.raw, biased, needs_math):
        reason = f"kernel {name!r} does not fit: {why}"
        raise call_error(Unsupported, reason, "ring_attention", fix, q=q, v=v)
    return KERNELS[name]


def second_gradients(
    job: AttentionJob,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    given: Given,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, bias and sink, with a graph of their own.

    Keys are gathered and scores computed as a whole: only for second derivatives, since it holds
    every score of a rank's queries.
    """
    dout, dlse, *_ = given
    out, lse = _dense(job, *inputs)
    wanted = [i for i, x in enumerate(inputs) if x is not None and x.requires_grad]
    outs, cots = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    leaves = [inputs[i] for i in wanted]
    found = torch.autograd.grad(outs, leaves, cots, create_graph=True, allow_unused=True)  # type: ignore[arg-type]
    grads = dict(zip(wanted, found, strict=True))
    return tuple(grads.get(i) for i in range(5))


def _dense(
    job: AttentionJob, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    runs = job.plan.k_runs
    # otherwise every rank holds all keys
    split = len(runs) > 1 and bool(job.plan.case.rows)
    keys, values = (gathered(job, x, runs) if split else x for x in (k, v))
    t = sum(map(length, runs if split else runs[:1]))
    k_at = torch.arange(t, device=q.device)
    outs, lses = [], []
    for rank in local_queries(job, q, bias):
        view = rank.view
        mine = unless_none(view, sink)
        o, n = _dense_rank(rank, view(keys)[:, :, :t], view(values)[:, :, :t], k_at, mine)
        spare = q.shape[-2] - len(rank.q_at)
        outs.append(torch.nn.functional.pad(o, (0, 0, 0, spare)))
        lses.append(torch.nn.functional.pad(n, (0, spare), value=float("-inf")))
    return storage(outs, job.mesh), storage(lses, job.mesh)


def _dense_rank(
    rank: LocalQueries, k: Tensor, v: Tensor, k_at: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend with the math block, made differentiable where a row has no allowed key."""
    n = len(rank.q_at)
    block = rank.block(ScorePiece(0, n, 0, len(k_at), "masked"), k, v, k_at)
    empty = without_keys(block.bias)
    if block.bias is not None:
        # the gradient of a softmax over -inf alone is NaN
        block.bias = block.bias.masked_fill(empty.unsqueeze(-1), 0.0)
    out, lse = settled(*KERNELS["math"].forward(block), empty)
    lse = add_sink(out, lse, sink)
    return out.to(rank.q.dtype), lse


Q = TypeVar("Q", bound=Tensor)


class _Arguments(TypedDict, total=False):
    """Arguments of ``ring_attention`` on which the type of its result does not depend."""

    layout: LayoutLike | None
    kv_layout: LayoutLike | None
    mask: Mask | Callable[..., Tensor] | None
    bias: Tensor | None
    sink: Tensor | None
    dropout: float | None
    scale: float | None
    algorithm: str | Engine
    kernel: str
    canonical: bool | int


@overload
def ring_attention(
    q: Q, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **how: Unpack[_Arguments]
) -> Q: ...
@overload
def ring_attention(
    q: Q, k: Tensor, v: Tensor, *, return_lse: Literal[True], **how: Unpack[_Arguments]
) -> tuple[Q, Q]: ...
@overload
def ring_attention(
    q: Q, k: Tensor, v: Tensor, *, return_lse: bool, **how: Unpack[_Arguments]
) -> Q | tuple[Q, Q]: ...
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: LayoutLike | None = None,
    kv_layout: LayoutLike | None = None,
    mask: Mask | Callable[..., Tensor] | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    algorithm: str | Engine = "auto",
    kernel: str = "auto",
    canonical: bool | int = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend over a sequence that is split over a ring of ranks, as if it were whole.

    Shapes: q [b, h, s, d], k [b, g, t, d], v [b, g, t, e] -> [b, h, s, e]; g divides h (only the g
            heads of keys are sent).  Batch and heads may be split too, alike in all three.
    ``layout``     of the sequence, for local blocks (inside shard_map); sharded tensors have their
                   own.
    ``kv_layout``  that of the keys, if it differs: any order, any length.
    ``mask``       a value in global positions: ``Causal() & Documents(cu_seqlens)``, or your own
                   ``Mask``; or a function (b, h, q, k).
    ``bias``       [.., s, t], added to the scores, or booleans; may be learned.
    ``sink``       [h], a score per head that takes part in the softmax and attends to nothing; may
                   be learned.
    ``dropout``    of the probabilities, drawn by global position: the same for every ring.
    ``scale``      of the scores, 1 / sqrt(d) if None.
    ``return_lse`` also return log-sum-exp of the scores [b, h, s], differentiable.
    ``algorithm``  "auto": the cheapest plan; or a name: ``sl.why("attention", q, k, v)`` lists
                   them; or an engine with its arguments:
                   ``sl.attention.AllGather(heads=1)``.
    ``kernel``     "auto", "math", "cpu", "flash", "efficient", "cudnn".
    ``canonical``  the same bits, out and gradients, for every ring size and layout: everything is
                   gathered and computed in tiles of 64 rows (or of ``canonical`` rows), at twice
                   the work.

    Rows without allowed keys give 0, with gradient 0.
    Moves:  the transfers of the plan: ``sl.planning.attention_plan(...)``.
    Raises: Unsupported where the algorithm does not support the
            mask or an argument; nothing is ignored.
    Source: Li et al., arXiv 2105.13120; Liu et al., arXiv 2310.01889.

    >>> import torch, shardlib as sl
    >>> q = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    >>> with sl.simulate(s=4):
    ...     x = sl.shard(q, sl.Ring("s", dim=2, schedule="zigzag"))
    ...     out = sl.unshard(sl.ring_attention(x, x, x, mask=sl.masks.Causal()))
    >>> dense = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> torch.allclose(out, dense)
    True
    """
    if canonical:
        algorithm = Canonical() if canonical is True else Canonical(int(canonical))
    options = Options(bias, sink, dropout, scale, return_lse, kernel)
    return heard(_attended, ring_attention, q, k, v, layout, kv_layout, mask, algorithm, options)


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: LayoutLike | None,
    kv_layout: LayoutLike | None,
    mask: Mask | Callable[..., Tensor] | None,
    algorithm: str | Engine,
    options: Options,
) -> Any:
    placed = layout is None and kv_layout is None and type(q) is type(k) is type(v) is ShardedTensor
    values = cast(Operands, (q, k, v, None)) if placed else entered(q, k, v, layout, kv_layout)
    q, k, v, leave = values
    call = _call_of(q, k, v, as_mask(mask), algorithm, options.bias is not None)
    if (watcher := scope().listeners.watcher) is not None:
        watcher.chose(call.match)
    out, lse = _run(q, k, v, call, options)
    if leave is None:
        return (out, lse) if options.return_lse else out
    return (leave(out), leave(lse)) if options.return_lse else leave(out)


def attention_plan(
    q: ShardedTensor,
    k: ShardedTensor,
    v: ShardedTensor,
    mask: Mask | None = None,
    algorithm: str | Engine = "auto",
) -> AttentionPlan:
    """Plan a ``ring_attention`` of these operands: steps, transfers, bytes; nothing runs.

    Use it under ``sl.record`` for a mesh of any size.

    >>> import torch, shardlib as sl
    >>> with sl.record(s=64):
    ...     q = torch.empty(1, 8, 65536, 64, device="meta")
    ...     q = sl.shard(q, sl.Ring("s", dim=2, schedule="zigzag"))
    ...     plan = attention_plan(q, q, q, sl.masks.Causal())
    >>> plan.algorithm, plan.steps
    ('ring', 63)
    """
    return planned(attention_case(q, k, v, mask), algorithm).run
