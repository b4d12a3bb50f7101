"""Ring Self-Attention as published: keys once round for all scores, softmax, values once round.

Every rank holds the scores of its queries with the whole sequence.  Here their gradients are the
dense ones, and those of keys and values are scattered rather than summed whole.

Source: Li et al., arXiv 2105.13120, section 3.2.
"""

import torch
from torch import Tensor

from shardlib.collectives import psum_scatter, unwrap, wrap
from shardlib.mesh import bind
from shardlib.ops.attention.executor import Given, Job, Local, fold_sink, locals_of, positions, send
from shardlib.ops.attention.kernels import wide
from shardlib.ops.attention.pieces import Piece

__all__ = ["backward", "forward"]


def _round(job: Job, x: Tensor):
    """Every rank's block once: (step, block), the next one under way."""
    parcels = job.plan.parcels
    for step in range(job.plan.p if parcels else 1):
        pairs = parcels[0].hops(step + 1) if parcels and step < job.plan.p - 1 else ()
        coming = send(job, [("block", (0, step), x, pairs)])
        yield step, x
        x = coming["block", (0, step)]() if coming else x


def _owner(job: Job, step: int, rank: int) -> int:
    return (rank - step) % job.plan.p


def _grouped(x: Tensor, g: int) -> Tensor:
    """[b, h, m, n] -> [b, g, h / g, m, n]."""
    return x.unflatten(1, (g, x.shape[1] // g))


def _keep(local: Local, owner: int, n: int) -> Tensor | None:
    """What dropout multiplies the probabilities of a rank's queries and an owner's keys with."""
    if not local.job.dropout:
        return None
    at = positions(local.job.plan.k_runs[owner], local.q.device)
    block = local.block(Piece(0, len(local.q_at), 0, len(at), "full"), local.q, local.q, at)
    assert block.keep is not None
    return block.keep(0, len(local.q_at)).expand(-1, n, -1, -1)


def forward(
    job: Job, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Saves q, k, v and the probabilities [b, h, lq, p lk]."""
    plan, lk, dtype, g = job.plan, k.shape[-2], wide(q.dtype), k.shape[-3]
    scores = q.new_full((*q.shape[:-1], plan.p * lk), float("-inf"), dtype=dtype)
    workers = locals_of(job, q, bias)
    for step, block in _round(job, k):
        for i, local, view in workers:
            owner, n = _owner(job, step, i), len(local.q_at)
            at = positions(plan.k_runs[owner], q.device)
            whole = local.block(Piece(0, n, 0, len(at), "masked"), view(block), view(block), at)
            s = torch.matmul(_grouped(whole.q.to(dtype) * job.scale, g), whole.k.to(dtype).unsqueeze(2).mT).flatten(
                1, 2
            )
            s = s if whole.bias is None else s + whole.bias
            view(scores)[:, :, :n, owner * lk : owner * lk + len(at)] = s
    lse = torch.logsumexp(scores, -1)
    probs = scores.sub_(lse.masked_fill(lse == -float("inf"), 0.0).unsqueeze(-1)).exp_().to(q.dtype)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=dtype)
    for step, block in _round(job, v):
        for i, local, view in workers:
            owner, n = _owner(job, step, i), len(local.q_at)
            m = sum(run.length for run in plan.k_runs[owner])
            part = view(probs)[:, :, :n, owner * lk : owner * lk + m].to(dtype)
            keep = _keep(local, owner, part.shape[1])
            part = part if keep is None else part * keep
            values = view(block)[:, :, :m].to(dtype).unsqueeze(2)
            view(out)[:, :, :n] += torch.matmul(_grouped(part, g), values).flatten(1, 2)
    return out, fold_sink(out, lse, sink), (q, k, v, probs)


def backward(
    job: Job, saved: tuple[Tensor, ...], bias: Tensor | None, sink: Tensor | None, given: Given, wants_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Values round for the scores' gradient, keys round for the queries'; whole dk and dv, then scattered."""
    (q, k, v, probs), plan, dtype = saved, job.plan, wide(saved[0].dtype)
    dout, dlse, out, lse = given
    lk, g, p = k.shape[-2], k.shape[-3], job.plan.p
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1)
    delta = delta if dlse is None else delta - dlse
    if sink is not None:  # what is left of each softmax beside the sink's share
        probs = probs * -(sink.to(dtype) - lse).expm1().unsqueeze(-1).to(probs.dtype)
    dscores = torch.zeros_like(probs, dtype=dtype)
    dq = torch.zeros_like(q, dtype=dtype, memory_format=torch.contiguous_format)
    dks, dvs = (x.new_zeros((*x.shape[:-2], p * lk, x.shape[-1]), dtype=dtype) for x in (k, v))
    dbias = bias.new_zeros(bias.shape, dtype=dtype) if wants_bias and bias is not None else None
    workers = locals_of(job, q, bias)
    for step, block in _round(job, v):
        for i, local, view in workers:
            owner, n = _owner(job, step, i), len(local.q_at)
            m = sum(run.length for run in plan.k_runs[owner])
            cols = slice(owner * lk, owner * lk + m)
            part, keep = view(probs)[:, :, :n, cols].to(dtype), _keep(local, owner, q.shape[-3])
            grad = view(dout)[:, :, :n].to(dtype)
            used = part if keep is None else part * keep
            view(dvs)[:, :, cols] += torch.matmul(_grouped(used, g).mT, _grouped(grad, g)).sum(2)
            dp = torch.matmul(_grouped(grad, g), view(block)[:, :, :m].to(dtype).unsqueeze(2).mT).flatten(1, 2)
            dp = dp if keep is None else dp * keep
            view(dscores)[:, :, :n, cols] = part * (dp - view(delta)[:, :, :n, None])
    for step, block in _round(job, k):
        for i, local, view in workers:
            owner, n = _owner(job, step, i), len(local.q_at)
            at = positions(plan.k_runs[owner], q.device)
            ds = view(dscores)[:, :, :n, owner * lk : owner * lk + len(at)]
            keys = view(block)[:, :, : len(at)].to(dtype).unsqueeze(2)
            view(dq)[:, :, :n] += torch.matmul(_grouped(ds, g), keys).flatten(1, 2) * job.scale
            into = view(dks)[:, :, owner * lk : owner * lk + len(at)]
            into += torch.matmul(_grouped(ds, g).mT, _grouped(local.q[:, :, :n].to(dtype), g)).sum(2) * job.scale
            if dbias is not None:
                local.add_bias(view(dbias), slice(0, n), at, ds)
    with bind(job.mesh):
        dk, dv = (unwrap(psum_scatter(wrap(x, job.mesh), job.axes, 2)) if p > 1 else x for x in (dks, dvs))
    return dq, dk, dv, dbias
