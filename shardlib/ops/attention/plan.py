"""What an attention will do, before any of it is done: pure values over runs of positions.

A *parcel* is a stretch of rows of every rank's keys and values that goes from rank to rank.  Its
route says where each owner's parcel is at each step; the gradient of the parcel follows the same
stops and then goes home, so that both ways take one hop per stop, and a full ring 3 (p - 1)
transfers in all.  Ring, zigzag both ways round, double ring and halo are routes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from shardlib.errors import Unsupported
from shardlib.layouts.orders import Run
from shardlib.mesh import Link
from shardlib.ops.attention.masks import Mask
from shardlib.ops.attention.pieces import Piece, narrowed, pieces
from shardlib.ops.registry import Cost, moving

__all__ = ["Parcel", "Plan", "Sizes", "both_ways", "double_ring", "halo", "ring"]

Pairs = tuple[tuple[int, int], ...]


class Sizes(NamedTuple):
    """One rank's block: q [b, h, lq, d], k [b, g, lk, d], v [b, g, lk, e]; bytes per element, and of a sum's."""

    b: int
    h: int
    g: int
    lq: int
    lk: int
    d: int
    e: int
    itemsize: int
    wide: int


@dataclass(frozen=True)
class Parcel:
    """Rows lo:hi of each owner's block, and where they stop.

    ``at[t - 1][owner]``  the rank that holds them at step t >= 1, None where they are done.
    ``since[t - 1]``      the step at which that rank's sender had them: t - 1, or earlier where they
                          go out in two directions.
    """

    lo: int
    hi: int
    at: tuple[tuple[int | None, ...], ...]
    since: tuple[int, ...]

    def place(self, step: int, owner: int) -> int | None:
        if step == 0:
            return owner
        return self.at[step - 1][owner] if step <= len(self.at) else None

    def hops(self, step: int) -> Pairs:
        """(source, destination) of the parcels that arrive at ``step``."""
        return self._pairs(self.since[step - 1], step)

    def stops(self, step: int) -> Pairs:
        """The gradients that go on to the stop of ``step``."""
        return self._pairs(step - 1, step) if 1 < step <= len(self.at) else ()

    def homes(self, step: int) -> Pairs:
        """The gradients that go home at ``step``, having made their last stop."""
        out = []
        for owner in range(len(self.at[0])) if self.at else ():
            source = self.place(step - 1, owner)
            if step > 1 and source is not None and self.place(step, owner) is None:
                out.append((source, owner))
        return tuple(out)

    def owner(self, step: int, rank: int) -> int | None:
        """Whose rows ``rank`` holds at ``step``."""
        places = self.at[step - 1] if step else range(len(self.at[0]))
        return next((j for j, r in enumerate(places) if r == rank), None)

    def _pairs(self, before: int, step: int) -> Pairs:
        out = []
        for owner, target in enumerate(self.at[step - 1]):
            source = self.place(before, owner)
            if target is not None and source is not None:
                out.append((source, target))
        return tuple(out)


@dataclass(frozen=True)
class Plan:
    """Steps, transfers and kernel calls of one attention over p ranks.

    ``q_runs``, ``k_runs``  per rank the positions of its rows of queries, and of keys.

    >>> from shardlib.layouts.orders import dealt
    >>> from shardlib.ops.attention.masks import Causal
    >>> zigzag = dealt("zigzag", 64, 4)
    >>> full, less = ring(zigzag, zigzag, Causal()), both_ways(zigzag, zigzag, Causal())
    >>> sizes = Sizes(1, 8, 8, 16, 16, 32, 32, 4, 4)
    >>> full.steps, less.forward(sizes).bytes / full.forward(sizes).bytes
    (3, Fraction(3, 4))
    """

    algorithm: str
    q_runs: tuple[tuple[Run, ...], ...]
    k_runs: tuple[tuple[Run, ...], ...]
    mask: Mask
    parcels: tuple[Parcel, ...] = ()
    group: int = 0  # allgather: heads of keys gathered at a time
    inner: int = 1  # usp: ranks among which heads and sequence change places

    @property
    def p(self) -> int:
        return len(self.q_runs)

    @property
    def steps(self) -> int:
        """Steps after the own block."""
        return max((len(parcel.at) for parcel in self.parcels), default=0)

    def own(self, rank: int) -> tuple[Piece, ...]:
        """The kernel calls on the rank's own keys."""
        return pieces(self.q_runs[rank], self.k_runs[rank], self.mask)

    def calls(self, parcel: Parcel, step: int, rank: int) -> tuple[int, tuple[Piece, ...]]:
        """(owner, kernel calls) on what ``rank`` holds of a parcel at ``step``; columns count from the parcel's lo."""
        owner = parcel.owner(step, rank) if step <= len(parcel.at) else None
        if owner is None:
            return -1, ()
        return owner, pieces(self.q_runs[rank], narrowed(self.k_runs[owner], parcel.lo, parcel.hi), self.mask)

    def areas(self) -> tuple[tuple[int, ...], ...]:
        """Scores computed, per step and rank."""
        out = [tuple(sum(c.area for c in self.own(r)) for r in range(self.p))]
        for step in range(1, self.steps + 1):
            out.append(
                tuple(
                    sum(c.area for parcel in self.parcels for c in self.calls(parcel, step, r)[1])
                    for r in range(self.p)
                )
            )
        return tuple(out)

    def forward(self, sizes: Sizes, axes: tuple[str, ...] = ()) -> Cost:
        """Bytes and messages of the forward pass."""
        return _sum(self._move(parcel, parcel.hops(t), sizes, sizes.itemsize, axes) for parcel, t in self._stops())

    def backward(self, sizes: Sizes, axes: tuple[str, ...] = ()) -> Cost:
        """Of the backward pass: keys and values again, and their gradients in ``sizes.wide`` bytes."""
        grads = (
            self._move(parcel, pairs, sizes, sizes.wide, axes)
            for parcel in self.parcels
            for t in range(2, len(parcel.at) + 2)
            for pairs in (parcel.stops(t), parcel.homes(t))
        )
        return self.forward(sizes, axes) + _sum(grads)

    def seconds(self, sizes: Sizes, link: Link, flops: float) -> float:
        """Estimate of forward and backward: the slower of transfer and compute at each step."""
        total = 0.0
        per_score = sizes.b * sizes.h * 2 * (sizes.d + sizes.e)
        areas = self.areas()
        for step, area in enumerate(areas):
            compute = max(area) * per_score / flops
            sent = _sum(
                self._move(parcel, parcel.hops(step + 1), sizes, sizes.itemsize, ())
                for parcel in self.parcels
                if step < len(parcel.at)
            )
            grads = _sum(
                self._move(parcel, pairs, sizes, sizes.wide, ())
                for parcel in self.parcels
                for pairs in (parcel.stops(step + 1), parcel.homes(step + 1))
            )
            wire = link.alpha * sent.messages + link.beta * float(sent.bytes)
            back = wire + link.alpha * grads.messages + link.beta * float(grads.bytes)
            total += max(compute, wire) + max(2.5 * compute, back)
        return total

    def _stops(self) -> list[tuple[Parcel, int]]:
        return [(parcel, t) for parcel in self.parcels for t in range(1, len(parcel.at) + 1)]

    def _move(self, parcel: Parcel, pairs: Pairs, sizes: Sizes, itemsize: int, axes: tuple[str, ...]) -> Cost:
        if not pairs:
            return Cost()
        nbytes = (parcel.hi - parcel.lo) * sizes.b * sizes.g * (sizes.d + sizes.e) * itemsize
        return moving(axes, Fraction(nbytes * len(pairs), self.p), 1)


def _sum(costs: "itertools.chain[Cost] | Sequence[Cost] | object") -> Cost:
    total = Cost()
    for cost in costs:  # type: ignore[attr-defined]
        total += cost
    return total


# ---------------------------------------------------------------- routes

_Runs = tuple[tuple[Run, ...], ...]


def _rows(k_runs: _Runs) -> int:
    return max((sum(run.length for run in runs) for runs in k_runs), default=0)


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
        raise Unsupported(
            f"an inner ring of {inner} does not divide a ring of {p}",
            op="ring_attention",
            fix=f'algorithm="double_ring({next(i for i in range(min(inner, p) or 1, 0, -1) if p % i == 0)})"',
        )
    at, since = [], []
    for step in range(1, p):
        outer, turn = divmod(step, inner)
        at.append(
            tuple((j // inner + outer) % (p // inner) * inner + (j % inner + turn) % inner for j in range(p))
        )
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
            fix='algorithm="ring_bidirectional"',
        )
    return replace(plan, algorithm="halo")
