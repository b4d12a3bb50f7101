"""Different transforms for different parameters, selected by pattern, tree or function.

Parameters are identified by path, the keys from the root joined by dots.  Under ``zero`` only the
paths are left of the tree.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardlib.errors import RuleLint, ShardError, Unsupported, axes_text, similar
from shardlib.modules.rules import Pattern, matches
from shardlib.optim.norms import norms_known
from shardlib.optim.transform import (
    Step,
    Transform,
    check_transform,
    kept_whole,
    run_in_place,
    stateless,
    trait_of,
)
from shardlib.optim.trees import (
    EmptyState,
    State,
    Tree,
    each,
    is_bucketed,
    merged,
    named,
    only,
    settled,
    stages_around,
    trainable,
)

Mask = str | re.Pattern[str] | Sequence[str | re.Pattern[str]] | Callable[[Any], Any] | Any
"""Globs or regexes of the selected paths; or a tree of bools; or a function of the tree."""

Labels = Sequence[tuple[Pattern[Any], str]] | Callable[[Any], Any] | Any
"""(pattern, label) pairs, of which the first match counts; or a tree of labels; or a function of
the tree that returns one."""


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
    both = by_mask(mask, tx, stateless(lambda grads: grads), "masked")

    def init(params: Tree) -> State:
        return both.init(params).inner["on"]

    def update(grads: Tree, state: State, params: Tree = None) -> tuple[Any, Any]:
        given = PartitionState({"on": state, "off": EmptyState()})
        updates, after = both.update(grads, given, params)
        return updates, after.inner["on"]

    return both._replace(init=init, update=update, donate=None, check=None, heeds=False)


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

    split = partial(labels, which, op="partition")
    return _Partition(transforms, split, every=True).transform()


def by_mask(mask: Mask, on: Transform, off: Transform, op: str) -> Transform:
    """Apply one transform to the leaves of a mask, another to the rest; either may be empty."""

    words = {True: "on", False: "off"}

    def split(tree: Tree) -> dict[str, str]:
        return {n: words[found] for n, found in flags(mask, tree, op).items()}

    return _Partition({"on": on, "off": off}, split, every=False).transform()


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


class _Partition:
    """A transform for each label, on the tree of its leaves.

    ``labels_of``  from a tree to each path's label.
    ``every``      whether each transform must have a parameter.
    """

    def __init__(
        self,
        transforms: Mapping[str, Transform],
        labels_of: Callable[[Tree], dict[str, str]],
        *,
        every: bool,
    ) -> None:
        for tx in transforms.values():
            check_transform(tx, "partition")
        self.transforms = transforms
        self.labels_of = labels_of
        self.every = every

    def transform(self) -> Transform:
        """Return these methods as a transform."""
        every = self.transforms.values()
        return Transform(
            self.init,
            self.update,
            trait_of(*every),
            self.donate,
            check=self.check if any(t.check is not None for t in every) else None,
            groups=self.words,
            sink=self.sink if any(t.sink is not None for t in every) else None,
            # each label's transform, or what runs it
            heeds=True,
        )

    def split(self, tree: Tree) -> dict[str, str]:
        """Map each path to its label."""
        found = self.labels_of(tree)
        unknown = {v for v in found.values() if v not in self.transforms and v is not None}
        if unknown:
            raise ShardError(
                f"{', '.join(map(repr, sorted(unknown)))} is no label; there are "
                f"{', '.join(map(repr, self.transforms))}",
                op="partition",
                fix=f"which = [('*', {next(iter(self.transforms), 'all')!r})]",
            )
        return found

    def parts(self, tree: Tree, found: Mapping[str, str]) -> dict[str, Any]:
        """Map each label that has leaves to the tree of its leaves."""
        parts = {label: only(tree, found, label) for label in self.transforms}
        return {n: part for n, part in parts.items() if optree.tree_leaves(part)}

    def sink(self, params: Tree) -> Any:
        """Refuse a sink: a group's transform has buckets of its own."""
        found = self.split(params)
        over = []
        for label, t in self.transforms.items():
            part = only(trainable(params), found, label)
            over += [] if t.sink is None else [getattr(t.sink(part), "over", ())]
        split = any(t.shard is not kept_whole for t in self.transforms.values())
        how = f", pending={axes_text(next(filter(None, over), ()))}" if split else ""
        raise Unsupported(
            "each group has buckets of its own, so their gradients come as a tree",
            op="value_and_grad",
            fix=f"sl.value_and_grad(f{how})(params)",
        )

    def init(self, params: Tree) -> PartitionState:
        """Initialise the state of each transform that has parameters."""
        found = self.split(params)
        unused = sorted(set(self.transforms) - set(found.values()))
        if unused and self.every and not _lacks_names(params):
            raise ShardError(
                f"no parameter is labelled {', '.join(map(repr, unused))}",
                op="partition",
                fix=f"transforms = {{k: v for k, v in transforms.items() if k != {unused[0]!r}}}",
            )
        parts = self.parts(trainable(params), found)
        if len(parts) < len(self.transforms) and stages_around(params) is not None:
            _have_no_norm({n: t for n, t in self.transforms.items() if n not in parts})
        return PartitionState(
            {
                n: _begun(t, parts[n]) if n in parts else EmptyState()
                for n, t in self.transforms.items()
            }
        )

    def update(
        self, grads: Tree, state: PartitionState, params: Tree = None
    ) -> tuple[Any, PartitionState]:
        """Update each label's leaves by its transform."""
        found = self.split(grads if params is None else params)
        held = {} if params is None else self.parts(trainable(params), found)
        new, after = {}, dict(state.inner)
        for n, part in self.parts(grads, found).items():
            new[n], after[n] = self.transforms[n].update(part, state.inner[n], held.get(n))
        return merged(grads, found, new), PartitionState(after)

    def donate(
        self, grads: Tree, state: PartitionState, params: Tree, step: Step
    ) -> PartitionState:
        """Step each label's leaves in place."""
        after = dict(state.inner)
        with norms_known():
            for n, part, held in self.check(grads, state, params, step):
                mine = replace(step, beside=None, ask=False)
                after[n] = run_in_place(self.transforms[n], part, state.inner[n], held, mine)
                step.lr = mine.lr
                step.norm = mine.norm
        return PartitionState(after)

    def check(
        self, grads: Tree, state: PartitionState, params: Tree, step: Step
    ) -> list[tuple[str, Tree, Tree]]:
        """Check every label before any of them steps: on a device all step, or none.

        Returns (label, gradients, parameters) of each.
        """
        found = self.split(params)
        held = self.parts(trainable(params), found)
        rows = [(n, part, held[n]) for n, part in self.parts(grads, found).items()]
        for n, part, mine in rows:
            if (check := self.transforms[n].check) is not None:
                check(part, state.inner[n], mine, step)
        return rows

    def words(self, params: Tree) -> list[Any]:
        """Return each parameter's label, with its transform's own word if that has some."""
        found = self.split(params)
        grouped = {n: t.groups for n, t in self.transforms.items() if t.groups is not None}
        own = {n: words(params) for n, words in grouped.items()}
        return [
            (label, own[label][i]) if label in own else label
            for i, label in enumerate(found.values())
        ]


