"""``ring_attention`` and the rule for scaled_dot_product_attention where the sequence is split.

Which plan runs is the registry's choice: every algorithm is a rule for "attention" that answers a
case (positions, mask, sizes) with a plan and its cost.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardlib.border import as_dtensor, from_dtensor
from shardlib.collectives import Stacked, unwrap
from shardlib.errors import ImplicitCommunication, NoRule, PlainTensor, RankMismatch, ShardError, Unsupported
from shardlib.layouts import Dim, Layout, Ring
from shardlib.layouts.dims import ring_runs
from shardlib.layouts.orders import Run
from shardlib.mesh import Link, Mesh, current_mesh
from shardlib.ops.attention import executor, gathered, passq, rsa, twice, ulysses
from shardlib.ops.attention import plan as plans
from shardlib.ops.attention.executor import Job
from shardlib.ops.attention.kernels import KERNELS, pick, unfit, wide
from shardlib.ops.attention.masks import At, Full, Mask, MaskMod
from shardlib.ops.attention.plan import Plan, Sizes
from shardlib.ops.elementwise import aligned
from shardlib.ops.registry import Cost, Match, case_of, choose, rule
from shardlib.ops.registry import algorithm as pinned
from shardlib.tensor import WATCHERS, PaddedTensor, ShardedTensor, partial_escape, replicated, typeof, vary

__all__ = ["AttentionCase", "attention_plan", "ring_attention"]

_RATE = {"cpu": 3e10, "meta": 3e10, "cuda": 3e14}  # flops per second that compute is priced at


@dataclass(frozen=True)
class AttentionCase:
    """Per rank the positions of q and of k, the mask, one rank's sizes; what else is asked for."""

    q_runs: tuple[tuple[Run, ...], ...]
    k_runs: tuple[tuple[Run, ...], ...]
    rows: int
    mask: Mask
    sizes: Sizes
    axes: tuple[str, ...]
    mesh: tuple[tuple[str, int], ...]
    types: tuple[str, str, str] = ("q", "k", "v")
    biased: bool = False
    rate: float = _RATE["cpu"]
    links: tuple[tuple[str, Link], ...] = ()

    def operands(self) -> dict[str, str]:
        return {**dict(zip(("q", "k", "v"), self.types, strict=True)), "mask": repr(self.mask)[:200]}

    def fix(self) -> tuple[str, type[NoRule]]:
        return 'sl.ring_attention(q, k, v, algorithm="ring")', NoRule


def _matched(case: AttentionCase, plan: Plan, note: str = "") -> Match:
    """The plan as a candidate; what hides behind computing is not priced twice."""
    forward, backward = plan.forward(case.sizes, case.axes), plan.backward(case.sizes, case.axes)
    links = dict(case.links)
    slowest = max((links.get(a, Link()) for a in case.axes), key=lambda k: k.beta, default=Link())
    moved = Cost(
        forward.bytes + backward.bytes, forward.messages + backward.messages, 0, forward.along + backward.along
    )
    hidden = plan.seconds(case.sizes, slowest, case.rate) - moved.seconds(links)
    forward = Cost(forward.bytes, forward.messages, forward.memory, forward.along, hidden)
    return Match(Layout(), plan, forward, backward, note)


@rule("attention", name="ring")
def _ring(case: AttentionCase) -> Match | str:
    return _matched(case, plans.ring(case.q_runs, case.k_runs, case.mask, case.rows))


@rule("attention", name="ring_bidirectional")
def _both_ways(case: AttentionCase) -> Match | str:
    return _matched(case, plans.both_ways(case.q_runs, case.k_runs, case.mask, case.rows))


@rule("attention", name="halo")
def _halo(case: AttentionCase) -> Match | str:
    try:
        return _matched(case, plans.halo(case.q_runs, case.k_runs, case.mask, case.rows))
    except Unsupported as error:
        return error.message


@rule("attention", name="double_ring")
def _double_ring(case: AttentionCase, inner: int | None = None) -> Match | str:
    p = len(case.q_runs)
    if inner is None:
        inner = max((i for i in range(2, math.isqrt(p) + 1) if p % i == 0), default=0)
        if not inner:
            return f"a ring of {p} has no rings within"
    return _matched(case, plans.double_ring(case.q_runs, case.k_runs, case.mask, case.rows, inner), f"of {inner}")


