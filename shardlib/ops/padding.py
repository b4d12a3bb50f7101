"""Rules for padded tensors: elementwise functions, sums, products, and what a padded vocabulary needs.

All else refuses.
The padding may hold anything.  It is set to zero wherever it would be added to something:
before a sum and before a contraction.
"""

import math
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import holds_values, played, storage
from shardlib.errors import Unsupported
from shardlib.layouts import Layout
from shardlib.mesh import Mesh
from shardlib.ops.elementwise import converted, elementwise
from shardlib.ops.embedding import EMBEDDING, embedding
from shardlib.ops.index import choice
from shardlib.ops.loss import CROSS_ENTROPY, checked, split_cross_entropy
from shardlib.ops.matmul import product_of
from shardlib.ops.reduce import SUM, reduced_layout, sums
from shardlib.ops.signatures import binder
from shardlib.ops.views import VIEW
from shardlib.tensor import PADDED, TABLE, PaddedTensor, ShardedTensor, typeof

__all__ = ["masked"]


def masked(x: PaddedTensor) -> ShardedTensor:
    """The padded value with zeros in the padding, and a gradient of zeros there."""
    if not holds_values(x.mesh):
        return x.inner
    return ShardedTensor(torch.where(_inside(x).raw, x.raw, 0), x.sharding, x.size_, x.mesh)


def _inside(x: PaddedTensor) -> ShardedTensor:
    """Which positions are no padding."""
    raw = _mask(x.sharding, tuple(x.size_), tuple(x.true), x.mesh, x.raw.device)
    return ShardedTensor(raw, x.sharding, x.size_, x.mesh)


@lru_cache(maxsize=64)
def _mask(layout: Layout, shape: tuple[int, ...], true: tuple[int, ...], mesh: Mesh, device: torch.device) -> Tensor:
    masks = []
    for c in played(mesh):
        inside = torch.ones((), dtype=torch.bool, device=device)
        for d, index in enumerate(layout.indices(shape, mesh, c)):
            row = torch.tensor([i < true[d] for i in index], device=device)
            inside = inside & row.reshape(-1, *[1] * (len(shape) - 1 - d))
        masks.append(inside)
    return storage(masks, mesh)


def _wrapped(value: ShardedTensor, true: tuple[int, ...]) -> ShardedTensor:
    if tuple(value.size_) == tuple(true):
        return value
    return PaddedTensor(value.raw, value.sharding, value.size_, value.mesh, torch.Size(true))


