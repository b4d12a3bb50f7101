"""How much memory a plan takes, by carrying it out on shapes alone and counting what is alive.

The executor itself runs, on the meta device, as one rank of a ring of any size; every storage it
makes counts from when it is made until it is freed.  What kernels allocate inside does not show.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.live import Live
from shardlib.mesh import Mesh
from shardlib.ops.attention.executor import Job
from shardlib.ops.attention.kernels import pick
from shardlib.ops.attention.masks import At, Full
from shardlib.ops.attention.op import ENGINES
from shardlib.ops.attention.plan import Plan, Sizes

__all__ = ["Peak", "peak"]


class Peak(NamedTuple):
    """Bytes of one rank, beside its blocks of q, k, v and of their gradients' and the output's own.

    ``forward``, ``backward``  the most alive at once during each, what is saved included.
    ``saved``                  kept from forward to backward beside q, k, v: out and lse, or more.
    """

    forward: int
    backward: int
    saved: int


def peak(plan: Plan, sizes: Sizes, dtype: torch.dtype, rank: int = 0) -> Peak:
    """What ``rank`` of the plan's ring needs for one attention and its gradient.

    >>> from shardlib.layouts.orders import dealt
    >>> from shardlib.ops.attention import routes
    >>> runs, sizes = dealt("zigzag", 4096, 4), Sizes(1, 4, 4, 1024, 1024, 64, 64, 4, 4)
    >>> ring = peak(routes.ring(runs, runs, Full()), sizes, torch.float32)
    >>> rsa = peak(routes.rsa(runs, runs, Full()), sizes, torch.float32)
    >>> rsa.backward / ring.backward > 5
    True
    """
    job = _job(plan, sizes, dtype, rank)
    q, k, v = blocks = _blocks(sizes, dtype)
    forward, backward = ENGINES[plan.engine]
    with Live() as live:
        out, lse, saved = forward(job, q, k, v, None, None)
        out = out.to(dtype)
        first = live.peak
        dout = torch.empty_like(out)
        kept = sum(x.untyped_storage().nbytes() for x in {id(x): x for x in (out, lse, *saved)}.values()
                   if all(x is not y for y in blocks))  # fmt: skip
        live.peak = live.now
        given: Any = (dout, None, out, lse)
        grads = backward(job, saved, None, None, given, False)
        last = live.peak - dout.untyped_storage().nbytes()
        del grads
    return Peak(first, last, kept)


def _blocks(z: Sizes, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (z.b, z.h, z.lq, z.d), (z.b, z.g, z.lk, z.d), (z.b, z.g, z.lk, z.e)
    return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)  # type: ignore[return-value]


def _job(plan: Plan, z: Sizes, dtype: torch.dtype, rank: int) -> Job:
    """A job for one rank of a ring on paper."""
    outer = plan.sub.p if plan.sub is not None else plan.p
    mesh = Mesh({"outer": outer, "inner": plan.p // outer}, kind="record", device="meta")
    mesh.coord = dict(zip(("outer", "inner"), divmod(rank, plan.p // outer), strict=True))
    at = At(torch.arange(z.b), torch.arange(z.h))
    s, t = (sum(run.length for runs in share for run in runs) for share in (plan.q_runs, plan.k_runs))
    q, _, v = _blocks(z, dtype)
    kernel = pick(q, v, plan.mask.biased or not isinstance(plan.mask, Full), False)
    return Job(mesh, ("outer", "inner"), plan, plan.mask, z.d**-0.5, kernel, lambda _: at, (z.h, s, t))
