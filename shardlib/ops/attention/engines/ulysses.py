"""Ulysses attention: all-to-all to fewer heads and a longer sequence, attention, and back.

Over all ranks of the ring (ulysses), or over its inner axis while keys are sent round the outer
ones (usp).  Heads need not divide: zero heads are added and dropped again, and heads of keys are
sent to each rank that has queries for them.

Source: DeepSpeed-Ulysses, arXiv 2309.14509; USP, arXiv 2405.07719.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import all_to_all, each_rank, storage, unwrap, wrap
from shardlib.layouts.orders import Run, joined_runs
from shardlib.mesh import bind, uploaded
from shardlib.ops.attention.case import AttentionCase, Runs, length
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
from shardlib.ops.attention.engines.ring import BothWays
from shardlib.ops.attention.kernels import acc_dtype
from shardlib.ops.attention.masks import At


class Heads(NamedTuple):
    """Assignment of heads to u ranks.

    ``per_rank``  heads of queries that each rank gets, added zero heads last.
    ``sent``      the heads of keys that are sent to rank 0, rank 1, ...; () where each rank gets
                  its own part.
    """

    per_rank: int
    sent: tuple[int, ...]

    @staticmethod
    def of(h: int, g: int, u: int) -> "Heads":
        """Assign h heads of queries, and g of keys, to u ranks.

        >>> Heads.of(8, 4, 2), Heads.of(8, 2, 4)
        (Heads(per_rank=4, sent=()), Heads(per_rank=2, sent=(0, 0, 1, 1)))
        >>> Heads.of(6, 3, 4)
        Heads(per_rank=2, sent=(0, 0, 1, 1, 2, 2, 2, 2))
        """
        per_rank, shared = -(-h // u), h // g
        if h % u == 0 and g % u == 0:
            return Heads(per_rank, ())
        if h % u == 0 and shared % per_rank == 0:
            return Heads(per_rank, tuple(m * per_rank // shared for m in range(u)))
        return Heads(per_rank, tuple(min(i, h - 1) // shared for i in range(u * per_rank)))


@dataclass(frozen=True)
class Ulysses(Engine):
    """Engine that swaps heads and sequence over the ring, or (``usp``) over its inner axis.

    ``usp``  keys are then sent round the outer axes.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(s=4), sl.trace() as t:
    ...     x = sl.shard(torch.randn(1, 4, 16, 8), sl.Ring("s", dim=2))
    ...     _ = sl.ring_attention(x, x, x, algorithm=sl.attention.Ulysses())
    >>> t.by_kind(), t.messages
    ({'all_to_all': 1584}, 12)
    """

    usp: bool = False

    saves_operands = False  # it saves the swapped ones

    @property
    def name(self) -> str:
        return "usp" if self.usp else "ulysses"

    def plan(self, case: AttentionCase) -> AttentionPlan | str:
        if case.biased:
            return (
                "a bias is held by the rows of its ring, and here rows change places; "
                "ALiBi is a mask"
            )
        outer: tuple[str, ...] = ()
        if self.usp:
            sizes = dict(case.mesh)
            split = [a for a in case.axes if sizes[a] > 1]
            if len(split) < 2:
                return (
                    "it needs a sequence split over two axes: heads over the inner, a ring over "
                    "the outer"
                )
            outer = case.axes[: case.axes.index(split[-1])]
        return case.unsplit() or AttentionPlan(self, case, inner=_between(case, outer))

    def moves(self, plan: AttentionPlan) -> Moves:
        z, (u, heads, inner) = plan.case.sizes, _swap_of(plan)

        def swap(heads: int, rows: int, width: int, itemsize: int) -> list[AttentionMove]:
            nbytes = Fraction((u - 1) * z.b * heads * rows * width * itemsize, u)
            return [AttentionMove(nbytes, u - 1)] if u > 1 else []

        q, k = u * heads.per_rank, len(heads.sent) or z.g
        out_back, lse_back = swap(q, z.lq, z.e, z.itemsize), swap(q, z.lq, 1, z.acc_itemsize)
        q_there, k_there = swap(q, z.lq, z.d, z.itemsize), swap(k, z.lk, z.d + z.e, z.itemsize)
        dk_back = swap(k, z.lk, z.d + z.e, z.acc_itemsize if heads.sent else z.itemsize)
        out, back = inner.engine.moves(inner)
        return Moves(
            [*q_there, *k_there, *out, *out_back, *lse_back], [*out_back, *back, *q_there, *dk_back]
        )

    def areas(self, plan: AttentionPlan) -> Areas:
        u, _, inner = _swap_of(plan)
        return tuple(tuple(-(-step[r // u] // u) for r in range(plan.p)) for step in inner.areas)

    def forward(
        self, job: AttentionJob, q: Tensor, k: Tensor, v: Tensor, bias: Opt, sink: Opt
    ) -> Outputs:
        """Attend between two swaps, and save q, k, v, out and lse of fewer heads."""
        assert bias is None, "the plan refuses a bias"
        swap = _Swap(job)
        d, rows = k.shape[-1], q.shape[-2]
        qs, kv = swap.queries(q), swap.keys(torch.cat([k, v], -1))
        ks, vs = kv[..., :d], kv[..., d:]
        engine = swap.inner.engine
        out, lse, _ = engine.forward(swap.job_between(), qs, ks, vs, None, swap.sink(sink))
        out = out.to(q.dtype)
        whole = swap.queries_back(out, rows)
        return whole, swap.queries_back(lse.unsqueeze(-1), rows).squeeze(-1), (qs, ks, vs, out, lse)

    def backward(
        self, job: AttentionJob, saved: Saved, bias: Opt, sink: Opt, given: Given, wants_bias: bool
    ) -> Gradients:
        """Compute the gradients between a swap of the cotangent and a swap back."""
        qs, ks, vs, out, lse = saved
        dout, dlse, *_ = given
        swap, dtype = _Swap(job), qs.dtype
        d, rows = ks.shape[-1], dout.shape[-2]
        douts = swap.queries(dout)
        dlses = None if dlse is None else swap.queries(dlse.unsqueeze(-1)).squeeze(-1)
        between = (douts, dlses, out, lse)
        dq, dk, dv, _ = swap.inner.engine.backward(
            swap.job_between(), (qs, ks, vs), None, None, between, False
        )
        dkv = torch.cat([dk, dv], -1).to(acc_dtype(dtype) if swap.heads.sent else dtype)
        dkv = swap.keys_back(dkv, job.plan.case.sizes.lk)
        return swap.queries_back(dq.to(dtype), rows), dkv[..., :d], dkv[..., d:], None


def _between(case: AttentionCase, outer: tuple[str, ...]) -> AttentionPlan:
    """Plan the inner attention, while the sequence is split over the outer axes alone.

    It has fewer heads.
    """
    sizes, z = dict(case.mesh), case.sizes
    p = math.prod(sizes[a] for a in outer)
    u = case.p // p
    q_runs, k_runs = (
        tuple(_union(runs[i : i + u]) for i in range(0, case.p, u))
        for runs in (case.q_runs, case.k_runs)
    )
    heads = Heads.of(z.h, z.g, u)
    lq, lk = max(map(length, q_runs)), max(map(length, k_runs))
    fewer = z._replace(h=heads.per_rank, g=(len(heads.sent) or z.g) // u, lq=lq, lk=lk)
    return BothWays().plan(
        replace(case, q_runs=q_runs, k_runs=k_runs, rows=lk, axes=outer, sizes=fewer)
    )


def _union(shares: Runs) -> tuple[Run, ...]:
    """Return the positions of several ranks as few runs, in rising order if they are contiguous."""
    runs = sorted(chain.from_iterable(shares))
    if not runs:
        return ()
    first, last = min(r.start for r in runs), max(r.last for r in runs)
    if last - first + 1 == length(tuple(runs)):
        return (Run(first, 1, last - first + 1),)
    return joined_runs(runs)


class _Swapped(NamedTuple):
    """Number of ranks that swap, the heads of each, and the plan that runs in between."""

    u: int
    heads: Heads
    inner: AttentionPlan


def _swap_of(plan: AttentionPlan) -> _Swapped:
    assert plan.inner is not None, "made by Ulysses.plan"
    u, z = plan.p // plan.inner.p, plan.case.sizes
    return _Swapped(u, Heads.of(z.h, z.g, u), plan.inner)


class _Swap:
    """Conversion of a ring's block to one with fewer heads and more positions, and back."""

    def __init__(self, job: AttentionJob) -> None:
        self.job, self.sizes = job, job.plan.case.sizes
        self.u, self.heads, self.inner = _swap_of(job.plan)
        self.outer_axes = self.inner.case.axes
        # over which heads are swapped
        self.axes = job.axes[len(self.outer_axes) :]

    def job_between(self) -> AttentionJob:
        """Return the job of the inner plan."""
        n = self.heads.per_rank

        def at(coord: dict[str, int]) -> At:
            whole, m = self.job.at(coord), self.job.place(coord, self.axes)
            heads = torch.arange(m * n, (m + 1) * n, device=whole.heads.device)
            mine = heads.clamp(max=len(whole.heads) - 1)
            return At(whole.batch, whole.heads[mine])

        return replace(self.job, plan=self.inner, at=at)

    def queries(self, x: Tensor) -> Tensor:
        """[b, h, lq, n] -> [b, h / u, lq of the outer ring, n]."""
        spare = self.u * self.heads.per_rank - self.sizes.h
        return self._there(
            F.pad(x, (0, 0, 0, 0, 0, spare)), self.job.plan.q_runs, self.inner.q_runs
        )

    def keys(self, x: Tensor) -> Tensor:
        """[b, g, lk, n] -> [b, heads of keys for these ranks' queries, lk of the outer ring, n]."""
        if self.heads.sent:
            x = x.index_select(-3, uploaded(self.heads.sent, x.device))
        return self._there(x, self.job.plan.k_runs, self.inner.k_runs)

    def queries_back(self, x: Tensor, rows: int) -> Tensor:
        return self._back(x, self.job.plan.q_runs, self.inner.q_runs, rows).narrow(
            -3, 0, self.sizes.h
        )

    def keys_back(self, x: Tensor, rows: int) -> Tensor:
        """Sum over the ranks to which a head of keys was sent."""
        x = self._back(x, self.job.plan.k_runs, self.inner.k_runs, rows)
        if not self.heads.sent:
            return x
        total = x.new_zeros((*x.shape[:-3], self.sizes.g, *x.shape[-2:]))
        return total.index_add_(-3, uploaded(self.heads.sent, x.device), x)

    def sink(self, sink: Tensor | None) -> Tensor | None:
        """Return the scores of each rank's swapped heads: [1, h, 1] -> [1, h / u, 1]."""
        if sink is None:
            return None
        n, out = self.heads.per_rank, []
        every = F.pad(sink, (0, 0, 0, self.u * n - self.sizes.h))
        for coord, view in each_rank(self.job.mesh):
            m = self.job.place(coord, self.axes)
            out.append(view(every)[:, m * n : (m + 1) * n])
        return storage(out, self.job.mesh)

    def _there(self, x: Tensor, shares: Runs, inner: Runs) -> Tensor:
        rows = x.shape[-2]
        with bind(self.job.mesh):
            x = unwrap(all_to_all(wrap(x, self.job.mesh), self.axes, 1, 2))
        return self._taken(x, _tables(shares, inner, rows).there)

    def _back(self, x: Tensor, shares: Runs, inner: Runs, rows: int) -> Tensor:
        x = self._taken(x, _tables(shares, inner, rows).back)
        with bind(self.job.mesh):
            return unwrap(all_to_all(wrap(x, self.job.mesh), self.axes, 2, 1))

    def _taken(self, x: Tensor, tables: "tuple[Tensor, ...]") -> Tensor:
        """Select rows of each rank's block by the table of its index on the outer ring."""
        if not tables:
            return x
        out = []
        for coord, view in each_rank(self.job.mesh):
            table = tables[self.job.place(coord, self.outer_axes)]
            out.append(view(x).index_select(-2, table.to(x.device)))
        return storage(out, self.job.mesh)


