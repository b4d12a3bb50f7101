"""Execution of routes: keys are sent ahead of use, kernel calls merge their results.

Ring, bidirectional ring, double ring and halo differ only in their routes: each is a ``Routes``
with a ``plan`` of its own.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from shardlib.mesh import Link
from shardlib.ops.attention.chunks import Pairs, RowChunk
from shardlib.ops.attention.engine import (
    Areas,
    AttentionJob,
    AttentionMove,
    AttentionPlan,
    Given,
    Gradients,
    Moves,
    Outputs,
    Saved,
)
from shardlib.ops.attention.kernels import acc_dtype
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
from shardlib.ops.attention.pieces import ScorePiece, narrowed, pieces
from shardlib.ops.attention.transfers import Coming, Leaving, send

__all__ = ["Routes", "busiest"]

Calls = tuple[ScorePiece, ...]
Keys = tuple[Tensor, Tensor]
View = Callable[[Tensor], Tensor]


class Routes:
    """Base of engines that send keys and values to other ranks, which attend to them and merge."""

    saves_operands = True

    def moves(self, plan: AttentionPlan) -> Moves:
        z = plan.case.sizes

        def hop(chunk: RowChunk, pairs: Pairs, itemsize: int) -> AttentionMove:
            nbytes = (chunk.hi - chunk.lo) * z.b * z.g * (z.d + z.e) * itemsize
            return AttentionMove(Fraction(nbytes * len(pairs), plan.p), int(bool(pairs)))

        out = [hop(chunk, chunk.hops(t), z.itemsize) for chunk, t in _stops(plan)]
        back = [
            hop(chunk, pairs, z.acc_itemsize)
            for chunk, t in _stops(plan)
            for pairs in (chunk.sum_hops(t + 1), chunk.home_hops(t + 1))
        ]
        return Moves(out, [*out, *back])

    def areas(self, plan: AttentionPlan) -> Areas:
        def area(rank: int, step: int) -> int:
            if step == 0:
                return sum(c.area for c in _own(plan, rank))
            return sum(c.area for chunk in plan.chunks for c in _visit(plan, chunk, step, rank)[1])

        return tuple(tuple(area(r, step) for r in range(plan.p)) for step in range(plan.steps + 1))

    def seconds(self, plan: AttentionPlan, link: Link, flops: float) -> float:
        """Estimate the time: transfers and compute overlap, except in one step.

        Ranks need not run in step, since a received block is sent on before it is used.  The rank
        that sends or receives most sets the pace: a bidirectional zigzag saves bytes, but not that
        rank's.
        """
        compute, total = plan.computing(flops), 0.0
        forward, backward = busiest(plan)
        # 2.5: backward has 5 products for the 2 of forward
        for cost, most, work in (
            (plan.forward, forward, compute),
            (plan.backward, backward, 2.5 * compute),
        ):
            wire = link.alpha * cost.messages + link.beta * max(float(cost.bytes), most)
            total += (
                max(work, wire) + min(work, wire) / (plan.steps + 1) if plan.steps else work + wire
            )
        return total

    def forward(
        self,
        job: AttentionJob,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
    ) -> Outputs:
        plan = job.plan
        out, lse = started(q, v.shape[-1])
        ranks, travel = local_queries(job, q, bias), _ChunkTransfers(job, k, v)
        for step in range(plan.steps + 1):
            travel.arrive(step)
            # posted before the kernels, so that the transfers run while they compute
            travel.coming |= send(job, travel.leaving(step))
            for rank, calls, k_at in _own_calls(plan, ranks) if step == 0 else ():
                rank.attend(calls, rank.view(k), rank.view(v), k_at, rank.view(out), rank.view(lse))
            for n in travel.holding(step):
                for rank, calls, k_at in _calls(plan, ranks, n, step):
                    keys = travel.keys(n, step, rank.view)
                    rank.attend(calls, *keys, k_at, rank.view(out), rank.view(lse))
                    del keys
        return out, add_sink(out, lse, sink), (q, k, v)

    def backward(
        self,
        job: AttentionJob,
        saved: Saved,
        bias: Tensor | None,
        sink: Tensor | None,
        given: Given,
        wants_bias: bool,
    ) -> Gradients:
        q, k, v = saved
        plan, d = job.plan, k.shape[-1]
        dq, dkv = (
            sums_like(q),
            k.new_zeros((*k.shape[:-1], d + v.shape[-1]), dtype=acc_dtype(k.dtype)),
        )
        dbias = sums_like(bias) if wants_bias and bias is not None else None
        ranks = local_queries(job, q, bias)
        travel, sums = _ChunkTransfers(job, k, v), _Sums(plan.chunks)

        def attend_back(
            rank: LocalQueries, calls: Calls, keys: Keys, k_at: Tensor, into: Callable[[], Keys]
        ) -> None:
            view = rank.view
            mine = None if dbias is None else view(dbias)
            rank.attend_back(calls, *keys, k_at, viewed(given, view), view(dq), into, mine)

        # one step more than forward: after the last one, gradients return to their owners
        for step in range(plan.steps + 2 if plan.chunks else 1):
            travel.arrive(step)
            coming = send(job, [*travel.leaving(step), *sums.leaving()])
            travel.coming |= {key: wait for key, wait in coming.items() if key[0] == "keys"}
            sums.coming = {key: wait for key, wait in coming.items() if key[0] != "keys"}
            del coming
            for rank, calls, k_at in _own_calls(plan, ranks) if step == 0 else ():
                own = partial(parted, rank.view(dkv), d)
                attend_back(rank, calls, (rank.view(k), rank.view(v)), k_at, own)
            for n in travel.holding(step):
                part = sums.part(n, step, travel.held[n, step])
                for rank, calls, k_at in _calls(plan, ranks, n, step):
                    attend_back(
                        rank,
                        calls,
                        travel.keys(n, step, rank.view),
                        k_at,
                        partial(part.keys, rank.view, d),
                    )
                sums.send_on(n, step, part)
                del part
            sums.come_home(step, dkv)
        return dq, dkv[..., :d], dkv[..., d:], dbias


# ---------------------------------------------------------------- kernel calls of a step


def _own(plan: AttentionPlan, rank: int) -> Calls:
    """List the kernel calls of a rank's queries on its own keys."""
    return pieces(plan.q_runs[rank], plan.k_runs[rank], plan.mask)


