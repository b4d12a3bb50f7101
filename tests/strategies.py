"""Random meshes, layouts and shapes, shared by the law tests."""

import math
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from shardlib.layouts import Dim, Layout

AXES = ("a", "b", "c", "d")


def examples(count: int) -> settings:
    """Draw so many examples in the suite, whose draws are the same on every run.

    Where a profile draws more or fewer than the suite (HYPOTHESIS_PROFILE=nightly), in proportion.
    """
    return settings(max_examples=count * settings.default.max_examples // 50)


@st.composite
def meshes(draw: Any, most: int = 24) -> dict[str, int]:
    """One to four axes, at most ``most`` ranks; sizes of one included."""
    mesh: dict[str, int] = {}
    for axis in AXES[: draw(st.integers(1, 4))]:
        left = most // math.prod(mesh.values())
        mesh[axis] = draw(st.integers(1, min(4, left)))
    return mesh


@st.composite
def layouts(
    draw: Any, ndim: int | None = None, special: bool = True, partial: bool = True
) -> Layout:
    """A layout of ``ndim`` dimensions (0 to 5 if None) over the axes a, b, c, d."""
    ndim = draw(st.integers(0, 5)) if ndim is None else ndim
    axes = draw(st.permutations(AXES))[: draw(st.integers(0, 4))]
    owners = [draw(st.integers(-1 if partial else 0, ndim - 1)) if ndim else -1 for _ in axes]
    dims = []
    for d in range(ndim):
        parts: tuple[Any, ...] = tuple(a for a, o in zip(axes, owners, strict=True) if o == d)
        order = "contiguous"
        if parts and special:
            kind = draw(st.sampled_from(["plain", "plain", "factor", "zigzag", "striped"]))
            if kind == "factor":
                at = draw(st.integers(0, len(parts) - 1))
                parts = (*parts[:at], draw(st.integers(2, 3)), *parts[at:])
            elif kind != "plain":
                order = kind
        dims.append(Dim(parts, order))
    pending = tuple(a for a, o in zip(axes, owners, strict=True) if o == -1) if partial else ()
    return Layout(tuple(dims), pending)


def only(layout: Layout, mesh: dict[str, int]) -> Layout:
    """The layout without the axes that a mesh lacks."""
    dims = []
    for d in layout.dims:
        parts = tuple(p for p in d.parts if isinstance(p, int) or p in mesh)
        while parts and isinstance(parts[-1], int):
            parts = parts[:-1]
        dims.append(Dim(parts, d.order if parts else "contiguous"))
    return Layout(tuple(dims), tuple(a for a in layout.partial if a in mesh))


@st.composite
def shape_for(
    draw: Any, chosen: list[Layout], mesh: dict[str, int], zero: bool = True
) -> tuple[int, ...]:
    """A shape that every one of the layouts divides."""
    shape = []
    for d in range(len(chosen[0].dims)):
        unit = 1
        for layout in chosen:
            dim = layout.dims[d]
            ways = math.prod(p if isinstance(p, int) else mesh[p] for p in dim.parts)
            unit = math.lcm(unit, ways * (2 if dim.order == "zigzag" else 1))
        shape.append(unit * draw(st.integers(0 if zero and draw(st.integers(0, 9)) == 0 else 1, 2)))
    return tuple(shape)


@st.composite
def spellings(draw: Any) -> Layout:
    """Every layout the text form can say, ``...`` and skews included."""
    if draw(st.integers(0, 4)) == 0:
        p, q, *rest = draw(st.permutations(AXES))
        partial = tuple(rest[: draw(st.integers(0, 2))])
        return Layout(skewed(draw, p, q), partial, draw(st.sampled_from([None, 0, 1, 2])))
    layout = draw(layouts())
    return Layout(layout.dims, layout.partial, draw(st.none() | st.integers(0, len(layout.dims))))


def skewed(draw: Any, row: str, col: str) -> tuple[Dim, Dim]:
    """The tokens of one of Cannon's operands, split over these axes."""
    plain = Dim((row,)), Dim((col,))
    either = (plain[0], Dim((col,), by=row)), (Dim((row,), by=col), plain[1])
    return draw(st.sampled_from(either))


@st.composite
def skewable(
    draw: Any, count: int, most: int, partial: bool
) -> tuple[list[Layout], dict[str, int]]:
    """Layouts of a matrix, at least one of them skewed, and
    a mesh with a square of two of its axes.
    """
    q = draw(st.integers(1, min(4, math.isqrt(most))))
    sizes = [q, q, *([draw(st.integers(1, most // q**2))] if draw(st.booleans()) else [])]
    names = draw(st.permutations(AXES[: len(sizes)]))
    mesh = {a: dict(zip(names, sizes, strict=True))[a] for a in AXES[: len(sizes)]}
    which = [draw(st.integers(0, 2)) > 0 for _ in range(count)]
    which[draw(st.integers(0, count - 1))] = True
    chosen = []
    for skew in which:
        plain = only(draw(layouts(2, partial=partial)), mesh)
        row, col = draw(st.permutations(names[:2]))
        pending = tuple(a for a in plain.partial if a not in (row, col))
        twisted = Layout(skewed(draw, row, col), pending)
        chosen.append(twisted if skew else plain)
    return chosen, mesh


@st.composite
def placed(
    draw: Any,
    count: int = 1,
    most: int = 24,
    most_elements: int = 3000,
    skew: bool = False,
    **kwargs: Any,
) -> Any:
    """(layouts..., shape, mesh): layouts of one rank and a shape all of them divide.

    ``skew``  one case in four is of matrices in Cannon's skew.
    """
    if skew and draw(st.integers(0, 3)) == 0:
        chosen, mesh = draw(skewable(count, most, kwargs.get("partial", True)))
        ndim = 2
    else:
        mesh, ndim = draw(meshes(most)), draw(st.integers(0, 5))
        chosen = [only(draw(layouts(ndim, **kwargs)), mesh) for _ in range(count)]
    shape = draw(shape_for(chosen, mesh))
    while math.prod(shape) > most_elements:
        big = max(range(ndim), key=lambda d: shape[d])
        chosen = [Layout((*c.dims[:big], Dim(), *c.dims[big + 1 :]), c.partial) for c in chosen]
        shape = (*shape[:big], 1, *shape[big + 1 :])
    return (*chosen, shape, mesh)
