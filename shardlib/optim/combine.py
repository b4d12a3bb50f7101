"""Combinators of transforms: chains, and the smallest transforms."""

from typing import Any

from shardlib.errors import BadArgument
from shardlib.optim.hyperparam_checks import NUMBER, ranged
from shardlib.optim.later import chosen
from shardlib.optim.schedules import Schedule
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
    for t in transforms:
        check_transform(t, "chain")

    def init(params: Any) -> Any:
        return tuple(t.init(params) for t in transforms)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new = []
        for t, s in zip(transforms, state, strict=True):
            grads, s = t.update(grads, s, params)
            new.append(s)
        return grads, tuple(new)

    def donate(grads: Any, state: Any, params: Any, step: Step) -> Any:
        new: list[Any] = []
        *before, (last, inner) = zip(transforms, state, strict=True)
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

    def check(grads: Any, state: Any, params: Any, step: Step) -> None:
        for t, s in zip(transforms, state, strict=True):
            if t.check is not None:
                t.check(grads, s, params, step)
            if t.rescale is None:  # it changes gradients, so later checks cannot run before it
                return

    def groups(params: Any) -> list[Any]:
        words = [t.groups(params) for t in transforms if t.groups is not None]
        return list(zip(*words, strict=True))

    grouped = any(t.groups is not None for t in transforms)
    only_scaled = all(t.rescale is not None for t in transforms[:-1])
    return Transform(
        init,
        update,
        trait_of(*transforms),
        donate if transforms else None,
        check=check if any(t.check is not None for t in transforms) else None,
        heeds=bool(transforms),
        groups=groups if grouped else None,
        halves=only_scaled and any(t.halves for t in transforms[-1:]),
        sink=next((t.sink for t in transforms if t.sink is not None), None),
        shard=next((t.shard for t in transforms if t.shard is not kept_whole), kept_whole),
    )


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
