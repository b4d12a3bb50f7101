"""What is taken where a layout is expected, and what is said where anything else is given."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

from shardlib.errors import LayoutSyntax, ShardError
from shardlib.layouts.block2d import Layout2D
from shardlib.layouts.col import Col
from shardlib.layouts.dims import axis_sizes
from shardlib.layouts.layout import Layout
from shardlib.layouts.replicated import Partial, Replicated
from shardlib.layouts.row import Row

__all__ = ["LayoutFamily", "LayoutLike", "as_layout", "is_layout"]


@runtime_checkable
class LayoutFamily(Protocol):
    """A value that says where a tensor lies, by its ``layout``.

    ``sl.Ring``, ``sl.Layout25D`` and ``sl.Layout3D`` are such values.  One of your own is taken
    wherever they are: nothing is registered, and ``sl.testing.check_layout`` proves it.  One that
    has a ``weight`` besides is for activations: a rule for a weight must say which of the two.

    >>> import torch, shardlib as sl
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Dealt:  # rows dealt in turn: four of them over two ranks as 0 2 | 1 3
    ...     axis: str
    ...     rounds: int = 2
    ...
    ...     @property
    ...     def layout(self) -> sl.Layout:
    ...         return sl.Layout.parse(f"({self.rounds} {self.axis}) ...")
    >>> isinstance(Dealt("x"), sl.extend.LayoutFamily)
    True
    >>> with sl.simulate(x=2):
    ...     print(sl.shard(torch.arange(4), Dealt("x")))
    ShardedTensor(i64[4@(2 x)] on x=2
    x=0: tensor([0, 2])
    x=1: tensor([1, 3]))
    """

    @property
    def layout(self) -> Layout:
        """Where the tensor lies."""
        ...


LayoutLike = Layout | str | LayoutFamily
"""A layout, its text, or a value that has one."""

_FUNCTIONS: tuple[Any, ...] = (Row, Col, Layout2D, Replicated, Partial)
"""Families without values of their own: each gives a Layout."""


def is_layout(given: object) -> TypeGuard[LayoutLike]:
    """Say whether ``as_layout`` takes it: no class, and no tensor, whose ``layout`` is torch's.

    >>> import torch
    >>> is_layout("x ..."), is_layout(torch.ones(2)), is_layout(LayoutFamily)
    (True, False, False)
    """
    return isinstance(given, Layout | str) or _of_family(given) is not None


def _of_family(given: object) -> Layout | None:
    """Return a family's layout, which is asked for once; None where it is no family."""
    found = None if isinstance(given, type) else getattr(given, "layout", None)
    return found if isinstance(found, Layout) else None


def as_layout(
    given: object,
    op: str,
    fix: str,
    *,
    shape: Sequence[int] = (1,),
    mesh: Any = None,
    weight: bool = False,
) -> Layout:
    """Read a layout, its text, or a family's layout of activations.

    ``fix``     what to write instead, with ``{}`` for the layout: ``"sl.shard(x, {})"``.
    ``shape``   what it is for, which the layout in the fix must fit.
    ``weight``  it is for a weight: a family is refused, since it has layouts for both.
    Raises: LayoutSyntax, whose fix says the layout that was meant where that can be told.

    >>> import shardlib as sl
    >>> as_layout(sl.Layout3D("x", "y", "z"), "shard", "sl.shard(x, {})")
    Layout('(x y) ... z')
    >>> try:
    ...     as_layout(("x", None), "shard", "sl.shard(x, {})", shape=(4, 4), mesh={"x": 2})
    ... except LayoutSyntax as e:
    ...     print(e.message, "--", e.fix)
    ('x', None) is no layout: a layout is its text, or a Layout -- sl.shard(x, 'x .')
    """
    if isinstance(given, Layout):
        return given
    if isinstance(given, str):
        return Layout.parse(given)
    if (found := _of_family(given)) is not None:
        if not weight or not isinstance(getattr(given, "weight", None), Layout):
            return found
        act = ".act" if hasattr(given, "act") else ".layout"
        raise LayoutSyntax(
            f"{given} has a layout for activations, {act}, and one for weights, .weight: say which",
            op=op,
            mesh=mesh,
            fix=fix.format(f"{_ours(type(given))}{given}.weight"),
        )
    called = any(given is f for f in _FUNCTIONS) or (
        isinstance(given, type) and hasattr(given, "layout")
    )
    why = "call it with mesh axes" if called else "a layout is its text, or a Layout"
    raise LayoutSyntax(
        f"{getattr(given, '__name__', given) if called else repr(given)} is no layout: {why}",
        op=op,
        mesh=mesh,
        fix=fix.format(_meant(given, called, tuple(shape), mesh)),
    )


def _meant(given: object, called: bool, shape: tuple[int, ...], mesh: Any) -> str:
    """Write the layout that was meant, or the whole tensor's where that does not fit."""
    names = list(axis_sizes(mesh)) if mesh is not None else list("xyzuvw")
    if called:
        code, found = _made(given, names)
    else:
        found = _text(given, len(shape), names)
        code = repr(found)
    if mesh is not None:
        try:
            as_layout(found, "", "").resolve(len(shape)).check(shape, mesh)
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
    except Exception:  # a family of one's own, which asks for more than axes
        return "'...'", "..."
    return f"{_ours(family)}{family.__name__}({', '.join(map(repr, axes))})", made


def _ours(family: Any) -> str:
    """Return what stands before its name in a user's code."""
    return "sl." if family.__module__.startswith("shardlib.") else ""


def _text(spec: object, ndim: int, names: Iterable[str]) -> str:
    """Write None, a JAX PartitionSpec or a list of DTensor placements as a layout's text."""
    from torch.distributed.tensor import Placement, Shard

    given = spec if isinstance(spec, tuple | list) else (spec,)
    if any(isinstance(p, Placement) for p in given):
        dims: list[list[str]] = [[] for _ in range(ndim)]
        pending = []
        for axis, p in zip(names, given, strict=False):
            if isinstance(p, Shard) and -ndim <= p.dim < ndim:
                dims[p.dim].append(axis)
            elif isinstance(p, Placement) and p.is_partial():
                pending.append(axis)
        tail = f" + sum({' '.join(pending)})" if pending else ""
    else:
        said = [e if isinstance(e, tuple | list) else (e,) for e in given]
        dims, tail = [[a for a in e if isinstance(a, str)] for e in said[:ndim]], ""
        dims += [[] for _ in range(ndim - len(dims))]
    if not any(dims):
        return "..." + tail
    return (
        " ".join("." if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in dims) + tail
    )
