"""Checks of an attention engine or a mask of your own, as functions to call in a test.

Each raises AssertionError naming the law and the failing case.  All run on simulated ranks, in
fp64, and compare with attention computed on whole tensors from its definition.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.collectives import trace
from shardlib.errors import Unsupported
from shardlib.layouts import Ring
from shardlib.layouts.orders import dealt
from shardlib.mesh import simulate
from shardlib.ops.attention.case import attention_case
from shardlib.ops.attention.engine import AttentionPlan, Engine, peak, planned
from shardlib.ops.attention.kernels import pieces
from shardlib.ops.attention.masks import At, Causal, Documents, Full, Mask, Window
from shardlib.ops.attention.op import ring_attention
from shardlib.ops.counter_rng import keep_mask
from shardlib.placing import shard
from shardlib.random import next_key
from shardlib.testing.compare import difference, normal

__all__ = ["check_engine", "check_mask", "dense_attention"]

_ORDERS = ("contiguous", "zigzag", "striped")
_MESHES: tuple[dict[str, int], ...] = ({"s": 1}, {"s": 2}, {"s": 3}, {"r": 2, "s": 2})


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: tuple[float, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention on whole tensors from its definition; return (out, lse).

    ``dropout`` is (p, seed).

    >>> q = torch.randn(1, 2, 5, 4)
    >>> out, _ = dense_attention(q, q, q, Causal())
    >>> theirs = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> torch.allclose(out, theirs, atol=1e-6)
    True
    """
    (b, h, s, d), t = q.shape, k.shape[2]
    own = q.device
    shared, at = h // k.shape[1], At(torch.arange(b, device=own), torch.arange(h, device=own))
    positions = torch.arange(s, device=own), torch.arange(t, device=own)
    scores = q @ k.repeat_interleave(shared, 1).mT * d**-0.5
    given = mask.scores(*positions, at), mask.allowed(*positions, at), bias
    every = [x for x in given if x is not None]
    for added in (x for x in every if x.dtype != torch.bool):
        scores = scores + added.to(scores.dtype)
    for allowed in (x for x in every if x.dtype == torch.bool):
        scores = scores.masked_fill(~allowed, -math.inf)
    empty = (scores == -math.inf).all(-1)
    scores = scores.masked_fill(empty.unsqueeze(-1), 0)
    lse = torch.logsumexp(scores, -1).masked_fill(empty, -math.inf)
    if sink is not None:
        lse = torch.logaddexp(lse, sink[:, None])
    p = (scores - lse.masked_fill(empty, 0).unsqueeze(-1)).exp().masked_fill(empty.unsqueeze(-1), 0)
    if dropout is not None:
        drawn = keep_mask(
            torch.arange(b * h * s * t, device=own).view(b, h, s, t), dropout[1], dropout[0]
        )
        p = p * drawn / (1 - dropout[0])
    return p @ v.repeat_interleave(shared, 1), lse


# ---------------------------------------------------------------- engines


class _AttentionCase(NamedTuple):
    """One attention call to check an engine on."""

    mesh: dict[str, int]
    order: str
    mask: Mask
    heads: tuple[int, int]
    lengths: tuple[int, int]
    extras: tuple[str, ...] = ()  # of "bias" and "sink"
    with_lse: bool = False
    dropout: float = 0.0


def _cases(masks: Sequence[Mask], lengths: tuple[int, int]) -> list[_AttentionCase]:
    """List every mesh with every mask; orders, heads and options alternate."""
    out = []
    for i, (mesh, mask) in enumerate(itertools.product(_MESHES, masks)):
        heads = ((4, 2), (3, 3), (6, 1))[i % 3]
        extras = tuple(name for name, every in (("bias", 4), ("sink", 3)) if i % every == 1)
        options = extras, i % 2 == 0, (0.0, 0.0, 0.3, 0.0, 0.0)[i % 5]
        out.append(_AttentionCase(mesh, _ORDERS[i % 3], mask, heads, lengths, *options))
    return out


def check_engine(engine: Engine, *, masks: Sequence[Mask] | None = None) -> None:
    """Check that an engine keeps its contract.

    - It is hashable, equal to itself, and plans equal cases equally.
    - Where it fits, output, log-sum-exp and every gradient equal dense attention: masks, grouped
      heads, lengths that do not divide, bias, sink, dropout.
    - The bytes and messages that its plan predicts equal those counted, forward and backward.
    - Its areas list every rank.  It runs on the meta device, so that its memory can be counted.
    - Its second derivative equals that of dense attention, or is refused.

    Raises: AssertionError.

    >>> import shardlib as sl
    >>> check_engine(sl.attention.OneWay())
    """
    assert hash(engine) == hash(engine) and engine == engine, f"{engine} is no value"
    if masks is None:
        masks = Full(), Causal(), Causal() & Window(4), Documents((0, 4, 5, 13))
    cases = _cases(masks, (13, 13))
    refusals = [refused for case in cases if (refused := _check_attention(engine, case))]
    # an engine that refuses every case would pass all checks
    assert len(refusals) < len(cases), f"{engine} fits nothing: {refusals[0]}"
    _check_second_derivative(engine)


