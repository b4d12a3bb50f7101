"""Different transforms for different parameters."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import optree
import torch

from shardlib.errors import ShardError, Unsupported
from shardlib.optim.buckets import Buckets
from shardlib.optim.clip import norms_known
from shardlib.optim.select import Labels, Mask, flags, labels, merged, named, only
from shardlib.optim.transform import (
    Step,
    Transform,
    check_transform,
    kept_whole,
    run_in_place,
    trait_of,
)
from shardlib.optim.trees import EmptyState, each, settled, trainable

__all__ = ["by_mask", "masked", "of_matrices", "partition", "set_to_zero"]


def masked(tx: Transform, mask: Mask) -> Transform:
    """Apply ``tx`` to the parameters that ``mask`` selects.

    ``mask``  a glob or regex of their paths or several; a tree of bools; a function of the tree.
    The other updates pass unchanged, as in optax: ``apply_updates`` would then ADD raw gradients.
    To freeze the other parameters, use ``partition`` with ``set_to_zero()``, or
    ``requires_grad_(False)``, for which no gradient is computed at all.

    >>> import shardlib as sl
    >>> tx = masked(sl.optim.scale(-1.0), "*.weight")
    >>> grads = {"a": {"weight": torch.ones(1), "bias": torch.ones(1)}}
    >>> tx.update(grads, tx.init(grads))[0]
    {'a': {'weight': tensor([-1.]), 'bias': tensor([1.])}}
    """

    check_transform(tx, "masked")

    def meant(tree: Any) -> dict[str, bool]:
        return flags(mask, tree, "masked")

    def init(params: Any) -> Any:
        return _begun(tx, only(trainable(params), meant(params), True))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        on = meant(grads)
        held = None if params is None else only(trainable(params), on, True)
        new, state = tx.update(only(grads, on, True), state, held)
        return merged(grads, on, {True: new, False: grads}), state

    def groups(params: Any) -> list[str]:
        return ["on" if on else "off" for on in meant(params).values()]

    def part(tree: Any) -> Any:
        return only(trainable(tree), meant(tree), True)

    return Transform(init, update, tx.trait, groups=groups, sink=_no_sink([(tx, part)]))


class PartitionState(NamedTuple):
    """The state of each label's transform."""

    inner: dict[str, Any]


def partition(transforms: Mapping[str, Transform], which: Labels) -> Transform:
    """Apply a transform to each group of parameters, with its own rate, decay, or none at all.

    ``transforms``  label -> the transform of its parameters.
    ``which``       (pattern, label) pairs, of which the first match counts; or a tree of labels; or
                    a function of the tree that returns one.
    A group's transform may be ``zero``: its gradients may be pending, also through a clip that
    comes before all groups.
    Raises: RuleLint if a parameter has no label, a label no transform, or a pattern or transform no
            parameter.

    >>> import shardlib as sl
    >>> tx = partition(
    ...     {"decay": sl.optim.adamw(1e-3), "rest": sl.optim.adamw(1e-3, weight_decay=0.0),
    ...      "hold": set_to_zero()},
    ...     [("wte.*", "hold"), ("*.bias", "rest"), ("*", "decay")],
    ... )
    >>> params = {n: torch.ones(2) for n in ("wte.weight", "h.weight", "h.bias")}
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> [round(1e3 * u[0].item(), 4) for u in updates.values()]
    [0.0, -1.01, -1.0]
    """

    return _partition(transforms, which, every=True)


def by_mask(mask: Mask, on: Transform, off: Transform, op: str) -> Transform:
    """Apply one transform to the leaves of a mask, another to the rest; either may be empty."""
    names = "on", "off"

    def which(tree: Any) -> Any:
        leaves, shape = optree.tree_flatten(tree, none_is_leaf=True)
        found = flags(mask, tree, op)
        return (
            optree.tree_unflatten(shape, [names[not found[n]] for n in named(tree)])
            if leaves
            else tree
        )

    return _partition(dict(zip(names, (on, off), strict=True)), which, every=False)


def of_matrices(
    core: Transform, rest: Transform | None, matrices: Mask, op: str, rate: float
) -> Transform:
    """Apply ``core`` to every parameter, or only to ``matrices``, with ``rest`` for the others."""
    if rest is None and matrices is None:
        return core
    if rest is None or matrices is None:
        raise ShardError(
            f"matrices= says which parameters {op} updates, and rest= what updates the others",
            op=op,
            fix=f'sl.optim.{op}({rate:g}, rest=sl.optim.adamw(3e-4), matrices="*.weight")',
        )
    return by_mask(matrices, core, rest, op)


