"""Optimizers that keep one running trace of gradients: SGD and Lion."""

from typing import Any, NamedTuple

from shardlib.optim.schedules import Schedule, at_step
from shardlib.optim.transform import Transform
from shardlib.optim.trees import each, moments, need, ready

__all__ = ["lion", "sgd"]


class TraceState(NamedTuple):
    """Steps taken and a running trace of gradients."""

    count: int
    trace: Any


def sgd(lr: float | Schedule, momentum: float = 0.0, nesterov: bool = False) -> Transform:
    """Stochastic gradient descent, as torch.optim.SGD."""

    def init(params: Any) -> TraceState:
        return TraceState(0, moments(params) if momentum else ())

    def update(grads: Any, state: TraceState, params: Any = None) -> tuple[Any, TraceState]:
        ready(grads, "sgd", state.trace if momentum else None)
        rate = at_step(lr, state.count)
        if not momentum:
            return each(lambda g: g * -rate, grads), TraceState(state.count + 1, ())
        trace = each(lambda t, g: t * momentum + g, state.trace, grads)
        ahead = momentum if nesterov else 0.0
        step = each(lambda g, t: (g + t * ahead if ahead else t) * -rate, grads, trace)
        return step, TraceState(state.count + 1, trace)

    return Transform(init, update)


def lion(
    lr: float | Schedule, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0
) -> Transform:
    """Sign of an interpolated momentum.  Source: Chen et al., arXiv 2302.06675."""

    def init(params: Any) -> TraceState:
        return TraceState(0, moments(params))

    def update(grads: Any, state: TraceState, params: Any = None) -> tuple[Any, TraceState]:
        ready(grads, "lion", state.trace)
        if weight_decay:
            need(params, "lion")
        rate = at_step(lr, state.count)
        sign = each(lambda g, m: m.lerp(g, 1 - b1).sign_(), grads, state.trace)
        if weight_decay:
            sign = each(lambda s, p: s + p * weight_decay, sign, params)
        trace = each(lambda m, g: m.lerp(g, 1 - b2), state.trace, grads)
        return each(lambda s: s * -rate, sign), TraceState(state.count + 1, trace)

    return Transform(init, update)
