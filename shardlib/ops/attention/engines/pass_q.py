"""Pass-Q ring attention: queries are sent round with their partial results; keys stay.

For few queries and many keys (cross attention, decoding): each rank's queries visit every other
rank, which merges the result for its own keys, and return home.
Source: TokenRing, arXiv 2412.20501; pass-Q ring attention, arXiv 2411.01783.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
    once_round,
    register_engine,
)
from shardlib.ops.attention.kernels import ScorePiece, merge, pieces
from shardlib.ops.attention.local import (
    Leaving,
    LocalQueries,
    add_sink,
    local_queries,
    positions,
    send,
    started,
    sums_like,
    viewed,
)

__all__ = ["PassQ"]


@dataclass(frozen=True)
class PassQ(Engine):
    """Engine that sends each rank's queries once round the ring.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(s=4), sl.trace() as t:
    ...     x = sl.shard(torch.randn(1, 4, 16, 8), sl.Ring("s", dim=2))
    ...     _ = sl.ring_attention(x, x, x, algorithm=sl.attention.PassQ())
    >>> t.by_kind(), t.messages
    ({'ppermute': 3264}, 6)
    """

    name = "pass_q"

    def plan(self, case: AttentionCase) -> AttentionPlan | str:
        if case.biased:
            return "a bias is held by the rows of its ring, and here rows travel; ALiBi is a mask"
        return case.unsplit() or AttentionPlan(self, case, once_round(case.p, 1))

    def moves(self, plan: AttentionPlan) -> Moves:
        z, n = plan.case.sizes, plan.p - 1
        rows = z.b * z.h * z.lq
        out = [
            AttentionMove(rows * z.d * z.itemsize, 1),
            AttentionMove(rows * (z.e + 1) * z.acc_itemsize, 1),
        ]
        packed = AttentionMove(rows * (z.d + 2 * z.e) * z.itemsize, 1)  # q, dout and out
        back = [
            packed,
            AttentionMove(rows * z.acc_itemsize, 1),
            AttentionMove(rows * z.d * z.acc_itemsize, 1),
        ]
        return Moves(out * n, back * n)

    def areas(self, plan: AttentionPlan) -> Areas:
        def area(rank: int, step: int) -> int:
            owner = (rank - step) % plan.p
            return sum(c.area for c in pieces(plan.q_runs[owner], plan.k_runs[rank], plan.mask))

        return tuple(tuple(area(r, t) for r in range(plan.p)) for t in range(plan.p))

    def forward(
        self, job: AttentionJob, q: Tensor, k: Tensor, v: Tensor, bias: Opt, sink: Opt
    ) -> Outputs:
        """Attend; out and lse are sent as one block, in the sums' dtype."""
        out, lse = started(q, v.shape[-1])
        ranks = local_queries(job, q)
        for rank in ranks:
            view, runs = rank.view, job.plan.k_runs[rank.place]
            rank.attend(
                rank.calls(runs), view(k), view(v), positions(runs, q.device), view(out), view(lse)
            )
        travel, before = _QueryTransfers(job, q), None
        for step, (block,) in travel:
            part, part_lse = started(block, v.shape[-1])
            for rank, foreign, calls, k_at in travel.calls(step, ranks, block):
                view = rank.view
                foreign.attend(calls, view(k), view(v), k_at, view(part), view(part_lse))
            # the sum of the ranks before arrived while this rank's kernels ran
            if before is not None:
                _merge(part, part_lse, before())
            before = travel.send_on(step, torch.cat([part, part_lse.unsqueeze(-1)], -1))
        if before is not None:
            _merge(out, lse, before())
        return out, add_sink(out, lse, sink), (q, k, v)

    def backward(
        self, job: AttentionJob, saved: Saved, bias: Opt, sink: Opt, given: Given, wants_bias: bool
    ) -> Gradients:
        """Compute the gradients: q, dout and out are sent together, then lse; dq is summed."""
        (q, k, v), (dout, dlse, out, lse) = saved, given
        d, e = q.shape[-1], v.shape[-1]
        dq, dk, dv = sums_like(q), sums_like(k), sums_like(v)
        ranks = local_queries(job, q)

        def attend_back(
            rank: LocalQueries,
            queries: LocalQueries,
            calls: Calls,
            k_at: Tensor,
            given: Given,
            dq: Tensor,
        ) -> None:
            view = rank.view
            queries.attend_back(
                calls, view(k), view(v), k_at, given, dq, lambda: (view(dk), view(dv))
            )

        for rank in ranks:
            runs = job.plan.k_runs[rank.place]
            at, mine = positions(runs, q.device), viewed(given, rank.view)
            attend_back(rank, rank, rank.calls(runs), at, mine, rank.view(dq))
        numbers = torch.stack([lse] if dlse is None else [lse, dlse.to(lse.dtype)], -1)
        travel, before = _QueryTransfers(job, torch.cat([q, dout, out], -1), numbers), None
        for step, (block, row) in travel:
            part = sums_like(block[..., :d])
            for rank, foreign, calls, k_at in travel.calls(step, ranks, block[..., :d]):
                packed, lses = rank.view(block), rank.view(row)
                theirs = (
                    packed[..., d : d + e],
                    None if dlse is None else lses[..., 1],
                    packed[..., d + e :],
                    lses[..., 0],
                )
                attend_back(rank, foreign, calls, k_at, theirs, rank.view(part))
            if before is not None:
                part += before()
            before = travel.send_on(step, part)
        if before is not None:
            dq += before()
        return dq, dk, dv, None


Calls = tuple[ScorePiece, ...]


class _QueryTransfers:
    """Queries on their way round the ring, and the blocks that are sent with them."""

    def __init__(self, job: AttentionJob, *travelling: Tensor) -> None:
        self.job, self.chunks = job, job.plan.chunks
        self.now = list(travelling)

    def __iter__(self) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield (step, the received blocks) for every stop."""
        for chunk in self.chunks:
            for step in range(1, len(chunk.at) + 1):
                keys = [(str(i), 0, step) for i in range(len(self.now))]
                pairs = chunk.hops(step)
                coming = send(
                    self.job,
                    [Leaving(key, x, pairs) for key, x in zip(keys, self.now, strict=True)],
                )
                self.now = [coming[key]() for key in keys]
                yield step, self.now

    def send_on(self, step: int, sums: Tensor) -> Callable[[], Tensor]:
        """Send sums to the queries' next stop, or home from the last."""
        (chunk,) = self.chunks
        pairs = chunk.sum_hops(step + 1) or chunk.home_hops(step + 1)
        return send(self.job, [Leaving(("sums", 0, step), sums, pairs)])["sums", 0, step]

    def calls(
        self, step: int, ranks: list[LocalQueries], block: Tensor
    ) -> Iterator[tuple[LocalQueries, LocalQueries, Calls, Tensor]]:
        """Yield, for each rank here: itself, the visiting queries, their calls, its positions."""
        plan = self.job.plan
        for rank in ranks:
            owner = self.chunks[0].owner(step, rank.place)
            assert owner is not None, "the queries of some rank stop at every rank at every step"
            runs, k_runs = plan.q_runs[owner], plan.k_runs[rank.place]
            foreign = rank.of(rank.view(block), runs)
            yield rank, foreign, pieces(runs, k_runs, plan.mask), positions(k_runs, block.device)


def _merge(out: Tensor, lse: Tensor, came: Tensor) -> None:
    merge(out, lse, came[..., :-1], came[..., -1])


register_engine(PassQ(), order=7)