def _visit(plan: AttentionPlan, chunk: RowChunk, step: int, rank: int) -> tuple[int, Calls]:
    """Return (owner, kernel calls) for a rank's part of a chunk; columns count from its lo."""
    owner = chunk.owner(step, rank) if step <= len(chunk.at) else None
    if owner is None:
        return -1, ()
    return owner, pieces(
        plan.q_runs[rank], narrowed(plan.k_runs[owner], chunk.lo, chunk.hi), plan.mask
    )


def _own_calls(
    plan: AttentionPlan, ranks: list[LocalQueries]
) -> Iterator[tuple[LocalQueries, Calls, Tensor]]:
    """Yield each rank in this process, with the calls on its own keys and their positions."""
    for rank in ranks:
        yield rank, _own(plan, rank.place), positions(plan.k_runs[rank.place], rank.q.device)


def _calls(
    plan: AttentionPlan, ranks: list[LocalQueries], n: int, step: int
) -> Iterator[tuple[LocalQueries, Calls, Tensor]]:
    """Yield each rank with calls on its part of a chunk: rank, calls, and the keys' positions."""
    chunk = plan.chunks[n]
    for rank in ranks:
        owner, calls = _visit(plan, chunk, step, rank.place)
        if calls:
            yield rank, calls, positions(plan.k_runs[owner], rank.q.device)[chunk.lo : chunk.hi]


def _stops(plan: AttentionPlan) -> list[tuple[RowChunk, int]]:
    return [(chunk, t) for chunk in plan.chunks for t in range(1, len(chunk.at) + 1)]


