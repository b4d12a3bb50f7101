"""Transforms made of transforms: one after another, for some leaves only, for none."""

from typing import Any

import optree
import torch

from shardlib.optim.schedules import Schedule
from shardlib.optim.transform import TRAITS, Step, Transform, divide, keep, run_in_place
from shardlib.optim.trees import EmptyState, each

__all__ = ["chain", "identity", "masked", "scale", "scale_by_schedule", "set_to_zero"]


def chain(*transforms: Transform) -> Transform:
    """Apply transforms in order.

    >>> import shardlib as sl
    >>> tx = chain(sl.optim.clip_by_global_norm(1.0), scale(-0.5))
    >>> state = tx.init(torch.zeros(2))
    >>> tx.update(torch.tensor([3.0, 4.0]), state)[0]
    tensor([-0.3000, -0.4000])
    """

    def init(params: Any) -> Any:
        return tuple(t.init(params) for t in transforms)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new = []
        for t, s in zip(transforms, state, strict=True):
            grads, s = t.update(grads, s, params)
            new.append(s)
        return grads, tuple(new)

    def donate(grads: Any, state: Any, params: Any, step: Step) -> Any:
        new = []
        for t, s in zip(transforms[:-1], state, strict=False):
            if t.rescale is not None:
                new.append(t.rescale(grads, s, params, step))
                continue
            divide(grads, step)
            grads, later = t.update(grads, s, params)
            new.append(keep(s, later))
        new += [run_in_place(t, grads, s, params, step) for t, s in [(transforms[-1], state[-1])]]
        return tuple(new)

    trait = max((t.trait for t in transforms), key=TRAITS.index, default="elementwise")
    return Transform(init, update, trait, donate if transforms else None)


def identity() -> Transform:
    """Updates are the gradients."""
    return Transform(lambda params: EmptyState(), lambda grads, state, params=None: (grads, state))


def scale(factor: float) -> Transform:
    """Multiply updates by a number."""
    return Transform(
        lambda params: EmptyState(), lambda g, s, p=None: (each(lambda x: x * factor, g), s)
    )


def scale_by_schedule(schedule: Schedule) -> Transform:
    """Multiply updates by ``schedule(step)``, steps counted from 0."""
    return Transform(
        lambda params: 0, lambda g, s, p=None: (each(lambda x: x * schedule(s), g), s + 1)
    )


def set_to_zero() -> Transform:
    """Updates of zero: what it is given stays as it is."""
    return Transform(
        lambda params: EmptyState(), lambda g, s, p=None: (each(torch.zeros_like, g), s)
    )


def masked(tx: Transform, mask: Any) -> Transform:
    """Apply ``tx`` where ``mask`` (a tree of bools, or a function of the tree) is true.

    The rest passes unchanged, as in optax: ``apply_updates`` would then ADD its raw gradients.  For
    leaves that are to stay as they are: ``chain(masked(adamw(1e-3), mask), masked(set_to_zero(),
    lambda t: optree.tree_map(operator.not_, mask)))``, or ``requires_grad_(False)``, for which no
    gradient is computed at all.

    >>> rest = {"w": False, "b": True}
    >>> tx = chain(masked(scale(-1.0), {"w": True, "b": False}), masked(set_to_zero(), rest))
    >>> grads = {"w": torch.ones(1), "b": torch.ones(1)}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([-1.]), 'b': tensor([0.])}
    """

    def chosen(tree: Any) -> dict[int, Any]:
        flags: list[Any] = optree.tree_leaves(_tree(mask, tree))
        leaves = optree.tree_leaves(tree, none_is_leaf=True)
        return {i: x for i, (x, on) in enumerate(zip(leaves, flags, strict=True)) if on}

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new, state = tx.update(chosen(grads), state, None if params is None else chosen(params))
        leaves, tree = optree.tree_flatten(grads, none_is_leaf=True)
        return optree.tree_unflatten(tree, [new.get(i, g) for i, g in enumerate(leaves)]), state

    return Transform(lambda params: tx.init(chosen(params)), update, "tree")


def _tree(mask: Any, tree: Any) -> Any:
    return mask(tree) if callable(mask) else mask
