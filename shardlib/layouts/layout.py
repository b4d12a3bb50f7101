"""Layout: for each tensor dimension, the mesh axes that split it.

Text form, one token per dimension: ``.`` not split, ``x`` split over axis x, ``(d x)`` over d
and within that over x (major first), ``(3 y)`` three groups each split over y (a fused qkv),
``zigzag(s)``, ``striped(s)``, ``documents(s; 0 5 9)`` and ``runs(s; 0:4 8:12 | 4:8)`` other orders
of the positions (``zigzag(8 s)``: eight groups, each in that order), ``...`` any number of unsplit
dimensions; then ``+ sum(z)`` for a pending sum over z and ``skew a`` / ``skew b`` for Cannon's
pre-skewed operands.

text.py reads and writes the text, dims.py computes the positions of a rank under each token, divisibility.py
checks divisibility, placements.py converts DTensor's placements, spec.py other layout notations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from shardlib.errors import (
    AxisReused,
    ImplicitCommunication,
    LayoutSyntax,
    RankMismatch,
    ShardError,
)
from shardlib.layouts.dims import WHOLE, Dim, axis_sizes, indices, skewed
from shardlib.layouts.divisibility import block_shape, check_axes, check_sizes
from shardlib.layouts.placements import from_placements, placements
from shardlib.layouts.reshard import ReshardPlan
from shardlib.layouts.spec import Names, PartitionSpecLike, PlacementLike, from_spec
from shardlib.layouts.text import read, written
from shardlib.mesh import coordinates, scope

__all__ = ["Layout", "LayoutFamily", "LayoutLike", "taken", "the_one"]


@dataclass(frozen=True)
class Layout:
    """One token per tensor dimension, the axes of a pending sum, and Cannon's skew.

    >>> L = Layout.parse("(d x) ... y + sum(z)")
    >>> L.axes, L.partial
    (('d', 'x', 'y'), ('z',))
    >>> L.local_shape((8, 5, 6), {"d": 2, "x": 2, "y": 2, "z": 3})
    (2, 5, 3)
    """

    dims: tuple[Dim, ...] = ()
    partial: tuple[str, ...] = ()
    skew: str = ""
    ellipsis: int | None = None
    # mesh axes that split a dimension, in order
    axes: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "partial", tuple(sorted(self.partial)))
        object.__setattr__(self, "axes", tuple(a for d in self.dims for a in d.axes))
        every = self.axes + self.partial
        if len(set(every)) < len(every):
            raise _reused(self)
        object.__setattr__(self, "_hash", hash((self.dims, self.partial, self.skew, self.ellipsis)))

    def __hash__(self) -> int:
        return self._hash

    # ------------------------------------------------------------ text

    @staticmethod
    def parse(text: str) -> "Layout":
        """Read the text form.  Raises: LayoutSyntax, AxisReused."""
        return _parsed(text)

    def __str__(self) -> str:
        return written((self.dims, self.partial, self.skew, self.ellipsis))

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"

    # ------------------------------------------------------------ shape and place

    def resolve(self, ndim: int) -> "Layout":
        """Return the layout of a tensor with ``ndim`` dimensions: ``...`` written out.

        Raises: RankMismatch.
        """
        return self if self.ellipsis is None and len(self.dims) == ndim else _resolve(self, ndim)

    def check(self, shape: Sequence[int], mesh: Any, *, op: str = "layout") -> None:
        """Raise if a tensor of this shape cannot be placed so on this mesh."""
        _check(self, tuple(shape), tuple(axis_sizes(mesh).items()), op)

    def local_shape(self, shape: Sequence[int], mesh: Any, *, pad: bool = False) -> tuple[int, ...]:
        """Return the shape of each rank's block; with ``pad`` uneven dimensions are rounded up."""
        return _local_shape(self, tuple(shape), tuple(axis_sizes(mesh).items()), pad)

    def indices(
        self, shape: Sequence[int], mesh: Any, coord: Mapping[str, int]
    ) -> tuple[Sequence[int], ...]:
        """List per dimension the global positions that the rank at ``coord`` holds."""
        sizes = axis_sizes(mesh)
        me = self.resolve(len(shape))
        me.check(shape, sizes)
        return indices(me.dims, me.skew, shape, sizes, coord)

    def slices(self, shape: Sequence[int], mesh: Any, coord: Mapping[str, int]) -> tuple[Any, ...]:
        """Return ``indices`` as slices where they are contiguous or strided, else as lists."""
        return tuple(_slice(i) for i in self.indices(shape, mesh, coord))

    # ------------------------------------------------------------ algebra

    @property
    def T(self) -> "Layout":
        """The layout of the tensor with its dimensions reversed."""
        if self.ellipsis is None:
            return self.transpose(*reversed(range(len(self.dims))))
        return Layout(
            self.dims[::-1], self.partial, _SKEW_T[self.skew], len(self.dims) - self.ellipsis
        )

    def transpose(self, *perm: int) -> "Layout":
        """Return the layout of the tensor permuted: its dimension i is the old ``perm[i]``."""
        me = self.resolve(len(perm))
        if sorted(p + len(perm) * (p < 0) for p in perm) != list(range(len(perm))):
            raise ShardError(
                f"{perm} is no permutation",
                op="transpose",
                fix=f"layout.transpose{tuple(range(len(perm)))}",
            )
        skew = me.skew
        if skew and [p % len(perm) for p in perm] != list(range(len(perm))):
            skew = _SKEW_T[skew]
        return Layout(tuple(me.dims[p] for p in perm), me.partial, skew)

    def __mul__(self, other: "LayoutLike") -> "Layout":
        """Return the product over disjoint axes: each dimension split by both layouts.

        It commutes and associates: where both split one dimension, the axes nest in alphabetical
        order.  Choose another nesting with ``refine``.
        """
        a, b = _aligned(self, _operand(other), "product")
        return _combined(
            a, b, lambda p, q: Dim(tuple(sorted(p.parts + q.parts, key=str))), "product"
        )

    def refine(self, other: "LayoutLike") -> "Layout":
        """Split every block further: this layout's axes major, ``other``'s minor."""
        a, b = _aligned(self, _operand(other), "refine")
        return _combined(a, b, lambda p, q: Dim(p.parts + q.parts), "refine")

    def __and__(self, other: "LayoutLike") -> "Layout":
        """Return the finest layout that both refine: their common leading parts."""
        a, b = _aligned(self, _operand(other), "&")
        dims = []
        for p, q in zip(a.dims, b.dims, strict=True):
            if p == q:
                dims.append(p)
                continue
            same = 0
            if p.order == q.order == "contiguous":
                while same < min(len(p.parts), len(q.parts)) and p.parts[same] == q.parts[same]:
                    same += 1
            parts = p.parts[:same]
            while parts and isinstance(parts[-1], int):
                parts = parts[:-1]
            dims.append(Dim(parts))
        skew = a.skew if a.skew == b.skew and tuple(dims) == a.dims else ""
        if (a.skew or b.skew) and not skew:
            dims = [WHOLE] * len(dims)
        return Layout(tuple(dims), tuple(sorted(set(a.partial) & set(b.partial))), skew, a.ellipsis)

    def __le__(self, other: "LayoutLike") -> bool:
        """Check whether this is at least as split: its blocks are inside blocks of ``other``."""
        other = _operand(other)
        try:
            return (self & other) == _aligned(other, self, "<=")[0]
        except RankMismatch:
            return False

    def equivalent(self, other: "LayoutLike", shape: Sequence[int], mesh: Any) -> bool:
        """Check whether every rank holds the same elements in the same order under both."""
        sizes = axis_sizes(mesh)
        a, b = self.resolve(len(shape)), _operand(other, mesh).resolve(len(shape))
        if {p for p in a.partial if sizes[p] > 1} != {p for p in b.partial if sizes[p] > 1}:
            return False
        if 0 in shape:
            return a.local_shape(shape, sizes) == b.local_shape(shape, sizes)
        return all(
            [list(i) for i in a.indices(shape, sizes, c)]
            == [list(i) for i in b.indices(shape, sizes, c)]
            for c in coordinates(sizes)
        )

    def __matmul__(self, other: "LayoutLike") -> "Layout":
        """Return the layout of the matrix product of [..., m, k] and [k, n] or [..., k, n].

        A contraction split the same way in both leaves ``+ sum(axes)``; split in different
        ways it would need communication that no local product can do.
        Raises: ImplicitCommunication.
        """
        return _product_layout(self, _operand(other))

    def __rshift__(self, other: "LayoutLike") -> ReshardPlan:
        """Plan the redistribution from this layout to ``other``: steps, bytes, peak."""
        return ReshardPlan(self, _operand(other))

    @property
    def bare(self) -> "Layout":
        """The layout without its pending sums."""
        return Layout(self.dims, (), self.skew, self.ellipsis) if self.partial else self

    # ------------------------------------------------------------ DTensor

    def placements(self, mesh: Any) -> tuple[Any, ...]:
        """Write DTensor placements, one per mesh axis.

        Raises: NotExpressible.
        """
        fields = self.dims, self.partial, self.skew, self.ellipsis
        return placements(fields, axis_sizes(mesh))

    @staticmethod
    def from_dtensor(t: Any) -> "Layout":
        """Return the layout of a DTensor on a named mesh.  Raises: NotExpressible, MeshError."""
        return Layout(*from_placements(t.placements, t.ndim, axis_sizes(t.device_mesh)))


