"""Keys gathered: a few heads at a time (allgather), or everything, in tiles whose bits hang on nothing.

    allgather   gather the keys and values of ``number`` heads, attend, scatter their gradients back
    canonical   every rank computes whole tiles of ``number`` rows in global order, its keys' gradients from
                gathered queries: the same kernel calls on the same numbers for every ring and layout

Source: Llama 3, arXiv 2407.21783, section 3.3.2 (all-gather context parallelism).
"""

from typing import Any

import torch
from torch import Tensor

from shardlib.collectives import all_gather, psum_scatter, start, unwrap, wrap
from shardlib.layouts.orders import Run
from shardlib.mesh import bind
from shardlib.ops.attention.executor import Given, Job, Local, fold_sink, locals_of, positions, started, viewed
from shardlib.ops.attention.kernels import wide
from shardlib.ops.attention.pieces import pieces
from shardlib.ops.attention.twice import whole

__all__ = ["backward", "canonical_backward", "canonical_forward", "forward"]

_Out = tuple[Tensor, Tensor, tuple[Tensor, ...]]
_Grads = tuple[Tensor, Tensor, Tensor, Tensor | None]


class _Groups:
    """Keys and values of ``number`` heads at a time, the next group's under way."""

    def __init__(self, job: Job, k: Tensor, v: Tensor) -> None:
        self.job, self.kv = job, torch.cat([k, v], -1)
        g, n = k.shape[-3], job.plan.number or k.shape[-3]
        self.ranges = [(g0, min(g0 + n, g)) for g0 in range(0, g, n)]

    def __iter__(self):
        coming = self._post(0)
        for i, (g0, g1) in enumerate(self.ranges):
            now = unwrap(coming.wait())
            coming = self._post(i + 1)
            yield g0, g1, now

    def _post(self, i: int):
        if i == len(self.ranges):
            return None
        g0, g1 = self.ranges[i]
        with bind(self.job.mesh):
            block = wrap(self.kv[..., g0:g1, :, :].contiguous(), self.job.mesh)
            return start(all_gather, block.unsqueeze(0), self.job.axes, dim=0)  # ranks first: nothing is copied


def _heads(x: Tensor | None, g0: int, g1: int, r: int) -> Tensor | None:
    """The heads of queries that share the heads g0:g1 of keys; one head for all stays."""
    return x if x is None or (x.shape[1] == 1 and r * g1 > 1) else x[:, g0 * r : g1 * r]


def _part(local: Local, g0: int, g1: int, r: int) -> Local:
    bias = None if local.bias is None else _heads(local.bias, g0, g1, r)
    return Local(local.job, local.coord, local.q[:, g0 * r : g1 * r], local.q_at, bias, (g0 * r, g1 * r))


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None) -> _Out:
    """Keys gathered over the ring, ``job.plan.number`` heads at a time."""
    plan, d, r = job.plan, k.shape[-1], q.shape[-3] // k.shape[-3]
    out, lse = started(q, v.shape[-1])
    for g0, g1, kv in _Groups(job, k, v):
        for i, local, view in locals_of(job, q, bias):
            part = _part(local, g0, g1, r)
            mine = view(out)[:, g0 * r : g1 * r], view(lse)[:, g0 * r : g1 * r]
            for owner in range(plan.p):
                block = view(kv)[owner]
                calls = pieces(plan.q_runs[i], plan.k_runs[owner], plan.mask)
                part.attend(calls, block[..., :d], block[..., d:], positions(plan.k_runs[owner], q.device), *mine)
    return out, fold_sink(out, lse, sink), (q, k, v)


def backward(
    job: Job, saved: tuple[Tensor, ...], bias: Tensor | None, sink: Tensor | None, given: Given, wants_bias: bool
) -> _Grads:
    """Keys gathered again; their gradients summed over the ring and scattered."""
    (q, k, v), plan, dtype = saved, job.plan, wide(saved[0].dtype)
    d, r = k.shape[-1], q.shape[-3] // k.shape[-3]
    dq = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    dbias = bias.new_zeros(bias.shape, dtype=dtype) if wants_bias and bias is not None else None
    grads = []
    for g0, g1, kv in _Groups(job, k, v):
        dkv = torch.zeros_like(kv, dtype=dtype)
        for i, local, view in locals_of(job, q, bias):
            part = _part(local, g0, g1, r)
            dout, dlse, out, lse = (None if x is None else x[:, g0 * r : g1 * r] for x in viewed(given, view))
            mine = view(dq)[:, g0 * r : g1 * r], _heads(None if dbias is None else view(dbias), g0, g1, r)
            for owner in range(plan.p):
                block, grad = view(kv)[owner], view(dkv)[owner]
                calls = pieces(plan.q_runs[i], plan.k_runs[owner], plan.mask)
                at, his = positions(plan.k_runs[owner], q.device), (dout, dlse, out, lse)
                part.attend_back(
                    calls, block[..., :d], block[..., d:], at, his, mine[0],  # type: ignore[arg-type]
                    lambda grad=grad: (grad[..., :d], grad[..., d:]), mine[1],
                )  # fmt: skip
        with bind(job.mesh):
            grads.append(unwrap(psum_scatter(wrap(dkv, job.mesh), job.axes, 0).squeeze(0)))
    dkv = torch.cat(grads, -3)
    return dq, dkv[..., :d], dkv[..., d:], dbias


