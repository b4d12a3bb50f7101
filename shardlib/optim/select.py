"""Selection of parameters by pattern, by a tree of values, or by a function of the tree.

Parameters are identified by path, the keys from the root joined by dots.  Under ``zero`` only the
paths are left of the tree.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.errors import RuleLint, similar
from shardlib.modules.patterns import Pattern, matches
from shardlib.optim.buckets import Buckets
from shardlib.optim.trees import each, names_of

__all__ = ["Labels", "Mask", "each_where", "flags", "labels", "merged", "named", "one_each", "only"]

Mask = str | re.Pattern[str] | Sequence[str | re.Pattern[str]] | Callable[[Any], Any] | Any
"""Globs or regexes of the selected paths; or a tree of bools; or a function of the tree."""

Labels = Sequence[tuple[Pattern[Any], str]] | Callable[[Any], Any] | Any
"""(pattern, label) pairs, of which the first match counts; or a tree of labels; or a function of
the tree that returns one."""


def named(tree: Any) -> dict[str, Any]:
    """Map each path to its leaf, None for a frozen one; for ``Buckets``, to tensors on meta.

    >>> sorted(named({"a": {"b": 1, "c": None}, "d": [2]}))
    ['a.b', 'a.c', 'd.0']
    """
    if isinstance(tree, Buckets):
        items = [tree.index.items[i] for b in tree.index for s in b.slots for i in s.leaves]
        return {item.path: torch.empty(item.whole, device="meta") for item in items}
    paths, leaves, _ = optree.tree_flatten_with_path(tree, none_is_leaf=True)
    return dict(zip(names_of(paths), leaves, strict=True))


def one_each(tree: Any) -> list[tuple[str, Any]]:
    """List (path, leaf), tied tensors once, in the order of ``totals``."""
    if not isinstance(tree, Buckets):
        return list(named(tree).items())
    known = named(tree)
    paths = [tree.index.items[s.leaves[0]].path for b in tree.index for s in b.slots]
    return [(path, known[path]) for path in paths]


def flags(mask: Mask, tree: Any, op: str) -> dict[str, bool]:
    """Map each path to whether the mask selects it.

    Raises: RuleLint if a pattern matches nothing, or a tree lacks a path.
    """
    known = named(tree)
    patterns = _patterns(mask)
    if patterns is None:
        return {n: bool(v) for n, v in _by_tree(mask, tree, known, op).items()}
    hits = {p: [n for n, v in known.items() if matches(p, n, v)] for p in patterns}
    for p, names in hits.items():
        # buckets of one group lack the others' paths
        if not names and not isinstance(tree, Buckets):
            raise _nothing(p, known, op)
    meant = {n for names in hits.values() for n in names}
    return {n: n in meant for n in known}


def labels(which: Labels, tree: Any, op: str) -> dict[str, str]:
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
    for p, _ in pairs:
        if not isinstance(tree, Buckets) and not any(matches(p, n, v) for n, v in known.items()):
            raise _nothing(p, known, op, _without(p, pairs))
    return out


def only(tree: Any, values: Mapping[str, Any], value: Any) -> Any:
    """Replace every leaf whose path has another value than ``value`` by None.

    For ``Buckets``, return the buckets whose parameters have it; they must agree within a bucket.
    """
    if isinstance(tree, Buckets):
        return tree.subset(tuple(n for n, v in _of_buckets(tree, values).items() if v == value))
    leaves, shape = optree.tree_flatten(tree, none_is_leaf=True)
    kept = [x if values[n] == value else None for n, x in zip(named(tree), leaves, strict=True)]
    return optree.tree_unflatten(shape, kept)


def merged(tree: Any, values: Mapping[str, Any], parts: Mapping[Any, Any]) -> Any:
    """Build a tree like ``tree``, taking each leaf from the part of its path's value."""
    if isinstance(tree, Buckets):
        return tree.like({n: parts[v][n] for n, v in _of_buckets(tree, values).items()})
    leaves, shape = optree.tree_flatten(tree, none_is_leaf=True)
    rows = {v: optree.tree_leaves(part, none_is_leaf=True) for v, part in parts.items()}
    out = [
        rows[values[n]][i] if values[n] in rows else x
        for i, (n, x) in enumerate(zip(named(tree), leaves, strict=True))
    ]
    return optree.tree_unflatten(shape, out)


def each_where(
    f: Callable[..., Tensor], values: Mapping[str, bool], first: Any, *others: Any, op: str
) -> Any:
    """Map over the leaves whose path has the value True; the others keep ``first``'s value."""
    if all(values.values()):
        return each(f, first, *others, op=op)
    done = each(f, *(only(t, values, True) for t in (first, *others)), op=op)
    return merged(first, values, {True: done, False: first})


def _of_buckets(tree: Buckets, values: Mapping[str, Any]) -> dict[str, Any]:
    """Map each bucket's name to the value of its parameters."""
    out = {}
    for bucket in tree.index:
        found = {values[tree.index.items[i].path] for slot in bucket.slots for i in slot.leaves}
        assert len(found) == 1, "Transform.groups keeps parameters of two values apart"
        out[bucket.name] = found.pop()
    return out


def _is_pairs(which: Any) -> bool:
    return (
        isinstance(which, list | tuple)
        and bool(which)
        and all(isinstance(w, tuple) and len(w) == 2 and _is_pattern(w[0]) for w in which)
    )


def _is_pattern(p: Any) -> bool:
    return isinstance(p, str | re.Pattern) or callable(p)


def _patterns(mask: Any) -> Sequence[Pattern[Any]] | None:
    if isinstance(mask, str | re.Pattern):
        return [mask]
    if (
        isinstance(mask, list | tuple)
        and mask
        and all(isinstance(m, str | re.Pattern) for m in mask)
    ):
        return list(mask)
    return None


def _without(pattern: Any, pairs: Any) -> str:
    """Format the fix that drops a pair, by its text, or by its number for a function."""
    if isinstance(pattern, str | re.Pattern):
        return f"which = [r for r in which if r[0] != {pattern!r}]"
    at = next(i for i, (p, _) in enumerate(pairs) if p is pattern)
    return f"which = [r for i, r in enumerate(which) if i != {at}]"


def _by_tree(
    which: Any, tree: Any, known: Mapping[str, Any], op: str, fix: str = ""
) -> dict[str, Any]:
    """Return a tree of values, or the result of a function of the tree, path by path."""
    given = named(
        which(dict(known) if isinstance(tree, Buckets) else tree) if callable(which) else which
    )
    missing = [n for n, v in known.items() if n not in given and isinstance(v, Tensor)]
    if missing:
        raise RuleLint(
            f"nothing is said of {', '.join(map(repr, missing[:4]))}",
            op=op,
            fix=fix.format(next((v for v in given.values() if v is not None), "rest"))
            or "mask = optree.tree_map(lambda p: p.ndim > 1, params)",
        )
    return {n: given.get(n) for n in known}


def _nothing(pattern: Any, known: Mapping[str, Any], op: str, fix: str = "") -> RuleLint:
    near = similar(str(pattern), list(known), 1, 0.0)
    return RuleLint(
        f"{pattern!r} matches no parameter" + (f"; there is {near[0]!r}" if near else ""),
        op=op,
        fix=fix or f"mask = {near[0] if near else '*'!r}",
    )
