"""Attention with a differentiable gradient: keys are gathered, scores computed as a whole.

Runs only for second derivatives; it holds every score of a rank's queries.
"""

import torch
from torch import Tensor

from shardlib.collectives import storage
from shardlib.ops.attention.case import length
from shardlib.ops.attention.engine import AttentionJob, Given
from shardlib.ops.attention.local import LocalQueries, gathered, local_queries
from shardlib.ops.attention.pieces import ScorePiece

__all__ = ["gradients"]


def gradients(
    job: AttentionJob,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    given: Given,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, bias and sink, with a graph of their own."""
    dout, dlse, *_ = given
    out, lse = _forward(job, *inputs)
    wanted = [i for i, x in enumerate(inputs) if x is not None and x.requires_grad]
    outs, cots = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse])
    leaves = [inputs[i] for i in wanted]
    found = torch.autograd.grad(outs, leaves, cots, create_graph=True, allow_unused=True)  # type: ignore[arg-type]
    grads = dict(zip(wanted, found, strict=True))
    return tuple(grads.get(i) for i in range(5))


def _forward(
    job: AttentionJob, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    runs = job.plan.k_runs
    split = len(runs) > 1 and bool(job.plan.case.rows)  # otherwise every rank holds all keys
    keys, values = (gathered(job, x, runs) if split else x for x in (k, v))
    t = sum(map(length, runs if split else runs[:1]))
    k_at = torch.arange(t, device=q.device)
    outs, lses = [], []
    for rank in local_queries(job, q, bias):
        view = rank.view
        mine = None if sink is None else view(sink)
        o, n = _one(rank, view(keys)[:, :, :t], view(values)[:, :, :t], k_at, mine)
        spare = q.shape[-2] - len(rank.q_at)
        outs.append(torch.nn.functional.pad(o, (0, 0, 0, spare)))
        lses.append(torch.nn.functional.pad(n, (0, spare), value=float("-inf")))
    return storage(outs, job.mesh), storage(lses, job.mesh)


def _one(
    rank: LocalQueries, k: Tensor, v: Tensor, k_at: Tensor, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    n, g = len(rank.q_at), k.shape[1]
    block = rank.block(ScorePiece(0, n, 0, len(k_at), "masked"), k, v, k_at)
    q = block.q.unflatten(1, (g, -1)) * block.scale
    s = torch.matmul(q, k.unsqueeze(2).mT).flatten(1, 2)
    s = s if block.bias is None else s + block.bias
    empty = (s == float("-inf")).all(-1)
    s = s.masked_fill(empty.unsqueeze(-1), 0.0)
    lse = torch.logsumexp(s, -1).masked_fill(empty, float("-inf"))
    after = lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype))
    p = (
        (s - after.masked_fill(empty, 0.0).unsqueeze(-1))
        .exp()
        .masked_fill(empty.unsqueeze(-1), 0.0)
    )
    p = p if block.keep is None else p * block.keep(0, n)
    return torch.matmul(p.unflatten(1, (g, -1)), v.unsqueeze(2)).flatten(1, 2).to(
        rank.q.dtype
    ), after
