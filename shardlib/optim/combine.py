"""Combinators of transforms: chains, and the smallest transforms."""

from collections.abc import Sequence
from typing import Any

from shardlib.errors import BadArgument
from shardlib.optim.hyperparam_checks import NUMBER, Schedule, ranged
from shardlib.optim.later import chosen
from shardlib.optim.transform import (
    Step,
    Transform,
    check_transform,
    divide,
    keep,
    kept_whole,
    run_in_place,
    trait_of,
)
from shardlib.optim.trees import EmptyState, each

__all__ = ["chain", "identity", "scale", "scale_by_schedule"]


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

    def init(self, params: Any) -> Any:
        """Initialise the state of each."""
        return tuple(t.init(params) for t in self.transforms)

    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """Pass the updates of each to the next."""
        new = []
        for t, s in zip(self.transforms, state, strict=True):
            grads, s = t.update(grads, s, params)
            new.append(s)
        return grads, tuple(new)

    def donate(self, grads: Any, state: Any, params: Any, step: Step) -> Any:
        """Run the last in place, on the updates of those before it."""
        new: list[Any] = []
        *before, (last, inner) = zip(self.transforms, state, strict=True)
        for t, s in before:
            if t.rescale is not None:
                new.append(t.rescale(grads, s, params, step))
                continue
            divide(grads, step)
            grads, later = t.update(grads, s, params)
            new.append(later)
        if last.check is not None and any(t.rescale is None for t, _ in before):
            last.check(grads, inner, params, step)
        # none refuses any more
        kept = [keep(s, chosen(step.sound, n, s)) for (_, s), n in zip(before, new, strict=True)]
        return *kept, run_in_place(last, grads, inner, params, step)

    def check(self, grads: Any, state: Any, params: Any, step: Step) -> None:
        """Check each, up to the first that changes gradients."""
        for t, s in zip(self.transforms, state, strict=True):
            if t.check is not None:
                t.check(grads, s, params, step)
            if t.rescale is None:  # it changes gradients, so later checks cannot run before it
                return

    def groups(self, params: Any) -> list[Any]:
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
    return Transform(
        lambda params: EmptyState(), lambda grads, state, params=None: (grads, state), "elementwise"
    )


@ranged("sl.optim.scale(0.1)", factor=NUMBER)
def scale(factor: float) -> Transform:
    """Multiply updates by a number.

    >>> import torch
    >>> tx, g = scale(-0.1), {"w": torch.ones(2)}
    >>> tx.update(g, tx.init(g))[0]["w"]
    tensor([-0.1000, -0.1000])
    """
    return Transform(
        lambda params: EmptyState(),
        lambda g, s, p=None: (each(lambda x: x * factor, g), s),
        "elementwise",
    )


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
