"""Carrying out a plan of routes, whose keys travel: transfers posted ahead, kernel calls, merges.

Every engine (this file, gathered.py, ulysses.py, passq.py, rsa.py) is ``forward(job, q, k, v, bias, sink) ->
out, lse, saved`` and ``backward(job, saved, bias, sink, given, wants_bias) -> dq, dk, dv, dbias``.

Storage here is raw (``[ranks, *block]`` under simulate), so that each rank can make its own calls.
Accumulators, and the gradients that travel, are fp32 (fp64 for fp64).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from shardlib.collectives import Pending, each_rank, start_ppermutes, unwrap, wrap
from shardlib.layouts.orders import Run
from shardlib.mesh import Mesh, bind
from shardlib.ops.attention.kernels import Block, Kernel, merge, wide
from shardlib.ops.attention.masks import At, Mask
from shardlib.ops.attention.pieces import Piece
from shardlib.ops.attention.plan import Pairs, Plan
from shardlib.ops.keyed import keep_mask

__all__ = [
    "Given",
    "Job",
    "Local",
    "backward",
    "fold_sink",
    "forward",
    "locals_of",
    "positions",
    "send",
    "started",
    "viewed",
]

Given = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""(dout, dlse, out, lse) of a rank's rows; dlse None where nobody asked for lse."""


@dataclass(frozen=True, eq=False)
class Job:
    """One attention but for its tensors.

    ``axes``   the ring's mesh axes, major first.     ``at``  coordinate -> global batch entries and heads.
    ``whole``  (heads, length of q, length of k) of the global tensors, which dropout is keyed by.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    plan: Plan
    mask: Mask
    scale: float
    kernel: Kernel
    at: Callable[[dict[str, int]], At]
    whole: tuple[int, int, int]
    dropout: float = 0.0
    seed: int = 0

    def index(self, coord: dict[str, int]) -> int:
        """A rank's place on the ring."""
        out = 0
        for a in self.axes:
            out = out * self.mesh.axes[a] + coord[a]
        return out


@lru_cache(maxsize=1024)
def _positions(runs: tuple[Run, ...]) -> Tensor:
    parts = [torch.arange(r.start, r.last + 1, r.stride) for r in runs]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def positions(runs: tuple[Run, ...], device: torch.device) -> Tensor:
    """The global positions of a block's rows."""
    return _positions(runs).to("cpu" if device.type == "meta" else device)


