"""Ring Self-Attention as published: keys once round for all scores, softmax, values once round.

Every rank holds the scores of its queries with the whole sequence.  Here their gradients are the
dense ones, and those of keys and values are scattered rather than summed whole.

Source: Li et al., arXiv 2105.13120, section 3.2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardlib.collectives import psum_scatter, unwrap, wrap
from shardlib.mesh import bind
from shardlib.ops.attention.case import AttentionCase, length
from shardlib.ops.attention.engine import (
    Areas,
    AttentionJob,
    AttentionMove,
    AttentionPlan,
    Engine,
    Given,
    Gradients,
    Moves,
    Opt,
    Outputs,
    Saved,
    once_round,
    register_engine,
)
from shardlib.ops.attention.kernels import ScorePiece, acc_dtype
from shardlib.ops.attention.local import (
    LocalQueries,
    add_sink,
    bias_sums,
    local_queries,
    positions,
    round_trip,
    sums_like,
)


@dataclass(frozen=True)
class RSA(Engine):
    """Engine with two rounds, of keys and of values, that holds all scores of a rank's queries.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(s=4), sl.trace() as t:
    ...     x = sl.shard(torch.randn(1, 4, 16, 8), sl.Ring("s", dim=2))
    ...     _ = sl.ring_attention(x, x, x, algorithm=sl.attention.RSA())
    >>> t.by_kind(), t.messages
    ({'ppermute': 3072}, 6)
    """

    name = "rsa"

    def plan(self, case: AttentionCase) -> AttentionPlan | str:
        return case.unsplit() or AttentionPlan(self, case, once_round(case.p, 1))

    def moves(self, plan: AttentionPlan) -> Moves:
        z, n = plan.case.sizes, plan.p - 1
        rows = z.b * z.g * z.lk
        rounds = [
            AttentionMove(rows * z.d * z.itemsize, 1),
            AttentionMove(rows * z.e * z.itemsize, 1),
        ] * n
        widths = (z.d, z.e) if n else ()
        return Moves(
            rounds,
            [*rounds, *(AttentionMove(n * rows * width * z.acc_itemsize, n) for width in widths)],
        )

    def areas(self, plan: AttentionPlan) -> Areas:
        """Count all scores, whatever the mask."""
        keys = sum(map(length, plan.k_runs))
        return (tuple(length(runs) * keys for runs in plan.q_runs),)

    def forward(
        self, job: AttentionJob, q: Tensor, k: Tensor, v: Tensor, bias: Opt, sink: Opt
    ) -> Outputs:
        """Attend, and save q, k, v and the probabilities [b, h, lq, p lk]."""
        dtype, g = acc_dtype(q.dtype), k.shape[-3]
        ranks = local_queries(job, q, bias)
        scores = q.new_full((*q.shape[:-1], job.plan.p * k.shape[-2]), float("-inf"), dtype=dtype)
        for step, (block,) in round_trip(job, k):
            for rank in ranks:
                part = _ScoreBlock(rank, step, k.shape[-2])
                part.of(scores).copy_(part.scores(rank.view(block), dtype))
        lse = torch.logsumexp(scores, -1)
        probs = (
            scores.sub_(lse.masked_fill(lse == -float("inf"), 0.0).unsqueeze(-1)).exp_().to(q.dtype)
        )
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
        for step, (block,) in round_trip(job, v):
            for rank in ranks:
                part = _ScoreBlock(rank, step, k.shape[-2])
                used = part.kept(part.of(probs).to(dtype))
                part.rows(out).add_(
                    torch.matmul(_grouped(used, g), part.keys(block, dtype)).flatten(1, 2)
                )
        return out, add_sink(out, lse, sink), (q, k, v, probs)

    def backward(
        self, job: AttentionJob, saved: Saved, bias: Opt, sink: Opt, given: Given, wants_bias: bool
    ) -> Gradients:
        """Compute the gradients: a round of values for the scores', of keys for the queries'."""
        (q, k, v, probs), dtype = saved, acc_dtype(saved[0].dtype)
        if sink is not None:
            # scale by the share of each softmax that the sink does not take
            probs = probs * -(sink.to(dtype) - given[3]).expm1().unsqueeze(-1).to(probs.dtype)
        ranks, p = local_queries(job, q, bias), job.plan.p
        dscores = torch.zeros_like(probs, dtype=dtype)
        dq, dbias = sums_like(q), bias_sums(bias, wants_bias)
        dks, dvs = (
            x.new_zeros((*x.shape[:-2], p * x.shape[-2], x.shape[-1]), dtype=dtype) for x in (k, v)
        )
        _values_round(job, ranks, v, probs, given, dscores, dvs)
        _keys_round(job, ranks, k, dscores, dq, dks, dbias)
        with bind(job.mesh):
            dk, dv = (unwrap(psum_scatter(wrap(x, job.mesh), job.axes, 2)) for x in (dks, dvs))
        return dq, dk, dv, dbias


def _values_round(
    job: AttentionJob,
    ranks: list[LocalQueries],
    v: Tensor,
    probs: Tensor,
    given: Given,
    dscores: Tensor,
    dvs: Tensor,
) -> None:
    """Fill the gradients of the scores and of all values."""
    dout, dlse, out, _ = given
    dtype, g = dscores.dtype, v.shape[-3]
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    delta = delta if dlse is None else delta - dlse
    for step, (block,) in round_trip(job, v):
        for rank in ranks:
            part = _ScoreBlock(rank, step, v.shape[-2])
            p, grad = part.of(probs).to(dtype), part.rows(dout).to(dtype)
            part.cols(dvs).add_(
                torch.matmul(_grouped(part.kept(p), g).mT, _grouped(grad, g)).sum(2)
            )
            dp = part.kept(
                torch.matmul(_grouped(grad, g), part.keys(block, dtype).mT).flatten(1, 2)
            )
            part.of(dscores).copy_(p * (dp - part.rows(delta.unsqueeze(-1))))


def _keys_round(
    job: AttentionJob,
    ranks: list[LocalQueries],
    k: Tensor,
    dscores: Tensor,
    dq: Tensor,
    dks: Tensor,
    dbias: Tensor | None,
) -> None:
    """Fill the gradients of the queries, of all keys and of the bias."""
    dtype, g = dscores.dtype, k.shape[-3]
    for step, (block,) in round_trip(job, k):
        for rank in ranks:
            part = _ScoreBlock(rank, step, k.shape[-2])
            ds, queries = part.of(dscores), rank.q[:, :, : part.n].to(dtype)
            part.rows(dq).add_(
                torch.matmul(_grouped(ds, g), part.keys(block, dtype)).flatten(1, 2) * job.scale
            )
            part.cols(dks).add_(
                torch.matmul(_grouped(ds, g).mT, _grouped(queries, g)).sum(2) * job.scale
            )
            if dbias is not None:
                rank.add_bias(rank.view(dbias), slice(0, part.n), part.k_at, ds)


class _ScoreBlock:
    """Scores of a rank's n queries with the m keys of the owner whose block it now holds."""

    def __init__(self, rank: LocalQueries, step: int, lk: int) -> None:
        owner = (rank.place - step) % rank.job.plan.p
        self.rank, self.n = rank, len(rank.q_at)
        self.k_at = positions(rank.job.plan.k_runs[owner], rank.q.device)
        self.m, self.first = len(self.k_at), owner * lk

    def of(self, scores: Tensor) -> Tensor:
        """Return the part [b, h, n, m] of a storage of all scores."""
        return self.rank.view(scores)[:, :, : self.n, self.first : self.first + self.m]

    def rows(self, x: Tensor) -> Tensor:
        return self.rank.view(x)[:, :, : self.n]

    def cols(self, x: Tensor) -> Tensor:
        """Return the part [b, g, m, d] of a storage of all keys."""
        return self.rank.view(x)[:, :, self.first : self.first + self.m]

    def keys(self, block: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the received block as [b, g, 1, m, d]."""
        return self.rank.view(block)[:, :, : self.m].to(dtype).unsqueeze(2)

    def scores(self, k: Tensor, dtype: torch.dtype) -> Tensor:
        block = self.rank.block(ScorePiece(0, self.n, 0, self.m, "masked"), k, k, self.k_at)
        q = _grouped(block.q.to(dtype) * block.scale, k.shape[1])
        s = torch.matmul(q, block.k.to(dtype).unsqueeze(2).mT).flatten(1, 2)
        return s if block.bias is None else s + block.bias

    def kept(self, x: Tensor) -> Tensor:
        """Apply dropout to probabilities, or to their gradient."""
        if not self.rank.job.dropout:
            return x
        q = self.rank.q
        keep = self.rank.block(ScorePiece(0, self.n, 0, self.m, "full"), q, q, self.k_at).keep
        assert keep is not None
        return x * keep(0, self.n)


def _grouped(x: Tensor, g: int) -> Tensor:
    """[b, h, m, n] -> [b, g, h / g, m, n]."""
    return x.unflatten(1, (g, x.shape[1] // g))


register_engine(RSA(), order=8)