def _elementwise(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """Operands broadcast as their true shapes do; where one is padded, so are the others, or they have size 1."""
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if TABLE[func] is choice and len(given) == 1:
        raise TypeError("positions, which are not in the padding")
    padded = next(a for a in given if isinstance(a, PaddedTensor))
    try:
        true = torch.broadcast_shapes(*(a.shape for a in given))
        torch.broadcast_shapes(*(a.size_ if isinstance(a, ShardedTensor) else a.shape for a in given))
    except RuntimeError:
        other = next((a for a in given if not isinstance(a, PaddedTensor) or a.true != padded.true), padded)
        raise Unsupported(
            "a padded tensor combines with tensors padded alike and with numbers",
            op=func.__name__,
            operands={"x": typeof(padded), "y": typeof(other)},
            mesh=padded.mesh,
            fix=f"sl.shard({'sl.unshard(y)' if isinstance(other, ShardedTensor) else 'y'}, "
            f"{str(padded.sharding)!r}, pad=True)",
        ) from None
    mask: Any = None
    if torch.is_grad_enabled() and any(a.requires_grad for a in given) and holds_values(padded.mesh):
        for a in (a for a in given if isinstance(a, PaddedTensor)):
            mask = _inside(a) if mask is None else elementwise(Tensor.__and__, (mask, _inside(a)), {})

    def brought(x: Any) -> Any:
        """What is computed in the padding has a gradient there, maybe 0 * inf; it ends before it is summed."""
        x = x.inner if isinstance(x, PaddedTensor) else x
        tracked = mask is not None and isinstance(x, Tensor) and x.requires_grad
        return elementwise(torch.where, (mask, x, 1), {}) if tracked else x

    return _wrapped(TABLE[func](func, tuple(map(brought, args)), {k: brought(v) for k, v in kwargs.items()}), true)


def _sums(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    given = SUM(*args, **kwargs)
    x, dim, keepdim, dtype = given["input"], given.get("dim"), given.get("keepdim", False), given["dtype"]
    means = func in (torch.mean, Tensor.mean)
    if means and not (dtype or x.dtype).is_floating_point:
        raise TypeError("torch's own refusal")
    inner = masked(x)
    gone, *_ = reduced_layout(inner, None if dim == [] else dim, keepdim, func.__name__)
    total = sums(torch.sum, (inner, gone, keepdim), {"dtype": dtype})
    if means:
        count = 1
        for d in gone:
            count *= x.true[d]
        total = total / count
    true = [1 if d in gone else n for d, n in enumerate(x.true) if keepdim or d not in gone]
    return _wrapped(total, tuple(true))


def _product(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    a, b = _TWO(*args, **kwargs).values()
    if min(a.ndim, b.ndim) < 2 or a.shape[-1] != b.shape[-2]:
        raise TypeError("a vector, or sizes that differ")
    true = (*(a.true if isinstance(a, PaddedTensor) else a.shape)[:-1], b.shape[-1])
    yields = getattr(b, "yields", None)
    a, b = (masked(t) if isinstance(t, PaddedTensor) else t for t in (a, b))
    return _wrapped(product_of(a, b, yields), true)


_TWO = binder("matmul(input, other)\nmm(input, mat2)")
_LINEAR = binder("linear(input, weight, bias=None)")


def _linear(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    x, w, bias = _LINEAR(*args, **kwargs).values()
    out = _product(func, (x, w.mT), {})
    return out if bias is None else out + bias


def _embedding(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """A padded vocabulary: nobody asks for the rows beyond it."""
    given = EMBEDDING(*args, **kwargs)
    ids, table = given["input"], given["weight"]
    if not isinstance(table, PaddedTensor) or table.true[1] != table.size_[1] or isinstance(ids, PaddedTensor):
        mesh = getattr(table, "mesh", None)
        axis = "x" if mesh is None else mesh.names[0]
        whole = ["sl.shard(sl.unshard(ids), '...')" if isinstance(ids, PaddedTensor) else "ids", "sl.unshard(table)"]
        raise Unsupported(
            "only the vocabulary of an embedding may be padded",
            op="embedding",
            operands={"ids": typeof(ids), "table": typeof(table)},
            mesh=mesh,
            fix=f"F.embedding({whole[0]}, sl.shard({whole[1]}, '{axis} .', pad=True))",
        )
    return embedding(func, (), given | {"weight": table.inner}, vocabulary=table.true[0])


def _last_only(x: PaddedTensor, func: Any) -> None:
    if tuple(x.true[:-1]) != tuple(x.size_[:-1]):
        raise Unsupported(
            f"{func.__name__} takes padding in the last dimension alone",
            op=func.__name__,
            operands={"tensor": typeof(x)},
            mesh=x.mesh,
            fix="sl.shard(sl.unshard(x), '...')",
        )


def _view(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """Other dimensions merge and split; the padded last one stays as it is."""
    x, wanted = VIEW(*args, **kwargs).values()
    _last_only(x, func)
    known = [n for n in wanted if n != -1]
    kept = wanted[-1:] == (x.true[-1],) and wanted.count(-1) <= 1
    kept = kept or (wanted[-1:] == (-1,) and math.prod(known) * x.true[-1] == x.true.numel())
    if not kept:
        raise Unsupported(
            f"a view of {list(wanted)} cuts through the padded dimension",
            op=func.__name__,
            operands={"tensor": typeof(x)},
            mesh=x.mesh,
            fix=f"x.view(-1, {x.true[-1]})",
        )
    return _wrapped_last(TABLE[func](func, (x.inner, *wanted[:-1], x.size_[-1]), {}), x)


def _getitem(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """Pieces of the other dimensions."""
    x, index = args
    if not isinstance(x, PaddedTensor):
        raise TypeError("a padded index")
    _last_only(x, func)
    index = index if isinstance(index, tuple) else (index,)
    named = [i for i in index if i is not None and i is not Ellipsis]
    reaches = len(named) == len(x.true) or (Ellipsis in index and index[-1] is not Ellipsis)
    if reaches and index[-1] != slice(None):
        raise Unsupported(
            "an index into the padded dimension",
            op="getitem",
            operands={"tensor": typeof(x)},
            mesh=x.mesh,
            fix="sl.unshard(x)[..., 0]",
        )
    return _wrapped_last(TABLE[func](func, (x.inner, index), {}), x)


def _wrapped_last(value: ShardedTensor, like: PaddedTensor) -> ShardedTensor:
    return _wrapped(value, (*value.size_[:-1], like.true[-1]))


def _cross_entropy(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The classes beyond the true ones count nothing."""
    given = CROSS_ENTROPY(*args, **kwargs)
    x = given["input"]
    if not isinstance(x, PaddedTensor) or isinstance(given["target"], PaddedTensor):
        raise TypeError("a padded target")
    _last_only(x, func)
    how = checked(given, x.true[-1])
    return split_cross_entropy(func, (), given | {"input": x.inner, "reduction": how}, classes=x.true[-1])


def _transposed(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    x = args[0]
    if x.ndim < 2:
        return x
    true = (*x.true[:-2], x.true[-1], x.true[-2])
    out = _wrapped(x.inner.mT, true)
    out.yields = x.yields
    return out


PADDED.update({f: _elementwise for f, rule in TABLE.items() if rule in (elementwise, converted, choice)})
PADDED.update(dict.fromkeys((torch.sum, Tensor.sum, torch.mean, Tensor.mean), _sums))
PADDED.update(dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _product))
PADDED.update(dict.fromkeys((Tensor.T.__get__, Tensor.mT.__get__, Tensor.t), _transposed))
PADDED.update(dict.fromkeys((Tensor.view, Tensor.reshape), _view))
PADDED.update(
    {F.linear: _linear, F.embedding: _embedding, Tensor.__getitem__: _getitem, F.cross_entropy: _cross_entropy}
)
PADDED[Tensor.backward] = TABLE[Tensor.backward]
