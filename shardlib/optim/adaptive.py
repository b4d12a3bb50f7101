"""Optimizers by elements: Adam and its kin, Adagrad, RMSprop, SGD, Lion; and LAMB, by tensor."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardlib.errors import BadArgument
from shardlib.kernels import active
from shardlib.kernels.active import Backend
from shardlib.kernels.adamw import adamw_, adamw_halves_, steppable
from shardlib.kernels.apex import AdamStep, apex
from shardlib.optim.groups import Mask, by_mask
from shardlib.optim.norms import norms, scale_in_place
from shardlib.optim.transform import (
    Schedule,
    Step,
    Transform,
    at_step,
    by_directions,
    divide,
    elementwise,
    fused,
    ranged,
    restoring,
    under,
)
from shardlib.optim.trees import (
    Pieces,
    Tree,
    each,
    is_bucketed,
    moments,
    pieces,
    ready,
    spans,
    zeros_like,
)
from shardlib.tensor import ShardedTensor, real_axes

__all__ = [
    "adagrad", "adam", "adamw", "lamb", "lion", "rmsprop", "sgd",
]  # fmt: skip


class MomentState(NamedTuple):
    """Steps taken, first and second moments."""

    count: int
    mu: Tree
    nu: Tree


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

    def init(params: Tree) -> MomentState:
        mu = moments(params)
        return MomentState(0, mu, zeros_like(mu))

    def rule(count: int, rate: float) -> Callable[..., Tensor]:
        of = direction(count, rate, b1, b2, eps, weight_decay)

        def step(g: Tensor, m: Tensor, v: Tensor, *p: Tensor) -> Tensor:
            average(g, m, v, b1, b2)
            return of(m, v, *p)

        return step

    def kernel(grads: Tree, state: MomentState, params: Tree, step: Step, rate: float) -> bool:
        g, p, m, v = pieces(grads, params, state.mu, state.nu)
        count = state.count + 1
        if _by_kernel(params, (g, p, m, v), step, (rate, b1, b2, eps, weight_decay, count)):
            return True
        how = {"lr": rate, "beta1": b1, "beta2": b2, "weight_decay": weight_decay, "eps": eps}
        return fused("adamw", (p, g, m, v), step, count, **how, amsgrad=False, maximize=False)

    def donate(grads: Tree, state: MomentState, params: Tree, step: Step) -> MomentState:
        if _needs_restoring(params, step):
            return restoring(whole, grads, state, params, step)
        return made.donate(grads, state, params, step)

    made: Any = elementwise(
        "adamw", init, lr, rule, moments=("mu", "nu"), weights=bool(weight_decay), kernel=kernel
    )
    whole = made._replace(donate=donate, halves=True, heeds=True)
    return under(backend, whole)


def _own(params: Pieces) -> bool:
    """Return whether the library's own kernels may step these parameters."""
    return bool(params) and (not params[0].is_cpu or active.cpu)


def _needs_restoring(params: Tree, step: Step) -> bool:
    """Return whether only a kernel that knows no step that is not sound can step these."""
    if step.beside is None or step.beside[0] is not params or step.sound is None or step.guarded:
        return False
    (p,) = pieces(params)
    return _own(p) and p[0].dtype == torch.bfloat16


def _by_kernel(params: Tree, lists: Sequence[Pieces], step: Step, hyper: tuple[Any, ...]) -> bool:
    """Step by a fused kernel, with the half-precision companions; False if no kernel applies."""
    g, p, m, v = lists
    # these kernels know no step that is not sound
    if not _own(p) or (step.sound is not None and not step.guarded):
        return False
    found = p.beside(g, m, v)
    if found.dtypes == {torch.float32} and _by_apex(lists, step, hyper):
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


def _by_apex(lists: Sequence[Pieces], step: Step, hyper: tuple[Any, ...]) -> bool:
    g, p, m, v = lists
    stepped = apex("adam", p[0])
    if stepped is None:
        return False
    if step.scale is not None:
        for t in g:
            t.div_(step.scale.to(t.device, t.dtype))
    stepped(g, p, m, v, AdamStep(*hyper))
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