def _travels(case: AttentionCase) -> str:
    """Why there is nothing to gather or to swap; "" if there is."""
    return "" if case.rows or len(case.q_runs) == 1 else "the keys are whole already"


@rule("attention", name="allgather")
def _allgather(case: AttentionCase, heads: int | None = None) -> Match | str:
    heads = min(case.sizes.g if heads is None else heads, case.sizes.g)
    if heads < 1:
        return "at least one head is gathered at a time"
    return _travels(case) or _matched(case, plans.allgather(case.q_runs, case.k_runs, case.mask, heads))


def _swap(case: AttentionCase, inner: int) -> Match | str:
    if case.biased:
        return "a bias is held by the rows of its ring, and here rows change places; ALiBi is a mask"
    z = case.sizes
    plan = plans.ulysses(case.q_runs, case.k_runs, case.mask, z.g, z.lk, inner)
    return _travels(case) or _matched(case, plan)


@rule("attention", name="ulysses")
def _ulysses(case: AttentionCase) -> Match | str:
    return _swap(case, len(case.q_runs))


@rule("attention", name="usp")
def _usp(case: AttentionCase) -> Match | str:
    sizes = [n for n in (dict(case.mesh)[a] for a in case.axes) if n > 1]
    if len(sizes) < 2:
        return "it needs a sequence split over two axes: heads over the inner, a ring over the outer"
    return _swap(case, sizes[-1])


@rule("attention", name="pass_q")
def _pass_q(case: AttentionCase) -> Match | str:
    if case.biased:
        return "a bias is held by the rows of its ring, and here rows travel; ALiBi is a mask"
    return _travels(case) or _matched(case, plans.pass_q(case.q_runs, case.k_runs, case.mask))


@rule("attention", name="rsa")
def _rsa(case: AttentionCase) -> Match | str:
    return _travels(case) or _matched(case, plans.rsa(case.q_runs, case.k_runs, case.mask))


@rule("attention", name="canonical")
def _canonical(case: AttentionCase, tile: int = 64) -> Match | str:
    if case.biased:
        return "a bias is held by the rows of its ring, and here all rows are gathered; ALiBi is a mask"
    return _travels(case) or _matched(case, plans.canonical(case.q_runs, case.k_runs, case.mask, tile))


_WITH_NUMBER: dict[str, Any] = {
    "double_ring": _double_ring,
    "allgather": _allgather,
    "canonical": _canonical,
}
_ENGINES: dict[str, tuple[Any, Any]] = {
    "routes": (executor.forward, executor.backward),
    "allgather": (gathered.forward, gathered.backward),
    "canonical": (gathered.canonical_forward, gathered.canonical_backward),
    "ulysses": (ulysses.forward, ulysses.backward),
    "passq": (passq.forward, passq.backward),
    "rsa": (rsa.forward, rsa.backward),
}


def _planned(case: AttentionCase, algorithm: str) -> Match:
    """The plan asked for by name ("auto": the cheapest; "double_ring(2)": with a number)."""
    found = re.fullmatch(r"(\w+)(?:\((\d+)\))?", algorithm)
    name, number = found.groups() if found else (algorithm, None)
    if name == "auto" and number is None:
        return choose("attention", case, lambda: case)
    if number is None:
        with pinned(attention=name):
            return choose("attention", case, lambda: case)
    if name not in _WITH_NUMBER:
        raise ShardError(
            f"{name!r} takes no number; these do: {', '.join(_WITH_NUMBER)}", op="ring_attention",
            fix='sl.ring_attention(q, k, v, algorithm="ring")',
        )  # fmt: skip
    match = _WITH_NUMBER[name](case, int(number))
    if isinstance(match, str):
        raise NoRule(f"{algorithm} does not fit: {match}", op="ring_attention", operands=case.operands(),
                     mesh=dict(case.mesh), fix='sl.ring_attention(q, k, v, algorithm="ring")')  # fmt: skip
    return replace(match, rule=algorithm)


# ---------------------------------------------------------------- autograd


