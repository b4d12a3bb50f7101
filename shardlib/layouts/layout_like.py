"""Layout arguments: the notations that are accepted, trees of them, and errors for the rest."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import optree

from shardlib.errors import LayoutSyntax, ShardError
from shardlib.layouts.dims import axis_sizes
from shardlib.layouts.layout import NEITHER, Layout, LayoutLike, taken
from shardlib.layouts.spec import is_spec

__all__ = ["LayoutTree", "as_layout", "is_layout", "per_leaf"]

LayoutTree: TypeAlias = LayoutLike | Mapping[str, "LayoutTree"] | Sequence["LayoutTree"] | None
"""A layout for every tensor of a tree, or a tree of layouts like the upper part of that tree."""


def is_layout(given: object) -> TypeGuard[LayoutLike]:
    """Check whether a value is one layout in any position: no class, no tensor, no plain tuple.

    A tuple such as ``("x", None)`` is one layout where one tensor's layout is expected, and a tree
    of layouts where a tuple of tensors is; ``sl.P("x", None)`` is one layout everywhere.

    >>> import torch
    >>> is_layout("x ..."), is_layout(torch.ones(2)), is_layout(("x", "y"))
    (True, False, False)
    """
    return isinstance(given, Layout | str) or _is_family(given) or is_spec(given)


def _is_family(given: object) -> bool:
    return not isinstance(given, type) and isinstance(getattr(given, "layout", None), Layout)


def as_layout(
    given: object,
    op: str,
    fix: str,
    *,
    shape: Sequence[int] = (1,),
    mesh: Any = None,
    weight: bool = False,
) -> Layout:
    """Convert any accepted notation to a Layout; for a family, its layout of activations.

    ``fix``     the line that errors suggest, with ``{}`` for the layout: ``"sl.shard(x, {})"``.
    ``shape``   shape of the tensor, which the layout in the fix must fit.
    ``mesh``    mesh whose axes DTensor placements refer to; None: the mesh in scope.
    ``weight``  whether it is for a weight: a family is refused, since it has layouts for both.
    Raises: LayoutSyntax, whose fix names the layout that was probably meant.

    >>> import shardlib as sl
    >>> as_layout(sl.Layout3D("x", "y", "z"), "shard", "sl.shard(x, {})")
    Layout('(x y) ... z')
    >>> as_layout(("x", None), "shard", "sl.shard(x, {})")
    Layout('x . ...')
    >>> try:
    ...     as_layout(("x", "."), "shard", "sl.shard(x, {})", shape=(4, 4), mesh={"x": 2})
    ... except LayoutSyntax as e:
    ...     print(e.fix)
    sl.shard(x, 'x .')
    """
    if isinstance(given, Layout):
        return given
    found = taken(given, mesh, op, fix)
    if found is not None:
        if not weight or not _is_family(given) or not hasattr(given, "weight"):
            return found
        act = ".act" if hasattr(given, "act") else ".layout"
        raise LayoutSyntax(
            f"{given} has a layout for activations, {act}, and one for weights, .weight: say which",
            op=op,
            mesh=mesh,
            fix=fix.format(f"{_ours(type(given))}{given}.weight"),
        )
    called = _is_uncalled(given)
    why = "call it with mesh axes" if called else NEITHER
    raise LayoutSyntax(
        f"{getattr(given, '__name__', given) if called else repr(given)} is no layout: {why}",
        op=op,
        mesh=mesh,
        fix=fix.format(_meant(given, called, tuple(shape), mesh)),
    )


def _is_uncalled(given: object) -> bool:
    """Check whether it is a family that was not called: a class, or a function of ours."""
    if isinstance(given, type):
        return hasattr(given, "layout")
    return inspect.isfunction(given) and given.__annotations__.get("return") is Layout


def _meant(given: object, called: bool, shape: tuple[int, ...], mesh: Any) -> str:
    """Write the layout that was probably meant, or the unsplit one if that does not fit."""
    names = list(axis_sizes(mesh)) if mesh is not None else list("xyzuvw")
    code, found = _made(given, names) if called else _joined(given)
    try:
        lay = as_layout(found, "", "").resolve(len(shape))
        if mesh is not None:
            lay.check(shape, mesh)
    except ShardError:
        return "'...'"
    return code


def _made(family: Any, names: Sequence[str]) -> tuple[str, LayoutLike]:
    """Call a family with the first axes of the mesh; return the code and the value."""
    asked = [p for p in inspect.signature(family).parameters.values() if p.default is p.empty]
    if len(asked) > len(names):
        return "'...'", "..."
    axes = names[: len(asked)]
    try:
        made = family(*axes)
        as_layout(made, "", "")
    except Exception:  # a user's own family, whose constructor takes more than axes
        return "'...'", "..."
    return f"{_ours(family)}{family.__name__}({', '.join(map(repr, axes))})", made


def _ours(family: Any) -> str:
    """Return the prefix of the family's name in a user's code."""
    return "sl." if family.__module__.startswith("shardlib.") else ""


def _joined(given: object) -> tuple[str, str]:
    """Join a tuple of tokens into a layout text."""
    tokens = given if isinstance(given, tuple | list) else (None,)
    text = " ".join("." if t is None else t for t in tokens if isinstance(t, str | None))
    if len(text.split()) < len(tokens) or text.split() == ["."]:
        text = "..."
    return repr(text), text


# ---------------------------------------------------------------- trees


def per_leaf(given: object, tree: object, op: str, fix: str) -> list[Any]:
    """Return a layout for each leaf of a tree, from one layout or a tree like its upper part.

    As JAX's prefixes: a layout in place of a subtree is used for every leaf of that subtree.
    Where the tree has a tuple or a list, a plain tuple is one layout for each of its children.
    ``fix``  the line that errors suggest, with ``{}`` for the layout.
    Raises: LayoutSyntax with the path at which the two trees differ.

    >>> per_leaf({"a": "x .", "b": "y"}, {"a": 1, "b": (2, {"c": 3})}, "shard", "{}")
    ['x .', 'y', 'y']
    >>> per_leaf(("x", None), {"a": 1, "b": 2}, "shard", "{}")
    [('x', None), ('x', None)]
    """
    return _spread(given, tree, (), op, fix)


def _spread(given: Any, node: Any, path: tuple[Any, ...], op: str, fix: str) -> list[Any]:
    spec = optree.tree_structure(node)
    if spec.is_leaf():
        return [given]
    count = spec.num_leaves
    if is_layout(given) or given is None or _is_uncalled(given):
        return [given] * count
    keys, children = spec.entries(), _below(node)
    below = _children(given, node, keys)
    if below is None:
        if (
            isinstance(given, tuple)
            and count
            and not isinstance(node, tuple | list)
            and taken(given)
        ):
            return [given] * count  # one PartitionSpec for all tensors of a dictionary
        raise LayoutSyntax(
            f"{given!r} is no layout, and no tree of layouts like {_outline(node, keys)}"
            + (f" at {'.'.join(map(str, path))}" if path else ""),
            op=op,
            fix=fix.format("'...'"),
        )
    return [
        layout
        for key, one, child in zip(keys, below, children, strict=True)
        for layout in _spread(one, child, (*path, key), op, fix)
    ]


def _children(given: Any, node: Any, keys: list[Any]) -> list[Any] | None:
    """Return a tree's entry for each child of a node; None if its structure differs."""
    if isinstance(node, Mapping):
        same = isinstance(given, Mapping) and set(given) == set(keys)
        return [given[k] for k in keys] if same else None
    if not keys:
        return [] if isinstance(given, tuple | list) and not given else None
    if isinstance(node, tuple | list):
        same = isinstance(given, tuple | list) and len(given) == len(keys)
        return list(given) if same else None
    return _below(given) if type(given) is type(node) else None


def _below(node: Any) -> list[Any]:
    """List a node's children, in the order of its structure's entries."""
    return optree.tree_leaves(node, is_leaf=lambda n: n is not node)


def _outline(node: Any, keys: Sequence[Any]) -> str:
    """Describe the top of a tree, for an error."""
    if isinstance(node, Mapping):
        return f"{{{', '.join(map(repr, keys))}}}"
    return f"{type(node).__name__} of {len(keys)}"
