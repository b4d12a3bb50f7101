"""Optimizers with a rate per element: Adam and its kin."""

from typing import Any, NamedTuple

from torch import Tensor

from shardlib.optim.schedules import Schedule, at_step
from shardlib.optim.transform import Step, Transform, fused, pieces, run_in_place
from shardlib.optim.trees import each, moments, need, ready

__all__ = ["adam", "adamw"]


class MomentState(NamedTuple):
    """Steps taken, first and second moments."""

    count: int
    mu: Any
    nu: Any


def adamw(
    lr: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Transform:
    """Adam with decoupled weight decay, as torch.optim.AdamW.

    Source: Loshchilov and Hutter, arXiv 1711.05101.
    """

    def init(params: Any) -> MomentState:
        return MomentState(0, moments(params), moments(params))

    def update(grads: Any, state: MomentState, params: Any = None) -> tuple[Any, MomentState]:
        ready(grads, "adamw", state.mu)
        if weight_decay:
            need(params, "adamw")
        count, rate = state.count + 1, at_step(lr, state.count)
        mu = each(lambda m, g: m.lerp(g, 1 - b1), state.mu, grads)
        nu = each(lambda v, g: (v * b2).addcmul_(g, g, value=1 - b2), state.nu, grads)
        size, root = rate / (1 - b1**count), (1 - b2**count) ** 0.5

        def step(_: Tensor, m: Tensor, v: Tensor, *p: Tensor) -> Tensor:
            u = (m * -size).div_((v.sqrt() / root).add_(eps))
            return u.add_(p[0], alpha=-rate * weight_decay) if p else u

        updates = each(step, grads, mu, nu, *([params] if weight_decay else []))
        return updates, MomentState(count, mu, nu)

    def donate(grads: Any, state: MomentState, params: Any, step: Step) -> MomentState:
        ready(grads, "adamw", state.mu)
        count, rate = state.count + 1, at_step(lr, state.count)
        g, p, m, v = pieces(grads, params, state.mu, state.nu)
        how = {"lr": rate, "beta1": b1, "beta2": b2, "weight_decay": weight_decay, "eps": eps}
        done = fused("adamw", (p, g, m, v), step, count, **how, amsgrad=False, maximize=False)
        if not done:
            return run_in_place(Transform(init, update), grads, state, params, step)
        step.lr = rate
        return state._replace(count=count)

    return Transform(init, update, donate=donate)


def adam(lr: float | Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Transform:
    """Adam: ``adamw`` without decay."""
    return adamw(lr, b1, b2, eps, weight_decay=0.0)
