"""Wrappers of a transform: accumulation over steps, changing hyperparameters, averages."""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import optree
import torch

from shardlib.optim.hyperparam_checks import COUNT, Range, ranged
from shardlib.optim.later import chosen
from shardlib.optim.transform import (
    Step,
    Transform,
    check_inner,
    check_transform,
    divide,
    handed_on,
    kept_whole,
    run_in_place,
)
from shardlib.optim.trees import (
    apply_updates,
    each,
    need,
    nothing,
    pieces,
    runs,
    settled,
    spans,
    trainable,
    wide,
    zeros_like,
)
from shardlib.tensor import ShardedTensor

__all__ = ["averaged", "ema", "inject_hyperparams", "multi_steps"]


class MultiState(NamedTuple):
    """Number of gradients added, their sum in fp32, and the transform's state."""

    mini: int
    total: Any
    inner: Any


class AroundZeroState(MultiState):
    """The same around ``zero``; the sum has the gradients' layout: ``()`` before the first."""

    __slots__ = ()


@ranged("tx = sl.optim.multi_steps(sl.optim.adamw(1e-3), 4)", every=COUNT)
def multi_steps(tx: Transform, every: int) -> Transform:
    """Update with the mean of ``every`` gradients; in between, updates are zero.

    Gradients are added in fp32 (fp64 ones in fp64).  Pending sums stay pending, so a cycle has one
    reduction, at its end.  Around ``zero``, and with pending gradients, ``state_dict`` cannot save
    a cycle that has begun.  The same by hand is ``+``:

        total = optree.tree_map(torch.add, total, grads)    # pending + pending: nothing moves

    Raises: ShardError if ``every`` is not positive.

    >>> import shardlib as sl
    >>> tx = multi_steps(sl.optim.scale(-1.0), 2)
    >>> params = {"w": torch.zeros(1)}
    >>> first, state = tx.update({"w": torch.tensor([1.0])}, tx.init(params), params)
    >>> second, state = tx.update({"w": torch.tensor([3.0])}, state, params)
    >>> first["w"].item(), second["w"].item()
    (0.0, -2.0)
    """

    check_transform(tx, "multi_steps")
    made = MultiState if tx.shard is kept_whole else AroundZeroState

    def init(params: Any) -> MultiState:
        return begun(zeros_like(trainable(params)), tx.init(params))

    def begun(zeros: Any, inner: Any) -> MultiState:
        """Return the state at the start of a cycle; ``zeros`` may have pending sums."""
        return made(0, settled(zeros) if made is MultiState else (), inner)

    def added(grads: Any, state: MultiState) -> Any:
        if not state.mini:
            return each(lambda g: g.to(wide(g.dtype), copy=True), grads)
        return each(lambda t, g: t + g, state.total, grads)

    def update(grads: Any, state: MultiState, params: Any = None) -> tuple[Any, MultiState]:
        total = added(grads, state)
        if state.mini + 1 < every:
            return nothing(grads, params), made(state.mini + 1, total, state.inner)
        mean = each(lambda t: t / every, total)
        updates, inner = tx.update(mean, state.inner, params)
        return updates, begun(each(torch.zeros_like, total), inner)

    def donate(grads: Any, state: MultiState, params: Any, step: Step) -> MultiState:
        divide(grads, step)
        total = state.total
        both = pieces(total, grads) if total != () else []  # refuses other parameters
        if state.mini or (both and _lie_alike(total, grads)):
            for t, g in zip(*both, strict=True):
                t.add_(g) if state.mini else t.copy_(g)
        else:
            total = added(grads, state)
        if state.mini + 1 < every:
            return made(state.mini + 1, total, state.inner)
        for t in pieces(total)[0]:
            t.div_(every)
        inner = run_in_place(tx, total, state.inner, params, step)
        for t in runs(total)[0]:  # between the parameters' parts, too: a divided 0 may be NaN
            t.zero_()
        return begun(total, inner)

    return Transform(init, update, tx.trait, donate, **handed_on(tx))


def _lie_alike(total: Any, grads: Any) -> bool:
    """Return whether gradients have the layouts of the sum."""
    (mine, tree), (theirs, other) = (optree.tree_flatten(t) for t in (total, grads))
    return tree == other and all(
        not isinstance(g, ShardedTensor) or g.sharding == t.sharding
        for t, g in zip(mine, theirs, strict=True)
    )


class InjectState(NamedTuple):
    """Steps taken, the hyperparameters from this step on, and the transform's state."""

    count: int
    hyperparams: dict[str, float]
    inner: Any


