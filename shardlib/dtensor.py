"""DTensor conversion without a copy, and shardlib's products for plain DTensors."""

from typing import TYPE_CHECKING, Any

import torch

from shardlib._compat import dtensor_handlers, is_dtensor
from shardlib.dtensor_convert import as_dtensor, from_dtensor
from shardlib.errors import NotExpressible, ShardError
from shardlib.layouts import Dim, Layout
from shardlib.ops.matmul import product_of
from shardlib.ops.registry import pinned
from shardlib.placing import reshard
from shardlib.tensor import ShardedTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["from_dtensor", "rules", "to_dtensor"]


def to_dtensor(x: ShardedTensor, *, normalize: bool = False) -> "DTensor":
    """Share the blocks of a sharded tensor as a DTensor; no copy, gradients flow.

    ``normalize``  a layout that placements cannot express is first moved to one that they can.
    Raises: NotExpressible (blocks that are not contiguous, or are nested in another order than
    the mesh's axes), Unsupported under simulate.

    >>> import shardlib as sl
    >>> with sl.make_mesh(x=1, device="cpu"):
    ...     d = sl.dtensor.to_dtensor(sl.shard(torch.ones(4, 4), "x ."))
    >>> type(d).__name__, d.placements
    ('DTensor', (Shard(dim=0),))
    >>> torch.distributed.destroy_process_group()
    """
    try:
        return as_dtensor(x)
    except NotExpressible:
        if not normalize:
            raise
        names = x.mesh.names
        dims = [Dim(tuple(sorted(d.axes, key=names.index))) for d in x.dims]
        return as_dtensor(reshard(x, x.sharding.onto(dims)))


# ---------------------------------------------------------------- shardlib's matmul for DTensors


class rules:
    """Run ``a @ b`` on plain DTensors by shardlib's matmul algorithms where one fits.

    Dispatch follows the operands' type below autograd, so backward products inside the block
    use them too; those outside of it run DTensor's own, with the same values.  The
    table is process-wide: enter it on one thread.

    >>> import shardlib as sl
    >>> with sl.make_mesh(x=1, y=1, device="cpu"), sl.dtensor.rules():
    ...     a = sl.dtensor.to_dtensor(sl.shard(torch.eye(4), "x y"))
    ...     sl.typeof(a @ a)  # 2D blocks in, 2D blocks out: SUMMA, where DTensor gathers
    'f32[4@x, 4@y]'
    >>> torch.distributed.destroy_process_group()
    """

    def __enter__(self) -> None:
        self.before = {op: dtensor_handlers().get(op) for op in _OPS}
        dtensor_handlers().update(dict.fromkeys(_OPS, _handle))

    def __exit__(self, *_: object) -> None:
        for op, handler in self.before.items():
            if handler is None:
                dtensor_handlers().pop(op, None)
            else:
                dtensor_handlers()[op] = handler


_OPS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def _handle(op: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    *bias, a, b = args
    with torch.no_grad():
        out = _product(a, b) if not kwargs else None
        if out is None:
            return _default(op, args, kwargs)
        return out if not bias else bias[0] + out


def _product(a: object, b: object) -> "DTensor | None":
    """Multiply a @ b by shardlib's algorithms; None where none fits."""
    if not (is_dtensor(a) and is_dtensor(b)):
        return None
    try:
        x, w = from_dtensor(a), from_dtensor(b)
        # a replicated cotangent: slicing it into a 2D layout moves nothing
        if not x.sharding.axes and len(w.sharding.axes) == 2:
            k, n = w.dims
            x = reshard(x, Layout((n, k)))
        elif not w.sharding.axes and len(x.sharding.axes) == 2:
            m, k = x.dims
            w = reshard(w, Layout((k, m)))
            # a in row-major mesh order is a transposed view, the case of the weight gradient
            if [a for a in x.mesh.names if a in x.sharding.axes] == [*k.axes, *m.axes]:
                with pinned(matmul="summa_w"):
                    return to_dtensor(product_of(x, w))
        return to_dtensor(product_of(x, w))
    except ShardError:
        return None


def _default(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run DTensor's own implementation: the handlers are removed for one call."""
    handlers = dtensor_handlers()
    held = {o: handlers.pop(o) for o in _OPS if o in handlers}
    try:
        return op(*args, **kwargs)
    finally:
        handlers.update(held)
