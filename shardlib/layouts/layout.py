"""Layout: for each tensor dimension, the mesh axes that split it.

Text form, one token per dimension: ``.`` not split, ``x`` split over axis x, ``(d x)`` over d
and within that over x (major first), ``(3 y)`` three groups each split over y (a fused qkv),
``zigzag(s)``, ``striped(s)``, ``documents(s; 0 5 9)`` and ``runs(s; 0:4 8:12 | 4:8)`` other orders
of the positions (``zigzag(8 s)``: eight groups, each in that order), ``...`` any number of unsplit
dimensions; then ``+ sum(z)`` for a pending sum over z and ``skew a`` / ``skew b`` for Cannon's
pre-skewed operands.

text.py reads and writes the text, dims.py computes the positions of a rank under each token and checks
divisibility, spec.py reads the notations of JAX and DTensor.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

import optree

from shardlib.errors import (
    AxisReused,
    ImplicitCommunication,
    LayoutSyntax,
    MeshError,
    RankMismatch,
    ShardError,
)
from shardlib.layouts.dims import (
    WHOLE,
    Dim,
    block_shape,
    check_axes,
    check_sizes,
    positions,
)
from shardlib.layouts.reshard import ReshardPlan
from shardlib.layouts.spec import (
    Names,
    PartitionSpecLike,
    PlacementLike,
    from_placements,
    from_spec,
    is_spec,
    placements,
)
from shardlib.layouts.text import Fields, read, skew_of, written
from shardlib.mesh import Axes, Coord, MeshKey, axis_sizes, coordinates, scope
from shardlib.optional import optional_text, unless_none


@dataclass(frozen=True)
class Layout:
    """One token per tensor dimension, and the axes of a pending sum.

    >>> L = Layout.parse("(d x) ... y + sum(z)")
    >>> L.axes, L.partial
    (('d', 'x', 'y'), ('z',))
    >>> L.local_shape((8, 5, 6), {"d": 2, "x": 2, "y": 2, "z": 3})
    (2, 5, 3)
    """

    dims: tuple[Dim, ...] = ()
    partial: Axes = ()
    ellipsis: int | None = None
    # mesh axes that split a dimension, in order
    axes: Axes = field(default=(), init=False, repr=False, compare=False)
    # those, then the axes of the pending sum
    named: Axes = field(default=(), init=False, repr=False, compare=False)
    # "a" or "b" where its blocks are those of Cannon's operand of this name
    skew: str = field(default="", init=False, repr=False, compare=False)
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "partial", tuple(sorted(self.partial)))
        object.__setattr__(self, "axes", tuple(a for d in self.dims for a in d.axes))
        object.__setattr__(self, "named", self.axes + self.partial)
        if len(set(self.named)) < len(self.named):
            raise _reused(self)
        object.__setattr__(self, "skew", skew_of(self.dims))
        object.__setattr__(self, "_hash", hash(self.fields))

    def __hash__(self) -> int:
        return self._hash

    @property
    def fields(self) -> Fields:
        """Dimensions, pending axes and place of ``...``, as its text has them."""
        return self.dims, self.partial, self.ellipsis

    def onto(self, dims: Iterable[Dim]) -> "Layout":
        """Return the layout of a value with other dimensions and the same sum."""
        return Layout(tuple(dims), self.partial)

    @property
    def aligned(self) -> "Layout":
        """The layout with each block at its own place, not moved on as Cannon's operands are."""
        return replace(self, dims=tuple(replace(d, by="") for d in self.dims))

    # ------------------------------------------------------------ text

    @staticmethod
    def parse(text: str) -> "Layout":
        """Read the text form.  Raises: LayoutSyntax, AxisReused."""
        return _parsed(text)

    def __str__(self) -> str:
        return written(self.fields)

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"

    # ------------------------------------------------------------ shape and place

    def resolve(self, ndim: int) -> "Layout":
        """Return the layout of a tensor with ``ndim`` dimensions: ``...`` written out.

        Raises: RankMismatch.
        """
        return self if self.ellipsis is None and len(self.dims) == ndim else _resolve(self, ndim)

    def check(self, shape: Sequence[int], mesh: object, *, op: str = "layout") -> None:
        """Raise if a tensor of this shape cannot be placed so on this mesh."""
        _check(self, tuple(shape), tuple(axis_sizes(mesh).items()), op)

    def local_shape(
        self, shape: Sequence[int], mesh: object, *, pad: bool = False
    ) -> tuple[int, ...]:
        """Return the shape of each rank's block; with ``pad`` uneven dimensions are rounded up."""
        return _local_shape(self, tuple(shape), tuple(axis_sizes(mesh).items()), pad)

    def indices(
        self, shape: Sequence[int], mesh: object, coord: Coord
    ) -> tuple[Sequence[int], ...]:
        """List per dimension the global positions that the rank at ``coord`` holds."""
        sizes = axis_sizes(mesh)
        me = self.resolve(len(shape))
        me.check(shape, sizes)
        pairs = zip(me.dims, shape, strict=True)
        return tuple(positions(d, n, sizes, d.holder(coord, sizes)) for d, n in pairs)

    def is_zero(self, coord: Coord) -> bool:
        """Check whether the rank at ``coord`` holds zeros, as all parts of a sum but the first do."""
        return any(coord[a] for a in self.partial)

    def slices(self, shape: Sequence[int], mesh: object, coord: Coord) -> tuple[Any, ...]:
        """Return ``indices`` as slices where they are contiguous or strided, else as lists."""
        return tuple(_slice(i) for i in self.indices(shape, mesh, coord))

    # ------------------------------------------------------------ algebra

    @property
    def T(self) -> "Layout":
        """The layout of the tensor with its dimensions reversed."""
        n = len(self.dims)
        written = replace(self, ellipsis=None).transpose(*reversed(range(n)))
        if self.ellipsis is None:
            return written
        return replace(written, ellipsis=n - self.ellipsis)

    def transpose(self, *perm: int) -> "Layout":
        """Return the layout of the tensor permuted: its dimension i is the old ``perm[i]``."""
        me = self.resolve(len(perm))
        if sorted(p + len(perm) * (p < 0) for p in perm) != list(range(len(perm))):
            why = f"{perm} is no permutation"
            raise ShardError(why, op="transpose", fix=f"layout.transpose{tuple(range(len(perm)))}")
        return me.onto([me.dims[p] for p in perm])

    def __mul__(self, other: "LayoutLike") -> "Layout":
        """Return the product over disjoint axes: each dimension split by both layouts.

        It commutes and associates: where both split one dimension, the axes nest in alphabetical
        order.  Choose another nesting with ``refine``.
        """
        a, b = _aligned(self, _operand(other))
        return _combined(
            a, b, lambda p, q: Dim(tuple(sorted(p.parts + q.parts, key=str))), "product"
        )

    def refine(self, other: "LayoutLike") -> "Layout":
        """Split every block further: this layout's axes major, ``other``'s minor."""
        a, b = _aligned(self, _operand(other))
        return _combined(a, b, lambda p, q: Dim(p.parts + q.parts), "refine")

    def __and__(self, other: "LayoutLike") -> "Layout":
        """Return the finest layout that both refine: their common leading parts."""
        a, b = _aligned(self, _operand(other))
        dims = [_common(p, q) for p, q in zip(a.dims, b.dims, strict=True)]
        return Layout(tuple(dims), tuple(sorted(set(a.partial) & set(b.partial))), a.ellipsis)

    def __le__(self, other: "LayoutLike") -> bool:
        """Check whether this is at least as split: its blocks are inside blocks of ``other``."""
        other = _operand(other)
        try:
            return (self & other) == _aligned(other, self)[0]
        except RankMismatch:
            return False

    def equivalent(self, other: "LayoutLike", shape: Sequence[int], mesh: object) -> bool:
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
        return replace(self, partial=()) if self.partial else self

    # ------------------------------------------------------------ DTensor

    def placements(self, mesh: object) -> tuple[Any, ...]:
        """Write DTensor placements, one per mesh axis.

        Raises: NotExpressible.
        """
        return placements(self.fields, axis_sizes(mesh))

    @staticmethod
    def from_dtensor(t: object) -> "Layout":
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
    given: object, mesh: object = None, op: str = "layout", fix: str = "sl.Layout.parse({})"
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
    fields = from_spec(given, unless_none(axis_sizes, mesh), op, fix)
    return None if fields is None else Layout(*fields)


