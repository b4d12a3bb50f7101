"""Bidirectional ring: keys are sent both ways, only as far as the mask needs them.

With zigzag and a causal mask the early rows go all round and the late ones only to the ranks
before: three quarters of the bytes.  Without a mask, half way round in each direction.
"""

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

from shardlib.ops.attention.case import AttentionCase, Runs
from shardlib.ops.attention.choose import register_engine
from shardlib.ops.attention.chunks import RowChunk
from shardlib.ops.attention.engine import AttentionPlan
from shardlib.ops.attention.engines.routes import Routes
from shardlib.ops.attention.masks import Mask
from shardlib.ops.attention.pieces import pieces

__all__ = ["BothWays", "both_ways"]


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
    hulls = {}
    for rank, owner in itertools.product(range(p), range(p)):
        calls = pieces(q_runs[rank], k_runs[owner], mask) if rank != owner else ()
        if calls:
            hulls[rank, owner] = min(c.k0 for c in calls), max(c.k1 for c in calls)
    edges = sorted({0, rows, *(n for hull in hulls.values() for n in hull)})
    if len(edges) > 9:  # more chunks save fewer bytes than their messages cost
        edges = [0, rows]
    chunks = []
    for lo, hi in itertools.pairwise(edges):
        needed = [
            [r for r in range(p) if (r, j) in hulls and hulls[r, j][0] < hi and hulls[r, j][1] > lo]
            for j in range(p)
        ]
        reach = [
            _reach([(r - j) % p for r in need], p, len(edges) > 2) for j, need in enumerate(needed)
        ]
        for way, far in ((1, [f for f, _ in reach]), (-1, [b for _, b in reach])):
            at = tuple(
                tuple((j + way * t) % p if t <= far[j] else None for j in range(p))
                for t in range(1, max(far) + 1)
            )
            if at:
                chunks.append(RowChunk(lo, hi, at, tuple(range(len(at)))))
    return _joined(chunks)


def _reach(distances: list[int], p: int, others: bool) -> tuple[int, int]:
    """Return (forward, backward) hops that reach every distance ahead with the fewest hops.

    Ties: evenly, or, where ``others`` are sent the other way meanwhile, all forward.
    """
    ahead = sorted(distances)
    forward = [0, *ahead]  # forward to the i nearest, backward to the rest
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
