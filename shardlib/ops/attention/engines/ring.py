"""Ring attention and its kin: keys are sent round ahead of use, kernel calls merge their results.

Ring, bidirectional ring, double ring and halo differ only in their routes: each is a ``Routes``
with a ``plan`` of its own.  For few queries and many keys (cross attention, decoding) ``PassQ``
sends the queries round with their partial results, and keys stay: each rank's queries visit every
other rank, which merges the result for its own keys, and return home.

Source: Liu et al., arXiv 2310.01889; the double ring, Gu et al., LoongTrain, arXiv 2406.18485,
section 4; pass-Q, TokenRing, arXiv 2412.20501, and arXiv 2411.01783.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from shardlib.mesh import Link
from shardlib.ops.attention.case import AttentionCase, Runs
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
    Pairs,
    RowChunk,
    Saved,
    once_round,
    register_engine,
)
from shardlib.ops.attention.kernels import ScorePiece, acc_dtype, merge, narrowed, pieces
from shardlib.ops.attention.local import (
    Coming,
    Leaving,
    LocalQueries,
    add_sink,
    bias_sums,
    local_queries,
    parted,
    positions,
    round_trip,
    send,
    started,
    sums_like,
    viewed,
)
from shardlib.ops.attention.masks import Mask
from shardlib.optional import unless_none

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
            wire = link.seconds(max(float(cost.bytes), most), cost.messages)
            total += max(work, wire) + min(work, wire) / (plan.steps + 1)
        return total

    def forward(
        self, job: AttentionJob, q: Tensor, k: Tensor, v: Tensor, bias: Opt, sink: Opt
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
        self, job: AttentionJob, saved: Saved, bias: Opt, sink: Opt, given: Given, wants_bias: bool
    ) -> Gradients:
        q, k, v = saved
        plan, d = job.plan, k.shape[-1]
        dq, dkv = (
            sums_like(q),
            k.new_zeros((*k.shape[:-1], d + v.shape[-1]), dtype=acc_dtype(k.dtype)),
        )
        dbias = bias_sums(bias, wants_bias)
        ranks = local_queries(job, q, bias)
        travel, sums = _ChunkTransfers(job, k, v), _Sums(plan.chunks)

        def attend_back(
            rank: LocalQueries, calls: Calls, keys: Keys, k_at: Tensor, into: Callable[[], Keys]
        ) -> None:
            view = rank.view
            mine = unless_none(view, dbias)
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
                    keys = travel.keys(n, step, rank.view)
                    attend_back(rank, calls, keys, k_at, partial(_sums_of, part, rank.view, d))
                    del keys
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


def _sums_of(part: Callable[[], Tensor], view: View, d: int) -> Keys:
    """Return a rank's sums of keys' and of values' gradients."""
    return parted(view(part()), d)


class _ChunkTransfers:
    """Keys and values of the chunks: posted once their sender has them, freed after use."""

    def __init__(self, job: AttentionJob, k: Tensor, v: Tensor) -> None:
        self.chunks, self.d = job.plan.chunks, k.shape[-1]
        # one transfer for both
        kv = torch.cat([k, v], -1) if self.chunks else k
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

    def part(self, n: int, step: int, like: Tensor) -> Callable[[], Tensor]:
        """Return a chunk's sum: received from its last stop when it is first used, or zeros."""
        return cache(self.coming.pop(("sum", n, step), partial(sums_like, like)))

    def send_on(self, n: int, step: int, part: Callable[[], Tensor]) -> None:
        """Send a sum to the next stop, or home from the last."""
        chunk = self.chunks[n]
        for what, pairs in (("sum", chunk.sum_hops(step + 1)), ("home", chunk.home_hops(step + 1))):
            if pairs:
                self.waiting.append(Leaving((what, n, step + 1), part(), pairs))

    def come_home(self, step: int, dkv: Tensor) -> None:
        """Add the sums that return to their owner at ``step``."""
        for n, chunk in enumerate(self.chunks):
            if wait := self.coming.pop(("home", n, step), None):
                dkv[..., chunk.lo : chunk.hi, :] += wait()


@dataclass(frozen=True)
class OneWay(Routes):
    """Engine that sends each block of keys to every other rank, neighbour by neighbour.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(s=4), sl.trace() as t:
    ...     x = sl.shard(torch.randn(1, 4, 16, 8), sl.Ring("s", dim=2))
    ...     _ = sl.ring_attention(x, x, x, algorithm=sl.attention.OneWay())
    >>> t.by_kind(), t.messages
    ({'ppermute': 3072}, 3)
    """

    name = "ring"

    def plan(self, case: AttentionCase) -> AttentionPlan:
        return AttentionPlan(self, case, once_round(case.p, case.rows))


register_engine(OneWay(), order=0)