def _operand(given: object, mesh: object = None) -> Layout:
    """Read the other operand of the algebra.  Raises: LayoutSyntax."""
    return as_layout(given, "layout", "sl.Layout.parse({})", mesh=mesh)


NEITHER = (
    "one is a text such as 'x .', a Layout, a tuple of mesh axes and None, or DTensor's placements"
)


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
    why = f"axis {axis!r} is used twice, in {first!r} and in {second!r}"
    fix = f"sl.Layout.parse({' '.join(tokens)!r})"
    return AxisReused(why, op="layout", operands={"layout": str(layout)}, fix=fix)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Layout:
    return Layout(*read(text))


@lru_cache(maxsize=8192)
def _resolve(layout: Layout, ndim: int) -> Layout:
    given = len(layout.dims)
    if (layout.ellipsis is None and given != ndim) or given > ndim:
        kept = [str(d) for d in layout.dims[:ndim]] + ["."] * max(0, ndim - given)
        why = f"layout {str(layout)!r} has {given} dimensions, the tensor {ndim}"
        fix = f"sl.Layout.parse({' '.join(kept)!r})"
        raise RankMismatch(why, op="layout", operands={"layout": str(layout)}, fix=fix)
    if layout.skew and ndim != 2:
        why = "a skewed layout is of a matrix"
        fix = f"sl.Layout.parse('x y skew {layout.skew}')"
        raise RankMismatch(why, op="layout", operands={"layout": str(layout)}, fix=fix)
    return the_one(_written_out(layout, ndim))