def _lacks_names(tree: Tree) -> bool:
    """Check whether a tree lacks names: frozen ones in buckets, those of other stages."""
    return is_bucketed(tree) or stages_around(tree) is not None


def _have_no_norm(absent: Mapping[str, Transform]) -> None:
    """Refuse labels without parameters in a stage, if their norms are of all stages."""
    for label, t in absent.items():
        if t.check is not None or t.trait == "norm":
            raise Unsupported(
                f"no parameter of this stage is labelled {label!r}, whose norm is of all stages",
                op="partition",
                fix="tx = sl.optim.chain(sl.optim.clip_by_global_norm(1.0), "
                'sl.optim.partition({"all": sl.optim.adamw(1e-3)}, [("*", "all")]))',
            )


def _begun(tx: Transform, part: Tree) -> State:
    """Initialise the state of a group's transform."""
    if tx.shard is not kept_whole and is_bucketed(tx.shard(part)):
        raise Unsupported(
            "stage 3 keeps parts of all parameters, and this is one group of them",
            op="zero",
            fix='tx = sl.optim.zero(sl.optim.partition({"all": sl.optim.adamw(1e-3)}, '
            '[("*", "all")]), axis="data", stage=3)',
        )
    return tx.init(part)


def set_to_zero() -> Transform:
    """Replace updates by zero, so that the parameters do not change.

    >>> tx = set_to_zero()
    >>> tx.update({"w": torch.ones(1)}, tx.init(None))[0]
    {'w': tensor([0.])}
    """

    tx = stateless(lambda grads: each(torch.zeros_like, settled(grads)))
    return tx._replace(donate=lambda grads, state, params, step: state, heeds=True)