@dataclass(frozen=True, eq=False)
class Local:
    """One rank's queries: what turns a piece of the plan into a block for the kernel."""

    job: Job
    coord: dict[str, int]
    q: Tensor
    q_at: Tensor
    bias: Tensor | None
    heads: tuple[int, int] | None = None  # which of the rank's heads of queries these are, if not all

    def block(self, piece: Piece, k: Tensor, v: Tensor, k_at: Tensor) -> Block:
        """The block of a piece; k, v and their positions k_at from the row that the piece counts from."""
        q0, q1, k0, k1, kind = piece
        q_at, k_at = self.q_at[q0:q1], k_at[k0:k1]
        bias = self._bias(q0, q1, q_at, k_at, kind == "masked")
        keep: Callable[[int, int], Tensor] | None = None
        if self.job.dropout:
            at = self._at()
            heads, s, t = self.job.whole
            row = (at.batch[:, None] * heads + at.heads)[:, :, None, None] * s + q_at[:, None]
            dropout, seed, dtype = self.job.dropout, self.job.seed, wide(self.q.dtype)

            def kept_rows(r0: int, r1: int) -> Tensor:
                if self.q.is_meta:  # positions are on the CPU there, and nothing is drawn
                    return self.q.new_empty((len(at.batch), len(at.heads), r1 - r0, len(k_at)), dtype=dtype)
                kept = keep_mask(row[..., r0:r1, :] * t + k_at, seed, dropout)
                return kept.to(dtype).div_(1 - dropout) if dropout < 1 else kept.to(dtype).zero_()

            keep = kept_rows

        q, k, v = self.q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1]
        return Block(q, k, v, kind == "causal", bias, self.job.scale, keep)

    def _at(self) -> At:
        at = self.job.at(self.coord)
        return at if self.heads is None else At(at.batch, at.heads[slice(*self.heads)])

    def _bias(self, q0: int, q1: int, q_at: Tensor, k_at: Tensor, masked: bool) -> Tensor | None:
        dtype = wide(self.q.dtype)
        out = None
        if self.bias is not None:
            rows = self.bias if self.bias.shape[-2] == 1 else self.bias[..., q0:q1, :]
            out = rows if rows.shape[-1] == 1 else rows.index_select(-1, k_at)
            if out.dtype == torch.bool:
                out = _additive(out, dtype)
            out = out.to(dtype)
        if not masked and not self.job.mask.biased:
            return out
        at = self._at()
        scores = self.job.mask.scores(q_at, k_at, at)
        if scores is not None:
            scores = scores.to(self.q.device, dtype)
            out = scores if out is None else out + scores
        allowed = self.job.mask.allowed(q_at, k_at, at) if masked else None
        if allowed is not None:
            allowed = allowed.to(self.q.device)
            out = _additive(allowed, dtype) if out is None else out.masked_fill(~allowed, float("-inf"))
        return out

    def attend(self, calls: tuple[Piece, ...], k: Tensor, v: Tensor, k_at: Tensor, out: Tensor, lse: Tensor) -> None:
        """Fold the calls' results into out and lse."""
        for piece in calls:
            o, new = self.job.kernel.forward(self.block(piece, k, v, k_at))
            merge(out[:, :, piece.q0 : piece.q1], lse[:, :, piece.q0 : piece.q1], o, new.to(lse.dtype))

    def attend_back(
        self,
        calls: tuple[Piece, ...],
        k: Tensor,
        v: Tensor,
        k_at: Tensor,
        given: Given,
        dq: Tensor,
        keys: Callable[[], tuple[Tensor, Tensor]],
        dbias: Tensor | None = None,
    ) -> None:
        """Add the calls' gradients to dq, to (dk, dv) = keys() and to dbias; given = (dout, dlse, out, lse).

        ``keys`` is asked after the first kernel call: what it gives may still travel until then.
        """
        for piece in calls:
            q0, q1, k0, k1, _ = piece
            dout, dlse, out, lse = (None if x is None else x[:, :, q0:q1] for x in given)
            block = self.block(piece, k, v, k_at)
            g = self.job.kernel.backward(block, dout, dlse, out, lse, dbias is not None)
            dq[:, :, q0:q1] += g.q
            if dbias is not None and g.bias is not None:
                self.add_bias(dbias, slice(q0, q1), k_at[k0:k1], g.bias)
            dk_, dv_ = g.k, g.v
            del g  # dq and dbias are added: make room before more comes
            dk, dv = keys()
            dk[:, :, k0:k1] += dk_
            dv[:, :, k0:k1] += dv_

    def add_bias(self, dbias: Tensor, rows: slice, k_at: Tensor, grad: Tensor) -> None:
        """Add the gradient of some rows' scores with the keys at ``k_at``."""
        into = dbias if dbias.shape[-2] == 1 else dbias[..., rows, :]
        at = torch.zeros(1, dtype=torch.int64) if into.shape[-1] == 1 else k_at
        into.index_add_(-1, at.to(into.device), grad.sum_to_size(*into.shape[:-1], len(at)).to(into.dtype))


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


def locals_of(job: Job, q: Tensor, bias: Tensor | None = None) -> list[tuple[int, Local, Callable[[Tensor], Tensor]]]:
    """(place on the ring, the rank's queries, how to see its block of a storage) of every rank played here."""
    out = []
    for coord, view in each_rank(job.mesh):
        i = job.index(coord)
        q_at = positions(job.plan.q_runs[i], q.device)
        out.append((i, Local(job, coord, view(q), q_at, None if bias is None else view(bias)), view))
    return out


