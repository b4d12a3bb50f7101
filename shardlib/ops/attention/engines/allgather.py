"""All-gather attention: keys and values are gathered over the ring, a few heads at a time.

Source: Llama 3, arXiv 2407.21783, section 3.3.2 (all-gather context parallelism).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardlib.collectives import all_gather, psum_scatter, start, unwrap, wrap
from shardlib.mesh import bind
from shardlib.ops.attention.case import AttentionCase
from shardlib.ops.attention.engine import (
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
from shardlib.ops.attention.local import (
    LocalQueries,
    add_sink,
    local_queries,
    parted,
    positions,
    started,
    sums_like,
    viewed,
)

__all__ = ["AllGather"]


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
        for heads, kv in _gathered(job, k, v, self._groups(k.shape[-3])):
            lo, hi = heads[0] * shared, heads[1] * shared
            for rank in ranks:
                part, view = rank.heads(lo, hi), rank.view
                out_part, lse_part = view(out)[:, lo:hi], view(lse)[:, lo:hi]
                for owner, runs in enumerate(job.plan.k_runs):
                    block, k_at = view(kv)[owner], positions(runs, q.device)
                    part.attend(
                        part.calls(runs), block[..., :d], block[..., d:], k_at, out_part, lse_part
                    )
        return out, add_sink(out, lse, sink), (q, k, v)

    def backward(
        self, job: AttentionJob, saved: Saved, bias: Opt, sink: Opt, given: Given, wants_bias: bool
    ) -> Gradients:
        """Gather the keys again, sum their gradients over the ring and scatter them."""
        q, k, v = saved
        d, shared = k.shape[-1], q.shape[-3] // k.shape[-3]
        dq, dbias = sums_like(q), sums_like(bias) if wants_bias and bias is not None else None
        ranks, grads = local_queries(job, q, bias), []
        for heads, kv in _gathered(job, k, v, self._groups(k.shape[-3])):
            dkv = sums_like(kv)
            lo, hi = heads[0] * shared, heads[1] * shared
            for rank in ranks:
                mine = None if dbias is None else rank.view(dbias)
                _attend_back(
                    rank, lo, hi, rank.view(kv), given, rank.view(dq), rank.view(dkv), mine, d
                )
            with bind(job.mesh):
                grads.append(unwrap(psum_scatter(wrap(dkv, job.mesh), job.axes, 0).squeeze(0)))
        dkv = torch.cat(grads, -3)
        return dq, dkv[..., :d], dkv[..., d:], dbias


def _attend_back(
    rank: LocalQueries,
    lo: int,
    hi: int,
    kv: Tensor,
    given: Given,
    dq: Tensor,
    dkv: Tensor,
    dbias: Tensor | None,
    d: int,
) -> None:
    """Add the gradients of the heads lo:hi of a rank's queries with the gathered keys."""
    part = rank.heads(lo, hi)
    dout, dlse, out, lse = (None if x is None else x[:, lo:hi] for x in viewed(given, rank.view))
    assert dout is not None and out is not None and lse is not None
    if dbias is not None and dbias.shape[1] > 1:
        dbias = dbias[:, lo:hi]
    for owner, runs in enumerate(rank.job.plan.k_runs):
        keys, k_at = kv[owner], positions(runs, part.q.device)
        part.attend_back(
            part.calls(runs),
            keys[..., :d],
            keys[..., d:],
            k_at,
            (dout, dlse, out, lse),
            dq[:, lo:hi],
            partial(parted, dkv[owner], d),
            dbias,
        )


def _gathered(
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