@dataclass(frozen=True)
class BothWays(Routes):
    """Engine that sends each range of rows in both directions, to the ranks that need it.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(s=4), sl.trace() as t:
    ...     x = sl.shard(torch.randn(1, 4, 16, 8), sl.Ring("s", dim=2))
    ...     mask = sl.masks.Causal() & sl.masks.Window(4)
    ...     _ = sl.ring_attention(x, x, x, mask=mask, algorithm=sl.attention.BothWays())
    >>> t.by_kind(), t.messages
    ({'ppermute': 768}, 1)
    """

    name = "ring_bidirectional"

    def plan(self, case: AttentionCase) -> AttentionPlan:
        return AttentionPlan(self, case, both_ways(case.q_runs, case.k_runs, case.mask, case.rows))


@lru_cache(maxsize=256)
def both_ways(q_runs: Runs, k_runs: Runs, mask: Mask, rows: int) -> tuple[RowChunk, ...]:
    """Route each range of rows both ways along the ring, as far as the mask needs it."""
    p = len(q_runs)
    if not rows:  # every rank holds all keys
        return ()
    hulls = _hulls(q_runs, k_runs, mask)
    edges = sorted({0, rows, *(n for hull in hulls.values() for n in hull)})
    if len(edges) > 9:
        # more chunks save fewer bytes than their messages cost
        edges = [0, rows]
    chunks = []
    for lo, hi in itertools.pairwise(edges):
        needed: list[list[int]] = [[] for _ in range(p)]
        for (rank, owner), (first, last) in hulls.items():
            if first < hi and last > lo:
                needed[owner].append((rank - owner) % p)
        forward, backward = zip(*(_reach(d, p, len(edges) > 2) for d in needed), strict=True)
        for at in (_stops_one_way(1, forward), _stops_one_way(-1, backward)):
            if at:
                chunks.append(RowChunk(lo, hi, at, tuple(range(len(at)))))
    return _joined(chunks)


def _stops_one_way(way: int, far: Sequence[int]) -> tuple[tuple[int | None, ...], ...]:
    """List the ranks at which each owner's rows stop, step by step, ``far`` hops in a direction."""
    p = len(far)
    return tuple(
        tuple((j + way * t) % p if t <= far[j] else None for j in range(p))
        for t in range(1, max(far) + 1)
    )


def _hulls(q_runs: Runs, k_runs: Runs, mask: Mask) -> dict[tuple[int, int], tuple[int, int]]:
    """Return, for each (rank, owner), the first of the owner's rows that it needs, and the end."""
    hulls = {}
    for rank, owner in itertools.permutations(range(len(q_runs)), 2):
        if calls := pieces(q_runs[rank], k_runs[owner], mask):
            hulls[rank, owner] = min(c.k0 for c in calls), max(c.k1 for c in calls)
    return hulls


def _reach(distances: list[int], p: int, others: bool) -> tuple[int, int]:
    """Return (forward, backward) hops that reach every distance ahead with the fewest hops.

    Ties: evenly, or, where ``others`` are sent the other way meanwhile, all forward.
    """
    ahead = sorted(distances)
    # forward to the i nearest, backward to the rest
    forward = [0, *ahead]
    backward = [*(p - distance for distance in ahead), 0]

    def cost(hops: tuple[int, int]) -> tuple[int, int, int, int]:
        f, b = hops
        return f + b, b if others else max(f, b), f, b

    return min(zip(forward, backward, strict=True), key=cost)


def _joined(chunks: list[RowChunk]) -> tuple[RowChunk, ...]:
    """Join adjacent rows with the same route into one chunk."""
    out: list[RowChunk] = []
    for chunk in chunks:
        same = next((i for i, o in enumerate(out) if o.hi == chunk.lo and o.at == chunk.at), -1)
        if same >= 0:
            out[same] = replace(out[same], hi=chunk.hi)
        else:
            out.append(chunk)
    return tuple(out)


register_engine(BothWays(), order=1)


@dataclass(frozen=True)
class DoubleRing(Routes):
    """Engine that sends keys round rings of ``inner`` ranks, then on to the next ring.

    ``inner``  None: at most sqrt(p).

    >>> import torch, shardlib as sl
    >>> with sl.simulate(s=4), sl.trace() as t:
    ...     x = sl.shard(torch.randn(1, 4, 16, 8), sl.Ring("s", dim=2))
    ...     _ = sl.ring_attention(x, x, x, algorithm=sl.attention.DoubleRing(inner=2))
    >>> t.by_kind(), t.messages
    ({'ppermute': 3072}, 3)
    """

    inner: int | None = None

    name = "double_ring"

    def plan(self, case: AttentionCase) -> AttentionPlan | str:
        p, inner = case.p, self.inner
        if inner is None:
            inner = max((i for i in range(2, math.isqrt(p) + 1) if p % i == 0), default=0)
            if not inner:
                return f"a ring of {p} has no rings within"
        if inner < 1 or p % inner:
            better = next(i for i in range(max(1, min(inner, p)), 0, -1) if p % i == 0)
            return f"an inner ring of {inner} does not divide a ring of {p}; one of {better} does"
        return AttentionPlan(
            DoubleRing(inner), case, once_round(p, case.rows, inner), note=f"of {inner}"
        )


