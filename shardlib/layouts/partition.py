"""PartitionSpec as in JAX: the mesh axes that split each dimension."""

from shardlib.errors import LayoutSyntax
from shardlib.layouts.layout import Layout, taken

__all__ = ["P"]


def P(*dims: str | tuple[str, ...] | None) -> Layout:
    """Name the mesh axes that split each dimension, as JAX's PartitionSpec does.

    Dimensions that are left out are not split.  A plain tuple of these is also accepted as the
    layout of one tensor; for a tuple of tensors it is one layout for each.
    Raises: LayoutSyntax, AxisReused.

    >>> P("x", None), P(("x", "y")), P()
    (Layout('x . ...'), Layout('(x y) ...'), Layout('...'))
    """
    found = taken(dims) if all(isinstance(d, str | tuple | None) for d in dims) else None
    if found is None:
        raise LayoutSyntax(
            f"{dims!r}: each dimension has a mesh axis, a tuple of them, or None",
            op="P",
            fix="sl.P('x', None)",
        )
    return found
