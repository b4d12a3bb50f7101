"""Rules for padded tensors: elementwise functions, sums, products; all else refuses.

The padding may hold anything.  It is set to zero wherever it would be added to something:
before a sum and before a contraction.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.errors import Unsupported
from shardlib.layouts import coordinates
from shardlib.ops.elementwise import elementwise
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
    """Padding meets padding, or numbers."""
    x = next(a for a in args if isinstance(a, PaddedTensor))
    for a in (*args, *kwargs.values()):
        fits = not isinstance(a, Tensor) or a.numel() == 1 or (isinstance(a, PaddedTensor) and a.true == x.true)
        if not fits:
            raise Unsupported(
                "a padded tensor combines with tensors padded alike and with numbers",
                op=func.__name__,
                operands={"padded": typeof(x), "other": typeof(a)},
                mesh=x.mesh,
                fix=f"sl.shard(y, {str(x.sharding)!r}, pad=True)",
            )
    plain = [a.inner if isinstance(a, PaddedTensor) else a for a in args]
    return _wrapped(elementwise(func, tuple(plain), kwargs), x.true)


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
    true = (*(a.true if isinstance(a, PaddedTensor) else a.size_)[:-1], b.shape[-1])
    a, b = (masked(t) if isinstance(t, PaddedTensor) else t for t in (a, b))
    return _wrapped(product_of(a, b), true)


def _transposed(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    x = args[0]
    true = (*x.true[:-2], x.true[-1], x.true[-2])
    return _wrapped(x.inner.mT, true)


PADDED.update({f: _elementwise for f, rule in TABLE.items() if rule is elementwise})
PADDED.update(dict.fromkeys((torch.sum, Tensor.sum, torch.mean, Tensor.mean), _sums))
PADDED.update(dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _product))
PADDED.update(dict.fromkeys((Tensor.T.__get__, Tensor.mT.__get__, Tensor.t), _transposed))
PADDED[F.linear] = lambda func, args, kwargs: (
    _product(func, (args[0], args[1].mT), {}) + (0 if len(args) < 3 or args[2] is None else args[2])
)
PADDED[Tensor.backward] = TABLE[Tensor.backward]