register_engine(DoubleRing(), order=3)


@dataclass(frozen=True)
class Halo(Routes):
    """Engine with the routes of BothWays, refused if one of them goes all round the ring.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(s=4), sl.trace() as t:
    ...     x = sl.shard(torch.randn(1, 4, 16, 8), sl.Ring("s", dim=2))
    ...     mask = sl.masks.Causal() & sl.masks.Window(4)
    ...     _ = sl.ring_attention(x, x, x, mask=mask, algorithm=sl.attention.Halo())
    >>> t.by_kind(), t.messages
    ({'ppermute': 768}, 1)
    """

    name = "halo"

    def plan(self, case: AttentionCase) -> AttentionPlan | str:
        p, chunks = case.p, both_ways(case.q_runs, case.k_runs, case.mask, case.rows)
        everywhere = [None not in chunk.at[-1] and len(chunk.at) >= p // 2 for chunk in chunks]
        if p > 2 and any(everywhere):
            return (
                "a halo needs a mask that ends near the diagonal, and neighbours that hold "
                "neighbouring positions"
            )
        return AttentionPlan(self, case, chunks)


register_engine(Halo(), order=2)


# ---------------------------------------------------------------- queries sent round


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
        # q, dout and out
        packed = AttentionMove(rows * (z.d + 2 * z.e) * z.itemsize, 1)
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
        ranks, before = local_queries(job, q), None
        for step, (block,) in round_trip(job, q, ahead=False):
            part, part_lse = started(block, v.shape[-1]) if step else (out, lse)
            for rank, queries, calls, k_at in _visitors(job, step, ranks, block):
                view = rank.view
                queries.attend(calls, view(k), view(v), k_at, view(part), view(part_lse))
            # the sum of the ranks before arrived while this rank's kernels ran
            if before is not None:
                _merge(part, part_lse, before())
            if step:
                before = _send_on(job, step, torch.cat([part, part_lse.unsqueeze(-1)], -1))
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
        ranks, before = local_queries(job, q), None

        def attend_back(
            rank: LocalQueries, queries: LocalQueries, calls: Calls, k_at: Tensor, rows: Given,
            into: Tensor,
        ) -> None:  # fmt: skip
            view = rank.view
            keys = view(k), view(v)
            queries.attend_back(calls, *keys, k_at, rows, into, lambda: (view(dk), view(dv)))

        for rank, queries, calls, k_at in _visitors(job, 0, ranks, q):
            attend_back(rank, queries, calls, k_at, viewed(given, rank.view), rank.view(dq))
        # packed only now: a rank's own queries need no copy
        numbers = torch.stack([lse] if dlse is None else [lse, dlse.to(lse.dtype)], -1)
        travelling = round_trip(job, torch.cat([q, dout, out], -1), numbers, ahead=False)
        for step, (block, row) in itertools.islice(travelling, 1, None):
            part = sums_like(block[..., :d])
            for rank, queries, calls, k_at in _visitors(job, step, ranks, block[..., :d]):
                _, douts, outs = rank.view(block).split((d, e, e), -1)
                dlses = None if dlse is None else rank.view(row)[..., 1]
                theirs = douts, dlses, outs, rank.view(row)[..., 0]
                attend_back(rank, queries, calls, k_at, theirs, rank.view(part))
            if before is not None:
                part += before()
            before = _send_on(job, step, part)
        if before is not None:
            dq += before()
        return dq, dk, dv, None


def _send_on(job: AttentionJob, step: int, sums: Tensor) -> Callable[[], Tensor]:
    """Send sums to the queries' next stop, or home from the last."""
    (chunk,) = job.plan.chunks
    pairs = chunk.sum_hops(step + 1) or chunk.home_hops(step + 1)
    return send(job, [Leaving(("sums", 0, step), sums, pairs)])["sums", 0, step]


def _visitors(
    job: AttentionJob, step: int, ranks: list[LocalQueries], block: Tensor
) -> Iterator[tuple[LocalQueries, LocalQueries, Calls, Tensor]]:
    """Yield, for each rank here: itself, the visiting queries, their calls, its positions."""
    plan = job.plan
    for rank in ranks:
        owner = (rank.place - step) % plan.p
        runs, k_runs = plan.q_runs[owner], plan.k_runs[rank.place]
        queries = rank.of(rank.view(block), runs)
        yield rank, queries, pieces(runs, k_runs, plan.mask), positions(k_runs, block.device)


def _merge(out: Tensor, lse: Tensor, came: Tensor) -> None:
    merge(out, lse, came[..., :-1], came[..., -1])


register_engine(PassQ(), order=7)