def _operands(case: _AttentionCase) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Draw q, k, v, and the extras by name, as whole tensors."""
    (h, g), (s, t) = case.heads, case.lengths
    q, k, v = normal(2, h, s, 4, seed=1), normal(2, g, t, 4, seed=2), normal(2, g, t, 5, seed=3)
    extras = {"bias": normal(h, s, t, seed=4), "sink": normal(h, seed=5)}
    learned = {name: extras[name].requires_grad_() for name in case.extras}
    return [x.requires_grad_() for x in (q, k, v)], learned


class _Wanted(NamedTuple):
    """The output, log-sum-exp and gradients of attention on whole tensors, and the cotangents."""

    values: list[Tensor]
    cotangents: tuple[Tensor, Tensor]


def _dense(case: _AttentionCase, leaves: list[Tensor], extras: dict[str, Tensor]) -> _Wanted:
    torch.manual_seed(0)
    with simulate(s=1, device="cpu") as one:
        seed = next_key(one)
    q, k, v = leaves
    out, lse = dense_attention(q, k, v, case.mask, dropout=(case.dropout, seed), **extras)
    gone = lse == -math.inf
    cotangents = normal(*out.shape, seed=6), normal(*lse.shape, seed=7).masked_fill(gone, 0)
    loss = (out * cotangents[0]).sum()
    if case.with_lse:
        loss = loss + (lse.masked_fill(gone, 0) * cotangents[1]).sum()
    learned = [*leaves, *extras.values()]
    return _Wanted([out, lse, *torch.autograd.grad(loss, learned)], cotangents)


def _check_attention(engine: str | Engine, case: _AttentionCase) -> str:
    """Compare one attention call with dense; return the reason if the engine does not fit."""
    leaves, extras = _operands(case)
    wanted = _dense(case, leaves, extras)
    with simulate(device="cpu", **case.mesh):
        layout = Ring(tuple(case.mesh), 2, case.order)
        xs = [shard(x.detach(), layout, pad=True).requires_grad_() for x in leaves]
        extra = {name: x.detach().requires_grad_() for name, x in extras.items()}
        planned_case = attention_case(*xs, case.mask, "bias" in extra)
        if isinstance(engine, str):
            engine = planned(planned_case, engine).run.engine
        assert not isinstance(engine, str)
        plan = engine.plan(planned_case)
        if isinstance(plan, str):
            return plan
        assert plan == engine.plan(planned_case), f"{engine} plans one case in two ways: {case}"
        options: Any = {**extra, "dropout": case.dropout}
        torch.manual_seed(0)
        with trace() as forward:
            out, lse = ring_attention(
                *xs, mask=case.mask, algorithm=engine, return_lse=True, **options
            )
        dout, dlse = (shard(c, layout, pad=True) for c in wanted.cotangents)
        total = (out * dout).sum()
        if case.with_lse:
            total = total + (lse.masked_fill(lse == -math.inf, 0.0) * dlse).sum()
        with trace() as backward:
            total.backward()
        _check_counted(engine, case, plan, forward, backward)
        _check_paper(engine, case, plan)
        values = [out, lse, *(x.grad for x in (*xs, *extra.values()))]
        names = ["out", "lse", *(f"the gradient of {n}" for n in ("q", "k", "v", *extra))]
        for name, got, expected in zip(names, values, wanted.values, strict=True):
            error = difference(got, expected, 1.0)
            assert error < 1e-12, f"{name} of {engine} is off by {error:.2g}: {case}"
    return ""


def _check_counted(
    engine: Engine, case: _AttentionCase, plan: AttentionPlan, forward: Any, backward: Any
) -> None:
    passes = [("forward", plan.forward, forward)]
    # gradients of bias, sink and lse use collectives that the plan does not count
    if not (case.extras or case.with_lse):
        passes.append(("backward", plan.backward, backward))
    for name, stated, counted in passes:
        said, found = (stated.bytes, stated.messages), (counted.bytes, counted.messages)
        assert said == found, (
            f"{engine} says {said} bytes and messages {name}, counted {found}: {case}"
        )


def _check_paper(engine: Engine, case: _AttentionCase, plan: AttentionPlan) -> None:
    """Check that areas list every rank and the plan runs on the meta device."""
    assert all(len(step) == plan.p for step in plan.areas), (
        f"areas of {engine} do not name every rank: {case}"
    )
    assert peak(plan, torch.float32, plan.p - 1).backward > 0, (
        f"{engine} computes nothing on paper: {case}"
    )


def _check_second_derivative(engine: Engine) -> None:
    leaves = [normal(1, h, 6, 4, seed=h).requires_grad_() for h in (4, 2, 2)]
    cotangent = normal(1, 4, 6, 4, seed=5)

    def penalty(out: Tensor, xs: Any) -> Any:
        return sum((g * g).sum() for g in torch.autograd.grad(out, xs, create_graph=True))

    q, k, v = leaves
    dense, _ = dense_attention(q, k, v, Causal())
    want = torch.autograd.grad(penalty((dense * cotangent).sum(), leaves), leaves)
    with simulate(s=2, device="cpu"):
        xs = [shard(x.detach(), Ring("s", 2)).requires_grad_() for x in leaves]
        if isinstance(engine.plan(attention_case(*xs, Causal())), str):
            return
        out = ring_attention(*xs, mask=Causal(), algorithm=engine)
        try:
            got = torch.autograd.grad(penalty((out * shard(cotangent, Ring("s", 2))).sum(), xs), xs)
        except Unsupported:
            assert not engine.saves_operands, (
                f"{engine} saves its operands and refuses a second derivative"
            )
            return
        for mine, its in zip(got, want, strict=True):
            error = difference(mine, its, 1.0)
            assert error < 1e-12, f"a second derivative of {engine} is off by {error:.2g}"


# ---------------------------------------------------------------- masks


def check_mask(
    mask: Mask, *, q: int = 13, k: int | None = None, engines: Sequence[str | Engine] = ("auto",)
) -> None:
    """Check that a mask keeps its contract, for ``q`` queries and ``k`` keys.

    There are 2 batch entries and 3 or 6 heads.

    - It is hashable and equal to itself.
    - ``allowed`` returns booleans that broadcast, and a block's equal that block of the whole mask;
      ``scores`` likewise.
    - ``relation`` and ``cuts`` agree with ``allowed``: the kernel calls derived from them cover
    each
      allowed pair once, and no other pair.
    - Attention with the mask equals dense attention, values and gradients, with each of
    ``engines``.

    Raises: AssertionError.

    >>> check_mask(Causal() & Window(5))
    """
    k = q if k is None else k
    assert hash(mask) == hash(mask) and mask == mask, f"{mask} is no value"
    at = At(torch.arange(2, device="cpu"), torch.arange(3, device="cpu"))
    full = torch.arange(q, device="cpu"), torch.arange(k, device="cpu")
    whole, added = _allowed(mask, *full, at), _scores(mask, *full, at)
    for p, order, key_order in itertools.product((1, 2, 3), _ORDERS, _ORDERS):
        for runs in itertools.product(dealt(order, q, p), dealt(key_order, k, p)):
            _check_block(mask, *runs, at, whole, added)
    for engine, mesh in itertools.product(engines, _MESHES[1:]):
        refused = _check_attention(engine, _AttentionCase(mesh, "zigzag", mask, (3, 3), (q, k)))
        assert not refused, f"{engine} refuses {mask}: {refused}"


def _check_block(
    mask: Mask, q_runs: Any, k_runs: Any, at: At, whole: Tensor, added: Tensor
) -> None:
    """Check a block against the whole mask, and the kernel calls derived from it."""
    rows, cols = (
        torch.tensor([i for run in runs for i in run.positions], device="cpu").long()
        for runs in (q_runs, k_runs)
    )
    block, scored = _allowed(mask, rows, cols, at), _scores(mask, rows, cols, at)
    assert torch.equal(block, whole[:, :, rows][..., cols]), f"{mask} answers otherwise for a block"
    assert torch.equal(scored, added[:, :, rows][..., cols]), f"{mask} scores a block otherwise"
    covered = torch.zeros_like(block, dtype=torch.int64)
    for c in pieces(q_runs, k_runs, mask):
        part = ..., slice(c.q0, c.q1), slice(c.k0, c.k1)
        inside = torch.ones_like(block[part])
        if c.kind == "causal":
            inside = inside.tril()
        elif c.kind == "masked":
            inside = block[part]
        covered[part] += inside.long()
    said = f"relation and allowed of {mask} differ: {q_runs}, {k_runs}"
    assert torch.equal(covered, block.long()), said


def _allowed(mask: Mask, q: Tensor, k: Tensor, at: At) -> Tensor:
    allowed = mask.allowed(q.clone(), k.clone(), at)
    if allowed is None:
        allowed = torch.ones((), dtype=torch.bool, device="cpu")
    assert allowed.dtype == torch.bool, f"{mask} gives {allowed.dtype}, not booleans"
    return allowed.expand(len(at.batch), len(at.heads), len(q), len(k))


def _scores(mask: Mask, q: Tensor, k: Tensor, at: At) -> Tensor:
    scores = mask.scores(q.clone(), k.clone(), at)
    assert scores is None or mask.biased, f"{mask} adds to the scores and says that it does not"
    if scores is None:
        scores = torch.zeros((), device="cpu")
    return scores.expand(len(at.batch), len(at.heads), len(q), len(k))
