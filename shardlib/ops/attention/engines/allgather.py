"""All-gather attention: keys and values are gathered over the ring, a few heads at a time.

``Canonical`` gathers the queries too and computes tiles in global order, with the same bits on any
number of ranks: every rank computes whole tiles of rows, and the gradients of its keys from
gathered queries, which are the same kernel calls on the same numbers for every ring and layout, at
twice the work.

Source: Llama 3, arXiv 2407.21783, section 3.3.2 (all-gather context parallelism).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardlib.collectives import all_gather, psum_scatter, start, unwrap, wrap
from shardlib.layouts.orders import Run
from shardlib.mesh import bind
from shardlib.ops.attention.case import AttentionCase
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
    register_engine,
)
from shardlib.ops.attention.kernels import ScorePiece, pieces
from shardlib.ops.attention.local import (
    LocalQueries,
    add_sink,
    bias_sums,
    gathered,
    local_queries,
    parted,
    positions,
    started,
    sums_like,
    viewed,
)
from shardlib.optional import unless_none


@dataclass(frozen=True)
class AllGather(Engine):
    """Engine that gathers keys and values, ``heads`` heads at once, and scatters gradients.

    ``heads``  None: all of them.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(s=4), sl.trace() as t:
    ...     x = sl.shard(torch.randn(1, 4, 16, 8), sl.Ring("s", dim=2))
    ...     _ = sl.ring_attention(x, x, x, algorithm=sl.attention.AllGather(heads=1))
    >>> t.by_kind(), t.messages
    ({'all_gather': 3072}, 12)
    """

    heads: int | None = None

    name = "allgather"

    def plan(self, case: AttentionCase) -> AttentionPlan | str:
        g = case.sizes.g
        heads = g if self.heads is None else min(self.heads, g)
        if heads < 1:
            return "at least one head is gathered at a time"
        return case.unsplit() or AttentionPlan(AllGather(heads), case)

    def moves(self, plan: AttentionPlan) -> Moves:
        if plan.p == 1:
            return Moves([], [])
        z, n = plan.case.sizes, plan.p - 1
        rows = n * z.b * z.lk * (z.d + z.e)
        groups = [hi - lo for lo, hi in self._groups(z.g)]
        out = [AttentionMove(rows * heads * z.itemsize, n) for heads in groups]
        return Moves(
            out, [*out, *(AttentionMove(rows * heads * z.acc_itemsize, n) for heads in groups)]
        )

    def _groups(self, g: int) -> list[tuple[int, int]]:
        """List the ranges lo:hi of heads of keys that are gathered together."""
        n = self.heads or g
        return [(lo, min(lo + n, g)) for lo in range(0, g, n)]

    def forward(
        self, job: AttentionJob, q: Tensor, k: Tensor, v: Tensor, bias: Opt, sink: Opt
    ) -> Outputs:
        d, shared = k.shape[-1], q.shape[-3] // k.shape[-3]
        out, lse = started(q, v.shape[-1])
        ranks = local_queries(job, q, bias)
        for (lo, hi), kv in _gathered_heads(job, k, v, self._groups(k.shape[-3])):
            for rank in ranks:
                part, blocks = rank.heads(lo * shared, hi * shared), rank.view(kv)
                for block, runs in zip(blocks, job.plan.k_runs, strict=True):
                    keys, k_at = parted(block, d), positions(runs, q.device)
                    part.attend(part.calls(runs), *keys, k_at, part.view(out), part.view(lse))
        return out, add_sink(out, lse, sink), (q, k, v)

    def backward(
        self, job: AttentionJob, saved: Saved, bias: Opt, sink: Opt, given: Given, wants_bias: bool
    ) -> Gradients:
        """Gather the keys again, sum their gradients over the ring and scatter them."""
        q, k, v = saved
        d, shared = k.shape[-1], q.shape[-3] // k.shape[-3]
        dq, dbias = sums_like(q), bias_sums(bias, wants_bias)
        ranks, grads = local_queries(job, q, bias), []
        for (lo, hi), kv in _gathered_heads(job, k, v, self._groups(k.shape[-3])):
            dkv = sums_like(kv)
            for rank in ranks:
                part = rank.heads(lo * shared, hi * shared)
                rows, into = viewed(given, part.view), part.view(dq)
                mine = unless_none(part.view, dbias)
                blocks = zip(rank.view(kv), rank.view(dkv), job.plan.k_runs, strict=True)
                for block, sums, runs in blocks:
                    keys, k_at = parted(block, d), positions(runs, q.device)
                    both = partial(parted, sums, d)
                    part.attend_back(part.calls(runs), *keys, k_at, rows, into, both, mine)
            with bind(job.mesh):
                grads.append(unwrap(psum_scatter(wrap(dkv, job.mesh), job.axes, 0).squeeze(0)))
        dkv = torch.cat(grads, -3)
        return dq, dkv[..., :d], dkv[..., d:], dbias


def _gathered_heads(
    job: AttentionJob, k: Tensor, v: Tensor, groups: list[tuple[int, int]]
) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield groups of heads with the keys and values of every rank; the next group is in transit.

    They are [p, b, heads, lk, d + e].
    """
    kv = torch.cat([k, v], -1)

    def post(i: int) -> Any:
        if i == len(groups):
            return None
        lo, hi = groups[i]
        with bind(job.mesh):
            block = wrap(kv[..., lo:hi, :, :].contiguous(), job.mesh)
            # gathered along a new first dimension, so the result needs no copy
            return start(all_gather, block.unsqueeze(0), job.axes, dim=0)

    coming = post(0)
    for i, heads in enumerate(groups):
        now = unwrap(coming.wait())
        coming = post(i + 1)
        yield heads, now


