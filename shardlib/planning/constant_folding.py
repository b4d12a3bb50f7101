"""Constant folding on the meta device: positions, masks and counts that a module makes itself.

Tensors on the meta device have no values, and a module that reads one (``if mask.all()``) would
raise.  Integer and boolean tensors computed from constants alone are therefore computed on the host
too, so that such a read returns a value; tensors computed from data stay unknown.
"""

from typing import Any

import optree
import torch
from torch import Tensor

from shardlib._compat import DispatchMode
from shardlib.opspec import Args, Func, Kwargs
from shardlib.planning.meta_cache import on_shapes

__all__ = ["Known"]

MOST = 1 << 22  # the most elements that are computed on the host


class Known(DispatchMode):  # type: ignore[misc, valid-type]
    """A dispatch mode that returns values of integer tensors on the meta device, where known.

    >>> with Known():
    ...     bool((torch.arange(4, device="meta").diff() == 1).all())
    True
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, Tensor] = {}
        self.alive: list[Tensor] = []  # kept alive: an id is reused once its tensor is gone

    def tell(self, x: Tensor, value: Tensor) -> None:
        """Record the values of an integer tensor on the meta device."""
        if not x.is_floating_point() and x.numel() <= MOST:
            self._keep(x, value.detach().cpu())

    def _keep(self, x: Tensor, value: Tensor) -> None:
        self.values[id(x)] = value
        self.alive.append(x)

    def __torch_dispatch__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" and id(args[0]) in self.values:  # item()
            return self.values[id(args[0])].item()
        out = on_shapes(func, args, kwargs)
        if not isinstance(out, Tensor) or not out.is_meta or out.is_floating_point():
            return out
        if name in ("fill_", "zero_"):  # its old values do not matter
            if out.numel() <= MOST and not isinstance(args[1] if len(args) > 1 else 0, Tensor):
                blank = torch.empty(out.shape, dtype=out.dtype, device="cpu")
                self._keep(out, func(blank, *args[1:]))
        elif out.numel() <= MOST and self._has_values(func, args, kwargs):
            host = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
            beside: Any = optree.tree_map(self._twin, (args, host))  # type: ignore[arg-type]
            self._keep(out, _computed(func, *beside))
        else:
            self.values.pop(id(out), None)  # written in place with unknown values
        return out

    def _has_values(self, func: Func, args: Args, kwargs: Kwargs) -> bool:
        """Return whether the values of all operands are known, and so those of the result."""
        # uninitialised and random values are not known
        if "empty" in func.overloadpacket.__name__:
            return False
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        given = [x for x in optree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]  # type: ignore[arg-type]
        if not given:
            return "device" in kwargs
        return all(id(x) in self.values or not x.is_meta for x in given)

    def _twin(self, x: Any) -> Any:
        return self.values.get(id(x), x) if isinstance(x, Tensor) else x


def _computed(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the host; if all rows are one expanded row, compute that row alone.

    The positions of a batch are one row, expanded a thousand times in a large batch.
    """
    rows = args[0] if args and isinstance(args[0], list | tuple) else args
    given = [x for x in rows if isinstance(x, Tensor)]
    most = max((x.ndim for x in given), default=0)
    widest = [x for x in given if x.ndim == most > 1]
    count = max((x.shape[0] for x in widest), default=0)
    # rows of stride 0 are the same memory: one of them gives all
    one = all(x.stride(0) == 0 or x.shape[0] == 1 for x in widest)
    if count <= 1 or not one or not _by_row(func, args, most) or func._schema.is_mutable:
        return func(*args, **kwargs)
    tree: Any = args
    first: Any = optree.tree_map(
        lambda x: x[:1] if isinstance(x, Tensor) and x.ndim == most else x, tree
    )
    out = func(*first, **kwargs)
    return out.expand(count, *out.shape[1:])


def _by_row(func: Any, args: tuple[Any, ...], ndim: int) -> bool:
    """Return whether each row of the result depends only on the same row of the operands."""
    if torch.Tag.pointwise in func.tags:
        return True
    along = args[1] if len(args) > 1 else 0
    name = func.overloadpacket.__name__
    return name in ("cat", "cumsum") and isinstance(along, int) and along % ndim > 0