def busiest(plan: AttentionPlan) -> tuple[int, int]:
    """Count the bytes that the busiest rank sends or receives, forward and backward."""
    z = plan.case.sizes
    forward, backward = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for chunk, t in _stops(plan):
        nbytes = (chunk.hi - chunk.lo) * z.b * z.g * (z.d + z.e)
        for source, target in chunk.hops(t):
            for way in (forward, backward):
                way["sends", source] += nbytes * z.itemsize
                way["receives", target] += nbytes * z.itemsize
        for source, target in (*chunk.sum_hops(t + 1), *chunk.home_hops(t + 1)):
            backward["sends", source] += nbytes * z.acc_itemsize
            backward["receives", target] += nbytes * z.acc_itemsize
    return max(forward.values(), default=0), max(backward.values(), default=0)


# ---------------------------------------------------------------- transfers of keys and sums


class _ChunkTransfers:
    """Keys and values of the chunks: posted once their sender has them, freed after use."""

    def __init__(self, job: AttentionJob, k: Tensor, v: Tensor) -> None:
        self.chunks, self.d = job.plan.chunks, k.shape[-1]
        kv = torch.cat([k, v], -1) if self.chunks else k  # one transfer for both
        self.held = {(n, 0): kv.narrow(-2, c.lo, c.hi - c.lo) for n, c in enumerate(self.chunks)}
        self.coming: Coming = {}

    def leaving(self, step: int) -> list[Leaving]:
        """List the transfers of the blocks held at ``step``."""
        out: list[Leaving] = []
        for n, chunk in enumerate(self.chunks):
            for later, since in enumerate(chunk.since, 1):
                if since == step:
                    self.held[n, step] = self.held[n, step].contiguous()
                    out.append(Leaving(("keys", n, later), self.held[n, step], chunk.hops(later)))
        return out

    def arrive(self, step: int) -> None:
        """Wait for the blocks that arrive at ``step``."""
        for n, chunk in enumerate(self.chunks):
            self.held.pop((n, step - 1), None)
            if 1 <= step <= len(chunk.at):
                self.held[n, step] = self.coming.pop(("keys", n, step))()

    def holding(self, step: int) -> list[int]:
        """List the chunks of other ranks that are held at ``step``."""
        return [n for n, chunk in enumerate(self.chunks) if 1 <= step <= len(chunk.at)]

    def keys(self, n: int, step: int, view: View) -> Keys:
        return parted(view(self.held[n, step]), self.d)


class _Sums:
    """Gradients of the chunks, sent one step after the keys, in one call with the next keys."""

    def __init__(self, chunks: tuple[RowChunk, ...]) -> None:
        self.chunks, self.coming = chunks, Coming()
        self.waiting: list[Leaving] = []

    def leaving(self) -> list[Leaving]:
        """List the sums to be sent since the last step."""
        out, self.waiting = self.waiting, []
        return out

    def part(self, n: int, step: int, like: Tensor) -> "_ChunkGradient":
        return _ChunkGradient(like, self.coming.pop(("sum", n, step), None))

    def send_on(self, n: int, step: int, part: "_ChunkGradient") -> None:
        """Send a sum to the next stop, or home from the last."""
        chunk = self.chunks[n]
        for what, pairs in (("sum", chunk.sum_hops(step + 1)), ("home", chunk.home_hops(step + 1))):
            if pairs:
                self.waiting.append(Leaving((what, n, step + 1), part.sum(), pairs))

    def come_home(self, step: int, dkv: Tensor) -> None:
        """Add the sums that return to their owner at ``step``."""
        for n, chunk in enumerate(self.chunks):
            if wait := self.coming.pop(("home", n, step), None):
                dkv[..., chunk.lo : chunk.hi, :] += wait()


class _ChunkGradient:
    """Partial gradient of a chunk: received from its last stop when first used, or zeros."""

    def __init__(self, like: Tensor, came: Callable[[], Tensor] | None) -> None:
        self.like, self.came = like, came
        self.so_far: Tensor | None = None

    def sum(self) -> Tensor:
        if self.so_far is None:
            self.so_far = sums_like(self.like) if self.came is None else self.came()
            self.came = None
        return self.so_far

    def keys(self, view: View, d: int) -> Keys:
        return parted(view(self.sum()), d)