def inject_hyperparams(make: Callable[..., Transform]) -> Callable[..., Transform]:
    """Keep a transform's numeric arguments in its state, where they can be changed.

    Numbers in ``state.hyperparams`` keep their value until they are changed there; schedules are
    evaluated at every step and stored there.  Other arguments are passed on.

    >>> import shardlib as sl
    >>> tx = inject_hyperparams(sl.optim.sgd)(lr=0.5, momentum=0.9)
    >>> params = {"w": torch.ones(1)}
    >>> state = tx.init(params)
    >>> state = state._replace(hyperparams=state.hyperparams | {"lr": 0.1})
    >>> updates, state = tx.update({"w": torch.ones(1)}, state, params)
    >>> round(updates["w"].item(), 4), state.hyperparams
    (-0.1, {'lr': 0.1, 'momentum': 0.9})
    """
    signature = inspect.signature(make)

    def made(*args: Any, **kwargs: Any) -> Transform:
        given = signature.bind(*args, **kwargs).arguments
        changing: dict[str, Any] = {
            n: v for n, v in given.items() if callable(v) and _says(signature, n, "Callable[[int]")
        }
        numbers = {n: v for n, v in given.items() if type(v) in (int, float)}
        fixed = {n: float(v) for n, v in numbers.items() if _says(signature, n, "float")}

        @lru_cache(maxsize=1)
        def of(*numbers: tuple[str, float]) -> Transform:
            return make(**(given | dict(numbers)))

        def at(count: int, known: dict[str, float]) -> tuple[Transform, dict[str, float]]:
            """Return the transform of these numbers, and the numbers."""
            now = known | {n: f(count) for n, f in changing.items()}
            return of(*now.items()), now

        def init(params: Any) -> InjectState:
            tx, numbers = at(0, fixed)
            return InjectState(0, numbers, tx.init(params))

        def update(grads: Any, state: InjectState, params: Any = None) -> tuple[Any, InjectState]:
            tx, numbers = at(state.count, state.hyperparams)
            updates, inner = tx.update(grads, state.inner, params)
            return updates, InjectState(state.count + 1, numbers, inner)

        def donate(grads: Any, state: InjectState, params: Any, step: Step) -> InjectState:
            tx, numbers = at(state.count, state.hyperparams)
            inner = run_in_place(tx, grads, state.inner, params, step)
            return InjectState(state.count + 1, numbers, inner)

        first = at(0, fixed)[0]
        return Transform(
            init, update, first.trait, donate, check=check_inner(first), **handed_on(first)
        )

    return made


def _says(signature: inspect.Signature, name: str, kind: str) -> bool:
    """Return whether a parameter's annotation contains ``kind``, or is missing."""
    note = signature.parameters[name].annotation
    return note is inspect.Parameter.empty or kind in str(note)


class EmaState(NamedTuple):
    """Steps taken, and the running mean."""

    count: int
    mean: Any


@ranged("sl.optim.ema(0.99)")
def ema(decay: float, *, debias: bool = True) -> Transform:
    """Replace updates by their running mean.

    ``debias``  divide by ``1 - decay**steps``, as Adam does.
    For a mean of the parameters themselves see ``averaged``.

    >>> tx = ema(0.9)
    >>> updates, state = tx.update({"w": torch.ones(1)}, tx.init({"w": torch.ones(1)}))
    >>> round(updates["w"].item(), 4), round(state.mean["w"].item(), 4)
    (1.0, 0.1)
    """

    def init(params: Any) -> EmaState:
        return EmaState(0, zeros_like(trainable(params)))

    def update(grads: Any, state: EmaState, params: Any = None) -> tuple[Any, EmaState]:
        mean = each(lambda m, g: m.lerp(g.to(m.dtype), 1 - decay), state.mean, grads)
        count = state.count + 1
        by = 1 - decay**count if debias else 1.0
        return each(lambda g, m: m / by, grads, mean), EmaState(count, mean)

    return Transform(init, update, "elementwise")


class AveragedState(NamedTuple):
    """The mean of the parameters, and the transform's state."""

    mean: Any
    inner: Any


@ranged(
    "sl.optim.averaged(sl.optim.adamw(1e-3), 0.999)",
    decay=Range("at least 0 and at most 1", lambda n: 0 <= n <= 1),
)
def averaged(tx: Transform, decay: float = 0.999) -> Transform:
    """Keep a running mean of the parameters that ``tx`` updates, in fp32: ``state.mean``.

    ``mean = decay * mean + (1 - decay) * params`` after every step, starting with the initial
    parameters, as torch.optim.swa_utils.get_ema_multi_avg_fn.

    >>> import shardlib as sl
    >>> tx, params = averaged(sl.optim.sgd(1.0), 0.5), {"w": torch.ones(1)}
    >>> _, state = tx.update({"w": torch.ones(1)}, tx.init(params), params)
    >>> state.mean
    {'w': tensor([0.5000])}
    """

    check_transform(tx, "averaged")

    def init(params: Any) -> AveragedState:
        mean = each(lambda p: p.detach().to(wide(p.dtype), copy=True), trainable(params))
        return AveragedState(mean, tx.init(params))

    def update(grads: Any, state: AveragedState, params: Any = None) -> tuple[Any, AveragedState]:
        need(params, "averaged")
        updates, inner = tx.update(grads, state.inner, params)
        new = apply_updates(params, updates)
        mean = each(lambda m, p: m.lerp(p.to(m.dtype), 1 - decay), state.mean, new)
        return updates, AveragedState(mean, inner)

    def donate(grads: Any, state: AveragedState, params: Any, step: Step) -> AveragedState:
        pieces(state.mean, params)  # refuses other parameters before anything is written
        inner = run_in_place(tx, grads, state.inner, params, step)
        if not step.skipped:
            for m, p in spans(*pieces(state.mean, params)):
                if step.sound is None:
                    m.lerp_(p.to(m.dtype), 1 - decay)
                else:
                    m.copy_(chosen(step.sound, m.lerp(p.to(m.dtype), 1 - decay), m))
        return AveragedState(state.mean, inner)

    return Transform(init, update, tx.trait, donate, check=check_inner(tx), **handed_on(tx))
