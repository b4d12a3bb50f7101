"""``ring_attention``: operands checked, a plan chosen, its engine run under autograd."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardlib._compat import Local
from shardlib.border import as_dtensor, from_dtensor
from shardlib.collectives import Stacked, unwrap
from shardlib.errors import ImplicitCommunication, PlainTensor, ShardError, Unsupported
from shardlib.layouts import Dim, Layout, Ring
from shardlib.mesh import Mesh, current_mesh, scope
from shardlib.ops.attention import executor, gathered, passq, rsa, twice, ulysses
from shardlib.ops.attention.case import attention_case, check, true_shape
from shardlib.ops.attention.choose import planned
from shardlib.ops.attention.executor import Job
from shardlib.ops.attention.kernels import KERNELS, pick, unfit
from shardlib.ops.attention.masks import At, Full, Mask, MaskMod
from shardlib.ops.attention.plan import Plan
from shardlib.ops.elementwise import aligned
from shardlib.random import next_key
from shardlib.tensor import PaddedTensor, ShardedTensor, replicated, typeof, vary

__all__ = ["ENGINES", "attention_plan", "ring_attention"]

ENGINES: dict[str, tuple[Any, Any]] = {
    "routes": (executor.forward, executor.backward),
    "allgather": (gathered.forward, gathered.backward),
    "canonical": (gathered.canonical_forward, gathered.canonical_backward),
    "ulysses": (ulysses.forward, ulysses.backward),
    "passq": (passq.forward, passq.backward),
    "rsa": (rsa.forward, rsa.backward),
}


# ---------------------------------------------------------------- autograd


class _Attend(Local):
    """Raw q, k, v, bias, sink -> out, lse.  Saves the blocks, out and lse; no scores."""

    @staticmethod
    def forward(
        ctx: Any, job: Job, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        out, lse, saved = ENGINES[job.plan.engine][0](job, q, k, v, bias, sink)
        out = out.to(q.dtype)
        ctx.job = job
        ctx.save_for_backward(bias, sink, out, lse, *saved)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (bias, sink, out, lse, *saved), job, (dout, dlse) = ctx.saved_tensors, ctx.job, grads
        if dout is None and dlse is None:
            return (None,) * 6
        dout = torch.zeros_like(out) if dout is None else dout
        wants = bias is not None and ctx.needs_input_grad[4]
        if torch.is_grad_enabled():  # a gradient of this gradient will be asked for
            if job.plan.engine == "ulysses":
                raise Unsupported(
                    "a gradient of a gradient needs the operands as they lay",
                    op="ring_attention",
                    mesh=job.mesh,
                    fix='sl.ring_attention(q, k, v, algorithm="ring")',
                )
            q, k, v = saved[:3]
            return None, *twice.gradients(job, (q, k, v, bias, sink), (dout, dlse, out, lse))
        back = ENGINES[job.plan.engine][1]
        dq, dk, dv, dbias = back(job, tuple(saved), bias, sink, (dout, dlse, out, lse), wants)
        dsink = None
        if sink is not None and ctx.needs_input_grad[5]:
            flow = -(dout.to(lse.dtype) * out).sum(-1)
            flow = flow if dlse is None else flow + dlse
            dsink = ((sink.to(lse.dtype) - lse).exp() * flow).sum_to_size(sink.shape).to(sink.dtype)
        return None, *(x.to(out.dtype) for x in (dq, dk, dv)), None if dbias is None else dbias.to(bias.dtype), dsink


# ---------------------------------------------------------------- the operation


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Ring | Layout | str | None = None,
    kv_layout: Ring | Layout | str | None = None,
    mask: Mask | Callable[..., Tensor] | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    algorithm: str = "auto",
    kernel: str = "auto",
    canonical: bool | int = False,
) -> Any:
    """Attention over a sequence that is split over a ring of ranks; the dense result and gradients.

    Shapes: q [b, h, s, d], k [b, g, t, d], v [b, g, t, e] -> [b, h, s, e]; g divides h (only the g
            heads of keys travel).  Batch and heads may be split too, alike in all three.
    ``layout``     of the sequence, for local blocks (inside shard_map); sharded tensors bring theirs.
                   ``kv_layout`` that of the keys, where they lie otherwise: any order, any length.
    ``mask``       a value in global positions: ``Causal() & Documents(cu_seqlens)``; or a function (b, h, q, k).
    ``bias``       [.., s, t], added to the scores, or booleans; may be learned.
    ``sink``       [h], a score per head that takes part in the softmax and attends to nothing; may be learned.
    ``dropout``    of the probabilities, drawn by global position: the same for every ring.
    ``scale``      of the scores, 1 / sqrt(d) if None.
    ``return_lse`` also give log-sum-exp of the scores [b, h, s], differentiable.
    ``algorithm``  "auto": the cheapest plan; ``sl.why("attention", q, k, v)`` lists them.
    ``kernel``     "auto", "math", "cpu", "flash", "efficient", "cudnn".
    ``canonical``  the same bits, out and gradients, for every ring size and layout: everything is gathered
                   and computed in tiles of 64 rows (or of ``canonical`` rows), twice the work.

    Rows that see nothing give 0, with gradient 0.
    Moves:  what the plan says: ``sl.attention_plan(...)``.
    Raises: Unsupported where the algorithm cannot honour the mask or an argument; nothing is dropped.
    Source: Li et al., arXiv 2105.13120; Liu et al., arXiv 2310.01889.

    >>> import shardlib as sl
    >>> q = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    >>> with sl.simulate(s=4):
    ...     x = sl.shard(q, sl.Ring("s", dim=2, schedule="zigzag"))
    ...     out = sl.unshard(sl.ring_attention(x, x, x, mask=sl.Causal()))
    >>> torch.allclose(out, F.scaled_dot_product_attention(q, q, q, is_causal=True))
    True
    """
    if canonical:
        algorithm = "canonical" if canonical is True else f"canonical({int(canonical)})"
    leave: Callable[[ShardedTensor], Tensor] = _same
    if any(isinstance(t, DTensor) for t in (q, k, v)):
        q, k, v = (from_dtensor(t) if isinstance(t, DTensor) else t for t in (q, k, v))
        leave = as_dtensor
    elif not isinstance(q, ShardedTensor):
        q, k, v = _placed(q, k, v, layout, kv_layout)
        layout, kv_layout, leave = None, None, _local
    check(q, k, v)
    for name, t, asked in (("q", q, layout), ("k", k, kv_layout if kv_layout is not None else layout)):
        _check_layout(name, t, asked)
    out, lse = _attend(q, k, v, _value(mask), bias, sink, dropout, scale, return_lse, algorithm, kernel)  # type: ignore[arg-type]
    return (leave(out), leave(lse)) if return_lse else leave(out)


def _value(mask: Any) -> Mask:
    """None and functions as masks."""
    if mask is None or isinstance(mask, Mask):
        return Full() if mask is None else mask
    if callable(mask) and not isinstance(mask, Tensor):
        function: Any = mask
        return MaskMod(function)
    tensor = isinstance(mask, Tensor)
    raise ShardError(
        "a mask is a value or a function of (b, h, q, k); " + ("a tensor is a bias" if tensor else f"not {mask!r}"),
        op="ring_attention",
        fix=f"sl.ring_attention(q, k, v, {'bias=mask' if tensor else 'mask=sl.Causal()'})",
    )


def _same(x: ShardedTensor) -> ShardedTensor:
    return x


def _local(x: ShardedTensor) -> Tensor:
    return x.local


def _attend(
    q: ShardedTensor,
    k: ShardedTensor,
    v: ShardedTensor,
    mask: Mask,
    bias: Tensor | None,
    sink: Tensor | None,
    dropout: float | None,
    scale: float | None,
    return_lse: bool,
    algorithm: str,
    kernel: str,
) -> tuple[ShardedTensor, ShardedTensor]:
    """(out, lse) of sharded operands that were checked."""
    mesh = q.mesh
    case = attention_case(q, k, v, mask, bias is not None)
    lengths = true_shape(q)[2], true_shape(k)[2]
    mask.check(true_shape(q)[0], true_shape(q)[1], *lengths)
    match = planned(case, algorithm)
    plan = match.run
    if (watcher := scope().watcher) is not None:
        watcher.chose(match)
    p = dropout or 0.0
    if not isinstance(p, int | float) or not 0 <= p <= 1:
        raise ShardError(
            f"dropout is a probability, not {dropout!r}",
            op="ring_attention",
            fix="sl.ring_attention(q, k, v, dropout=0.1)",
        )
    raw_bias = None if bias is None else _aligned_bias(q, k, bias)
    raw_sink = None if sink is None else _aligned_sink(q, sink)
    learned = raw_bias is not None and raw_bias.requires_grad
    special = bool(p) or learned or (return_lse and torch.is_grad_enabled())
    biased = raw_bias is not None or mask.biased or not isinstance(mask, Full)
    chosen = _kernel(kernel, q, v, biased, special)
    seed = next_key(mesh) if p else 0
    at = partial(_batch_and_heads, q.sharding.resolve(4), tuple(q.size_), mesh)
    whole = (true_shape(q)[1], *lengths)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    job = Job(mesh, case.axes, plan, mask, factor, chosen, at, whole, p, seed)
    raws = _met(q, k, v, case.axes)
    out, lse = _Attend.apply(job, *raws, raw_bias, raw_sink)  # type: ignore[misc]
    deferred = q.deferred | k.deferred | v.deferred
    return _like(q, out, (*q.size_[:3], v.size_[3]), deferred), _like(q, lse, tuple(q.size_[:3]), deferred)


def _kernel(name: str, q: ShardedTensor, v: ShardedTensor, biased: bool, special: bool) -> Any:
    if name == "auto":
        return pick(q.raw, v.raw, biased, special)
    if name not in KERNELS:
        raise ShardError(
            f"unknown kernel {name!r}; there are {', '.join(KERNELS)}",
            op="ring_attention",
            fix='sl.ring_attention(q, k, v, kernel="math")',
        )
    if why := unfit(name, q.raw, v.raw, biased, special):
        raise Unsupported(
            f"kernel {name!r} does not fit: {why}",
            op="ring_attention",
            operands={"q": typeof(q), "v": typeof(v)},
            mesh=q.mesh,
            fix='sl.ring_attention(q, k, v, kernel="math")',
        )
    return KERNELS[name]


def _like(q: ShardedTensor, raw: Tensor, size: Sequence[int], deferred: frozenset[str]) -> ShardedTensor:
    layout = Layout(q.sharding.resolve(4).dims[: len(size)])
    if isinstance(q, PaddedTensor):
        true = torch.Size((*q.true[:3], *size[3:]))
        return PaddedTensor(raw, layout, torch.Size(size), q.mesh, true)
    return ShardedTensor(raw, layout, torch.Size(size), q.mesh, deferred)


def _placed(q: Any, k: Any, v: Any, layout: Any, kv_layout: Any) -> tuple[ShardedTensor, ...]:
    """Local blocks as values whose sequence is split as the layouts say."""
    if layout is None:
        axis = next(iter(current_mesh().axes))
        raise PlainTensor(
            "local blocks need their layout; a whole tensor is sharded first",
            op="ring_attention",
            operands={"q": typeof(q)},
            fix=f"sl.ring_attention(*(sl.shard(t, sl.Ring({axis!r}, dim=2)) for t in (q, k, v)))",
        )
    mesh = q.mesh if type(q) is Stacked else current_mesh()
    out = []
    for x, asked in ((q, layout), (k, kv_layout or layout), (v, kv_layout or layout)):
        token = _token(asked)
        size = list(x.shape)
        size[2] *= mesh.axis_size(token.axes) if token.axes else 1
        out.append(ShardedTensor(unwrap(x), Layout((Dim(), Dim(), token, Dim())), torch.Size(size), mesh))
    return tuple(out)


def _token(layout: Any) -> Dim:
    """How a layout splits the sequence: a Ring over whatever dimension, or dimension 2 of a Layout."""
    if isinstance(layout, Ring):
        return layout.layout.dims[-1]
    return (Layout.parse(layout) if isinstance(layout, str) else layout).resolve(4).dims[2]


def _check_layout(name: str, x: Any, asked: Any) -> None:
    if asked is not None and _token(asked) != x.sharding.resolve(4).dims[2]:
        dims = [str(d) for d in x.sharding.resolve(4).dims]
        raise ImplicitCommunication(
            f"{name}'s sequence is split {dims[2]}, not {_token(asked)}",
            op="ring_attention",
            operands={name: typeof(x)},
            mesh=x.mesh,
            fix=f"sl.reshard({name}, {' '.join([*dims[:2], str(_token(asked)), dims[3]])!r})",
        )


def attention_plan(
    q: ShardedTensor, k: ShardedTensor, v: ShardedTensor, mask: Mask | None = None, algorithm: str = "auto"
) -> Plan:
    """What ``ring_attention`` of these operands would do: steps, transfers, kernel calls, bytes; nothing runs.

    Under ``sl.record`` for a mesh of any size.

    >>> import shardlib as sl
    >>> with sl.record(s=64):
    ...     q = sl.shard(torch.empty(1, 8, 65536, 64, device="meta"), sl.Ring("s", dim=2, schedule="zigzag"))
    ...     plan = attention_plan(q, q, q, sl.Causal())
    >>> plan.algorithm, plan.steps
    ('ring', 63)
    """
    return planned(attention_case(q, k, v, mask), algorithm).run


def _met(q: ShardedTensor, k: ShardedTensor, v: ShardedTensor, axes: tuple[str, ...]) -> tuple[Tensor, ...]:
    """Raw blocks; whole keys meet queries that differ along the ring."""
    deferred = q.deferred | k.deferred | v.deferred
    split = {*q.sharding.axes, *deferred}
    return tuple(vary(t.raw, t.mesh, split.difference(t.sharding.axes, t.deferred)) for t in (q, k, v))


def _frame(q: ShardedTensor, last: int) -> ShardedTensor:
    """A value laid out as the scores [b, h, s, last]."""
    dims = q.sharding.resolve(4).dims
    return ShardedTensor(
        q.raw[..., :1], Layout((*dims[:3], Dim())), torch.Size((*q.size_[:3], last)), q.mesh, q.deferred
    )


def _aligned_bias(q: ShardedTensor, k: ShardedTensor, bias: Tensor) -> Tensor:
    """The rows of a bias [.., s, t] for this rank's queries, all keys: [b or 1, h or 1, lq or 1, t]."""
    s, t = true_shape(q)[2], true_shape(k)[2]
    fits = 2 <= bias.ndim <= 4 and bias.shape[-2] in (1, s) and bias.shape[-1] in (1, t)
    if not fits:
        raise ShardError(
            f"a bias is [.., {s}, {t}], broadcast over batch and heads, not {list(bias.shape)}",
            op="ring_attention",
            operands={"q": typeof(q), "k": typeof(k), "bias": typeof(bias)},
            mesh=q.mesh,
            fix=f"sl.ring_attention(q, k, v, bias=torch.zeros({s}, {t}))",
        )
    if not isinstance(bias, ShardedTensor):
        if bias.shape[-2] not in (1, q.size_[2]):
            bias = F.pad(bias, (0, 0, 0, q.size_[2] - s))
        bias = replicated(bias, q.mesh)
    bias = bias[(None,) * (4 - bias.ndim)] if bias.ndim < 4 else bias
    (_, raw), *_ = aligned("ring_attention", [_frame(q, max(t, 2)), bias])  # type: ignore[list-item]
    return raw


def _aligned_sink(q: ShardedTensor, sink: Tensor) -> Tensor:
    """One score per local head: [1, h, 1], with a leading dimension of ranks under simulate."""
    if tuple(sink.shape) != (q.size_[1],):
        raise ShardError(
            f"a sink is one score for each of {q.size_[1]} heads, not {list(sink.shape)}",
            op="ring_attention",
            operands={"q": typeof(q), "sink": typeof(sink)},
            mesh=q.mesh,
            fix=f"sl.ring_attention(q, k, v, sink=torch.zeros({q.size_[1]}))",
        )
    sink = sink if isinstance(sink, ShardedTensor) else replicated(sink, q.mesh)
    (_, raw), *_ = aligned("ring_attention", [_frame(q, 2), sink[:, None, None]])  # type: ignore[list-item]
    return raw.squeeze(-1).unsqueeze(-3)


def _batch_and_heads(layout: Layout, shape: tuple[int, ...], mesh: Mesh, coord: dict[str, int]) -> At:
    batch, heads, *_ = layout.indices(shape, mesh, coord)
    return At(torch.tensor(list(batch)), torch.tensor(list(heads)))