class _Travel:
    """The parcels under way: posted as soon as their sender has them, dropped when nobody needs them."""

    def __init__(self, job: Job, kv: Tensor) -> None:
        self.job, self.parcels = job, job.plan.parcels
        self.held = {(n, 0): kv.narrow(-2, p.lo, p.hi - p.lo) for n, p in enumerate(self.parcels)}
        self.coming: dict[tuple[str, tuple[int, int]], Callable[[], Tensor]] = {}

    def leaving(self, step: int) -> list["Leaving"]:
        """What is sent on of what is held at ``step``."""
        out: list[Leaving] = []
        for n, parcel in enumerate(self.parcels):
            for later, since in enumerate(parcel.since, 1):
                if since == step:
                    self.held[n, step] = self.held[n, step].contiguous()
                    out.append(("keys", (n, later), self.held[n, step], parcel.hops(later)))
        return out

    def arrive(self, step: int) -> None:
        """Wait for what arrives at ``step``."""
        for n, parcel in enumerate(self.parcels):
            self.held.pop((n, step - 1), None)
            if step <= len(parcel.at):
                self.held[n, step] = self.coming.pop(("keys", (n, step)))()


Leaving = tuple[str, tuple[int, int], Tensor, Pairs]
"""(what it is, which, the storage that is sent, from whom to whom)"""


def send(job: Job, leaving: Sequence[Leaving]) -> dict[tuple[str, tuple[int, int]], Callable[[], Tensor]]:
    """Post transfers as one call; call a result to wait for what comes (zeros where nothing does)."""
    moving = [item for item in leaving if item[3]]
    with bind(job.mesh):
        blocks = [wrap(raw, job.mesh) for _, _, raw, _ in moving]
        pending = start_ppermutes(blocks, job.axes, [pairs for *_, pairs in moving]) if moving else []
    return {(what, key): _Sent(p, raw) for (what, key, raw, _), p in zip(moving, pending, strict=True)}


class _Sent:
    """A transfer under way; holds what is sent until it is waited for, as the network does."""

    def __init__(self, pending: Pending, sent: Tensor) -> None:
        self.pending, self.sent = pending, sent

    def __call__(self) -> Tensor:
        return unwrap(self.pending.wait())


def started(q: Tensor, e: int) -> tuple[Tensor, Tensor]:
    """(out, lse) of rows that have seen nothing yet."""
    dtype = wide(q.dtype)
    return q.new_zeros((*q.shape[:-1], e), dtype=dtype), q.new_full(q.shape[:-1], float("-inf"), dtype=dtype)


def fold_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    """The sink's share of each softmax, once, after all merges: out shrinks in place, the new lse is returned."""
    if sink is None:
        return lse
    both = torch.logaddexp(lse, sink.to(lse.dtype))
    out.mul_((lse - both).exp_().unsqueeze(-1))
    return both