def _written_out(layout: Layout, ndim: int, ellipsis: int | None = None) -> Layout:
    """Return the layout with ``ndim`` dimensions written, and ``...``, if any, after these."""
    at = layout.ellipsis or 0
    dims = (*layout.dims[:at], *[WHOLE] * (ndim - len(layout.dims)), *layout.dims[at:])
    return replace(layout, dims=dims, ellipsis=ellipsis)


@lru_cache(maxsize=8192)
def the_one(layout: Layout) -> Layout:
    """Return the first of equal layouts, so that later comparisons are by identity."""
    return layout


@lru_cache(maxsize=8192)
def _check(layout: Layout, shape: tuple[int, ...], mesh: MeshKey, op: str) -> None:
    sizes = dict(mesh)
    check_axes(layout.named, sizes, str(layout), op)
    me = layout.resolve(len(shape))
    check_sizes(me.dims, shape, sizes, str(layout), op)
    for dim in me.dims:
        if dim.by and (dim.by not in me.axes or sizes[dim.by] != sizes[dim.axes[0]]):
            why = "a skew needs a matrix split over two axes of equal size"
            fix = f"sl.Layout.parse({str(me.aligned)!r})"
            raise MeshError(why, op="layout", operands={"layout": str(me)}, mesh=sizes, fix=fix)


@lru_cache(maxsize=16384)
def _local_shape(
    layout: Layout, shape: tuple[int, ...], mesh: MeshKey, pad: bool
) -> tuple[int, ...]:
    me = layout.resolve(len(shape))
    if not pad:
        _check(me, shape, mesh, "layout")
    return block_shape(me.dims, shape, dict(mesh))


def _slice(index: Sequence[int]) -> Any:
    if isinstance(index, range):
        return slice(index.start, max(index.start, index.stop), index.step)
    return list(index)


def _aligned(a: Layout, b: Layout) -> tuple[Layout, Layout]:
    """Return both layouts with the same number of written dimensions."""
    if a.ellipsis is None or b.ellipsis is None:
        ndim = len((b if b.ellipsis is None else a).dims)
        return a.resolve(ndim), b.resolve(ndim)
    head = max(a.ellipsis, b.ellipsis)
    count = head + max(len(a.dims) - a.ellipsis, len(b.dims) - b.ellipsis)
    return _written_out(a, count, head), _written_out(b, count, head)


def _combined(a: Layout, b: Layout, join: Callable[[Dim, Dim], Dim], op: str) -> Layout:
    shared = sorted({*a.named} & {*b.named})
    if shared:
        raise _pair_error(AxisReused, f"axis {shared[0]!r} is in both layouts", op, a, b)
    dims = []
    for p, q in zip(a.dims, b.dims, strict=True):
        if not (p.is_split and q.is_split):
            dims.append(p if p.is_split else q)
        elif p.is_plain and q.is_plain:
            dims.append(join(p, q))
        else:
            why = f"{p} and {q} on one dimension do not combine"
            raise _pair_error(ShardError, why, op, a, b)
    if a.skew or b.skew:
        raise _pair_error(ShardError, "a skewed layout does not combine", op, a, b, "x y")
    return Layout(tuple(dims), a.partial + b.partial, a.ellipsis)


