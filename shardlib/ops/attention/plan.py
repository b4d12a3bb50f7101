"""What an attention will do, before any of it is done: pure values over runs of positions.

A *parcel* is a stretch of rows of every rank's keys and values that goes from rank to rank.  Its
route says where each owner's parcel is at each step; the gradient of the parcel follows the same
stops and then goes home, so that both ways take one hop per stop, and a full ring 3 (p - 1)
transfers in all.  Ring, zigzag both ways round, double ring and halo are routes.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from shardlib.cost import Cost, moving
from shardlib.layouts.orders import Run
from shardlib.mesh import Link
from shardlib.ops.attention.masks import Mask
from shardlib.ops.attention.pieces import Piece, narrowed, pieces

__all__ = ["Heads", "Parcel", "Plan", "Sizes", "length"]

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


@dataclass(frozen=True, repr=False)
class Plan:
    """Steps, transfers and kernel calls of one attention over p ranks.

    ``q_runs``, ``k_runs``  per rank the positions of its rows of queries, and of keys.

    >>> from shardlib.layouts.orders import dealt
    >>> from shardlib.ops.attention.masks import Causal
    >>> zigzag = dealt("zigzag", 64, 4)
    >>> from shardlib.ops.attention.routes import both_ways, ring
    >>> full, less = ring(zigzag, zigzag, Causal()), both_ways(zigzag, zigzag, Causal())
    >>> sizes = Sizes(1, 8, 8, 16, 16, 32, 32, 4, 4)
    >>> full.steps, less.forward(sizes).bytes / full.forward(sizes).bytes, set(full.flops(sizes))
    (3, Fraction(3, 4), {532480})
    >>> full
    Plan(ring of 4 ranks, 3 steps, 4.0 kernel calls per rank)
    """

    algorithm: str
    q_runs: tuple[tuple[Run, ...], ...]
    k_runs: tuple[tuple[Run, ...], ...]
    mask: Mask
    parcels: tuple[Parcel, ...] = ()
    engine: str = "routes"
    number: int = 0  # allgather: heads of keys gathered at a time; canonical: rows of a tile; ulysses: heads of keys
    sub: "Plan | None" = None  # ulysses, usp: what runs while the sequence is less split
    rows: int = 0  # of a block of keys, padding included

    @property
    def p(self) -> int:
        return len(self.q_runs)

    @property
    def steps(self) -> int:
        """Steps after the own block."""
        return max((len(parcel.at) for parcel in self.parcels), default=0)

    def __repr__(self) -> str:
        calls = sum(len(self.own(r)) for r in range(self.p)) if self.engine == "routes" else 0
        calls += sum(len(self.calls(m, t, r)[1]) for m, t in self._stops() for r in range(self.p)) if calls else 0
        text = f"Plan({self.algorithm} of {self.p} ranks, {self.steps} steps"
        return text + (f", {calls / self.p:.1f} kernel calls per rank)" if calls else ")")

    def _stops(self) -> list[tuple[Parcel, int]]:
        return [(m, t) for m in self.parcels for t in range(1, len(m.at) + 1)] if self.engine == "routes" else []

    def flops(self, sizes: Sizes) -> tuple[int, ...]:
        """Per rank, of the forward pass; the backward pass takes five products for these two."""
        per_score = sizes.b * sizes.h * 2 * (sizes.d + sizes.e)
        return tuple(sum(areas) * per_score for areas in zip(*self.areas(), strict=True))

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
        """Scores computed for each head, per step and rank."""
        p = range(self.p)
        if self.engine == "rsa":
            keys = sum(run.length for runs in self.k_runs for run in runs)
            return (tuple(sum(run.length for run in runs) * keys for runs in self.q_runs),)
        if self.sub is not None:
            u = self.p // self.sub.p
            return tuple(tuple(-(-step[r // u] // u) for r in p) for step in self.sub.areas())
        if self.engine in ("allgather", "canonical"):
            twice = 2 if self.engine == "canonical" else 1
            return (tuple(twice * sum(c.area for o in p for c in pieces(self.q_runs[r], self.k_runs[o], self.mask))
                          for r in p),)  # fmt: skip
        if self.engine == "passq":
            return tuple(
                tuple(sum(c.area for c in pieces(self.q_runs[(r - t) % self.p], self.k_runs[r], self.mask)) for r in p)
                for t in p
            )
        out = [tuple(sum(c.area for c in self.own(r)) for r in p)]
        for step in range(1, self.steps + 1):
            out.append(tuple(sum(c.area for m in self.parcels for c in self.calls(m, step, r)[1]) for r in p))
        return tuple(out)

    def forward(self, sizes: Sizes, axes: tuple[str, ...] = ()) -> Cost:
        """Bytes and messages of the forward pass."""
        return _sum(moving(axes, n, m) for n, m in _MOVES[self.engine](self, sizes)[0])

    def backward(self, sizes: Sizes, axes: tuple[str, ...] = ()) -> Cost:
        """Of the backward pass; sums travel in ``sizes.wide`` bytes per element."""
        return _sum(moving(axes, n, m) for n, m in _MOVES[self.engine](self, sizes)[1])

    def seconds(self, sizes: Sizes, link: Link, flops: float) -> float:
        """Estimate of forward and backward.

        On routes, transfers hide behind computing (or the other way) but for one step's worth: ranks
        need not keep step, since what arrives is sent on before it is used.  The rank that sends or
        receives most sets the pace: zigzag both ways round saves bytes, but not that rank's.
        """
        areas, total = self.areas(), 0.0
        compute = max(map(sum, zip(*areas, strict=True))) * sizes.b * sizes.h * 2 * (sizes.d + sizes.e) / flops
        forward, backward = self._busiest(sizes)
        for cost, most, work in (
            (self.forward(sizes), forward, compute),
            (self.backward(sizes), backward, 2.5 * compute),
        ):
            wire = link.alpha * cost.messages + link.beta * max(float(cost.bytes), most)
            hidden = self.engine == "routes" and self.steps
            total += max(work, wire) + min(work, wire) / (self.steps + 1) if hidden else work + wire
        return total

    def _busiest(self, z: Sizes) -> tuple[int, int]:
        """Bytes that the busiest rank of a route sends or receives, forward and backward."""
        forward, backward = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        for parcel, t in self._stops():
            nbytes = (parcel.hi - parcel.lo) * z.b * z.g * (z.d + z.e)
            for way in (forward, backward):
                for source, target in parcel.hops(t):
                    way["sends", source] += nbytes * z.itemsize
                    way["receives", target] += nbytes * z.itemsize
            for source, target in (*parcel.stops(t + 1), *parcel.homes(t + 1)):
                backward["sends", source] += nbytes * z.wide
                backward["receives", target] += nbytes * z.wide
        return max(forward.values(), default=0), max(backward.values(), default=0)


_Move = tuple[Fraction | int, int]  # bytes received per rank, messages
_Moves = tuple[list[_Move], list[_Move]]  # forward, backward


def _hop(plan: Plan, parcel: Parcel, pairs: Pairs, z: Sizes, itemsize: int) -> _Move:
    nbytes = (parcel.hi - parcel.lo) * z.b * z.g * (z.d + z.e) * itemsize
    return Fraction(nbytes * len(pairs), plan.p), int(bool(pairs))


def _routes(plan: Plan, z: Sizes) -> _Moves:
    out = [_hop(plan, m, m.hops(t), z, z.itemsize) for m in plan.parcels for t in range(1, len(m.at) + 1)]
    back = [
        _hop(plan, m, pairs, z, z.wide)
        for m in plan.parcels
        for t in range(2, len(m.at) + 2)
        for pairs in (m.stops(t), m.homes(t))
    ]
    return out, [*out, *back]


def _gathered(plan: Plan, z: Sizes) -> _Moves:
    if plan.p == 1:
        return [], []
    groups = [min(plan.number, z.g - g) for g in range(0, z.g, plan.number)]
    rows = (plan.p - 1) * z.b * z.lk * (z.d + z.e)
    out: list[_Move] = [(rows * n * z.itemsize, plan.p - 1) for n in groups]
    return out, [*out, *((rows * n * z.wide, plan.p - 1) for n in groups)]


def _canonical(plan: Plan, z: Sizes) -> _Moves:
    if plan.p == 1:
        return [], []
    q, m = (plan.p - 1) * z.b * z.h * z.lq, plan.p - 1
    k = (plan.p - 1) * z.b * z.g * z.lk
    out: list[_Move] = [(q * z.d * z.itemsize, m), (k * z.d * z.itemsize, m), (k * z.e * z.itemsize, m)]
    return out, [*out, (q * z.e * z.itemsize, m), (q * z.e * z.itemsize, m), (q * z.wide, m)]


def _swapped(plan: Plan, z: Sizes) -> _Moves:
    assert plan.sub is not None
    u = plan.p // plan.sub.p
    heads = Heads.of(z.h, z.g, u)
    sent = len(heads.sent) or z.g
    keys_wide = z.wide if heads.sent else z.itemsize

    def swap(heads: int, rows: int, width: int, itemsize: int) -> list[_Move]:
        return [(Fraction((u - 1) * z.b * heads * rows * width * itemsize, u), u - 1)] if u > 1 else []

    q = u * heads.each
    between = Sizes(z.b, heads.each, sent // u, 0, max(map(length, plan.sub.k_runs)), z.d, z.e, z.itemsize, z.wide)
    out, back = _routes(plan.sub, between)
    whole = swap(q, z.lq, z.e, z.itemsize), swap(q, z.lq, 1, z.wide)
    out = [*swap(q, z.lq, z.d, z.itemsize), *swap(sent, z.lk, z.d + z.e, z.itemsize), *out, *whole[0], *whole[1]]
    back = [*whole[0], *back, *swap(q, z.lq, z.d, z.itemsize), *swap(sent, z.lk, z.d + z.e, keys_wide)]
    return out, back


def _passed(plan: Plan, z: Sizes) -> _Moves:
    rows, n = z.b * z.h * z.lq, plan.p - 1
    out: list[_Move] = [(rows * z.d * z.itemsize, 1), (rows * (z.e + 1) * z.wide, 1)] * n
    packed, lse, dq = rows * (z.d + 2 * z.e) * z.itemsize, rows * z.wide, rows * z.d * z.wide
    return out, [(packed, 1), (lse, 1), (dq, 1)] * n


def _published(plan: Plan, z: Sizes) -> _Moves:
    rows, n = z.b * z.g * z.lk, plan.p - 1
    rounds: list[_Move] = [(rows * z.d * z.itemsize, 1), (rows * z.e * z.itemsize, 1)] * n
    scattered: list[_Move] = [(n * rows * z.d * z.wide, n), (n * rows * z.e * z.wide, n)] if n else []
    return rounds, [*rounds, *scattered]


_MOVES = {
    "routes": _routes,
    "allgather": _gathered,
    "canonical": _canonical,
    "ulysses": _swapped,
    "passq": _passed,
    "rsa": _published,
}


def length(runs: Sequence[Run]) -> int:
    return sum(run.length for run in runs)


class Heads(NamedTuple):
    """How heads are dealt to u ranks: ``each`` of the queries' (made-up ones last); the heads of keys sent to
    the ranks in turn, () if each rank simply gets its part."""

    each: int
    sent: tuple[int, ...]

    @staticmethod
    def of(h: int, g: int, u: int) -> "Heads":
        """
        >>> Heads.of(8, 4, 2), Heads.of(8, 2, 4), Heads.of(6, 3, 4)
        (Heads(each=4, sent=()), Heads(each=2, sent=(0, 0, 1, 1)), Heads(each=2, sent=(0, 0, 1, 1, 2, 2, 2, 2)))
        """
        each, shared = -(-h // u), h // g
        if h % u == 0 and g % u == 0:
            return Heads(each, ())
        if h % u == 0 and shared % each == 0:
            return Heads(each, tuple(m * each // shared for m in range(u)))
        return Heads(each, tuple(min(i, h - 1) // shared for i in range(u * each)))


def _sum(costs: "itertools.chain[Cost] | Sequence[Cost] | object") -> Cost:
    total = Cost()
    for cost in costs:  # type: ignore[attr-defined]
        total += cost
    return total
