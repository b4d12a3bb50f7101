"""Heads and sequence change places: attention over more of the sequence for fewer heads, and back.

Over all ranks of the ring (ulysses), or over its inner axes while keys travel round the outer ones
(usp).  Heads need not divide: those that are missing are made up and dropped again, and heads of
keys are sent to each rank that has queries for them.

Source: DeepSpeed-Ulysses, arXiv 2309.14509; USP, arXiv 2405.07719.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import all_to_all, each_rank, unwrap, wrap
from shardlib.layouts.orders import Run
from shardlib.mesh import bind
from shardlib.ops.attention import executor
from shardlib.ops.attention.executor import Given, Job
from shardlib.ops.attention.kernels import wide
from shardlib.ops.attention.masks import At
from shardlib.ops.attention.plan import Heads

__all__ = ["backward", "forward"]


class _Swap:
    """The way from a block of the ring to one with fewer heads and more positions, and back."""

    def __init__(self, job: Job, h: int, g: int) -> None:
        assert job.plan.sub is not None
        self.job, self.sub, self.h, self.g = job, job.plan.sub, h, g
        n, size = 0, 1
        while size < self.sub.p:
            size, n = size * job.mesh.axes[job.axes[n]], n + 1
        self.outer, self.inner = job.axes[:n], job.axes[n:]
        self.u = job.plan.p // self.sub.p
        self.heads = Heads.of(h, g, self.u)

    def job_between(self) -> Job:
        """The attention in between."""
        each = self.heads.each

        def at(coord: dict[str, int]) -> At:
            whole, m = self.job.at(coord), _place(self.job, self.inner, coord)
            mine = torch.arange(m * each, (m + 1) * each).clamp(max=len(whole.heads) - 1)
            return At(whole.batch, whole.heads[mine])

        return replace(self.job, axes=self.outer, plan=self.sub, at=at)

    def queries(self, x: Tensor) -> Tensor:
        """[b, h, lq, n] -> [b, h / u, lq of the outer ring, n]."""
        spare = self.u * self.heads.each - self.h
        return self._there(F.pad(x, (0, 0, 0, 0, 0, spare)), self.job.plan.q_runs, self.sub.q_runs)

    def keys(self, x: Tensor) -> Tensor:
        """[b, g, lk, n] -> [b, heads that these ranks' queries share, lk of the outer ring, n]."""
        if self.heads.sent:
            x = x.index_select(-3, torch.tensor(self.heads.sent, device=x.device))
        return self._there(x, self.job.plan.k_runs, self.sub.k_runs)

    def queries_back(self, x: Tensor, room: int) -> Tensor:
        return self._back(x, self.job.plan.q_runs, self.sub.q_runs, room).narrow(-3, 0, self.h)

    def keys_back(self, x: Tensor, room: int) -> Tensor:
        """The sum over the ranks that a head of keys was sent to."""
        x = self._back(x, self.job.plan.k_runs, self.sub.k_runs, room)
        if not self.heads.sent:
            return x
        total = x.new_zeros((*x.shape[:-3], self.g, *x.shape[-2:]))
        return total.index_add_(-3, torch.tensor(self.heads.sent, device=x.device), x)

    def sink(self, sink: Tensor | None) -> Tensor | None:
        """Each rank's heads' scores.  [1, h, 1] -> [1, h / u, 1]."""
        if sink is None:
            return None
        each, out = self.heads.each, []
        padded = F.pad(sink, (0, 0, 0, self.u * each - self.h))
        for coord, view in each_rank(self.job.mesh):
            m = _place(self.job, self.inner, coord)
            out.append(view(padded)[:, m * each : (m + 1) * each])
        return torch.stack(out) if self.job.mesh.kind == "stacked" else out[0]

    def _there(self, x: Tensor, shares: Sequence[tuple[Run, ...]], sub: Sequence[tuple[Run, ...]]) -> Tensor:
        room = x.shape[-2]
        with bind(self.job.mesh):
            x = unwrap(all_to_all(wrap(x, self.job.mesh), self.inner, 1, 2))
        return self._taken(x, _tables(tuple(shares), tuple(sub), room)[0])

    def _back(self, x: Tensor, shares: Sequence[tuple[Run, ...]], sub: Sequence[tuple[Run, ...]], room: int) -> Tensor:
        x = self._taken(x, _tables(tuple(shares), tuple(sub), room)[1])
        with bind(self.job.mesh):
            return unwrap(all_to_all(wrap(x, self.job.mesh), self.inner, 2, 1))

    def _taken(self, x: Tensor, tables: Sequence[Tensor]) -> Tensor:
        """Rows of each rank's block by the table of its place on the outer ring."""
        if not tables:
            return x
        out = []
        for coord, view in each_rank(self.job.mesh):
            table = tables[_place(self.job, self.outer, coord)]
            out.append(view(x).index_select(-2, table.to(x.device)))
        return torch.stack(out) if self.job.mesh.kind == "stacked" else out[0]


def _place(job: Job, axes: tuple[str, ...], coord: dict[str, int]) -> int:
    out = 0
    for a in axes:
        out = out * job.mesh.axes[a] + coord[a]
    return out


@lru_cache(maxsize=64)
def _tables(
    shares: tuple[tuple[Run, ...], ...], sub: tuple[tuple[Run, ...], ...], room: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Per place on the outer ring: the rows, as they came, in the order of positions; and back.

    What comes from each rank has ``room`` rows, its padding last.
    """
    u = len(shares) // len(sub)
    length = max(1, *(sum(run.length for run in runs) for runs in sub))
    there, back = [], []
    for outer, runs in enumerate(sub):
        row = {}
        for m, share in enumerate(shares[outer * u : (outer + 1) * u]):
            held = [i for run in share for i in run.positions]
            row |= {i: m * room + n for n, i in enumerate(held)}
        order = torch.tensor([row[i] for run in runs for i in run.positions], dtype=torch.int64)
        there.append(F.pad(order, (0, length - len(order))))
        back.append(torch.zeros(u * room, dtype=torch.int64).index_copy_(0, order, torch.arange(len(order))))
    return _none_if_same(there, u * room), _none_if_same(back, length)


def _none_if_same(tables: list[Tensor], rows: int) -> list[Tensor]:
    """No tables, where each would leave its ``rows`` rows as they are."""
    return [] if all(len(t) == rows and torch.equal(t, torch.arange(rows)) for t in tables) else tables


def forward(
    job: Job, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Saves what lay in between: q, k, v, out, lse of fewer heads."""
    assert bias is None, "the rule refuses a bias"
    swap, d, room = _Swap(job, q.shape[-3], k.shape[-3]), k.shape[-1], q.shape[-2]
    qs, kv = swap.queries(q), swap.keys(torch.cat([k, v], -1))
    ks, vs = kv[..., :d], kv[..., d:]
    out, lse, _ = executor.forward(swap.job_between(), qs, ks, vs, None, swap.sink(sink))
    out = out.to(q.dtype)
    whole = swap.queries_back(out, room)
    return whole, swap.queries_back(lse.unsqueeze(-1), room).squeeze(-1), (qs, ks, vs, out, lse)


def backward(
    job: Job, saved: tuple[Tensor, ...], bias: Tensor | None, sink: Tensor | None, given: Given, wants_bias: bool
) -> tuple[Tensor, Tensor, Tensor, None]:
    """The cotangent goes there, the gradients come back."""
    (qs, ks, vs, out, lse), (dout, dlse, *_), d = saved, given, saved[1].shape[-1]
    h, room, dtype = dout.shape[-3], dout.shape[-2], qs.dtype
    swap = _Swap(job, h, job.plan.number)
    douts = swap.queries(dout)
    dlses = None if dlse is None else swap.queries(dlse.unsqueeze(-1)).squeeze(-1)
    dq, dk, dv, _ = executor.backward(swap.job_between(), (qs, ks, vs), None, None, (douts, dlses, out, lse), False)
    dkv = torch.cat([dk, dv], -1).to(wide(dtype) if swap.heads.sent else dtype)
    dkv = swap.keys_back(dkv, job.plan.rows)
    return swap.queries_back(dq.to(dtype), room), dkv[..., :d], dkv[..., d:], None
