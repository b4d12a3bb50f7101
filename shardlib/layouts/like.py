"""What is taken where a layout is expected, and what is said where anything else is given."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from shardlib.errors import LayoutSyntax, ShardError
from shardlib.layouts.block2d import Layout2D
from shardlib.layouts.col import Col
from shardlib.layouts.cube3d import Layout3D
from shardlib.layouts.depth25d import Layout25D
from shardlib.layouts.dims import axis_sizes
from shardlib.layouts.layout import Layout
from shardlib.layouts.replicated import Partial, Replicated
from shardlib.layouts.ring import Ring
from shardlib.layouts.row import Row

__all__ = ["LayoutLike", "as_layout"]

LayoutLike = Layout | str | Ring | Layout25D | Layout3D
"""A layout, its text, or a family of layouts that has one for activations."""

_FAMILIES: tuple[Any, ...] = (Row, Col, Layout2D, Layout25D, Layout3D, Ring, Replicated, Partial)


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

    >>> as_layout(Layout3D("x", "y", "z"), "shard", "sl.shard(x, {})")
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
    if isinstance(given, Ring):
        return given.layout
    if isinstance(given, Layout25D | Layout3D):
        if not weight:
            return given.act
        raise LayoutSyntax(
            f"{given} has a layout for activations, .act, and one for weights, .weight: say which",
            op=op,
            mesh=mesh,
            fix=fix.format(f"sl.{given}.weight"),
        )
    called = any(given is f for f in _FAMILIES)
    why = "call it with mesh axes" if called else "a layout is its text, or a Layout"
    raise LayoutSyntax(
        f"{getattr(given, '__name__', given) if called else repr(given)} is no layout: {why}",
        op=op,
        mesh=mesh,
        fix=fix.format(_meant(given, called, tuple(shape), mesh)),
    )


def _meant(given: object, called: bool, shape: tuple[int, ...], mesh: Any) -> str:
    """Code for the layout that was meant, or for the whole tensor where that does not fit it."""
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
    """A family called with the first axes of the mesh, as code and as a value."""
    asked = [p for p in inspect.signature(family).parameters.values() if p.default is p.empty]
    if len(asked) > len(names):
        return "'...'", "..."
    axes = names[: len(asked)]
    return f"sl.{family.__name__}({', '.join(map(repr, axes))})", family(*axes)


def _text(spec: object, ndim: int, names: Iterable[str]) -> str:
    """What None, a JAX PartitionSpec or a list of DTensor placements says, in a layout's text."""
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
