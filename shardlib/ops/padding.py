"""Rules for padded tensors: elementwise functions, sums, products, and what a padded vocabulary needs.

All else refuses.
The padding may hold anything.  It is set to zero wherever it would be added to something:
before a sum and before a contraction.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.errors import Unsupported
from shardlib.layouts import coordinates
from shardlib.ops.elementwise import elementwise
from shardlib.ops.embedding import embedding
from shardlib.ops.loss import split_cross_entropy
from shardlib.ops.matmul import product_of
from shardlib.ops.reduce import reduced_layout, sums
from shardlib.tensor import PADDED, TABLE, PaddedTensor, ShardedTensor, typeof

__all__ = ["masked"]


def masked(x: PaddedTensor) -> ShardedTensor:
    """The padded value with zeros in the padding."""
    mesh, shape = x.mesh, tuple(x.size_)
    if mesh.kind == "record":
        return x.inner
    coords = [dict(mesh.coord or {})] if mesh.kind == "dist" else coordinates(mesh)
    masks = []
    for c in coords:
        inside = torch.ones((), dtype=torch.bool, device=x.raw.device)
        for d, index in enumerate(x.sharding.indices(shape, mesh, c)):
            row = torch.tensor([i < x.true[d] for i in index], device=x.raw.device)
            inside = inside & row.reshape(-1, *[1] * (len(shape) - 1 - d))
        masks.append(inside)
    mask = torch.stack(masks) if mesh.kind == "stacked" else masks[0]
    return ShardedTensor(torch.where(mask, x.raw, 0), x.sharding, x.size_, mesh)


def _wrapped(value: ShardedTensor, true: tuple[int, ...]) -> ShardedTensor:
    if tuple(value.size_) == tuple(true):
        return value
    return PaddedTensor(value.raw, value.sharding, value.size_, value.mesh, torch.Size(true))


def _elementwise(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """Operands broadcast as their true shapes do; where one is padded, so are the others, or they have size 1."""
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    padded = next(a for a in given if isinstance(a, PaddedTensor))
    try:
        true = torch.broadcast_shapes(*(a.shape for a in given))
        torch.broadcast_shapes(*(a.size_ if isinstance(a, ShardedTensor) else a.shape for a in given))
    except RuntimeError:
        other = next((a for a in given if not isinstance(a, PaddedTensor) or a.true != padded.true), padded)
        raise Unsupported(
            "a padded tensor combines with tensors padded alike and with numbers",
            op=func.__name__,
            operands={"padded": typeof(padded), "other": typeof(other)},
            mesh=padded.mesh,
            fix=f"sl.shard(y, {str(padded.sharding)!r}, pad=True)",
        ) from None
    return _wrapped(elementwise(func, tuple(_inner(a) for a in args), {k: _inner(v) for k, v in kwargs.items()}), true)


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, PaddedTensor) else x


def _sums(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    x, *rest = args
    dim = rest[0] if rest else kwargs.get("dim")
    keepdim = rest[1] if len(rest) > 1 else kwargs.get("keepdim", False)
    inner = masked(x)
    gone, *_ = reduced_layout(inner, dim, keepdim)
    total = sums(torch.sum, (inner, gone, keepdim), {})
    if func in (torch.mean, Tensor.mean):
        count = 1
        for d in gone:
            count *= x.true[d]
        total = total / count
    true = [1 if d in gone else n for d, n in enumerate(x.true) if keepdim or d not in gone]
    return _wrapped(total, tuple(true))


def _product(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    a, b = args
    true = (*(a.true if isinstance(a, PaddedTensor) else a.shape)[:-1], b.shape[-1])
    yields = getattr(b, "yields", None)
    a, b = _contracted(a, -1), _contracted(b, -2)
    return _wrapped(product_of(a, b, yields), true)


def _contracted(x: Any, dim: int) -> Any:
    """An operand ready for a contraction along ``dim``: zeros in the padding there."""
    if not isinstance(x, PaddedTensor):
        return x
    return masked(x) if x.true[dim] != x.size_[dim] else x.inner


def _linear(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    x, w, bias = (*args, kwargs.get("bias"))[:3]
    out = _product(func, (x, w.mT), {})
    return out if bias is None else out + bias


def _embedding(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """A padded vocabulary: nobody asks for the rows beyond it."""
    ids, table = args[:2]
    if not isinstance(table, PaddedTensor) or table.true[1] != table.size_[1] or isinstance(ids, PaddedTensor):
        raise Unsupported(
            "only the vocabulary of an embedding may be padded",
            op="embedding",
            operands={"ids": typeof(ids), "table": typeof(table)},
            mesh=getattr(table, "mesh", None),
            fix="F.embedding(ids, sl.shard(table, 'x .', pad=True))",
        )
    return embedding(func, (ids, table.inner, *args[2:]), kwargs)


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
    x, *sizes = args
    _last_only(x, func)
    wanted = tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else tuple(sizes)
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
    names = ("input", "target")
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
    x = given["input"]
    _last_only(x, func)
    rest = {k: v for k, v in kwargs.items() if k not in names}
    return split_cross_entropy(func, (x.inner, given["target"], *args[2:]), rest, classes=x.true[-1])


def _transposed(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    x = args[0]
    true = (*x.true[:-2], x.true[-1], x.true[-2])
    out = _wrapped(x.inner.mT, true)
    out.yields = x.yields
    return out


PADDED.update({f: _elementwise for f, rule in TABLE.items() if rule is elementwise})
PADDED.update(dict.fromkeys((torch.sum, Tensor.sum, torch.mean, Tensor.mean), _sums))
PADDED.update(dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _product))
PADDED.update(dict.fromkeys((Tensor.T.__get__, Tensor.mT.__get__, Tensor.t), _transposed))
PADDED.update(dict.fromkeys((Tensor.view, Tensor.reshape), _view))
PADDED.update(
    {F.linear: _linear, F.embedding: _embedding, Tensor.__getitem__: _getitem, F.cross_entropy: _cross_entropy}
)
PADDED[Tensor.backward] = TABLE[Tensor.backward]
