"""Layouts in DTensor's words: one placement per mesh axis, and back."""

from collections.abc import Sequence
from typing import Any

from shardlib.errors import NotExpressible, RankMismatch
from shardlib.layouts.dims import Dim, Sizes
from shardlib.layouts.text import Fields, written

__all__ = ["from_placements", "placements"]


def placements(fields: Fields, sizes: Sizes) -> tuple[Any, ...]:
    """Write DTensor placements, one per mesh axis.

    Raises: NotExpressible, RankMismatch.

    >>> from shardlib.layouts.text import read
    >>> placements(read(". x + sum(y)"), {"x": 2, "y": 2})
    (Shard(dim=1), Partial(sum))
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    dims, partial, skew, ellipsis = fields
    names = list(sizes)
    if ellipsis is not None:
        raise RankMismatch(
            "placements need a definite rank",
            op="placements",
            operands={"layout": written(fields)},
            fix="layout.resolve(x.ndim).placements(mesh)",
        )
    for d in dims:
        natural = sorted(d.axes, key=names.index) if all(a in names for a in d.axes) else []
        if d.order != "contiguous" or list(d.parts) != natural:
            raise NotExpressible(
                f"DTensor cannot say {d}: it nests axes in mesh order, contiguously",
                op="to_dtensor",
                operands={"layout": written(fields)},
                mesh=dict(sizes),
                fix="sl.dtensor.to_dtensor(x, normalize=True)",
            )
    if skew:
        raise NotExpressible(
            "DTensor cannot say a skew",
            op="to_dtensor",
            operands={"layout": written(fields)},
            fix="sl.dtensor.to_dtensor(x, normalize=True)",
        )
    where = {a: i for i, d in enumerate(dims) for a in d.axes}
    return tuple(
        Shard(where[n]) if n in where else Partial() if n in partial else Replicate() for n in names
    )


def from_placements(
    given: Sequence[Any], ndim: int, sizes: Sizes
) -> tuple[tuple[Dim, ...], tuple[str, ...]]:
    """Read the dimensions and pending axes that a DTensor's placements say.

    Raises: NotExpressible.
    """
    from torch.distributed.tensor import Partial

    from shardlib._compat import is_strided

    parts: list[list[str]] = [[] for _ in range(ndim)]
    partial = []
    for name, p in zip(sizes, given, strict=True):
        if p.is_partial():
            # A subclass of Partial pends something other than a plain sum.
            if type(p) is not Partial or p.reduce_op != "sum":
                what = p.reduce_op if type(p) is Partial else type(p).__name__.strip("_")
                raise NotExpressible(
                    f"a pending {what} over axis {name!r} has no layout here",
                    op="from_dtensor",
                    operands={"placements": str(tuple(given))},
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
            parts[p.dim % ndim].append(name)
    return tuple(Dim(tuple(p)) for p in parts), tuple(partial)
