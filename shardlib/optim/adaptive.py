"""Optimizers with a rate per element: Adam and its kin, Adagrad, RMSprop."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.kernels import active
from shardlib.kernels.active import Backend
from shardlib.kernels.adamw import adamw_, adamw_halves_, steppable
from shardlib.kernels.apex import apex
from shardlib.optim.groups import Mask, by_mask
from shardlib.optim.hyperparam_checks import Schedule, at_step, ranged
from shardlib.optim.later import chosen
from shardlib.optim.transform import Step, Transform, divide, fused, restoring, run_in_place, under
from shardlib.optim.trees import Pieces, each, moments, need, pieces, ready, runs, spans, zeros_like

__all__ = ["adagrad", "adam", "adamw", "rmsprop"]


class MomentState(NamedTuple):
    """Steps taken, first and second moments."""

    count: int
    mu: Any
    nu: Any


@ranged()
def adamw(
    lr: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    mask: Mask = None,
    backend: Backend = "auto",
) -> Transform:
    """Update by Adam with decoupled weight decay, as torch.optim.AdamW.

    ``mask``     the parameters that decay, as ``masked`` takes it; None: all.
    ``backend``  the kernels of ``sl.optim.step``, as ``sl.kernels.use`` names them.
    Source: Loshchilov and Hutter, arXiv 1711.05101.

    >>> import torch
    >>> tx = adamw(0.5, weight_decay=0.0)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([3.0, -0.1])}, tx.init(params), params)[0]
    {'w': tensor([-0.5000,  0.5000])}
    """

    if mask is not None:
        decaying, others = (
            adamw(lr, b1, b2, eps, by, backend=backend) for by in (weight_decay, 0.0)
        )
        return by_mask(mask, decaying, others, "adamw")

    def init(params: Any) -> MomentState:
        mu = moments(params)
        return MomentState(0, mu, zeros_like(mu))

    def update(grads: Any, state: MomentState, params: Any = None) -> tuple[Any, MomentState]:
        ready(grads, "adamw", state.mu)
        if weight_decay:
            need(params, "adamw")
        count, rate = state.count + 1, at_step(lr, state.count)
        mu, nu = running(grads, state, b1, b2)
        of = direction(count, rate, b1, b2, eps, weight_decay)
        decayed = [params] if weight_decay else []
        return each(lambda _, *x: of(*x), grads, mu, nu, *decayed), MomentState(count, mu, nu)

    def donate(grads: Any, state: MomentState, params: Any, step: Step) -> MomentState:
        ready(grads, "adamw", state.mu)
        count, rate = state.count + 1, at_step(lr, state.count)
        g, p, m, v = pieces(grads, params, state.mu, state.nu)
        own = bool(p) and (not p[0].is_cpu or active.cpu)
        if own and step.sound is not None and not step.guarded:  # these kernels know no such step
            beside = step.beside is not None and step.beside[0] is params
            if beside and p[0].dtype == torch.bfloat16:
                return restoring(whole, grads, state, params, step)
            own = False
        if own:
            hyper = rate, b1, b2, eps, weight_decay, count
            if _by_kernel(params, (g, p, m, v), step, hyper):
                step.lr = rate
                return state._replace(count=count)
        how = {"lr": rate, "beta1": b1, "beta2": b2, "weight_decay": weight_decay, "eps": eps}
        done = fused("adamw", (p, g, m, v), step, count, **how, amsgrad=False, maximize=False)
        if not done:
            return run_in_place(Transform(init, update, "elementwise"), grads, state, params, step)
        step.lr = rate
        return chosen(step.sound, state._replace(count=count), state)

    whole = Transform(init, update, "elementwise", donate, halves=True, heeds=True)
    return under(backend, whole)


def _by_kernel(params: Any, lists: Sequence[Pieces], step: Step, hyper: Any) -> bool:
    """Step by a fused kernel, with the half-precision companions; False if no kernel applies."""
    g, p, m, v = lists
    found = p.beside(g, m, v)
    if found.dtypes == {torch.float32} and (stepped := apex("adam", p[0])) is not None:
        if step.scale is not None:
            for t in g:
                t.div_(step.scale.to(t.device, t.dtype))
        stepped(g, p, m, v, *hyper)
        torch.autograd.graph.increment_version(found.roots)
        return True
    scale = None if step.scale is None else step.scale.to(p[0].device, torch.float32)
    mine = step.beside is not None and step.beside[0] is params
    out = pieces(step.beside[1])[0] if step.beside is not None and mine else []
    if mine and p[0].dtype == torch.bfloat16:
        adamw_halves_(g, p, out, m, v, scale, *hyper)
    elif steppable(g, p, m, v, out):
        adamw_(g, p, m, v, out, scale, *hyper)
    else:
        return False
    if mine:
        step.beside = None
    # so that backward through an older graph raises; pieces may have versions of their own
    torch.autograd.graph.increment_version(found.roots)
    return True


def direction(
    count: int, rate: float, b1: float, b2: float, eps: float, weight_decay: float
) -> Callable[..., Tensor]:
    """Return the function from both moments, and a weight that decays, to their update."""
    size, root = rate / (1 - b1**count), (1 - b2**count) ** 0.5

    def of(m: Tensor, v: Tensor, *p: Tensor) -> Tensor:
        u = (m * -size).div_((v.sqrt() / root).add_(eps))
        return u.add_(p[0], alpha=-rate * weight_decay) if p else u

    return of


def running(grads: Any, state: MomentState, b1: float, b2: float) -> tuple[Any, Any]:
    """Return the moments updated with these gradients."""
    mu = each(lambda m, g: m.lerp(g.to(m.dtype), 1 - b1), state.mu, grads)
    nu = each(lambda v, g: (v * b2).addcmul_(g, g, value=1 - b2), state.nu, grads)
    return mu, nu


def adam(lr: float | Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Transform:
    """Update by Adam: ``adamw`` without decay.

    >>> import torch
    >>> tx = adam(0.5)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([3.0, -0.1])}, tx.init(params))[0]
    {'w': tensor([-0.5000,  0.5000])}
    """
    return adamw(lr, b1, b2, eps, weight_decay=0.0)


class SumState(NamedTuple):
    """Steps taken, and the sum of all squared gradients."""

    count: int
    total: Any


@ranged()
def adagrad(
    lr: float | Schedule,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    lr_decay: float = 0.0,
    start: float = 0.0,
) -> Transform:
    """Update at a rate that falls as an element's squared gradients add up: torch.optim.Adagrad.

    ``start``  initial value of the sums.
    Source: Duchi, Hazan and Singer, JMLR 12 (2011), figure 1.

    >>> import torch
    >>> tx = adagrad(0.5)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([3.0, -0.1])}, tx.init(params))[0]
    {'w': tensor([-0.5000,  0.5000])}
    """

    def init(params: Any) -> SumState:
        total = moments(params)
        return SumState(0, each(lambda t: t + start, total) if start else total)

    def update(grads: Any, state: SumState, params: Any = None) -> tuple[Any, SumState]:
        ready(grads, "adagrad", state.total)
        rate = at_step(lr, state.count) / (1 + state.count * lr_decay)
        if weight_decay:
            need(params, "adagrad")
            grads = each(lambda g, p: g.add(p, alpha=weight_decay), grads, params)
        total = each(lambda t, g: t.addcmul(g, g), state.total, grads)
        updates = each(lambda g, t: g / t.sqrt().add_(eps) * -rate, grads, total)
        return updates, SumState(state.count + 1, total)

    def donate(grads: Any, state: SumState, params: Any, step: Step) -> SumState:
        ready(grads, "adagrad", state.total)
        count, rate = state.count + 1, at_step(lr, state.count)
        g, p, t = pieces(grads, params, state.total)
        how = {"lr": rate, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        if not fused("adagrad", (p, g, t), step, count, **how, maximize=False):
            return run_in_place(Transform(init, update, "elementwise"), grads, state, params, step)
        step.lr = rate
        return state._replace(count=count)

    return Transform(init, update, "elementwise", donate)


class RmsState(NamedTuple):
    """Steps taken, the running mean squares, the running means (``centered``), and the momentum."""

    count: int
    nu: Any
    mean: Any
    trace: Any


@ranged()
def rmsprop(
    lr: float | Schedule,
    decay: float = 0.99,
    eps: float = 1e-8,
    momentum: float = 0.0,
    centered: bool = False,
    weight_decay: float = 0.0,
) -> Transform:
    """Update by gradients over the root of their running mean square, as torch.optim.RMSprop.

    ``decay``     of the running means; torch calls it alpha.
    ``centered``  take the variance in place of the mean square.
    Source: Tieleman and Hinton, lecture 6.5 of Neural Networks for Machine Learning (2012).

    >>> import torch
    >>> tx = rmsprop(0.5, decay=0.0)
    >>> params = {"w": torch.ones(2)}
    >>> tx.update({"w": torch.tensor([3.0, -0.1])}, tx.init(params))[0]
    {'w': tensor([-0.5000,  0.5000])}
    """

    def init(params: Any) -> RmsState:
        nu = moments(params)
        return RmsState(
            0, nu, zeros_like(nu) if centered else (), zeros_like(nu) if momentum else ()
        )

    def update(grads: Any, state: RmsState, params: Any = None) -> tuple[Any, RmsState]:
        ready(grads, "rmsprop", state.nu)
        rate = at_step(lr, state.count)
        if weight_decay:
            need(params, "rmsprop")
            grads = each(lambda g, p: g.add(p, alpha=weight_decay), grads, params)
        nu = each(lambda v, g: (v * decay).addcmul_(g, g, value=1 - decay), state.nu, grads)
        mean, root = (), each(lambda v: v.sqrt(), nu)
        if centered:
            mean = each(lambda m, g: m.lerp(g.to(m.dtype), 1 - decay), state.mean, grads)
            root = each(lambda v, m: v.addcmul(m, m, value=-1).sqrt_(), nu, mean)
        step, trace = each(lambda g, r: g / (r + eps), grads, root), ()
        if momentum:
            trace = step = each(lambda t, s: t * momentum + s, state.trace, step)
        return each(lambda s: s * -rate, step), RmsState(state.count + 1, nu, mean, trace)

    def donate(grads: Any, state: RmsState, params: Any, step: Step) -> RmsState:
        ready(grads, "rmsprop", state.nu)
        divide(grads, step)
        step.lr = rate = at_step(lr, state.count)
        kept = [t for t, on in ((state.mean, centered), (state.trace, momentum)) if on]
        for g, p, v, *more in spans(*runs(grads, params, state.nu, *kept)):
            g = g.add(p, alpha=weight_decay) if weight_decay else g
            v.mul_(decay).addcmul_(g, g, value=1 - decay)
            root = v
            if centered:
                more[0].lerp_(g.to(more[0].dtype), 1 - decay)
                root = v.addcmul(more[0], more[0], value=-1)
            way = g / root.sqrt().add_(eps)
            if momentum:
                way = more[-1].mul_(momentum).add_(way)
            p.add_(way * -rate)
        return state._replace(count=state.count + 1)

    return Transform(init, update, "elementwise", donate)