def _partition(transforms: Mapping[str, Transform], which: Labels, *, every: bool) -> Transform:
    """Build the transform of groups; with ``every`` each transform must have a parameter."""
    for tx in transforms.values():
        check_transform(tx, "partition")

    def split(tree: Any) -> dict[str, str]:
        found = labels(which, tree, "partition")
        unknown = {v for v in found.values() if v not in transforms and v is not None}
        if unknown:
            raise ShardError(
                f"{', '.join(map(repr, sorted(unknown)))} is no label; there are "
                f"{', '.join(map(repr, transforms))}",
                op="partition",
                fix=f"which = [('*', {next(iter(transforms), 'all')!r})]",
            )
        return found

    def groups(tree: Any, found: Mapping[str, str]) -> dict[str, Any]:
        """Map each label that has leaves to the tree of its leaves."""
        parts = {label: only(tree, found, label) for label in transforms}
        return {n: part for n, part in parts.items() if optree.tree_leaves(part)}

    def init(params: Any) -> PartitionState:
        found = split(params)
        unused = set(transforms) - set(found.values())
        if unused and every and not isinstance(params, Buckets):  # buckets have no frozen leaves
            raise ShardError(
                f"no parameter is labelled {', '.join(map(repr, sorted(unused)))}",
                op="partition",
                fix="transforms = {k: v for k, v in transforms.items() if k != "
                f"{sorted(unused)[0]!r}}}",
            )
        parts = groups(trainable(params), found)
        return PartitionState(
            {n: _begun(t, parts[n]) if n in parts else EmptyState() for n, t in transforms.items()}
        )

    def update(grads: Any, state: PartitionState, params: Any = None) -> tuple[Any, PartitionState]:
        found = split(grads if params is None else params)
        held = {} if params is None else groups(trainable(params), found)
        new, after = {}, dict(state.inner)
        for n, part in groups(grads, found).items():
            new[n], after[n] = transforms[n].update(part, state.inner[n], held.get(n))
        return merged(grads, found, new), PartitionState(after)

    asking = {n: t.check for n, t in transforms.items() if t.check is not None}

    def asked(parts: Any, state: PartitionState, held: Any, step: Step) -> None:
        """Check every group before any of them steps: on a device all step, or none."""
        for n, part in parts.items():
            if n in asking:
                asking[n](part, state.inner[n], held[n], step)

    def donate(grads: Any, state: PartitionState, params: Any, step: Step) -> PartitionState:
        found = split(params)
        after, held = dict(state.inner), groups(trainable(params), found)
        parts = groups(grads, found)
        with norms_known() if asking else nullcontext():
            asked(parts, state, held, step)
            for n, part in parts.items():
                mine = Step(step.scale, sound=step.sound, skips=step.skips, guarded=step.guarded)
                after[n] = run_in_place(transforms[n], part, state.inner[n], held[n], mine)
                step.lr = step.lr if mine.lr is None else mine.lr
                step.norm = step.norm if mine.norm is None else mine.norm
        return PartitionState(after)

    def check(grads: Any, state: PartitionState, params: Any, step: Step) -> None:
        found = split(params)
        asked(groups(grads, found), state, groups(trainable(params), found), step)

    def words(params: Any) -> list[Any]:
        found = split(params)
        own = {n: t.groups(params) for n, t in transforms.items() if t.groups is not None}
        return [
            label if label not in own else (label, own[label][i])
            for i, label in enumerate(found.values())
        ]

    def part(label: str, tree: Any) -> Any:
        return only(trainable(tree), split(tree), label)

    trait = trait_of(*transforms.values())
    sink = _no_sink([(t, partial(part, label)) for label, t in transforms.items()])
    return Transform(
        init, update, trait, donate, check=check if asking else None, groups=words, sink=sink
    )


def _begun(tx: Transform, part: Any) -> Any:
    """Initialise the state of a group's transform."""
    if tx.shard is not kept_whole and isinstance(tx.shard(part), Buckets):
        raise Unsupported(
            "stage 3 keeps parts of all parameters, and this is one group of them",
            op="zero",
            fix='tx = sl.optim.zero(sl.optim.partition({"all": sl.optim.adamw(1e-3)}, '
            '[("*", "all")]), axis="data", stage=3)',
        )
    return tx.init(part)


def _no_sink(
    transforms: Sequence[tuple[Transform, Callable[[Any], Any]]],
) -> Callable[[Any], Any] | None:
    """Return a sink that refuses, if some group's transform has its own buckets."""

    def refuse(params: Any) -> Any:
        pending: tuple[str, ...] = ()
        for tx, part in transforms:
            mine = tx.sink(part(params)) if tx.sink is not None else None
            pending = pending or (() if mine is None else mine.pending)
        names = pending[0] if len(pending) == 1 else pending
        split = any(tx.shard is not kept_whole for tx, _ in transforms)
        how = f", pending={names!r}" if split else ""
        raise Unsupported(
            "each group has buckets of its own, so their gradients come as a tree",
            op="value_and_grad",
            fix=f"sl.value_and_grad(f{how})(params)",
        )

    return refuse if any(tx.sink is not None for tx, _ in transforms) else None


def set_to_zero() -> Transform:
    """Replace updates by zero, so that the parameters do not change.

    >>> tx = set_to_zero()
    >>> tx.update({"w": torch.ones(1)}, tx.init(None))[0]
    {'w': tensor([0.])}
    """

    def donate(grads: Any, state: EmptyState, params: Any, step: Step) -> EmptyState:
        return state

    return Transform(lambda params: EmptyState(), _zeros, "elementwise", donate)


def _zeros(grads: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
    return each(torch.zeros_like, settled(grads)), state
