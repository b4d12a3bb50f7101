"""PartitionSpec of JAX, tuples like it and placements of DTensor, read into a layout's fields.

text.py does the same for a layout's text.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from shardlib.errors import LayoutSyntax, NotExpressible, RankMismatch
from shardlib.layouts.dims import WHOLE, Dim
from shardlib.layouts.text import NAME, Fields, written
from shardlib.mesh import Axis, Sizes


def placements(fields: Fields, sizes: Sizes) -> tuple[Any, ...]:
    """Write DTensor placements, one per mesh axis.

    Raises: NotExpressible, RankMismatch.

    >>> from shardlib.layouts.text import read
    >>> placements(read(". x + sum(y)"), {"x": 2, "y": 2})
    (Shard(dim=1), Partial(sum))
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    dims, partial, ellipsis = fields
    names = list(sizes)
    if ellipsis is not None:
        why = "placements need a definite rank"
        fix = "layout.resolve(x.ndim).placements(mesh)"
        raise RankMismatch(why, op="placements", operands={"layout": written(fields)}, fix=fix)
    unsaid = [d for d in dims if d != Dim(tuple(a for a in names if a in d.axes))]
    if unsaid:
        what = "a skew" if unsaid[0].by else unsaid[0]
        why = f"DTensor cannot say {what}: it nests axes in mesh order, contiguously"
        given = {"layout": written(fields)}
        fix = "sl.dtensor.to_dtensor(x, normalize=True)"
        raise NotExpressible(why, op="to_dtensor", operands=given, mesh=dict(sizes), fix=fix)
    found: dict[str, Any] = dict.fromkeys(names, Replicate()) | dict.fromkeys(partial, Partial())
    found |= {a: Shard(i) for i, d in enumerate(dims) for a in d.axes}
    return tuple(map(found.get, names))


def from_placements(
    given: Sequence[Any],
    ndim: int | None,
    sizes: Sizes,
    op: str = "from_dtensor",
    fix: str = "sl.shard(t.full_tensor(), {})",
) -> Fields:
    """Convert placements, one for each mesh axis, to a layout's dimensions and pending axes.

    ``ndim``  dimensions of the tensor; where None, ``...`` is put between the dimensions that are
              counted from the front and those that are counted from the end.
    Raises: NotExpressible.
    """

    from shardlib._compat import is_strided

    parts: dict[int, list[str]] = {}
    partial = []
    for name, p in zip(sizes, given, strict=True):
        if p.is_partial():
            _check_sum(p, name, given, op, fix)
            partial.append(name)
        elif is_strided(p) or not (p.is_replicate() or p.is_shard()):
            why = f"placement {p} of axis {name!r} is strided"
            if op == "from_dtensor":
                fix = "t.redistribute(placements=[Replicate()])"
            raise NotExpressible(why, op=op, fix=fix.format("'...'"))
        elif p.is_shard():
            parts.setdefault(p.dim if ndim is None else p.dim % ndim, []).append(name)
    front = ndim if ndim is not None else 1 + max([-1, *parts])
    back = -min([0, *parts])
    dims = tuple(Dim(tuple(parts.get(d, ()))) for d in (*range(front), *range(-back, 0)))
    return dims, tuple(partial), front if ndim is None else None


def _check_sum(p: Any, name: str, given: Sequence[Any], op: str, fix: str) -> None:
    """Refuse a pending placement that is no plain sum; subclasses of Partial are none."""
    from torch.distributed.tensor import Partial

    if type(p) is Partial and p.reduce_op == "sum":
        return
    what = p.reduce_op if type(p) is Partial else type(p).__name__.strip("_")
    why = f"a pending {what} over axis {name!r} has no layout here"
    raise NotExpressible(
        why, op=op, operands={"placements": str(tuple(given))}, fix=fix.format("'...'")
    )


@runtime_checkable
class PlacementLike(Protocol):
    """Placement of DTensor: ``Shard(0)``, ``Replicate()``, ``Partial()``."""

    def is_shard(self, dim: int | None = None) -> bool: ...
    def is_replicate(self) -> bool: ...
    def is_partial(self) -> bool: ...


class PartitionSpecLike(Protocol):
    """PartitionSpec of JAX (``jax.sharding.PartitionSpec``)."""

    @property
    def unreduced(self) -> frozenset[str]: ...
    def __iter__(self) -> Iterator[object]: ...


Names: TypeAlias = tuple[Axis | None, ...]
"""Entries of a PartitionSpec: per dimension a mesh axis, several, or None."""


def is_spec(given: object) -> bool:
    """Check whether it is one layout in any position, which a plain tuple in a tree is not.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> is_spec([Shard(0), Replicate()]), is_spec(("x", None))
    (True, False)
    """
    if isinstance(given, tuple | list) and type(given).__name__ != _JAX:
        return bool(given) and all(_is_placement(p) for p in given)
    return type(given).__name__ == _JAX or _is_placement(given)


# matched by name, so that jax need not be installed
_JAX = "PartitionSpec"


def _is_placement(p: object) -> bool:
    return not isinstance(p, str | type | None) and isinstance(p, PlacementLike)


def from_spec(given: Any, sizes: Sizes | None, op: str, fix: str) -> Fields | None:
    """Read a PartitionSpec, a tuple like it or placements; None for anything else.

    Dimensions that a PartitionSpec leaves out are not split, as in JAX.
    ``sizes``  the mesh whose axes the placements refer to, in order; None if there is no mesh.
    Raises: LayoutSyntax, NotExpressible.

    >>> written(from_spec(("x", None, ("y", "z")), None, "shard", "{}"))
    'x . (y z) ...'
    >>> from torch.distributed.tensor import Partial, Shard
    >>> written(from_spec([Shard(-1), Partial()], {"x": 2, "y": 2}, "shard", "{}"))
    '... x + sum(y)'
    """
    if is_spec(given) and type(given).__name__ != _JAX:
        return _placed(given if isinstance(given, tuple | list) else [given], sizes, op, fix)
    if not isinstance(given, tuple | list) and not is_spec(given):
        return None
    dims = [_dim(entry) for entry in given]
    if None in dims:
        return None
    return tuple(d for d in dims if d), tuple(getattr(given, "unreduced", ())), len(dims)


def _dim(entry: Any) -> Dim | None:
    """Read the split of one dimension: an axis name, several, or None; None for anything else."""
    if entry is None:
        return WHOLE
    names = entry if isinstance(entry, tuple | list) else (entry,)
    if not all(isinstance(a, str) and NAME.match(a) for a in names):
        return None
    return Dim(tuple(names))


def _placed(given: Sequence[Any], sizes: Sizes | None, op: str, fix: str) -> Fields:
    if sizes is None or len(given) != len(sizes):
        names = list("xyzuvw" if sizes is None else sizes)[: len(given)]
        meant = "..."
        if len(names) == len(given):
            meant = written(from_placements(given, None, dict.fromkeys(names, 1), op, fix))
        why = (
            f"DTensor's placements are one for each axis of the mesh, in order: {len(given)} given, "
            + ("and no mesh is in scope" if sizes is None else f"the mesh has {', '.join(sizes)}")
        )
        raise LayoutSyntax(why, op=op, mesh=sizes, fix=fix.format(repr(meant)))
    return from_placements(given, None, sizes, op, fix)
