"""Queries travel, with what they have gathered so far; keys stay.

For few queries and many keys (cross attention, decoding): each rank's queries stop once at every
other rank, which folds in what its own keys add, and come home.

Source: TokenRing, arXiv 2412.20501; pass-Q ring attention, arXiv 2411.01783.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shardlib.ops.attention.executor import (
    Given,
    Job,
    Local,
    fold_sink,
    locals_of,
    positions,
    send,
    started,
    viewed,
)
from shardlib.ops.attention.kernels import merge, wide
from shardlib.ops.attention.pieces import Piece, pieces

__all__ = ["backward", "forward"]


class _Guests:
    """Other ranks' queries, stop by stop, and what goes on with them."""

    def __init__(self, job: Job, *travelling: Tensor) -> None:
        self.job, self.route, self.now = job, job.plan.parcels, list(travelling)

    def __iter__(self):
        """(step, the blocks that came) of every stop."""
        for parcel in self.route:
            for step in range(1, len(parcel.at) + 1):
                leaving = [("guest", (n, step), x, parcel.hops(step)) for n, x in enumerate(self.now)]
                coming = send(self.job, leaving)
                self.now = [coming["guest", (n, step)]() for n in range(len(self.now))]
                yield step, self.now

    def onward(self, step: int, sums: Tensor) -> Callable[[], Tensor]:
        """Send sums to the queries' next stop, or home from the last."""
        (parcel,) = self.route
        pairs = parcel.stops(step + 1) or parcel.homes(step + 1)
        return send(self.job, [("sums", (0, step), sums, pairs)])["sums", (0, step)]

    def calls(self, step: int, rank: int) -> tuple[int, tuple[Piece, ...]]:
        owner, plan = self.route[0].owner(step, rank), self.job.plan
        assert owner is not None, "every rank has a guest at every stop"
        return owner, pieces(plan.q_runs[owner], plan.k_runs[rank], plan.mask)


def forward(
    job: Job, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """out and lse travel as one, in the sums' dtype."""
    plan, e = job.plan, v.shape[-1]
    out, lse = started(q, e)
    workers = locals_of(job, q)
    for i, local, view in workers:
        local.attend(plan.own(i), view(k), view(v), positions(plan.k_runs[i], q.device), view(out), view(lse))
    guests, before = _Guests(job, q), None
    for step, (guest,) in guests:
        part, part_lse = started(guest, e)
        for i, local, view in workers:
            owner, calls = guests.calls(step, i)
            visitor = Local(job, local.coord, view(guest), positions(plan.q_runs[owner], q.device), None)
            visitor.attend(calls, view(k), view(v), positions(plan.k_runs[i], q.device), view(part), view(part_lse))
        if before is not None:
            _merge(part, part_lse, before())
        before = guests.onward(step, torch.cat([part, part_lse.unsqueeze(-1)], -1))
    if before is not None:
        _merge(out, lse, before())
    return out, fold_sink(out, lse, sink), (q, k, v)


def _merge(out: Tensor, lse: Tensor, came: Tensor) -> None:
    merge(out, lse, came[..., :-1], came[..., -1])


def backward(
    job: Job, saved: tuple[Tensor, ...], bias: Tensor | None, sink: Tensor | None, given: Given, wants_bias: bool
) -> tuple[Tensor, Tensor, Tensor, None]:
    """q, dout and out travel together, then lse (and dlse); dq is gathered on the way."""
    (q, k, v), plan, dtype = saved, job.plan, wide(saved[0].dtype)
    dout, dlse, out, lse = given
    d, e = q.shape[-1], v.shape[-1]
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (q, k, v))
    workers = locals_of(job, q)
    for i, local, view in workers:
        at, keys = positions(plan.k_runs[i], q.device), (view(dk), view(dv))
        local.attend_back(plan.own(i), view(k), view(v), at, viewed(given, view), view(dq), lambda keys=keys: keys)
    rows = torch.stack([lse] if dlse is None else [lse, dlse.to(lse.dtype)], -1)
    guests, before = _Guests(job, torch.cat([q, dout, out], -1), rows), None
    for step, (guest, numbers) in guests:
        part = torch.zeros_like(guest[..., :d], dtype=dtype, memory_format=torch.contiguous_format)
        for i, local, view in workers:
            owner, calls = guests.calls(step, i)
            mine = view(guest)
            visitor = Local(job, local.coord, mine[..., :d], positions(plan.q_runs[owner], q.device), None)
            his = (mine[..., d : d + e], None if dlse is None else view(numbers)[..., 1], mine[..., d + e :],
                   view(numbers)[..., 0])  # fmt: skip
            at, keys = positions(plan.k_runs[i], q.device), (view(dk), view(dv))
            visitor.attend_back(calls, view(k), view(v), at, his, view(part), lambda keys=keys: keys)
        if before is not None:
            part += before()
        before = guests.onward(step, part)
    if before is not None:
        dq += before()
    return dq, dk, dv, None
