"""Combinators and wrappers of transforms: chains, accumulation over steps, averages."""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import optree
import torch

from shardlib.dtypes import wider
from shardlib.errors import BadArgument
from shardlib.optim.transform import (
    Range,
    Schedule,
    Step,
    Transform,
    check_inner,
    check_transform,
    chosen,
    handed_on,
    keep,
    kept_whole,
    ranged,
    run_in_place,
    stateless,
    trait_of,
)
from shardlib.optim.trees import (
    State,
    Tree,
    each,
    need,
    nothing,
    pieces,
    settled,
    spans,
    trainable,
    zeros_like,
)
from shardlib.tensor import ShardedTensor


def chain(*transforms: Transform) -> Transform:
    """Apply transforms in order.

    >>> import torch, shardlib as sl
    >>> tx = chain(sl.optim.clip_by_global_norm(1.0), scale(-0.5))
    >>> state = tx.init(torch.zeros(2))
    >>> tx.update(torch.tensor([3.0, 4.0]), state)[0]
    tensor([-0.3000, -0.4000])
    """
    return _Chain(transforms).transform()


class _Chain:
    """Transforms applied in order; its state is the tuple of theirs."""

    def __init__(self, transforms: tuple[Transform, ...]) -> None:
        for t in transforms:
            check_transform(t, "chain")
        self.transforms = transforms

    def transform(self) -> Transform:
        """Return these methods as a transform."""
        every = self.transforms
        checked, grouped = (
            any(getattr(t, name) is not None for t in every) for name in ("check", "groups")
        )
        only_scaled = all(t.rescale is not None for t in every[:-1])
        return Transform(
            self.init,
            self.update,
            trait_of(*every),
            self.donate if every else None,
            check=self.check if checked else None,
            heeds=bool(every),
            groups=self.groups if grouped else None,
            halves=only_scaled and any(t.halves for t in every[-1:]),
            **_of_zero(every),
        )

    def init(self, params: Tree) -> State:
        """Initialise the state of each."""
        return tuple(t.init(params) for t in self.transforms)

    def update(self, grads: Tree, state: State, params: Tree = None) -> tuple[Any, Any]:
        """Pass the updates of each to the next."""
        new = []
        for t, s in zip(self.transforms, state, strict=True):
            grads, s = t.update(grads, s, params)
            new.append(s)
        return grads, tuple(new)

    def donate(self, grads: Tree, state: State, params: Tree, step: Step) -> State:
        """Run the last in place, on the updates of those before it."""
        new: list[Any] = []
        *before, (last, inner) = zip(self.transforms, state, strict=True)
        for t, s in before:
            if t.rescale is not None:
                new.append(t.rescale(grads, s, params, step))
                continue
            step.unscale(grads)
            grads, later = t.update(grads, s, params)
            new.append(later)
        if last.check is not None and any(t.rescale is None for t, _ in before):
            last.check(grads, inner, params, step)
        # none refuses any more
        kept = [keep(s, chosen(step.sound, n, s)) for (_, s), n in zip(before, new, strict=True)]
        return *kept, run_in_place(last, grads, inner, params, step)

    def check(self, grads: Tree, state: State, params: Tree, step: Step) -> None:
        """Check each, up to the first that changes gradients."""
        for t, s in zip(self.transforms, state, strict=True):
            if t.check is not None:
                t.check(grads, s, params, step)
            if t.rescale is None:
                # it changes gradients, so later checks cannot run before it
                return

    def groups(self, params: Tree) -> list[Any]:
        """Return per parameter the words of each."""
        words = [t.groups(params) for t in self.transforms if t.groups is not None]
        return list(zip(*words, strict=True))


def _of_zero(transforms: Sequence[Transform]) -> dict[str, Any]:
    """Return sink and shard of the transform that splits parameters or gradients, if one does."""
    sinks = (t.sink for t in transforms if t.sink is not None)
    shards = (t.shard for t in transforms if t.shard is not kept_whole)
    return {"sink": next(sinks, None), "shard": next(shards, kept_whole)}


def identity() -> Transform:
    """Return updates unchanged.

    >>> import torch
    >>> tx, g = identity(), {"w": torch.ones(2)}
    >>> tx.update(g, tx.init(g))[0]["w"]
    tensor([1., 1.])
    """
    return stateless(lambda grads: grads)


@ranged("sl.optim.scale(0.1)")
def scale(factor: float) -> Transform:
    """Multiply updates by a number.

    >>> import torch
    >>> tx, g = scale(-0.1), {"w": torch.ones(2)}
    >>> tx.update(g, tx.init(g))[0]["w"]
    tensor([-0.1000, -0.1000])
    """
    return stateless(lambda grads: each(lambda x: x * factor, grads))