def average(g: Tensor, m: Tensor, v: Tensor, b1: float, b2: float) -> None:
    """Update both moments with a gradient, in place."""
    m.lerp_(g.to(m.dtype), 1 - b1)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)


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
    total: Tree


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

    def init(params: Tree) -> SumState:
        total = moments(params)
        return SumState(0, each(lambda t: t + start, total) if start else total)

    def rule(count: int, rate: float) -> Callable[..., Tensor]:
        size = rate / (1 + (count - 1) * lr_decay)

        def step(g: Tensor, t: Tensor, *p: Tensor) -> Tensor:
            g = g.add(p[0], alpha=weight_decay) if p else g
            root = t.addcmul_(g, g).sqrt().add_(eps)
            return g / root * -size

        return step

    def kernel(grads: Tree, state: SumState, params: Tree, step: Step, rate: float) -> bool:
        g, p, t = pieces(grads, params, state.total)
        how = {"lr": rate, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        return fused("adagrad", (p, g, t), step, state.count + 1, **how, maximize=False)

    return elementwise(
        "adagrad", init, lr, rule, moments=("total",), weights=bool(weight_decay), kernel=kernel
    )


class RmsState(NamedTuple):
    """Steps taken, the running mean squares, the running means (``centered``), and the momentum."""

    count: int
    nu: Tree
    mean: Tree
    trace: Tree


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

    def init(params: Tree) -> RmsState:
        nu = moments(params)
        return RmsState(
            0, nu, zeros_like(nu) if centered else (), zeros_like(nu) if momentum else ()
        )

    def rule(count: int, rate: float) -> Callable[..., Tensor]:
        def step(g: Tensor, v: Tensor, *more: Tensor) -> Tensor:
            g = g.add(more[-1], alpha=weight_decay) if weight_decay else g
            root = v.mul_(decay).addcmul_(g, g, value=1 - decay)
            if centered:
                mean = more[0].lerp_(g.to(more[0].dtype), 1 - decay)
                root = v.addcmul(mean, mean, value=-1)
            way = g / root.sqrt().add_(eps)
            if momentum:
                way = more[1 if centered else 0].mul_(momentum).add_(way)
            return way * -rate

        return step

    kept = ["nu", *(["mean"] if centered else []), *(["trace"] if momentum else [])]
    return elementwise("rmsprop", init, lr, rule, moments=kept, weights=bool(weight_decay))


# ---------------------------------------------------------------- one running trace: SGD and Lion


class TraceState(NamedTuple):
    """Steps taken and a running trace of gradients."""

    count: int
    trace: Tree


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

    def init(params: Tree) -> TraceState:
        return TraceState(0, moments(params) if momentum else ())

    def rule(count: int, rate: float) -> Callable[..., Tensor]:
        def step(g: Tensor, *more: Tensor) -> Tensor:
            g = g.add(more[-1], alpha=weight_decay) if weight_decay else g
            if not momentum:
                return g * -rate
            trace = more[0].mul_(momentum).add_(g)
            return (g + trace * momentum if nesterov else trace) * -rate

        return step

    kept = ["trace"] if momentum else []

    def kernel(grads: Tree, state: TraceState, params: Tree, step: Step, rate: float) -> bool:
        g, p, *trace = pieces(grads, params, *(getattr(state, name) for name in kept))
        how = {"lr": rate, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        more = {"dampening": 0.0, "maximize": False, "is_first_step": False}
        return fused("sgd", (p, g, *trace), step, state.count + 1, **how, **more)

    return elementwise(
        "sgd", init, lr, rule, moments=kept, weights=bool(weight_decay), kernel=kernel
    )


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

    def init(params: Tree) -> TraceState:
        return TraceState(0, moments(params))

    def rule(count: int, rate: float) -> Callable[..., Tensor]:
        def step(g: Tensor, m: Tensor, *p: Tensor) -> Tensor:
            sign = m.lerp(g.to(m.dtype), 1 - b1).sign_()
            m.lerp_(g.to(m.dtype), 1 - b2)
            return (sign.add_(p[0], alpha=weight_decay) if p else sign).mul_(-rate)

        return step

    return elementwise("lion", init, lr, rule, moments=("trace",), weights=bool(weight_decay))


# ---------------------------------------------------------------- LAMB


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

    def init(params: Tree) -> MomentState:
        mu = moments(params)
        return MomentState(0, mu, zeros_like(mu))

    def direction(count: int) -> Callable[..., Tensor]:
        size, root = 1 - b1**count, (1 - b2**count) ** 0.5

        def of(m: Tensor, v: Tensor, p: Tensor) -> Tensor:
            u = (m / size).div_((v.sqrt() / root).add_(eps))
            return u.add_(p, alpha=weight_decay) if weight_decay else u

        return of

    def direct(
        grads: Tree, state: MomentState, params: Tree, way: Tree, rate: float
    ) -> tuple[MomentState, float]:
        of = direction(state.count + 1)
        for g, p, m, v, u in spans(*pieces(grads, params, state.mu, state.nu, way)):
            average(g, m, v, b1, b2)
            u.copy_(of(m, v, p))
        rows = zip(*norms(params, way), strict=True)
        scale_in_place(way, [w if w is None else _ratio(p, w) * -rate for p, w in rows])
        return state._replace(count=state.count + 1), 0.0

    def donate(grads: Tree, state: MomentState, params: Tree, step: Step) -> MomentState:
        ready(grads, "lamb", state.mu)
        first, *others = lists = pieces(grads, params, state.mu, state.nu)
        found = first.beside(*others)
        stepped = None
        if _own(others[0]) and _whole(params) and found.dtypes == {torch.float32}:
            stepped = apex("lamb", first[0])
        if stepped is None:
            return made.donate(grads, state, params, step)
        divide(grads, step)
        step.lr = at_step(lr, state.count)
        stepped(*lists, AdamStep(step.lr, b1, b2, eps, weight_decay, state.count + 1))
        torch.autograd.graph.increment_version(found.roots)
        return state._replace(count=state.count + 1)

    made: Any = by_directions(
        "lamb", "tensor", init, lr, direct, lambda grads, state: state.mu, moment="mu"
    )
    return under(backend, made._replace(donate=donate))


def _whole(params: Tree) -> bool:
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