class _Tables(NamedTuple):
    """Row tables for each index on the outer ring: from received to position order, and back.

    () changes nothing.
    """

    there: tuple[Tensor, ...]
    back: tuple[Tensor, ...]


def _tables(shares: Runs, inner: Runs, rows: int) -> _Tables:
    """Return copies of the tables for blocks of ``rows`` rows, padding last."""
    kept = _tables_kept(shares, inner, rows)
    return _Tables(tuple(t.clone() for t in kept.there), tuple(t.clone() for t in kept.back))


@lru_cache(maxsize=64)
def _tables_kept(shares: Runs, inner: Runs, rows: int) -> _Tables:
    u, most = len(shares) // len(inner), max(1, *map(length, inner))
    there, back = [], []
    for outer, runs in enumerate(inner):
        row = {}
        for m, share in enumerate(shares[outer * u : (outer + 1) * u]):
            held = [i for run in share for i in run.positions]
            row |= {i: m * rows + n for n, i in enumerate(held)}
        order = torch.tensor(
            [row[i] for run in runs for i in run.positions], dtype=torch.int64, device="cpu"
        )
        there.append(F.pad(order, (0, most - len(order))))
        back.append(
            torch.zeros(u * rows, dtype=torch.int64, device="cpu").index_copy_(
                0, order, torch.arange(len(order), device="cpu")
            )
        )
    return _Tables(_none_if_same(there, u * rows), _none_if_same(back, most))


def _none_if_same(tables: list[Tensor], rows: int) -> tuple[Tensor, ...]:
    """Return () if every table would leave its ``rows`` rows unchanged."""
    same = all(len(t) == rows and torch.equal(t, torch.arange(rows, device="cpu")) for t in tables)
    return () if same else tuple(tables)


register_engine(Ulysses(), order=5)
register_engine(Ulysses(usp=True), order=6)