def forward(
    job: Job, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """out [.., h, lq, e] in the sums' dtype, lse [.., h, lq]; saves q, k, v."""
    plan, d = job.plan, k.shape[-1]
    out, lse = started(q, v.shape[-1])
    workers = locals_of(job, q, bias)
    kv = torch.cat([k, v], -1) if plan.parcels else None  # one transfer for both
    travel = None if kv is None else _Travel(job, kv)
    del kv  # held by the parcels until they have left
    for step in range(plan.steps + 1):
        if travel is not None:
            travel.coming |= send(job, travel.leaving(step))
        for i, local, view in workers:
            if step == 0:
                at = positions(plan.k_runs[i], q.device)
                local.attend(plan.own(i), view(k), view(v), at, view(out), view(lse))
                continue
            for n, parcel in enumerate(plan.parcels):
                owner, calls = plan.calls(parcel, step, i)
                if calls and travel is not None:
                    block = view(travel.held[n, step])
                    at = positions(plan.k_runs[owner], q.device)[parcel.lo : parcel.hi]
                    local.attend(calls, block[..., :d], block[..., d:], at, view(out), view(lse))
        if travel is not None and step < plan.steps:
            travel.arrive(step + 1)
    return out, fold_sink(out, lse, sink), (q, k, v)


def backward(
    job: Job, saved: tuple[Tensor, ...], bias: Tensor | None, sink: Tensor | None, given: Given, wants_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv, dbias in the sums' dtype."""
    (q, k, v), plan, dtype, d = saved, job.plan, wide(saved[0].dtype), saved[1].shape[-1]
    dq = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    dkv = k.new_zeros((*k.shape[:-1], d + v.shape[-1]), dtype=dtype)
    dbias = bias.new_zeros(bias.shape, dtype=dtype) if wants_bias and bias is not None else None
    workers = locals_of(job, q, bias)
    kv = torch.cat([k, v], -1) if plan.parcels else None
    travel = None if kv is None else _Travel(job, kv)
    del kv  # held by the parcels until they have left
    gradients: list[Leaving] = []  # that leave with the next step's keys, in one call
    for step in range(plan.steps + 2 if plan.parcels else 1):
        leaving = travel.leaving(step) if travel is not None and step <= plan.steps else []
        coming = send(job, [*leaving, *gradients])
        gradients = []
        if travel is not None:
            travel.coming |= {key: wait for key, wait in coming.items() if key[0] == "keys"}
        if step == 0:
            for i, local, view in workers:
                at, mine = positions(plan.k_runs[i], q.device), (view(dkv)[..., :d], view(dkv)[..., d:])
                local.attend_back(
                    plan.own(i), view(k), view(v), at, viewed(given, view), view(dq), lambda mine=mine: mine,
                    None if dbias is None else view(dbias),
                )  # fmt: skip
        for n, parcel in enumerate(plan.parcels):
            if step < 1 or step > len(parcel.at) or travel is None:
                continue
            part = _Part(travel.held[n, step], dtype, coming.pop(("stop", (n, step)), None))
            for i, local, view in workers:
                owner, calls = plan.calls(parcel, step, i)
                if calls:
                    at = positions(plan.k_runs[owner], q.device)[parcel.lo : parcel.hi]
                    block = view(travel.held[n, step])
                    local.attend_back(
                        calls, block[..., :d], block[..., d:], at, viewed(given, view), view(dq),
                        lambda view=view, part=part: (view(part())[..., :d], view(part())[..., d:]),
                        None if dbias is None else view(dbias),
                    )  # fmt: skip
            gradients += [
                (what, (n, step + 1), part(), pairs)
                for what, pairs in (("stop", parcel.stops(step + 1)), ("home", parcel.homes(step + 1)))
                if pairs
            ]
            del part
        for n, parcel in enumerate(plan.parcels):
            if wait := coming.pop(("home", (n, step)), None):
                dkv[..., parcel.lo : parcel.hi, :] += wait()
        if travel is not None and step < plan.steps:
            travel.arrive(step + 1)
    return dq, dkv[..., :d], dkv[..., d:], dbias


class _Part:
    """The gradient of a parcel so far: what comes from its last stop, or zeros; waited for when first asked for."""

    def __init__(self, like: Tensor, dtype: torch.dtype, came: Callable[[], Tensor] | None) -> None:
        self.like, self.dtype, self.came = like, dtype, came
        self.sum: Tensor | None = None

    def __call__(self) -> Tensor:
        if self.sum is None and self.came is None:
            self.sum = torch.zeros_like(self.like, dtype=self.dtype, memory_format=torch.contiguous_format)
        elif self.sum is None and self.came is not None:
            self.sum, self.came = self.came(), None
        assert self.sum is not None
        return self.sum


def viewed(given: Given, view: Callable[[Tensor], Tensor]) -> Given:
    """One rank's rows of them."""
    dout, dlse, out, lse = given
    return view(dout), None if dlse is None else view(dlse), view(out), view(lse)