@runtime_checkable
class LayoutFamily(Protocol):
    """Protocol of a value that has a ``layout``.

    ``sl.Ring``, ``sl.Layout25D`` and ``sl.Layout3D`` are such values.  A class of your own is
    accepted wherever they are: nothing is registered, and ``sl.testing.check_layout`` tests it.
    One that also has a ``weight`` is for activations: a rule for a weight must name one of the two.

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
        """The layout of the tensor."""
        ...


LayoutLike = (
    Layout
    | str
    | LayoutFamily
    | Names
    | PartitionSpecLike
    | PlacementLike
    | Sequence[PlacementLike]
)
"""A layout, its text, a value with a ``layout``; or the notation of JAX and DTensor: PartitionSpec,
a tuple like it, placements."""


def taken(
    given: object, mesh: Any = None, op: str = "layout", fix: str = "sl.Layout.parse({})"
) -> Layout | None:
    """Convert any accepted notation to a Layout; None for anything else.

    ``mesh``     mesh whose axes DTensor placements refer to; None: the mesh in scope.
    ``op, fix``  the verb in errors, and the line they suggest, with ``{}`` for the layout.
    Raises: LayoutSyntax for a text that cannot be read, or placements of another mesh.

    >>> taken(("x", None)), taken("x ."), taken(3)
    (Layout('x . ...'), Layout('x .'), None)
    """
    if isinstance(given, Layout):
        return given
    if isinstance(given, str):
        return Layout.parse(given)
    found = None if isinstance(given, type) else getattr(given, "layout", None)
    if isinstance(found, Layout):
        return found
    mesh = scope().mesh if mesh is None else mesh
    fields = from_spec(given, None if mesh is None else axis_sizes(mesh), op, fix)
    return None if fields is None else Layout(*fields)


def _operand(given: object, mesh: Any = None) -> Layout:
    """Read the other operand of the algebra.  Raises: LayoutSyntax."""
    found = given if isinstance(given, Layout) else taken(given, mesh)
    if found is None:
        raise LayoutSyntax(
            f"{given!r} is no layout: {NEITHER}", op="layout", fix="sl.Layout.parse('...')"
        )
    return found


NEITHER = (
    "one is a text such as 'x .', a Layout, a tuple of mesh axes and None, or DTensor's placements"
)


_SKEW_T = {"": "", "a": "b", "b": "a"}


def _reused(layout: Layout) -> AxisReused:
    """Return the error for an axis in two places; the fix keeps the first."""
    named = [(a, str(d)) for d in layout.dims for a in d.axes] + [
        (a, f"sum({a})") for a in layout.partial
    ]
    axis = next(a for i, (a, _) in enumerate(named) if a in {b for b, _ in named[:i]})
    first, second = [where for a, where in named if a == axis][:2]
    tokens, seen = [], set()
    for d in layout.dims:
        tokens.append("." if seen & set(d.axes) or len(set(d.axes)) < len(d.axes) else str(d))
        seen |= set(d.axes)
    return AxisReused(
        f"axis {axis!r} is used twice, in {first!r} and in {second!r}",
        op="layout",
        operands={"layout": str(layout)},
        fix=f"sl.Layout.parse({' '.join(tokens)!r})",
    )


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Layout:
    return Layout(*read(text))


@lru_cache(maxsize=8192)
def _resolve(layout: Layout, ndim: int) -> Layout:
    given = len(layout.dims)
    if (layout.ellipsis is None and given != ndim) or given > ndim:
        kept = [str(d) for d in layout.dims[:ndim]] + ["."] * max(0, ndim - given)
        raise RankMismatch(
            f"layout {str(layout)!r} has {given} dimensions, the tensor {ndim}",
            op="layout",
            operands={"layout": str(layout)},
            fix=f"sl.Layout.parse({' '.join(kept)!r})",
        )
    at = layout.ellipsis or 0
    dims = (*layout.dims[:at], *[WHOLE] * (ndim - given), *layout.dims[at:])
    if layout.skew and ndim != 2:
        raise RankMismatch(
            "a skewed layout is of a matrix",
            op="layout",
            operands={"layout": str(layout)},
            fix=f"sl.Layout.parse('x y skew {layout.skew}')",
        )
    return the_one(Layout(dims, layout.partial, layout.skew))


@lru_cache(maxsize=8192)
def the_one(layout: Layout) -> Layout:
    """Return the first of equal layouts, so that later comparisons are by identity."""
    return layout


@lru_cache(maxsize=8192)
def _check(
    layout: Layout, shape: tuple[int, ...], mesh: tuple[tuple[str, int], ...], op: str
) -> None:
    sizes = dict(mesh)
    check_axes(layout.axes + layout.partial, sizes, str(layout), op)
    me = layout.resolve(len(shape))
    check_sizes(me.dims, shape, sizes, str(layout), op)
    if me.skew:
        skewed(me.dims, me.skew, sizes, dict.fromkeys(sizes, 0))


@lru_cache(maxsize=16384)
def _local_shape(
    layout: Layout, shape: tuple[int, ...], mesh: tuple[tuple[str, int], ...], pad: bool
) -> tuple[int, ...]:
    me = layout.resolve(len(shape))
    if not pad:
        _check(me, shape, mesh, "layout")
    return block_shape(me.dims, shape, dict(mesh))


def _slice(index: Sequence[int]) -> Any:
    if isinstance(index, range):
        return slice(index.start, max(index.start, index.stop), index.step)
    return list(index)


def _aligned(a: Layout, b: Layout, op: str) -> tuple[Layout, Layout]:
    """Return both layouts with the same number of written dimensions."""
    if a.ellipsis is None and b.ellipsis is None:
        return a.resolve(len(b.dims)) if len(a.dims) != len(b.dims) else a, b
    if a.ellipsis is None:
        return a, b.resolve(len(a.dims))
    if b.ellipsis is None:
        return a.resolve(len(b.dims)), b
    head, tail = (
        max(a.ellipsis, b.ellipsis),
        max(len(a.dims) - a.ellipsis, len(b.dims) - b.ellipsis),
    )

    def widen(me: Layout) -> Layout:
        at = me.ellipsis or 0
        dims = (
            *me.dims[:at],
            *[WHOLE] * (head - at),
            *[WHOLE] * (tail - len(me.dims) + at),
            *me.dims[at:],
        )
        return Layout(dims, me.partial, me.skew, head)

    return widen(a), widen(b)


def _combined(a: Layout, b: Layout, join: Any, op: str) -> Layout:
    shared = sorted({*a.axes, *a.partial} & {*b.axes, *b.partial})
    if shared:
        raise AxisReused(
            f"axis {shared[0]!r} is in both layouts",
            op=op,
            operands={"a": str(a), "b": str(b)},
            fix=f"sl.Layout.parse({str(a)!r})",
        )
    dims = []
    for p, q in zip(a.dims, b.dims, strict=True):
        if p.is_split and q.is_split:
            if (
                p.order != "contiguous"
                or q.order != "contiguous"
                or any(isinstance(x, int) for x in p.parts + q.parts)
            ):
                raise ShardError(
                    f"{p} and {q} on one dimension do not combine",
                    op=op,
                    operands={"a": str(a), "b": str(b)},
                    fix=f"sl.Layout.parse({str(a)!r})",
                )
            dims.append(join(p, q))
        else:
            dims.append(p if p.is_split else q)
    if a.skew or b.skew:
        raise ShardError(
            "a skewed layout does not combine",
            op=op,
            operands={"a": str(a), "b": str(b)},
            fix="sl.Layout.parse('x y')",
        )
    return Layout(tuple(dims), a.partial + b.partial, "", a.ellipsis)


def _product_layout(a: Layout, b: Layout) -> Layout:
    if a.ellipsis is not None and a.ellipsis == len(a.dims):
        a = Layout(
            (*a.dims, *[WHOLE] * max(0, 2 - len(a.dims))),
            a.partial,
            a.skew,
            a.ellipsis if len(a.dims) >= 2 else None,
        )
    a = a.resolve(max(2, len(a.dims))) if a.ellipsis is not None else a
    b = b.resolve(max(2, len(b.dims))) if b.ellipsis is not None else b
    if len(a.dims) < 2 or len(b.dims) < 2:
        raise RankMismatch(
            "a product takes matrices",
            op="@",
            operands={"a": str(a), "b": str(b)},
            fix="sl.Layout.parse('x y')",
        )
    ka, kb, columns = a.dims[-1], b.dims[-2], b.dims[-1]
    lead = len(a.dims) - len(b.dims)
    batch = a.dims[max(0, lead) : -2] if len(b.dims) > 2 else ()
    clash = set(columns.axes) & {x for d in a.dims[:-1] for x in d.axes}
    if ka != kb or clash or a.partial or b.partial or a.skew or b.skew or batch != b.dims[:-2]:
        bare = Layout(a.dims)
        raise ImplicitCommunication(
            f"contraction split {ka} in a and {kb} in b"
            if ka != kb
            else "the operands do not multiply in place",
            op="@",
            operands={"a": str(a), "b": str(b)},
            fix=f"sl.Layout.parse({str(bare)!r})"
            f" @ sl.Layout.parse({' '.join([*map(str, batch), str(ka), '.'])!r})",
        )
    return Layout((*a.dims[:-1], columns), ka.axes)