class _Attend(torch.autograd.Function):
    """Raw q, k, v, bias, sink -> out, lse.  Saves the blocks, out and lse; no scores."""

    @staticmethod
    def forward(
        ctx: Any, job: Job, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        out, lse, saved = _ENGINES[job.plan.engine][0](job, q, k, v, bias, sink)
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
        back = _ENGINES[job.plan.engine][1]
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
    if any(isinstance(t, DTensor) for t in (q, k, v)):
        q, k, v = (from_dtensor(t) if isinstance(t, DTensor) else t for t in (q, k, v))
        given = locals()
        out = _attend(**{n: given[n] for n in _NAMES})
        return tuple(map(as_dtensor, out)) if return_lse else as_dtensor(out)
    blocks = not isinstance(q, ShardedTensor)
    if blocks:
        q, k, v = _placed(q, k, v, layout, kv_layout)
        layout = kv_layout = None
    given = locals()
    out = _attend(**{n: given[n] for n in _NAMES})
    if not blocks:
        return out
    return tuple(t.local for t in out) if return_lse else out.local


_NAMES = ("q", "k", "v", "layout", "kv_layout", "mask", "bias", "sink", "dropout", "scale", "return_lse",
          "algorithm", "kernel")  # fmt: skip


def _attend(
    q: ShardedTensor,
    k: ShardedTensor,
    v: ShardedTensor,
    layout: Any,
    kv_layout: Any,
    mask: Any,
    bias: Tensor | None,
    sink: Tensor | None,
    dropout: float | None,
    scale: float | None,
    return_lse: bool,
    algorithm: str,
    kernel: str,
) -> Any:
    mask = Full() if mask is None else mask if isinstance(mask, Mask) else MaskMod(mask)
    _check(q, k, v)
    for name, t, asked in (("q", q, layout), ("k", k, kv_layout if kv_layout is not None else layout)):
        _check_layout(name, t, asked)
    mesh = q.mesh
    case = attention_case(q, k, v, mask, bias is not None)
    lengths = _true(q)[2], _true(k)[2]
    mask.check(_true(q)[0], _true(q)[1], *lengths)
    match = _planned(case, algorithm)
    plan = match.run
    if WATCHERS:
        WATCHERS[-1].chose(match)
    p = float(dropout or 0.0)
    if not 0 <= p <= 1:
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
    seed = int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)) if p else 0
    at = partial(_batch_and_heads, q.sharding.resolve(4), tuple(q.size_), mesh)
    whole = (_true(q)[1], *lengths)
    job = Job(
        mesh, case.axes, plan, mask, scale if scale is not None else q.shape[-1] ** -0.5, chosen, at, whole, p, seed
    )
    raws = _met(q, k, v, case.axes)
    out, lse = _Attend.apply(job, *raws, raw_bias, raw_sink)  # type: ignore[misc]
    deferred = q.deferred | k.deferred | v.deferred
    out = _like(q, out, (*q.size_[:3], v.size_[3]), deferred)
    return (out, _like(q, lse, tuple(q.size_[:3]), deferred)) if return_lse else out


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


def _true(x: ShardedTensor) -> tuple[int, ...]:
    return tuple(x.true) if isinstance(x, PaddedTensor) else tuple(x.size_)


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


def _check_layout(name: str, x: ShardedTensor, asked: Any) -> None:
    if asked is not None and _token(asked) != x.sharding.resolve(4).dims[2]:
        dims = [str(d) for d in x.sharding.resolve(4).dims]
        raise ImplicitCommunication(
            f"{name}'s sequence is split {dims[2]}, not {_token(asked)}",
            op="ring_attention",
            operands={name: typeof(x)},
            mesh=x.mesh,
            fix=f"sl.reshard({name}, {' '.join([*dims[:2], str(_token(asked)), dims[3]])!r})",
        )


