"""Where data sits: a layout names, per tensor dimension, the mesh axes that split it.

Text form, one token per dimension: ``.`` not split, ``x`` split over axis x, ``(d x)`` over d
and within that over x (major first), ``(3 y)`` three groups each split over y (a fused qkv),
``zigzag(s)``, ``striped(s)``, ``documents(s; 0 5 9)`` and ``runs(s; 0:4 8:12 | 4:8)`` other orders
of the positions (``zigzag(8 s)``: eight groups, each in that order), ``...`` any number of unsplit
dimensions; then ``+ sum(z)`` for a pending sum over z and ``skew a`` / ``skew b`` for Cannon's
pre-skewed operands.

dims.py says which positions a rank holds under each token.
"""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from shardlib.errors import (
    AxisReused,
    ImplicitCommunication,
    LayoutSyntax,
    NotExpressible,
    RankMismatch,
    ShardError,
    UnevenSplit,
    UnknownAxis,
)
from shardlib.layouts.dims import WHOLE, Dim, axis_sizes, indices, skewed
from shardlib.layouts.orders import ORDERS, block, declared
from shardlib.layouts.reshard import ReshardPlan
from shardlib.mesh import coordinates

__all__ = ["Layout", "the_one"]

_NAME = re.compile(r"[A-Za-z_]\w*\Z")


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
    # that split a dimension, in order
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
        return _parse(text)

    def __str__(self) -> str:
        tokens = [str(d) for d in self.dims]
        if self.ellipsis is not None:
            tokens.insert(self.ellipsis, "...")
        body = " ".join(tokens)
        if self.partial:
            body += f" + sum({' '.join(self.partial)})"
        if self.skew:
            body += f" skew {self.skew}"
        return body.strip()

    def __repr__(self) -> str:
        return f"Layout({str(self)!r})"

    # ------------------------------------------------------------ shape and place

    def resolve(self, ndim: int) -> "Layout":
        """Return the layout of a tensor with ``ndim`` dimensions: ``...`` written out.

        Raises: RankMismatch.
        """
        return self if self.ellipsis is None and len(self.dims) == ndim else _resolve(self, ndim)

    def check(self, shape: Sequence[int], mesh: Any, *, op: str = "layout") -> None:
        """Raise what is wrong with placing such a tensor on such a mesh."""
        _check(self, tuple(shape), tuple(axis_sizes(mesh).items()), op)

    def local_shape(self, shape: Sequence[int], mesh: Any, *, pad: bool = False) -> tuple[int, ...]:
        """Return the shape of each rank's block; with ``pad`` uneven dimensions are rounded up."""
        return _local_shape(self, tuple(shape), tuple(axis_sizes(mesh).items()), pad)

    def indices(
        self, shape: Sequence[int], mesh: Any, coord: Mapping[str, int]
    ) -> tuple[Sequence[int], ...]:
        """Per dimension the global positions that the rank at ``coord`` holds."""
        sizes = axis_sizes(mesh)
        me = self.resolve(len(shape))
        me.check(shape, sizes)
        return indices(me.dims, me.skew, shape, sizes, coord)

    def slices(self, shape: Sequence[int], mesh: Any, coord: Mapping[str, int]) -> tuple[Any, ...]:
        """``indices`` as slices where they are contiguous or strided, else as lists."""
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
        """Return the layout of the tensor permuted so that its
        dimension i is the old ``perm[i]``.
        """
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

    def __mul__(self, other: "Layout") -> "Layout":
        """Product over disjoint axes: each dimension split by both.  Commutes and associates.

        Where both split one dimension, the axes nest in alphabetical order; write the nesting
        you want with ``refine``.
        """
        a, b = _aligned(self, other, "product")
        return _combined(
            a, b, lambda p, q: Dim(tuple(sorted(p.parts + q.parts, key=str))), "product"
        )

    def refine(self, other: "Layout") -> "Layout":
        """Split every block further: this layout's axes major, ``other``'s minor."""
        a, b = _aligned(self, other, "refine")
        return _combined(a, b, lambda p, q: Dim(p.parts + q.parts), "refine")

    def __and__(self, other: "Layout") -> "Layout":
        """The finest layout that both are at least as split as: their common leading parts."""
        a, b = _aligned(self, other, "&")
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

    def __le__(self, other: "Layout") -> bool:
        """At least as split: every block of this lies inside a block of ``other``."""
        try:
            return (self & other) == _aligned(other, self, "<=")[0]
        except RankMismatch:
            return False

    def equivalent(self, other: "Layout", shape: Sequence[int], mesh: Any) -> bool:
        """Say whether every rank holds the same elements in the same order under both."""
        sizes = axis_sizes(mesh)
        a, b = self.resolve(len(shape)), other.resolve(len(shape))
        if {p for p in a.partial if sizes[p] > 1} != {p for p in b.partial if sizes[p] > 1}:
            return False
        if 0 in shape:
            return a.local_shape(shape, sizes) == b.local_shape(shape, sizes)
        return all(
            [list(i) for i in a.indices(shape, sizes, c)]
            == [list(i) for i in b.indices(shape, sizes, c)]
            for c in coordinates(sizes)
        )

    def __matmul__(self, other: "Layout") -> "Layout":
        """Layout of the matrix product of [..., m, k] and [k, n] or [..., k, n].

        A contraction split the same way in both leaves ``+ sum(axes)``; split in different
        ways it would need communication that no local product can do.
        Raises: ImplicitCommunication.
        """
        return _product_layout(self, other)

    def __rshift__(self, other: "Layout") -> ReshardPlan:
        """Say how to get from this layout to ``other``: steps, bytes, peak."""
        return ReshardPlan(self, other)

    @property
    def bare(self) -> "Layout":
        """Without what is pending."""
        return Layout(self.dims, (), self.skew, self.ellipsis) if self.partial else self

    # ------------------------------------------------------------ DTensor

    def placements(self, mesh: Any) -> tuple[Any, ...]:
        """DTensor placements, one per mesh axis.  Raises: NotExpressible."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        names = list(axis_sizes(mesh))
        if self.ellipsis is not None:
            raise RankMismatch(
                "placements need a definite rank",
                op="placements",
                operands={"layout": str(self)},
                fix="layout.resolve(x.ndim).placements(mesh)",
            )
        for d in self.dims:
            natural = sorted(d.axes, key=names.index) if all(a in names for a in d.axes) else []
            if d.order != "contiguous" or list(d.parts) != natural:
                raise NotExpressible(
                    f"DTensor cannot say {d}: it nests axes in mesh order, contiguously",
                    op="to_dtensor",
                    operands={"layout": str(self)},
                    mesh=dict(axis_sizes(mesh)),
                    fix="sl.dtensor.to_dtensor(x, normalize=True)",
                )
        if self.skew:
            raise NotExpressible(
                "DTensor cannot say a skew",
                op="to_dtensor",
                operands={"layout": str(self)},
                fix="sl.dtensor.to_dtensor(x, normalize=True)",
            )
        where = {a: i for i, d in enumerate(self.dims) for a in d.axes}
        return tuple(
            Shard(where[n]) if n in where else Partial() if n in self.partial else Replicate()
            for n in names
        )

    @staticmethod
    def from_dtensor(t: Any) -> "Layout":
        """Return the layout of a DTensor on a named mesh.  Raises: NotExpressible, MeshError."""
        from torch.distributed.tensor import Partial

        from shardlib._compat import is_strided

        names = tuple(axis_sizes(t.device_mesh))
        parts: list[list[str]] = [[] for _ in range(t.ndim)]
        partial = []
        for name, p in zip(names, t.placements, strict=True):
            if p.is_partial():
                # a subclass pends something else
                if type(p) is not Partial or p.reduce_op != "sum":
                    what = p.reduce_op if type(p) is Partial else type(p).__name__.strip("_")
                    raise NotExpressible(
                        f"a pending {what} over axis {name!r} has no layout here",
                        op="from_dtensor",
                        operands={"placements": str(t.placements)},
                        fix="sl.shard(t.full_tensor(), '...')",
                    )
                partial.append(name)
            elif is_strided(p) or not (p.is_replicate() or p.is_shard()):
                raise NotExpressible(
                    f"placement {p} of axis {name!r} is strided",
                    op="from_dtensor",
                    fix="t.redistribute(placements=[Replicate()])",
                )
            elif p.is_shard():
                parts[p.dim % t.ndim].append(name)
        return Layout(tuple(Dim(tuple(p)) for p in parts), tuple(partial))


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


_RUN = re.compile(r"\d+:\d+(:[1-9]\d*)?")


def _is_given(order: str, text: str) -> bool:
    """Say whether ``text`` is what the order takes: borders from 0 on, or ranges between bars."""
    if order == "documents":
        words = text.split()
        return (
            len(words) > 1 and words[0] == "0" and all(w.isdecimal() and w.isascii() for w in words)
        )
    return all(_RUN.fullmatch(w) for w in text.replace("|", " ").split())


_WRITTEN = {"documents": "documents(s; 0 5 8)", "runs": "runs(s; 0:2 6:8 | 2:6)"}


@lru_cache(maxsize=4096)
def _parse(text: str) -> Layout:
    body, _, skew = f" {text}".partition(" skew ")
    body, plus, tail = body.partition("+")
    partial: tuple[str, ...] = ()
    if plus:
        found = re.fullmatch(r"\s*sum\(([\w\s]+)\)\s*", tail)
        if not found:
            raise _bad(
                text, f"after '+' comes sum(axes), not {tail.strip()!r}", f"{body.strip()} + sum(z)"
            )
        partial = tuple(found[1].split())
    if skew.strip() not in ("", "a", "b"):
        raise _bad(text, f"a skew is 'a' or 'b', not {skew.strip()!r}", f"{body.strip()} skew a")
    dims, ellipsis = [], None
    for token in re.findall(r"\w*\([^()]*\)|[^\s()]+|[()]", body):
        if token == "...":
            if ellipsis is not None:
                raise _bad(text, "'...' stands once", "x ... y")
            ellipsis = len(dims)
        else:
            dims.append(_token(token, text))
    return Layout(tuple(dims), partial, skew.strip(), ellipsis)


def _token(token: str, text: str) -> Dim:
    if token == ".":
        return WHOLE
    order, parens, inner, given = "contiguous", False, token, ""
    if token.endswith(")"):
        order, _, inner = token[:-1].partition("(")
        inner, _, given = inner.partition(";")
        order, parens = order or "contiguous", True
    if order not in ORDERS:
        near = difflib.get_close_matches(order, ORDERS[:3], 1) or ["zigzag"]
        raise _bad(
            text,
            f"unknown order {order!r}; there are {', '.join(ORDERS)}",
            re.sub(rf"\b{order}\(", f"{near[0]}(", text),
        )
    parts: list[str | int] = []
    ordered = order != "contiguous"
    for word in inner.split():
        if word.isdecimal() and word.isascii() and int(word) > (not ordered) and parens:
            parts.append(int(word))
        elif _NAME.match(word):
            parts.append(word)
        else:
            raise _bad(text, f"{word!r} is no axis name", "x ... y")
    if not parts or (ordered and isinstance(parts[-1], int)):
        raise _bad(text, f"{token!r} names no axis", ". ...")
    if bool(given) != (order in ("documents", "runs")) or (given and not _is_given(order, given)):
        raise _bad(
            text,
            f"{order} is written {_WRITTEN.get(order, order + '(s)')}",
            f". {_WRITTEN.get(order, 's')}",
        )
    if given:
        order = f"{order}; {' '.join(given.split())}"
    while parts and isinstance(parts[-1], int):
        parts.pop()  # a trailing factor says nothing
    return Dim(tuple(parts), order)


def _bad(text: str, what: str, example: str) -> LayoutSyntax:
    try:
        _parse(example)
    except ShardError:  # the text has another mistake too
        example = "x ... y"
    return LayoutSyntax(
        f"cannot read {text!r}: {what}", op="layout", fix=f"sl.Layout.parse({example!r})"
    )


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
    """Return the first of equal layouts: what is compared at
    every call is then compared by identity.
    """
    return layout


@lru_cache(maxsize=8192)
def _check(
    layout: Layout, shape: tuple[int, ...], mesh: tuple[tuple[str, int], ...], op: str
) -> None:
    sizes = dict(mesh)
    for axis in (*layout.axes, *layout.partial):
        if axis not in sizes:
            near = difflib.get_close_matches(
                axis, sizes.keys() - {*layout.axes, *layout.partial}, 1
            )
            hint = f"; did you mean {near[0]!r}?" if near else ""
            better = re.sub(rf"\b{re.escape(axis)}\b", near[0], str(layout)) if near else "..."
            raise UnknownAxis(
                f"unknown axis {axis!r}; this mesh has {', '.join(sizes)}{hint}",
                op=op,
                operands={"layout": str(layout)},
                mesh=sizes,
                fix=f"sl.Layout.parse({better!r})",
            )
    me = layout.resolve(len(shape))
    for d, (dim, n) in enumerate(zip(me.dims, shape, strict=True)):
        ways = _ways(dim, n, sizes)
        if n % ways:
            over = (
                f"mesh axis {dim.axes[0]!r} (size {sizes[dim.axes[0]]}"
                if len(dim.parts) == 1
                else f"{dim} ({ways} parts"
            )
            what = f"does not divide over {over}, remainder {n % ways})"
            if (length := declared(dim.order)) is not None:
                what = f"does not fit {dim}, " + (
                    "whose shares differ" if n == length else f"written for {length}"
                )
            raise UnevenSplit(
                f"dimension {d} of size {n} {what}",
                op=op,
                operands={"tensor": list(shape), "layout": str(layout)},
                mesh=sizes,
                fix=f"sl.shard(x, {' '.join(map(str, (*me.dims[:d], WHOLE, *me.dims[d + 1 :])))!r})"
                if length is not None
                else f"sl.shard({'sl.unshard(x)' if op == 'reshard' else 'x'}, {str(layout)!r}, pad=True)",
            )
    if me.skew:
        skewed(me.dims, me.skew, sizes, dict.fromkeys(sizes, 0))


@lru_cache(maxsize=16384)
def _local_shape(
    layout: Layout, shape: tuple[int, ...], mesh: tuple[tuple[str, int], ...], pad: bool
) -> tuple[int, ...]:
    sizes = dict(mesh)
    me = layout.resolve(len(shape))
    if not pad:
        _check(me, shape, mesh, "layout")
    out = []
    for dim, n in zip(me.dims, shape, strict=True):
        ranks = math.prod(sizes[a] for a in dim.axes)
        if declared(dim.order) is None:
            ways = _ways(dim, n, sizes)
            out.append(-(-n // ways) * ways // ranks)
        else:
            ring = math.prod(sizes[a] for a in dim.ring)
            groups = math.prod(p if isinstance(p, int) else sizes[p] for p in dim.groups.parts)
            out.append(block(dim.order, n // groups, ring) * groups * ring // ranks)
    return tuple(out)


def _ways(dim: Dim, n: int, sizes: Mapping[str, int]) -> int:
    """Return what a dimension's size must be a multiple of; for an
    order written for one length, that size.
    """
    groups = math.prod(p if isinstance(p, int) else sizes[p] for p in dim.groups.parts)
    ring = math.prod(sizes[a] for a in dim.ring)
    if declared(dim.order) is None:
        return groups * ring * (2 if dim.order == "zigzag" else 1)
    whole = groups * ring * block(dim.order, n, ring)
    return max(1, whole) if n == whole else n + 1


def _slice(index: Sequence[int]) -> Any:
    if isinstance(index, range):
        return slice(index.start, max(index.start, index.stop), index.step)
    return list(index)


def _aligned(a: Layout, b: Layout, op: str) -> tuple[Layout, Layout]:
    """Both with the same number of written dimensions."""
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
            fix=f"sl.Layout.parse({str(bare)!r}) @ sl.Layout.parse({' '.join([*map(str, batch), str(ka), '.'])!r})",
        )
    return Layout((*a.dims[:-1], columns), ka.axes)