# ---------------------------------------------------------------- the same bits for every ring


def _tiles(runs: tuple[Run, ...], n: int, size: int) -> list[Run]:
    """The tiles of 0..n that hold some of these positions."""
    wanted = sorted({i // size for run in runs for i in run.positions})
    return [Run(t * size, 1, min(size, n - t * size)) for t in wanted]


def canonical_forward(job: Job, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None) -> _Out:
    """Whole tiles of queries against all tiles of keys, in order."""
    plan = job.plan
    wholes = whole(job, q, plan.q_runs), whole(job, k, plan.k_runs), whole(job, v, plan.k_runs)
    s, t = wholes[0].shape[-2], wholes[1].shape[-2]
    out, lse = started(q, v.shape[-1])
    for i, local, view in locals_of(job, q):
        every, ones = started(view(wholes[0]), v.shape[-1])
        all_rows = Local(job, local.coord, view(wholes[0]), torch.arange(s), None)
        keys, values, k_at = view(wholes[1]), view(wholes[2]), torch.arange(t)
        for a in _tiles(plan.q_runs[i], s, plan.number):
            for b in _tiles((Run(0, 1, t),), t, plan.number):
                all_rows.attend(_moved(pieces((a,), (b,), plan.mask), a, b), keys, values, k_at, every, ones)
        at = positions(plan.q_runs[i], q.device)
        view(out)[:, :, : len(at)] = every[:, :, at]
        view(lse)[:, :, : len(at)] = ones[:, :, at]
    return out, fold_sink(out, lse, sink), (q, k, v)


def _moved(calls, a: Run, b: Run):
    return tuple(c._replace(q0=c.q0 + a.start, q1=c.q1 + a.start, k0=c.k0 + b.start, k1=c.k1 + b.start) for c in calls)


def canonical_backward(
    job: Job, saved: tuple[Tensor, ...], bias: Tensor | None, sink: Tensor | None, given: Given, wants_bias: bool
) -> _Grads:
    """dq from all tiles of keys, dk and dv from all tiles of queries: each sum in global order, on its owner."""
    (q, k, v), plan, dtype = saved, job.plan, wide(saved[0].dtype)
    dout, dlse, out, lse = given
    qs, ks, vs = whole(job, q, plan.q_runs), whole(job, k, plan.k_runs), whole(job, v, plan.k_runs)
    rows: Any = tuple(None if x is None else whole(job, x, plan.q_runs) for x in (dout, dlse, out, lse))
    s, t = qs.shape[-2], ks.shape[-2]
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (q, k, v))
    for i, local, view in locals_of(job, q):
        every = Local(job, local.coord, view(qs), torch.arange(s), None)
        keys, values, k_at = view(ks), view(vs), torch.arange(t)
        for mine, theirs in ((plan.q_runs[i], (Run(0, 1, t),)), ((Run(0, 1, s),), plan.k_runs[i])):
            sums = tuple(torch.zeros_like(x, dtype=dtype) for x in (view(qs), keys, values))
            for a in _tiles(mine, s, plan.number):
                for b in _tiles(theirs, t, plan.number):
                    calls = _moved(pieces((a,), (b,), plan.mask), a, b)
                    grads = sums[1], sums[2]
                    every.attend_back(
                        calls,
                        keys,
                        values,
                        k_at,
                        viewed(rows, view),
                        sums[0],
                        lambda grads=grads: grads,  # type: ignore[arg-type]
                    )
            if mine is plan.q_runs[i]:
                at = positions(plan.q_runs[i], q.device)
                view(dq)[:, :, : len(at)] = sums[0][:, :, at]
            else:
                at = positions(plan.k_runs[i], q.device)
                view(dk)[:, :, : len(at)], view(dv)[:, :, : len(at)] = sums[1][:, :, at], sums[2][:, :, at]
    return dq, dk, dv, None