def _check(q: Any, k: Any, v: Any) -> None:
    """Raise what is wrong with the operands."""
    operands = {n: typeof(t) for n, t in (("q", q), ("k", k), ("v", v))}
    mesh = q.mesh
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, ShardedTensor):
            raise PlainTensor(
                f"{name} is a plain tensor and q is sharded", op="ring_attention", operands=operands, mesh=mesh,
                fix=f"sl.shard({name}, {str(q.sharding)!r})",
            )  # fmt: skip
        if len(t.size_) != 4:
            raise RankMismatch(
                f"{name} has {len(t.size_)} dimensions; attention takes [batch, heads, sequence, size]",
                op="ring_attention", operands=operands, mesh=mesh,
                fix=f"{name}[(None,) * {max(0, 4 - len(t.size_))}]",
            )  # fmt: skip
        if t.sharding.partial:
            raise partial_escape("ring_attention", t)
    (qb, qh, qs, qd), (kb, kh, ks, kd), (vb, vh, vs, ve) = (t.sharding.resolve(4).dims for t in (q, k, v))
    shapes = [_true(t) for t in (q, k, v)]
    sizes = shapes[0][0] == shapes[1][0] == shapes[2][0] and shapes[1][1:3] == shapes[2][1:3]
    if not sizes or shapes[0][3] != shapes[1][3] or shapes[1][1] == 0 or shapes[0][1] % shapes[1][1]:
        raise ShardError(
            "sizes do not fit: q [b, h, s, d], k [b, g, t, d], v [b, g, t, e] with g a divisor of h",
            op="ring_attention", operands=operands, mesh=mesh, fix="sl.ring_attention(q, q, q)",
        )  # fmt: skip
    local = qd.is_split or kd.is_split or ve.is_split
    if local or not (qb == kb == vb and qh == kh == vh and ks == vs):
        want = " ".join([str(qb), str(qh), str(ks), "."])
        raise ImplicitCommunication(
            "batch and heads must be split alike, keys and values too, and the head size be whole",
            op="ring_attention", operands=operands, mesh=mesh,
            fix=f"sl.ring_attention(*(sl.reshard(t, {want!r}) for t in (q, k, v)))",
        )  # fmt: skip
    grouped = qs.groups.parts or ks.groups.parts
    if grouped or (ks.is_split and ks.axes != qs.axes):
        want = " ".join([str(qb), str(qh), str(ks), "."])
        raise ImplicitCommunication(
            f"the sequence of q is split {qs} and that of k {ks}: they must be split over the same axes",
            op="ring_attention", operands=operands, mesh=mesh, fix=f"sl.reshard(q, {want!r})",
        )  # fmt: skip
    if qh.is_split and (q.size_[1] // math.prod(mesh.axes[a] for a in qh.axes)) % (
        k.size_[1] // math.prod(mesh.axes[a] for a in kh.axes)
    ):
        raise ImplicitCommunication(
            "each rank's heads of queries must share its heads of keys", op="ring_attention", operands=operands,
            mesh=mesh, fix=f"sl.ring_attention(*(sl.reshard(t, '{qb} . {qs} .') for t in (q, k, v)))",
        )  # fmt: skip


@case_of("attention")
def attention_case(
    q: ShardedTensor, k: ShardedTensor, v: ShardedTensor, mask: Mask | None = None, biased: bool = False
) -> AttentionCase:
    """What the plans need to know of three operands."""
    _check(q, k, v)
    mesh = q.mesh
    qs, ks = q.sharding.resolve(4).dims[2], k.sharding.resolve(4).dims[2]
    axes = qs.axes
    p = mesh.axis_size(axes) if axes else 1
    q_runs = tuple(ring_runs(qs, _true(q)[2], mesh.axes, r) for r in range(p))
    k_runs = tuple(ring_runs(ks, _true(k)[2], mesh.axes, r if ks.axes else 0) for r in range(p))
    (b, h, lq, d), (_, g, lk, _) = (
        Layout(t.sharding.resolve(4).dims).local_shape(tuple(t.size_), mesh) for t in (q, k)
    )
    item = q.raw.element_size()
    sizes = Sizes(b, h, g, lq, lk, d, v.size_[3], item, wide(q.raw.dtype).itemsize)
    types = typeof(q), typeof(k), typeof(v)
    rows = lk if ks.axes else 0  # whole keys need not travel
    rate = _RATE.get(q.raw.device.type, _RATE["cuda"])
    links = tuple(mesh.links.items())
    return AttentionCase(
        q_runs, k_runs, rows, mask or Full(), sizes, axes, tuple(mesh.axes.items()), types, biased, rate, links
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
    ('ring_bidirectional', 63)
    """
    return _planned(attention_case(q, k, v, mask), algorithm).run


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
    s, t = _true(q)[2], _true(k)[2]
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