register_engine(AllGather(), order=4)


# ---------------------------------------------------------------- the same bits on any number of ranks


@dataclass(frozen=True)
class Canonical(Engine):
    """Engine that gathers all rows and computes whole tiles of ``tile`` rows.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(s=4), sl.trace() as t:
    ...     x = sl.shard(torch.randn(1, 4, 16, 8), sl.Ring("s", dim=2))
    ...     _ = sl.ring_attention(x, x, x, algorithm=sl.attention.Canonical(tile=16))
    >>> t.by_kind(), t.messages
    ({'all_gather': 4608}, 9)
    """

    tile: int = 64

    name = "canonical"

    def plan(self, case: AttentionCase) -> AttentionPlan | str:
        if case.biased:
            return (
                "a bias is held by the rows of its ring, and here all rows are gathered; "
                "ALiBi is a mask"
            )
        return case.unsplit() or AttentionPlan(self, case)

    def moves(self, plan: AttentionPlan) -> Moves:
        if plan.p == 1:
            return Moves([], [])
        z, n = plan.case.sizes, plan.p - 1
        q, k = n * z.b * z.h * z.lq, n * z.b * z.g * z.lk
        out = [AttentionMove(words * z.itemsize, n) for words in (q * z.d, k * z.d, k * z.e)]
        rows = [AttentionMove(q * z.e * z.itemsize, n)] * 2  # dout and out
        return Moves(out, [*out, *rows, AttentionMove(q * z.acc_itemsize, n)])

    def areas(self, plan: AttentionPlan) -> Areas:
        """Count the scores that the mask needs twice: for rows of queries and for rows of keys."""
        return tuple(tuple(2 * area for area in step) for step in super().areas(plan))

    def forward(
        self, job: AttentionJob, q: Tensor, k: Tensor, v: Tensor, bias: Opt, sink: Opt
    ) -> Outputs:
        """Attend with whole tiles of queries to all tiles of keys, in order."""
        plan = job.plan
        qs = gathered(job, q, plan.q_runs)
        ks, vs = gathered(job, k, plan.k_runs), gathered(job, v, plan.k_runs)
        s, t = qs.shape[-2], ks.shape[-2]
        out, lse = started(q, v.shape[-1])
        for rank in local_queries(job, q):
            view, every = rank.view, rank.of(rank.view(qs), (Run(0, 1, s),))
            all_out, all_lse = started(view(qs), v.shape[-1])
            k_at = positions((Run(0, 1, t),), q.device)
            for calls in self._calls(every, plan.q_runs[rank.place], s, (Run(0, 1, t),), t):
                every.attend(calls, view(ks), view(vs), k_at, all_out, all_lse)
            at = positions(plan.q_runs[rank.place], q.device)
            view(out)[:, :, : len(at)] = all_out[:, :, at]
            view(lse)[:, :, : len(at)] = all_lse[:, :, at]
        return out, add_sink(out, lse, sink), (q, k, v)

    def backward(
        self, job: AttentionJob, saved: Saved, bias: Opt, sink: Opt, given: Given, wants_bias: bool
    ) -> Gradients:
        """Compute dq from all tiles of keys, dk and dv from all tiles of queries.

        Each sum is in global order, on its owner.
        """
        q, k, v = saved
        plan = job.plan
        rows: Any = [unless_none(partial(gathered, job), x, plan.q_runs) for x in given]
        runs = plan.q_runs, plan.k_runs, plan.k_runs
        whole = tuple(gathered(job, x, at) for x, at in zip(saved, runs, strict=True))
        all_q, all_k = ((Run(0, 1, x.shape[-2]),) for x in whole[:2])
        dq, dk, dv = sums_like(q), sums_like(k), sums_like(v)
        for rank in local_queries(job, q):
            view = rank.view
            q_runs, k_runs = plan.q_runs[rank.place], plan.k_runs[rank.place]
            at = positions(q_runs, q.device)
            view(dq)[:, :, : len(at)] = self._sums(rank, whole, rows, q_runs, all_k)[0][:, :, at]
            at = positions(k_runs, q.device)
            _, dks, dvs = self._sums(rank, whole, rows, all_q, k_runs)
            view(dk)[:, :, : len(at)] = dks[:, :, at]
            view(dv)[:, :, : len(at)] = dvs[:, :, at]
            del dks, dvs
        return dq, dk, dv, None

    def _sums(
        self,
        rank: LocalQueries,
        whole: Saved,
        rows: Given,
        q_runs: tuple[Run, ...],
        k_runs: tuple[Run, ...],
    ) -> list[Tensor]:
        """Sum dq, dk and dv over the tiles that hold some of the positions in these runs."""
        q, k, v = map(rank.view, whole)
        s, t = q.shape[-2], k.shape[-2]
        every, mine = rank.of(q, (Run(0, 1, s),)), viewed(rows, rank.view)
        dq, dk, dv = sums = [sums_like(x) for x in (q, k, v)]
        for calls in self._calls(every, q_runs, s, k_runs, t):
            every.attend_back(
                calls, k, v, positions((Run(0, 1, t),), q.device), mine, dq, lambda: (dk, dv)
            )
        return sums

    def _calls(
        self, every: LocalQueries, q_runs: tuple[Run, ...], s: int, k_runs: tuple[Run, ...], t: int
    ) -> list[tuple[ScorePiece, ...]]:
        """List the kernel calls of each pair of tiles, rows counted from position 0."""
        tiles = _tiles(k_runs, t, self.tile)
        return [
            _from_zero(pieces((a,), (b,), every.job.mask), a, b)
            for a in _tiles(q_runs, s, self.tile)
            for b in tiles
        ]


def _tiles(runs: tuple[Run, ...], n: int, size: int) -> list[Run]:
    """List the tiles of 0..n that hold some of these positions."""
    wanted = sorted({i // size for run in runs for i in run.positions})
    return [Run(t * size, 1, min(size, n - t * size)) for t in wanted]


def _from_zero(calls: tuple[ScorePiece, ...], a: Run, b: Run) -> tuple[ScorePiece, ...]:
    return tuple(
        c._replace(q0=c.q0 + a.start, q1=c.q1 + a.start, k0=c.k0 + b.start, k1=c.k1 + b.start)
        for c in calls
    )


register_engine(Canonical(), order=9)