def _common(p: Dim, q: Dim) -> Dim:
    """Return the leading parts that two tokens share, up to the last axis among them."""
    if p == q:
        return p
    if p.is_dealt or q.is_dealt:
        return WHOLE
    pairs = itertools.takewhile(
        lambda pair: pair[0] == pair[1], zip(p.parts, q.parts, strict=False)
    )
    parts = [part for part, _ in pairs]
    while parts and isinstance(parts[-1], int):
        parts.pop()
    return Dim(tuple(parts))


def _pair_error(
    kind: type[ShardError], why: str, op: str, a: Layout, b: Layout, fix: str | None = None
) -> ShardError:
    """Return the error for two layouts; the fix is by default the first."""
    better = str(a) if fix is None else fix
    operands = {"a": str(a), "b": str(b)}
    return kind(why, op=op, operands=operands, fix=f"sl.Layout.parse({better!r})")


def _product_layout(a: Layout, b: Layout) -> Layout:
    a, b = (x if x.ellipsis is None else x.resolve(max(2, len(x.dims))) for x in (a, b))
    if len(a.dims) < 2 or len(b.dims) < 2:
        raise _pair_error(RankMismatch, "a product takes matrices", "@", a, b, "x y")
    ka, kb, columns = a.dims[-1], b.dims[-2], b.dims[-1]
    lead = len(a.dims) - len(b.dims)
    batch = a.dims[max(0, lead) : -2]
    clash = set(columns.axes) & set(Layout(a.dims[:-1]).axes)
    odd = any(x.partial or x.skew for x in (a, b))
    if ka != kb or clash or odd or batch != b.dims[:-2]:
        why = "the operands do not multiply in place"
        if ka != kb:
            why = f"contraction split {ka} in a and {kb} in b"
        second = " ".join([*map(str, batch), str(ka), "."])
        fix = f"sl.Layout.parse({str(Layout(a.dims))!r}) @ sl.Layout.parse({second!r})"
        raise ImplicitCommunication(why, op="@", operands={"a": str(a), "b": str(b)}, fix=fix)
    return Layout((*a.dims[:-1], columns), ka.axes)


# ---------------------------------------------------------------- arguments: one layout in any notation


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
    mesh: object = None,
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
        why = (
            f"{given} has a layout for activations, {act}, and one for weights, .weight: say which"
        )
        line = fix.format(f"{_ours(type(given))}{given}.weight")
        raise LayoutSyntax(why, op=op, mesh=mesh, fix=line)
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


def _meant(given: object, called: bool, shape: tuple[int, ...], mesh: object) -> str:
    """Write the layout that was probably meant, or the unsplit one if that does not fit."""
    names = list(axis_sizes(mesh)) if mesh is not None else list("xyzuvw")
    try:
        code, found = _made(given, names) if called else _joined(given)
        lay = as_layout(found, "", "").resolve(len(shape))
        if mesh is not None:
            lay.check(shape, mesh)
    except Exception:
        # also of a user's own family, whose constructor takes more than axes
        return "'...'"
    return code


def _made(family: Any, names: Sequence[str]) -> tuple[str, LayoutLike]:
    """Call a family with the first axes of the mesh; return the code and the value."""
    asked = [p for p in inspect.signature(family).parameters.values() if p.default is p.empty]
    axes = names[: len(asked)]
    return f"{_ours(family)}{family.__name__}({', '.join(map(repr, axes))})", family(*axes)


def _ours(family: object) -> str:
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
            # one PartitionSpec for all tensors of a dictionary
            return [given] * count
        where = optional_text(" at {}", ".".join(map(str, path)))
        why = f"{given!r} is no layout, and no tree of layouts like {_outline(node, keys)}{where}"
        raise LayoutSyntax(why, op=op, fix=fix.format("'...'"))
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
    if not keys or isinstance(node, tuple | list):
        same = isinstance(given, tuple | list) and len(given) == len(keys)
        return list(given) if same else None
    return _below(given) if type(given) is type(node) else None


def _below(node: Any) -> list[Any]:
    """List a node's children, in the order of its structure's entries."""
    return optree.tree_leaves(node, is_leaf=lambda n: n is not node)


def _outline(node: object, keys: Sequence[Any]) -> str:
    """Describe the top of a tree, for an error."""
    if isinstance(node, Mapping):
        return f"{{{', '.join(map(repr, keys))}}}"
    return f"{type(node).__name__} of {len(keys)}"
