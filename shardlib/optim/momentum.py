"""Optimizers with one running trace of gradients: SGD and Lion."""

from typing import Any, NamedTuple

from shardlib.errors import BadArgument
from shardlib.optim.groups import Mask, by_mask
from shardlib.optim.hyperparam_checks import Schedule, at_step, ranged
from shardlib.optim.transform import Step, Transform, divide, fused, run_in_place
from shardlib.optim.trees import each, moments, need, pieces, ready, runs, spans

__all__ = ["lion", "sgd"]


class TraceState(NamedTuple):
    """Steps taken and a running trace of gradients."""

    count: int
    trace: Any


@ranged()
def sgd(
    lr: float | Schedule,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> Transform:
    """Update by stochastic gradient descent, as torch.optim.SGD; decay is added to the gradient.

    >>> import torch
    >>> tx = sgd(0.5)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([1.0, 2.0])}, tx.init(params))[0]
    {'w': tensor([-0.5000, -1.0000])}
    """

    if nesterov and not momentum:
        raise BadArgument(
            "nesterov looks ahead along the momentum, and there is none",
            op="sgd",
            fix="sl.optim.sgd(0.1, momentum=0.9, nesterov=True)",
        )

    def init(params: Any) -> TraceState:
        return TraceState(0, moments(params) if momentum else ())

    def decayed(grads: Any, params: Any) -> Any:
        if not weight_decay:
            return grads
        need(params, "sgd")
        return each(lambda g, p: g.add(p, alpha=weight_decay), grads, params)

    def update(grads: Any, state: TraceState, params: Any = None) -> tuple[Any, TraceState]:
        ready(grads, "sgd", state.trace if momentum else None)
        rate = at_step(lr, state.count)
        grads = decayed(grads, params)
        if not momentum:
            return each(lambda g: g * -rate, grads), TraceState(state.count + 1, ())
        trace = each(lambda t, g: t * momentum + g, state.trace, grads)
        ahead = momentum if nesterov else 0.0
        step = each(lambda g, t: (g + t * ahead if ahead else t) * -rate, grads, trace)
        return step, TraceState(state.count + 1, trace)

    def donate(grads: Any, state: TraceState, params: Any, step: Step) -> TraceState:
        ready(grads, "sgd", state.trace if momentum else None)
        rate = at_step(lr, state.count)
        lists = pieces(grads, params, *([state.trace] if momentum else []))
        how = {"lr": rate, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        count = state.count + 1
        if not fused(
            "sgd", (lists[1], lists[0], *lists[2:]), step, count, **how,
            dampening=0.0, maximize=False, is_first_step=False,
        ):  # fmt: skip
            return run_in_place(Transform(init, update, "elementwise"), grads, state, params, step)
        step.lr = rate
        return state._replace(count=count)

    return Transform(init, update, "elementwise", donate)


@ranged()
def lion(
    lr: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    mask: Mask = None,
) -> Transform:
    """Update by the sign of an interpolated momentum.

    Source: Chen et al., arXiv 2302.06675.

    ``mask``  the parameters that decay, as ``masked`` takes it; None: all.

    >>> import torch
    >>> tx = lion(0.5)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([3.0, -0.1])}, tx.init(params))[0]
    {'w': tensor([-0.5000,  0.5000])}
    """

    if mask is not None:
        decaying, others = (lion(lr, b1, b2, by) for by in (weight_decay, 0.0))
        return by_mask(mask, decaying, others, "lion")

    def init(params: Any) -> TraceState:
        return TraceState(0, moments(params))

    def update(grads: Any, state: TraceState, params: Any = None) -> tuple[Any, TraceState]:
        ready(grads, "lion", state.trace)
        if weight_decay:
            need(params, "lion")
        rate = at_step(lr, state.count)
        sign = each(lambda g, m: m.lerp(g.to(m.dtype), 1 - b1).sign_(), grads, state.trace)
        if weight_decay:
            sign = each(lambda s, p: s.add(p, alpha=weight_decay), sign, params)
        trace = each(lambda m, g: m.lerp(g.to(m.dtype), 1 - b2), state.trace, grads)
        return each(lambda s: s * -rate, sign), TraceState(state.count + 1, trace)

    def donate(grads: Any, state: TraceState, params: Any, step: Step) -> TraceState:
        ready(grads, "lion", state.trace)
        divide(grads, step)
        step.lr = rate = at_step(lr, state.count)
        for g, p, m in spans(*runs(grads, params, state.trace)):
            sign = m.lerp(g.to(m.dtype), 1 - b1).sign_()
            sign = sign.add_(p, alpha=weight_decay) if weight_decay else sign
            p.add_(sign.mul_(-rate))
            m.lerp_(g.to(m.dtype), 1 - b2)
        return state._replace(count=state.count + 1)

    return Transform(init, update, "elementwise", donate)
