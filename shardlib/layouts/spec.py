"""PartitionSpec, tuples like it and DTensor placements, read into the fields of a ``Layout``.

text.py does the same for a layout's text.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from shardlib.errors import LayoutSyntax
from shardlib.layouts.dims import WHOLE, Dim, Sizes
from shardlib.layouts.placements import from_placements
from shardlib.layouts.text import NAME, Fields, written

__all__ = ["Names", "PartitionSpecLike", "PlacementLike", "from_spec", "is_spec"]


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


Names: TypeAlias = tuple[str | tuple[str, ...] | None, ...]
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


_JAX = "PartitionSpec"  # matched by name, so that jax need not be installed


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
    return tuple(d for d in dims if d), tuple(getattr(given, "unreduced", ())), "", len(dims)


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
        raise LayoutSyntax(
            f"DTensor's placements are one for each axis of the mesh, in order: {len(given)} given, "
            + ("and no mesh is in scope" if sizes is None else f"the mesh has {', '.join(sizes)}"),
            op=op,
            mesh=sizes,
            fix=fix.format(repr(meant)),
        )
    return from_placements(given, None, sizes, op, fix)