def scale_by_schedule(schedule: Schedule) -> Transform:
    """Multiply updates by ``schedule(step)``, steps counted from 0.

    >>> import torch
    >>> tx, g = scale_by_schedule(lambda step: 1 / (1 + step)), {"w": torch.ones(2)}
    >>> state = tx.init(g)
    >>> for _ in range(3):
    ...     updates, state = tx.update(g, state)
    >>> updates["w"], state
    (tensor([0.3333, 0.3333]), 3)
    """
    if not callable(schedule):
        raise BadArgument(
            f"a schedule is a function of the step, not {schedule!r}",
            op="scale_by_schedule",
            fix="sl.optim.scale_by_schedule(sl.optim.linear(1.0, 0.0, 1000))",
        )
    return Transform(
        lambda params: 0,
        lambda g, s, p=None: (each(lambda x: x * schedule(s), g), s + 1),
        "elementwise",
    )


# ---------------------------------------------------------------- wrappers


class MultiState(NamedTuple):
    """Number of gradients added, their sum in fp32, and the transform's state."""

    mini: int
    total: Tree
    inner: State


class AroundZeroState(MultiState):
    """The same around ``zero``; the sum has the gradients' layout: ``()`` before the first."""

    __slots__ = ()


@ranged("tx = sl.optim.multi_steps(sl.optim.adamw(1e-3), 4)")
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

    def init(params: Tree) -> MultiState:
        return begun(zeros_like(trainable(params)), tx.init(params))

    def begun(zeros: Tree, inner: State) -> MultiState:
        """Return the state at the start of a cycle; ``zeros`` may have pending sums."""
        return made(0, settled(zeros) if made is MultiState else (), inner)

    def added(grads: Tree, state: MultiState) -> Tree:
        if not state.mini:
            return each(lambda g: g.to(wider(g.dtype), copy=True), grads)
        return each(lambda t, g: t + g, state.total, grads)

    def update(grads: Tree, state: MultiState, params: Tree = None) -> tuple[Any, MultiState]:
        total = added(grads, state)
        if state.mini + 1 < every:
            return nothing(grads, params), made(state.mini + 1, total, state.inner)
        mean = each(lambda t: t / every, total)
        updates, inner = tx.update(mean, state.inner, params)
        return updates, begun(each(torch.zeros_like, total), inner)

    def donate(grads: Tree, state: MultiState, params: Tree, step: Step) -> MultiState:
        step.unscale(grads)
        total = state.total
        # refuses other parameters
        both = pieces(total, grads) if total != () else []
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
        # padding too: a divided 0 may be NaN; around zero the sum is not kept
        for t in pieces(total)[0] if made is MultiState else []:
            t.zero_()
        return begun(total, inner)

    # of a run that was killed within a cycle the cycle begins again
    return Transform(init, update, tx.trait, donate, **handed_on(tx, begins_again=True))


def _lie_alike(total: Tree, grads: Tree) -> bool:
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
    inner: State


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

        def init(params: Tree) -> InjectState:
            tx, numbers = at(0, fixed)
            return InjectState(0, numbers, tx.init(params))

        def update(grads: Tree, state: InjectState, params: Tree = None) -> tuple[Any, InjectState]:
            tx, numbers = at(state.count, state.hyperparams)
            updates, inner = tx.update(grads, state.inner, params)
            return updates, InjectState(state.count + 1, numbers, inner)

        def donate(grads: Tree, state: InjectState, params: Tree, step: Step) -> InjectState:
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
    mean: Tree


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

    def init(params: Tree) -> EmaState:
        return EmaState(0, zeros_like(trainable(params)))

    def update(grads: Tree, state: EmaState, params: Tree = None) -> tuple[Any, EmaState]:
        mean = each(lambda m, g: m.lerp(g.to(m.dtype), 1 - decay), state.mean, grads)
        count = state.count + 1
        by = 1 - debias * decay**count
        return each(lambda g, m: m / by, grads, mean), EmaState(count, mean)

    return Transform(init, update, "elementwise")


class AveragedState(NamedTuple):
    """The mean of the parameters, and the transform's state."""

    mean: Tree
    inner: State


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

    def init(params: Tree) -> AveragedState:
        mean = each(lambda p: p.detach().to(wider(p.dtype), copy=True), trainable(params))
        return AveragedState(mean, tx.init(params))

    def update(grads: Tree, state: AveragedState, params: Tree = None) -> tuple[Any, AveragedState]:
        need(params, "averaged")
        updates, inner = tx.update(grads, state.inner, params)
        new = each(lambda p, u: (p + u).to(p.dtype), params, updates, op="apply_updates")
        mean = each(lambda m, p: m.lerp(p.to(m.dtype), 1 - decay), state.mean, new)
        return updates, AveragedState(mean, inner)

    def donate(grads: Tree, state: AveragedState, params: Tree, step: Step) -> AveragedState:
        # refuses other parameters before anything is written
        pieces(state.mean, params)
        inner = run_in_place(tx, grads, state.inner, params, step)
        if not step.skipped:
            for m, p in spans(*pieces(state.mean, params)):
                if step.sound is None:
                    m.lerp_(p.to(m.dtype), 1 - decay)
                else:
                    m.copy_(chosen(step.sound, m.lerp(p.to(m.dtype), 1 - decay), m))
        return AveragedState(state.mean, inner)

    return Transform(init, update, tx.trait, donate, check=check_inner(tx), **handed_on(tx))
