"""LAMB: Adam with a step proportional to each tensor's norm."""

from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.kernels import active
from shardlib.kernels.active import Backend
from shardlib.kernels.apex import apex
from shardlib.optim.adaptive import MomentState, running
from shardlib.optim.global_reductions import norms, scale_in_place, scaled
from shardlib.optim.hyperparam_checks import Schedule, at_step, ranged
from shardlib.optim.transform import Step, Transform, divide, under
from shardlib.optim.trees import (
    each,
    is_bucketed,
    moments,
    need,
    pieces,
    ready,
    spans,
    writable,
    zeros_like,
)
from shardlib.tensor import ShardedTensor, real_axes

__all__ = ["lamb"]


@ranged()
def lamb(
    lr: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    backend: Backend = "auto",
) -> Transform:
    """Update by Adam's direction for each tensor, scaled to the tensor's norm, times the rate.

    If a tensor or its direction is zero, the direction is not scaled.
    ``backend``  the kernels of ``sl.optim.step``, as ``sl.kernels.use`` names them; apex's takes
                 parameters that every rank holds whole.
    Moves one psum, of two scalars per tensor.
    Source: You et al., arXiv 1904.00962, algorithm 2.

    >>> tx = lamb(0.5)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([3.0, -3.0])}, tx.init(params), params)[0]
    {'w': tensor([-0.5000,  0.5000])}
    """

    def init(params: Any) -> MomentState:
        mu = moments(params)
        return MomentState(0, mu, zeros_like(mu))

    def direction(count: int) -> Any:
        size, root = 1 - b1**count, (1 - b2**count) ** 0.5

        def of(m: Tensor, v: Tensor, p: Tensor) -> Tensor:
            u = (m / size).div_((v.sqrt() / root).add_(eps))
            return u.add_(p, alpha=weight_decay) if weight_decay else u

        return of

    def lengths(params: Any, way: Any, rate: float) -> list[Tensor | None]:
        long, wide = norms(params, way)
        return [
            None if w is None else _ratio(p, w) * -rate for p, w in zip(long, wide, strict=True)
        ]

    def update(grads: Any, state: MomentState, params: Any = None) -> tuple[Any, MomentState]:
        ready(grads, "lamb", state.mu)
        need(params, "lamb")
        count, rate = state.count + 1, at_step(lr, state.count)
        mu, nu = running(grads, state, b1, b2)
        of = direction(count)
        way = each(lambda _, m, v, p: of(m, v, p), grads, mu, nu, params)
        return scaled(way, lengths(params, way, rate)), MomentState(count, mu, nu)

    def donate(grads: Any, state: MomentState, params: Any, step: Step) -> MomentState:
        ready(grads, "lamb", state.mu)
        divide(grads, step)
        count, rate = state.count + 1, at_step(lr, state.count)
        lists = pieces(grads, params, state.mu, state.nu)
        if lists[1] and (not lists[1][0].is_cpu or active.cpu) and _whole(params):
            kinds = frozenset().union(*(row.dtypes for row in lists))
            stepped = apex("lamb", lists[1][0])
            if stepped is not None and kinds == {torch.float32}:
                stepped(*lists, rate, b1, b2, eps, weight_decay, count)
                roots = [t for row in lists for t in row.roots]
                torch.autograd.graph.increment_version(roots)
                step.lr = rate
                return state._replace(count=count)
        way, of = writable(grads, state.mu), direction(count)
        for g, p, m, v, u in spans(*pieces(grads, params, state.mu, state.nu, way)):
            m.lerp_(g.to(m.dtype), 1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            u.copy_(of(m, v, p))
        scale_in_place(way, lengths(params, way, rate))
        for p, u in zip(*pieces(params, way), strict=True):
            p.add_(u)
        step.lr = rate
        return state._replace(count=count)

    return under(backend, Transform(init, update, "tensor", donate))


def _whole(params: Any) -> bool:
    """Return whether each rank holds every tensor whole: then its norm needs no communication."""
    if is_bucketed(params):
        return False
    leaves = [x for x in optree.tree_leaves(params) if isinstance(x, ShardedTensor)]
    return not any(x.is_padded or real_axes(x.mesh, x.sharding.axes) for x in leaves)


def _ratio(tensor: Tensor | None, way: Tensor) -> Tensor:
    assert tensor is not None, "a parameter has no norm"
    both = (tensor > 0) & (way > 0)
    # the inner where avoids a division by 0
    return torch.where(both, tensor / torch.where(both, way, 1.0), 1.0)
