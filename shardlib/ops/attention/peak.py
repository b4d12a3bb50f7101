"""Peak memory of a plan, counted by running its engine on the meta device.

The engine runs as one rank of a ring of any size; every storage counts from its creation until it
is freed.  Memory that kernels allocate internally is not counted.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from shardlib.memory_tracker import Live
from shardlib.mesh import record
from shardlib.ops.attention.case import Sizes, length
from shardlib.ops.attention.engine import AttentionJob, AttentionPlan
from shardlib.ops.attention.kernels import pick
from shardlib.ops.attention.masks import At, Full

__all__ = ["Peak", "peak"]


class Peak(NamedTuple):
    """Bytes of one rank, besides its blocks of q, k, v, their gradients and the output.

    ``forward``, ``backward``  the most alive at once during each, saved tensors included.
    ``saved``                  kept from forward to backward besides q, k, v: out and lse, or more.
    """

    forward: int
    backward: int
    saved: int


def peak(plan: AttentionPlan, dtype: torch.dtype, rank: int = 0) -> Peak:
    """Predict the peak memory of ``rank`` in the plan's ring, for one attention and its gradient.

    >>> import shardlib as sl
    >>> with sl.record(s=4):
    ...     q = sl.shard(torch.empty(1, 4, 4096, 64, device="meta"), sl.Ring("s", 2, "zigzag"))
    ...     ring = sl.planning.attention_plan(q, q, q, algorithm="ring")
    ...     rsa = sl.planning.attention_plan(q, q, q, algorithm="rsa")
    >>> peak(rsa, torch.float32).backward / peak(ring, torch.float32).backward > 5
    True
    """
    engine = plan.engine
    q, k, v = blocks = _blocks(plan.case.sizes, dtype)
    job = _job(plan, q, v, rank)
    with Live(paper=True) as live:
        out, lse, saved = engine.forward(job, q, k, v, None, None)
        out = out.to(dtype)
        first = live.peak
        dout = torch.empty_like(out)
        made = {id(x): x for x in (out, lse, *saved) if all(x is not y for y in blocks)}
        kept = sum(x.untyped_storage().nbytes() for x in made.values())
        live.peak = live.now
        grads = engine.backward(job, saved, None, None, (dout, None, out, lse), False)
        last = live.peak - dout.untyped_storage().nbytes()
        del grads
    return Peak(first, last, kept)


def _blocks(z: Sizes, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (z.b, z.h, z.lq, z.d), (z.b, z.g, z.lk, z.d), (z.b, z.g, z.lk, z.e)
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    return q, k, v


def _job(plan: AttentionPlan, q: Tensor, v: Tensor, rank: int) -> AttentionJob:
    """Return the job of one rank on a recorded mesh."""
    case, z = plan.case, plan.case.sizes
    mesh = record(**dict(case.mesh))
    mesh.coord = dict.fromkeys(mesh.axes, 0)
    for axis in reversed(case.axes):
        rank, mesh.coord[axis] = divmod(rank, mesh.axes[axis])
    at = At(torch.arange(z.b, device="cpu"), torch.arange(z.h, device="cpu"))
    s, t = (sum(map(length, runs)) for runs in (case.q_runs, case.k_runs))
    kernel = pick(q, v, type(case.mask) is not Full, False)
    return AttentionJob(mesh, plan, z.d**-0.5, kernel, lambda _: at, (z.h, s, t))
