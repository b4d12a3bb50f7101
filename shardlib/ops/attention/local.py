"""Local attention of one rank's queries: kernel calls with masks, biases and dropout, merged.

Storage here is raw (``[ranks, *block]`` under simulate), so that each rank makes its own calls.
Accumulators, and the gradients that are sent, are fp32 (fp64 for fp64).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.collectives import (
    Pending,
    all_gather,
    each_rank,
    psum_scatter,
    start_ppermutes,
    unwrap,
    wrap,
)
from shardlib.errors import BadArgument
from shardlib.kernels import active
from shardlib.kernels.merge import accumulate_
from shardlib.layouts import Layout
from shardlib.layouts.orders import Run
from shardlib.mesh import Mesh, bind, uploaded
from shardlib.ops.attention.case import Runs, length
from shardlib.ops.attention.engine import AttentionJob, Given, Pairs
from shardlib.ops.attention.kernels import Block, ScorePiece, acc_dtype, merge, pieces, rows_of
from shardlib.ops.attention.masks import At
from shardlib.ops.counter_rng import keep_mask
from shardlib.optional import unless_none


@lru_cache(maxsize=1024)
def _positions(runs: tuple[Run, ...], device: torch.device) -> Tensor:
    parts = [torch.arange(r.start, r.last + 1, r.stride, device=device) for r in runs]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)


def positions(runs: tuple[Run, ...], device: torch.device) -> Tensor:
    """List the global positions of a block's rows, in a new tensor.

    >>> positions((Run(0, 1, 2), Run(6, 1, 2)), torch.device("cpu"))  # rank 0 of 2, zigzag
    tensor([0, 1, 6, 7])
    """
    return _positions(runs, torch.device("cpu") if device.type == "meta" else device).clone()


@dataclass(frozen=True, eq=False)
class LocalQueries:
    """Queries of one rank that runs in this process.

    ``coord``  of the rank on the mesh, ``place`` on the ring.
    ``view``   storage -> this rank's block of it.
    ``q_at``   global positions of the rows of ``q``.
    ``bias``   of these rows, if one is given.
    ``only``   the rank's heads of queries that it has.

    >>> import shardlib as sl
    >>> from shardlib.ops.attention.engines.ring import PassQ
    >>> class Told(PassQ):
    ...     def forward(self, job, q, k, v, bias, sink):
    ...         first = local_queries(job, q, bias)[0]
    ...         for piece in first.calls(job.plan.k_runs[0]):  # with its own keys
    ...             print(first.place, list(first.q.shape), piece)
    ...         return super().forward(job, q, k, v, bias, sink)
    >>> with sl.simulate(s=2):
    ...     q = sl.shard(torch.zeros(1, 1, 8, 4), sl.Ring("s", 2, "zigzag"))
    ...     _ = sl.ring_attention(q, q, q, mask=sl.masks.Causal(), algorithm=Told())
    0 [1, 1, 4, 4] ScorePiece(q0=0, q1=4, k0=0, k1=4, kind='causal')
    """

    job: AttentionJob
    coord: dict[str, int]
    place: int
    view: Callable[[Tensor], Tensor]
    q: Tensor
    q_at: Tensor
    bias: Tensor | None = None
    only: tuple[int, int | None] = (0, None)

    def of(self, q: Tensor, runs: tuple[Run, ...]) -> "LocalQueries":
        """Return this with other queries: a block, and the positions of its rows."""
        return replace(self, q=q, q_at=positions(runs, q.device), bias=None)

    def heads(self, lo: int, hi: int) -> "LocalQueries":
        """Return this with the queries of some heads alone; ``view`` too gives those heads."""

        def some(block: Tensor) -> Tensor:
            # one head serves all
            return block if block.shape[1] == 1 else block[:, lo:hi]

        def view(raw: Tensor) -> Tensor:
            return some(self.view(raw))

        bias = unless_none(some, self.bias)
        return replace(self, view=view, q=some(self.q), bias=bias, only=(lo, hi))

    def at(self) -> At:
        """Return the global batch entries and heads."""
        batch, heads = self.job.at(self.coord)
        return At(batch, heads[slice(*self.only)])

    def calls(self, k_runs: tuple[Run, ...]) -> tuple[ScorePiece, ...]:
        """List the kernel calls of these rows with the keys at some positions."""
        return pieces(self.job.plan.q_runs[self.place], k_runs, self.job.mask)

    # ------------------------------------------------------------ one kernel call

    def block(self, piece: ScorePiece, k: Tensor, v: Tensor, k_at: Tensor) -> Block:
        """Return the block of a piece; k, v and k_at begin at the row from which it counts."""
        q0, q1, k0, k1, kind = piece
        q_at, k_at = self.q_at[q0:q1], k_at[k0:k1]
        bias = self._bias(q0, q1, q_at, k_at, kind == "masked")
        keep = self._keep(q_at, k_at) if self.job.dropout else None
        q, k, v = self.q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1]
        return Block(q, k, v, kind == "causal", bias, self.job.scale, keep)

    def _keep(self, q_at: Tensor, k_at: Tensor) -> Callable[[int, int], Tensor]:
        """Return a function of rows: their dropout factors, drawn by global position."""
        batch, heads = self.at()
        all_heads, s, t = self.job.whole
        row = (batch[:, None] * all_heads + heads)[:, :, None, None] * s + q_at[:, None]
        p, seed = self.job.dropout, self.job.seed
        dtype = acc_dtype(self.q.dtype)

        def kept_rows(r0: int, r1: int) -> Tensor:
            if self.q.is_meta:
                # on meta nothing is drawn, and positions are on the CPU
                return self.q.new_empty((len(batch), len(heads), r1 - r0, len(k_at)), dtype=dtype)
            kept = keep_mask(row[..., r0:r1, :] * t + k_at, seed, p)
            return kept.to(dtype).div_(1 - p) if p < 1 else kept.to(dtype).zero_()

        return kept_rows

    def _bias(self, q0: int, q1: int, q_at: Tensor, k_at: Tensor, masked: bool) -> Tensor | None:
        """Sum the bias tensor, the mask's scores, and -inf where the mask does not allow."""
        mask, dtype = self.job.mask, acc_dtype(self.q.dtype)
        out = None
        if self.bias is not None:
            rows = rows_of(self.bias, q0, q1)
            out = rows if rows.shape[-1] == 1 else rows.index_select(-1, k_at)
            out = _additive(out, dtype) if out.dtype == torch.bool else out.to(dtype)
        if not masked and not mask.biased:
            return out
        at = self.at()
        scores = mask.scores(q_at.clone(), k_at.clone(), at)
        if scores is not None:
            scores = scores.to(self.q.device, dtype)
            out = scores if out is None else out + scores
        allowed = mask.allowed(q_at.clone(), k_at.clone(), at) if masked else None
        if allowed is not None:
            allowed = _booleans(mask, allowed, len(q_at), len(k_at)).to(self.q.device)
            if out is None:
                return _additive(allowed, dtype)
            out = out.masked_fill(~allowed, float("-inf"))
        return out

    # ------------------------------------------------------------ several calls, merged

    def attend(
        self,
        calls: tuple[ScorePiece, ...],
        k: Tensor,
        v: Tensor,
        k_at: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Merge the calls' results into out and lse."""
        for piece in calls:
            o, new = self.job.kernel.forward(self.block(piece, k, v, k_at))
            merge(
                out[:, :, piece.q0 : piece.q1], lse[:, :, piece.q0 : piece.q1], o, new.to(lse.dtype)
            )

    def attend_back(
        self,
        calls: tuple[ScorePiece, ...],
        k: Tensor,
        v: Tensor,
        k_at: Tensor,
        given: Given,
        dq: Tensor,
        keys: Callable[[], tuple[Tensor, Tensor]],
        dbias: Tensor | None = None,
    ) -> None:
        """Add the calls' gradients to dq, to (dk, dv) = keys() and to dbias.

        ``keys`` is called after the first kernel call, so its result may be in transit until then.
        """
        for piece in calls:
            q0, q1, k0, k1, _ = piece
            dout, dlse, out, lse = (None if x is None else x[:, :, q0:q1] for x in given)
            block = self.block(piece, k, v, k_at)
            g = self.job.kernel.backward(block, dout, dlse, out, lse, dbias is not None)
            fused = (not self.q.is_cpu or active.cpu) and active.serving(self.q)
            add = accumulate_ if fused else Tensor.add_
            add(dq[:, :, q0:q1], g.q)
            if dbias is not None and g.bias is not None:
                self.add_bias(dbias, slice(q0, q1), k_at[k0:k1], g.bias)
            new_dk, new_dv = g.k, g.v
            # dq and dbias are added: free them before keys() receives more
            del g
            dk, dv = keys()
            add(dk[:, :, k0:k1], new_dk)
            add(dv[:, :, k0:k1], new_dv)

    def add_bias(self, dbias: Tensor, rows: slice, k_at: Tensor, grad: Tensor) -> None:
        """Add the gradient of some rows' scores with the keys at ``k_at``."""
        into = rows_of(dbias, rows.start, rows.stop)
        at = torch.zeros_like(k_at[:1]) if into.shape[-1] == 1 else k_at
        summed = grad.sum_to_size(*into.shape[:-1], len(at)).to(into.dtype)
        into.index_add_(-1, at.to(into.device), summed)


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return zeros.masked_fill_(~allowed, float("-inf"))


def _booleans(mask: Any, allowed: Any, m: int, n: int) -> Tensor:
    """Return the result of a mask's ``allowed``, if it is booleans for m queries and n keys."""
    fits = isinstance(allowed, Tensor) and allowed.dtype == torch.bool and allowed.ndim <= 4
    if fits and all(
        have in (1, want) for have, want in zip(reversed(allowed.shape), (n, m), strict=False)
    ):
        return allowed
    found = repr(allowed)
    if isinstance(allowed, Tensor):
        found = f"{allowed.dtype} {list(allowed.shape)}"
    wanted = f"gives booleans that broadcast to [b, h, {m}, {n}], not {found}"
    fix = "sl.ring_attention(q, k, v, mask=lambda b, h, i, j: i >= j)"
    why = f"`allowed` of {type(mask).__name__} {wanted}"
    raise BadArgument(why, op="ring_attention", fix=fix)


def local_queries(job: AttentionJob, q: Tensor, bias: Tensor | None = None) -> list[LocalQueries]:
    """List the queries of every rank that runs in this process.

    >>> import shardlib as sl
    >>> from shardlib.ops.attention.engines.ring import PassQ
    >>> class Told(PassQ):
    ...     def forward(self, job, q, k, v, bias, sink):
    ...         print([(rank.place, rank.q_at.tolist()) for rank in local_queries(job, q, bias)])
    ...         return super().forward(job, q, k, v, bias, sink)
    >>> with sl.simulate(s=2):
    ...     q = sl.shard(torch.zeros(1, 1, 8, 4), sl.Ring("s", 2, "zigzag"))
    ...     _ = sl.ring_attention(q, q, q, algorithm=Told())
    [(0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])]
    """
    out = []
    for coord, view in each_rank(job.mesh):
        place = job.place(coord)
        q_at = positions(job.plan.q_runs[place], q.device)
        mine = None
        if bias is not None:
            mine = view(bias)
        out.append(LocalQueries(job, coord, place, view, view(q), q_at, mine))
    return out


def batch_and_heads(
    layout: Layout, shape: tuple[int, ...], mesh: Mesh, coord: dict[str, int]
) -> At:
    """Return the global batch entries and heads of the block at a coordinate."""
    batch, heads, *_ = layout.indices(shape, mesh, coord)
    device = torch.device("cpu") if mesh.device.type == "meta" else mesh.device
    return At(uploaded(tuple(batch), device), uploaded(tuple(heads), device))


def started(q: Tensor, e: int) -> tuple[Tensor, Tensor]:
    """Return (out, lse) before any keys are attended to, in the dtype of sums.

    >>> out, lse = started(torch.ones(1, 2, 3, 4, dtype=torch.bfloat16), e=5)
    >>> out.shape, out.dtype, lse[0, 0]
    (torch.Size([1, 2, 3, 5]), torch.float32, tensor([-inf, -inf, -inf]))
    """
    dtype = acc_dtype(q.dtype)
    return q.new_zeros((*q.shape[:-1], e), dtype=dtype), q.new_full(
        q.shape[:-1], float("-inf"), dtype=dtype
    )


def sums_like(x: Tensor) -> Tensor:
    """Return zeros to which gradients are added, in the dtype of sums.

    >>> sums_like(torch.ones(2, dtype=torch.bfloat16))
    tensor([0., 0.])
    """
    return torch.zeros_like(x, dtype=acc_dtype(x.dtype), memory_format=torch.contiguous_format)


def bias_sums(bias: Tensor | None, wanted: bool) -> Tensor | None:
    """Return ``sums_like(bias)``; None without a bias, or where its gradient is not wanted."""
    return unless_none(sums_like, bias) if wanted else None


def add_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    """Add the sink to each softmax, once, after all merges; return the new lse.

    ``out`` is scaled down in place.

    >>> out, lse = torch.ones(1, 1, 2, 3), torch.zeros(1, 1, 2)  # rows [b, h, s, e] and [b, h, s]
    >>> lse = add_sink(out, lse, torch.zeros(1, 1, 1))  # a sink that weighs what the keys weigh
    >>> out.unique(), lse.exp()
    (tensor([0.5000]), tensor([[[2., 2.]]]))
    """
    if sink is None:
        return lse
    both = torch.logaddexp(lse, sink.to(lse.dtype))
    out.mul_((lse - both).exp_().unsqueeze(-1))
    return both


def parted(kv: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Split one storage into views of keys (d columns) and values, or of their gradients."""
    return kv[..., :d], kv[..., d:]


def viewed(given: Given, view: Callable[[Tensor], Tensor]) -> Given:
    """Return one rank's rows of backward's arguments.

    >>> both = torch.arange(2.0).reshape(2, 1, 1, 1, 1)  # dout and out of two simulated ranks
    >>> dout, dlse, out, lse = viewed((both, None, both, both[..., 0]), lambda raw: raw[1])
    >>> dout.shape, dlse, lse
    (torch.Size([1, 1, 1, 1]), None, tensor([[[1.]]]))
    """
    dout, dlse, out, lse = given
    return view(dout), unless_none(view, dlse), view(out), view(lse)


def gathered(job: AttentionJob, x: Tensor, runs: Runs, dim: int = 2) -> Tensor:
    """Gather a block over the ring, in the order of positions, without padding.

    Differentiable.

    >>> import shardlib as sl
    >>> from shardlib.ops.attention.engines.ring import PassQ
    >>> class Told(PassQ):
    ...     def forward(self, job, q, k, v, bias, sink):
    ...         every = gathered(job, k, job.plan.k_runs)
    ...         print(k[0].flatten(), every[0].flatten())  # of rank 0
    ...         return super().forward(job, q, k, v, bias, sink)
    >>> with sl.simulate(s=2):
    ...     q = sl.shard(torch.arange(8.0).reshape(1, 1, 8, 1), sl.Ring("s", 2, "zigzag"))
    ...     _ = sl.ring_attention(q, q, q, algorithm=Told())
    tensor([0., 1., 6., 7.]) tensor([0., 1., 2., 3., 4., 5., 6., 7.])
    """
    with bind(job.mesh):
        whole = all_gather(wrap(x, job.mesh), job.axes, dim)
        rows = _rows(runs, whole.shape[dim] // len(runs), x.device)
        return unwrap(whole.index_select(dim, rows))


def scattered(job: AttentionJob, x: Tensor, runs: Runs, rows: int, dim: int = 2) -> Tensor:
    """Sum ``gathered`` blocks over the ring; each rank keeps its block of ``rows`` rows.

    >>> import shardlib as sl
    >>> from shardlib.ops.attention.engines.ring import PassQ
    >>> class Told(PassQ):
    ...     def forward(self, job, q, k, v, bias, sink):
    ...         every = gathered(job, k, job.plan.k_runs)  # the same on both ranks
    ...         print(scattered(job, every, job.plan.k_runs, k.shape[-2]).squeeze())
    ...         return super().forward(job, q, k, v, bias, sink)
    >>> with sl.simulate(s=2):
    ...     q = sl.shard(torch.arange(8.0).reshape(1, 1, 8, 1), sl.Ring("s", 2, "zigzag"))
    ...     _ = sl.ring_attention(q, q, q, algorithm=Told())
    tensor([[ 0.,  2., 12., 14.],
            [ 4.,  6.,  8., 10.]])
    """
    with bind(job.mesh):
        block = wrap(x, job.mesh)
        shape = (*block.shape[:dim], len(runs) * rows, *block.shape[dim + 1 :])
        whole = block.new_zeros(shape).index_copy(dim, _rows(runs, rows, x.device), block)
        return unwrap(psum_scatter(whole, job.axes, dim))


@lru_cache(maxsize=256)
def _rows(runs: Runs, rows: int, device: torch.device) -> Tensor:
    """Return for each position its row among the blocks of all ranks, of ``rows`` rows each."""
    row = [0] * sum(map(length, runs))
    for owner, share in enumerate(runs):
        held = [i for run in share for i in run.positions]
        for n, i in enumerate(held):
            row[i] = owner * rows + n
    with torch.inference_mode(False):
        # cached: a later backward may save it
        return torch.tensor(row, dtype=torch.int64, device=device)


Key = tuple[str, int, int]
"""(kind of block, index of its chunk, step at which it arrives)"""

Coming = dict[Key, Callable[[], Tensor]]
"""Transfers under way; calling a value waits for its block."""


class Leaving(NamedTuple):
    """Storage to be sent, with its (source, destination) pairs."""

    key: Key
    raw: Tensor
    pairs: Pairs


def round_trip(
    job: AttentionJob, *blocks: Tensor, ahead: bool = True
) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Yield every rank's blocks once, its own first: (step, blocks).

    ``ahead``  the next ones are in transit meanwhile, which holds a block more.
    """
    hops = [chunk.hops(t) for chunk in job.plan.chunks for t in range(1, len(chunk.at) + 1)]
    for step, pairs in enumerate([*hops, ()]):
        keys = [(str(i), 0, step) for i in range(len(blocks))]
        leaving = [Leaving(key, x, pairs) for key, x in zip(keys, blocks, strict=True)]
        coming = send(job, leaving if ahead else [])
        yield step, blocks
        coming = coming or send(job, leaving)
        blocks = tuple(coming[key]() for key in keys if pairs)


def send(job: AttentionJob, leaving: Sequence[Leaving]) -> Coming:
    """Post transfers over the ring as one call; a rank that receives nothing gets zeros.

    Those without pairs are left out.
    """
    moving = [item for item in leaving if item.pairs]
    if not moving:
        return {}
    with bind(job.mesh):
        blocks = [wrap(item.raw, job.mesh) for item in moving]
        transfers = start_ppermutes(blocks, job.axes, [item.pairs for item in moving])
    pairs = zip(moving, transfers, strict=True)
    return {item.key: partial(_arrived, transfer, item.raw) for item, transfer in pairs}


def _arrived(transfer: Pending, sent: Tensor) -> Tensor:
    """Wait for a transfer; the network reads the sent block, which is kept alive until then."""
    return unwrap(transfer.wait())
