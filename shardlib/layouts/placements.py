"""DTensor placements: conversion from a layout, one per mesh axis, and back."""

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
    from torch.distributed.tensor import Partial

    from shardlib._compat import is_strided

    parts: dict[int, list[str]] = {}
    partial = []
    for name, p in zip(sizes, given, strict=True):
        if p.is_partial():
            # A subclass of Partial is pending in some other way than a plain sum.
            if type(p) is not Partial or p.reduce_op != "sum":
                what = p.reduce_op if type(p) is Partial else type(p).__name__.strip("_")
                raise NotExpressible(
                    f"a pending {what} over axis {name!r} has no layout here",
                    op=op,
                    operands={"placements": str(tuple(given))},
                    fix=fix.format("'...'"),
                )
            partial.append(name)
        elif is_strided(p) or not (p.is_replicate() or p.is_shard()):
            raise NotExpressible(
                f"placement {p} of axis {name!r} is strided",
                op=op,
                fix="t.redistribute(placements=[Replicate()])"
                if op == "from_dtensor"
                else fix.format("'...'"),
            )
        elif p.is_shard():
            parts.setdefault(p.dim if ndim is None else p.dim % ndim, []).append(name)
    front = ndim if ndim is not None else 1 + max([-1, *parts])
    back = -min([0, *parts])
    dims = tuple(Dim(tuple(parts.get(d, ()))) for d in (*range(front), *range(-back, 0)))
    return dims, tuple(partial), "", front if ndim is None else None