# ---------------------------------------------------------------- selection of parameters


def flags(mask: Mask, tree: Tree, op: str) -> dict[str, bool]:
    """Map each path to whether the mask selects it.

    Raises: RuleLint if a pattern matches nothing, or a tree lacks a path.
    """
    known = named(tree)
    patterns = _patterns(mask)
    if patterns is None:
        fix = "mask = optree.tree_map(lambda p: p.ndim > 1, params)"
        return {n: bool(v) for n, v in _by_tree(mask, tree, known, op, fix).items()}
    _all_match(patterns, known, tree, op)
    return {n: any(matches(p, n, v) for p in patterns) for n, v in known.items()}


def labels(which: Labels, tree: Tree, op: str) -> dict[str, str]:
    """Map each path to its label.

    Raises: RuleLint if a pattern matches nothing, or no pattern matches a path.
    """
    known = named(tree)
    if not _is_pairs(which):
        return _by_tree(which, tree, known, op, "which = [('*', {!r})]")
    pairs: Any = which
    out = {}
    for n, v in known.items():
        found = next((label for p, label in pairs if matches(p, n, v)), None)
        if found is None:
            raise RuleLint(
                f"no pattern matches parameter {n!r}",
                op=op,
                fix=f"which = [*which, ('*', {pairs[-1][1]!r})]",
            )
        out[n] = found
    fix = "which = [r for i, r in enumerate(which) if i != {}]"
    _all_match([p for p, _ in pairs], known, tree, op, fix)
    return out


def _is_pairs(which: object) -> bool:
    return (
        isinstance(which, list | tuple)
        and bool(which)
        and all(isinstance(w, tuple) and len(w) == 2 for w in which)
        and all(isinstance(p, str | re.Pattern) or callable(p) for p, _ in which)
    )


def _patterns(mask: Any) -> Sequence[Pattern[Any]] | None:
    if isinstance(mask, str | re.Pattern):
        return [mask]
    several = isinstance(mask, list | tuple) and bool(mask)
    return list(mask) if several and all(isinstance(m, str | re.Pattern) for m in mask) else None


def _by_tree(which: Any, tree: Tree, known: Mapping[str, Any], op: str, fix: str) -> dict[str, Any]:
    """Return a tree of values, or the result of a function of the tree, path by path."""
    given = named(which(dict(known) if is_bucketed(tree) else tree) if callable(which) else which)
    missing = [n for n, v in known.items() if n not in given and isinstance(v, Tensor)]
    if missing:
        raise RuleLint(
            f"nothing is said of {', '.join(map(repr, missing[:4]))}",
            op=op,
            fix=fix.format(next((v for v in given.values() if v is not None), "rest")),
        )
    return {n: given.get(n) for n in known}


def _all_match(
    patterns: Sequence[Pattern[Any]], known: Mapping[str, Any], tree: Tree, op: str, fix: str = ""
) -> None:
    """Refuse a pattern that matches no parameter of a tree with all names.

    ``fix``  drops a pattern by its number; "": the nearest path replaces it.
    """
    for i, p in enumerate(() if _lacks_names(tree) else patterns):
        if not any(matches(p, n, v) for n, v in known.items()):
            near = similar(str(p), list(known), 1, 0.0)
            there = "".join(f"; there is {n!r}" for n in near)
            other = f"mask = {[*near, '*'][0]!r}"
            raise RuleLint(f"{p!r} matches no parameter{there}", op=op, fix=fix.format(i) or other)
