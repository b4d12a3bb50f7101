"""The algorithms, as plans: where keys stop on the way round, or which engine moves what.

Ring, double ring, both ways and halo differ in their routes alone; the others name an engine.
"""

import itertools
from dataclasses import replace
from functools import lru_cache

from shardlib.errors import Unsupported
from shardlib.layouts.orders import Run
from shardlib.ops.attention.masks import Mask
from shardlib.ops.attention.pieces import pieces
from shardlib.ops.attention.plan import Parcel, Plan, length

__all__ = ["allgather", "both_ways", "canonical", "double_ring", "halo", "pass_q", "ring", "rsa", "ulysses"]

_Runs = tuple[tuple[Run, ...], ...]


def _rows(k_runs: _Runs) -> int:
    return max(map(length, k_runs), default=0)


def ring(q_runs: _Runs, k_runs: _Runs, mask: Mask, rows: int | None = None) -> Plan:
    """Whole blocks once round the ring, whatever the mask.

    Source: Liu et al., arXiv 2310.01889.
    """
    return double_ring(q_runs, k_runs, mask, rows, inner=len(q_runs), name="ring")


def double_ring(
    q_runs: _Runs, k_runs: _Runs, mask: Mask, rows: int | None = None, inner: int = 1, name: str = ""
) -> Plan:
    """Round rings of ``inner`` ranks, then on to the next of p / inner such rings.

    Only one hop in ``inner`` crosses between rings, and it is posted while the inner ring turns.

    Source: Gu et al., LoongTrain, arXiv 2406.18485, section 4.
    """
    p = len(q_runs)
    if inner < 1 or p % inner:
        better = next(i for i in range(max(1, min(inner, p)), 0, -1) if p % i == 0)
        raise Unsupported(
            f"an inner ring of {inner} does not divide a ring of {p}",
            op="ring_attention",
            fix=f'sl.ring_attention(q, k, v, algorithm="double_ring({better})")',
        )
    at, since = [], []
    for step in range(1, p):
        outer, turn = divmod(step, inner)
        at.append(tuple((j // inner + outer) % (p // inner) * inner + (j % inner + turn) % inner for j in range(p)))
        since.append(step - 1 if turn else step - inner)
    rows = _rows(k_runs) if rows is None else rows
    parcels = (Parcel(0, rows, tuple(at), tuple(since)),) if at and rows else ()
    return Plan(name or f"double_ring({inner})", q_runs, k_runs, mask, parcels)


@lru_cache(maxsize=256)
def both_ways(q_runs: _Runs, k_runs: _Runs, mask: Mask, rows: int | None = None) -> Plan:
    """Each stretch of rows goes both ways along the ring, as far as the mask has need of it.

    With zigzag and a causal mask the early chunks go all round and the late ones only to the ranks
    before: three quarters of the bytes.  Without a mask, half way round in each direction.
    """
    p, rows = len(q_runs), _rows(k_runs) if rows is None else rows
    hulls = {}
    for rank, owner in itertools.product(range(p), range(p)):
        calls = pieces(q_runs[rank], k_runs[owner], mask) if rank != owner else ()
        if calls:
            hulls[rank, owner] = min(c.k0 for c in calls), max(c.k1 for c in calls)
    edges = sorted({0, rows, *(n for hull in hulls.values() for n in hull)})
    if len(edges) > 9:  # more parcels than their messages are worth
        edges = [0, rows]
    parcels = []
    for lo, hi in itertools.pairwise(edges):
        needed = [
            [r for r in range(p) if (r, j) in hulls and hulls[r, j][0] < hi and hulls[r, j][1] > lo] for j in range(p)
        ]
        reach = [_reach([(r - j) % p for r in need], p, len(edges) > 2) for j, need in enumerate(needed)]
        for way, far in ((1, [f for f, _ in reach]), (-1, [b for _, b in reach])):
            at = tuple(
                tuple((j + way * t) % p if t <= far[j] else None for j in range(p)) for t in range(1, max(far) + 1)
            )
            if at:
                parcels.append(Parcel(lo, hi, at, tuple(range(len(at)))))
    return Plan("ring_bidirectional", q_runs, k_runs, mask, _joined(parcels))


def _reach(distances: list[int], p: int, others: bool) -> tuple[int, int]:
    """(forward, backward) hops that reach every distance ahead with the fewest hops.

    Ties: evenly, or, where ``others`` go the other way meanwhile, all forward.
    """
    ahead = sorted(distances)
    best = min(
        (
            (f + b, max(f, b) if not others else b, f, b)
            for i in range(len(ahead) + 1)
            for f, b in [(ahead[i - 1] if i else 0, p - ahead[i] if i < len(ahead) else 0)]
        ),
        default=(0, 0, 0, 0),
    )
    return best[2], best[3]


def _joined(parcels: list[Parcel]) -> tuple[Parcel, ...]:
    """Neighbouring rows that take the same route are one parcel."""
    out: list[Parcel] = []
    for parcel in parcels:
        same = next((i for i, o in enumerate(out) if o.hi == parcel.lo and o.at == parcel.at), -1)
        if same >= 0:
            out[same] = replace(out[same], hi=parcel.hi)
        else:
            out.append(parcel)
    return tuple(out)


def halo(q_runs: _Runs, k_runs: _Runs, mask: Mask, rows: int | None = None) -> Plan:
    """Only the rows that the neighbours' windows reach, whatever the number of ranks.

    Raises: Unsupported where the mask lets some rank see all of the ring.
    """
    plan, p = both_ways(q_runs, k_runs, mask, rows), len(q_runs)
    if p > 2 and any(all(place is not None for place in parcel.at[-1]) and len(parcel.at) >= p // 2
                     for parcel in plan.parcels):  # fmt: skip
        raise Unsupported(
            "a halo needs a mask that ends near the diagonal, and neighbours that hold neighbouring positions",
            op="ring_attention",
            operands={"mask": repr(mask)[:200]},
            fix='sl.ring_attention(q, k, v, algorithm="ring_bidirectional")',
        )
    return replace(plan, algorithm="halo")


# ---------------------------------------------------------------- other engines


def allgather(q_runs: _Runs, k_runs: _Runs, mask: Mask, heads: int) -> Plan:
    """Keys and values of ``heads`` heads gathered at a time (gathered.py)."""
    return Plan(f"allgather({heads})", q_runs, k_runs, mask, engine="allgather", number=heads)


def canonical(q_runs: _Runs, k_runs: _Runs, mask: Mask, tile: int = 64) -> Plan:
    """Everything gathered, computed in tiles in global order (gathered.py)."""
    return Plan("canonical", q_runs, k_runs, mask, engine="canonical", number=tile)


def ulysses(q_runs: _Runs, k_runs: _Runs, mask: Mask, heads: int, rows: int, inner: int) -> Plan:
    """Heads and sequence change places among ``inner`` neighbours; keys ring round what is left (ulysses.py)."""
    p = len(q_runs)
    q_less, k_less = (tuple(_union(runs[i : i + inner]) for i in range(0, p, inner)) for runs in (q_runs, k_runs))
    sub = both_ways(q_less, k_less, mask, None)
    return Plan("ulysses" if inner == p else "usp", q_runs, k_runs, mask, (), "ulysses", heads, sub, rows)


def _union(shares: _Runs) -> tuple[Run, ...]:
    """The positions of several ranks as few runs, in rising order where they are stretches."""
    runs = sorted(run for share in shares for run in share)
    if not runs:
        return ()
    first, last = min(r.start for r in runs), max(r.last for r in runs)
    if last - first + 1 == length(runs):
        return (Run(first, 1, last - first + 1),)
    out: list[Run] = []
    for run in runs:
        if out and out[-1].stride == run.stride == 1 and out[-1].last + 1 == run.start:
            out[-1] = Run(out[-1].start, 1, out[-1].length + run.length)
        else:
            out.append(run)
    return tuple(out)


def pass_q(q_runs: _Runs, k_runs: _Runs, mask: Mask) -> Plan:
    """Queries travel instead of keys (passq.py)."""
    route = ring(q_runs, k_runs, mask, 1).parcels
    return Plan("pass_q", q_runs, k_runs, mask, route, engine="passq")


def rsa(q_runs: _Runs, k_runs: _Runs, mask: Mask) -> Plan:
    """The two rounds of Ring Self-Attention (rsa.py)."""
    route = ring(q_runs, k_runs, mask, 1).parcels
    return Plan("rsa", q_runs, k_runs, mask, route, engine="rsa")
