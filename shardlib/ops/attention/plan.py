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

__all__ = [
    "Heads", "Parcel", "Plan", "Sizes", "allgather", "both_ways", "canonical", "double_ring", "halo", "pass_q", "ring",
    "rsa", "ulysses",
]  # fmt: skip

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
        need not keep step, since what arrives is sent on before it is used.
        """
        areas, total = self.areas(), 0.0
        compute = max(map(sum, zip(*areas, strict=True))) * sizes.b * sizes.h * 2 * (sizes.d + sizes.e) / flops
        for cost, work in ((self.forward(sizes), compute), (self.backward(sizes), 2.5 * compute)):
            wire = link.alpha * cost.messages + link.beta * float(cost.bytes)
            hidden = self.engine == "routes" and self.steps
            total += max(work, wire) + min(work, wire) / (self.steps + 1) if hidden else work + wire
        return total


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
    between = Sizes(z.b, heads.each, sent // u, 0, max(map(_length, plan.sub.k_runs)), z.d, z.e, z.itemsize, z.wide)
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


# ---------------------------------------------------------------- routes

_Runs = tuple[tuple[Run, ...], ...]


def _length(runs: Sequence[Run]) -> int:
    return sum(run.length for run in runs)


def _rows(k_runs: _Runs) -> int:
    return max(map(_length, k_runs), default=0)


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
    if last - first + 1 == _length(runs):
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
