"""Reductions: over whole dimensions on the blocks, over split ones with a psum or pmax."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import pmax, unwrap, wrap
from shardlib.errors import ImplicitCommunication
from shardlib.layouts import Dim, Layout
from shardlib.mesh import bind
from shardlib.tensor import ShardedTensor, implements, local_call, partial_escape, total, typeof

__all__ = ["reduced_layout"]


def reduced_layout(
    x: ShardedTensor, dim: Any, keepdim: bool
) -> tuple[tuple[int, ...], tuple[str, ...], Layout, torch.Size]:
    """(dims reduced, mesh axes that split them, result layout, result shape)."""
    ndim = len(x.size_)
    dims = tuple(range(ndim)) if dim is None or dim == () else tuple(dim) if isinstance(dim, tuple | list) else (dim,)
    gone = tuple(sorted(d % ndim for d in dims))
    tokens = x.sharding.resolve(ndim).dims
    axes = tuple(a for d in gone for a in tokens[d].axes)
    kept = [Dim() if d in gone else t for d, t in enumerate(tokens) if keepdim or d not in gone]
    shape = torch.Size([1 if d in gone else n for d, n in enumerate(x.size_) if keepdim or d not in gone])
    return gone, axes, Layout(dims=tuple(kept), partial=x.sharding.partial), shape


def _arguments(args: Any, kwargs: Any) -> tuple[ShardedTensor, Any, bool, dict[str, Any]]:
    x, *rest = args
    kwargs = dict(kwargs)
    dim = rest[0] if rest else kwargs.pop("dim", None)
    keepdim = rest[1] if len(rest) > 1 else kwargs.pop("keepdim", False)
    return x, dim, keepdim, kwargs


@implements(torch.sum, Tensor.sum, torch.mean, Tensor.mean)
def sums(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """Local sum, then one psum over the axes that split what was reduced."""
    x, dim, keepdim, more = _arguments(args, kwargs)
    gone, axes, layout, shape = reduced_layout(x, dim, keepdim)
    asked = more.get("dtype") or x.raw.dtype
    half = asked in (torch.bfloat16, torch.float16)  # rounded once it is summed, or to travel
    more = more | {"dtype": torch.float32} if half else more
    raw = local_call(torch.sum, x.mesh, (x.raw, gone), {"keepdim": keepdim} | more) if gone else x.raw
    if func in (torch.mean, Tensor.mean):
        raw = raw / (x.size_.numel() // max(1, shape.numel()))
    raw = total(raw, x.mesh, axes, asked if half else None)
    return ShardedTensor(raw, layout, shape, x.mesh, x.deferred)


@implements(Tensor.any, torch.any, Tensor.all, torch.all)
def claims(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Whether some, or all, elements are nonzero: counted, so that split dimensions take one psum."""
    x, dim, keepdim, _ = _arguments(args, kwargs)
    if x.sharding.partial:
        raise partial_escape(func.__name__, x)
    if func.__name__ == "any":
        return (x != 0).long().sum(dim, keepdim=keepdim) > 0
    return (x == 0).long().sum(dim, keepdim=keepdim) == 0


@implements(torch.amax, Tensor.amax, torch.amin, Tensor.amin)
def extremes(func: Any, args: Any, kwargs: Any) -> ShardedTensor:
    """Local maximum; over split dimensions a pmax as well (then without a gradient)."""
    x, dim, keepdim, _ = _arguments(args, kwargs)
    if x.sharding.partial:
        raise partial_escape(func.__name__, x)
    gone, axes, layout, shape = reduced_layout(x, dim, keepdim)
    raw = local_call(func, x.mesh, (x.raw, gone, keepdim), {})
    if axes:
        if raw.requires_grad:
            raise ImplicitCommunication(
                "the gradient of a maximum over a split dimension is not defined here",
                op=func.__name__,
                operands={"tensor": typeof(x)},
                mesh=x.mesh,
                fix=f"x.detach().{func.__name__}({dim}, keepdim={keepdim})",
            )
        sign = 1 if func in (torch.amax, Tensor.amax) else -1
        with bind(x.mesh):
            raw = sign * unwrap(pmax(wrap(sign * raw, x.mesh), axes))
    return ShardedTensor(raw, layout, shape, x.mesh, x.deferred)


@implements(torch.max, Tensor.max, torch.min, Tensor.min)
def max_or_min(func: Any, args: Any, kwargs: Any) -> Any:
    """Without a dimension the extreme of all; with one, values and indices along a whole dimension."""
    if len(args) == 1 and not kwargs:
        return extremes(torch.amax if func in (torch.max, Tensor.max) else torch.amin, args, {})
    return along(func, args, kwargs)


def _locally(x: ShardedTensor, dim: int, name: str) -> int:
    ndim = len(x.size_)
    token = x.sharding.resolve(ndim).dims[dim % ndim]
    if x.sharding.partial:
        raise partial_escape(name, x)
    if token.is_split:
        dims = [str(t) for t in x.sharding.resolve(ndim).dims]
        dims[dim % ndim] = "."
        raise ImplicitCommunication(
            f"{name} along dimension {dim % ndim}, which is split {token}, needs it whole",
            op=name,
            operands={"tensor": typeof(x)},
            mesh=x.mesh,
            fix=f"sl.reshard(x, {' '.join(dims)!r})",
        )
    return dim % ndim


@implements(
    torch.argmax, Tensor.argmax, torch.argmin, Tensor.argmin, torch.topk, Tensor.topk, torch.sort, Tensor.sort,
    torch.argsort, Tensor.argsort, torch.cumsum, Tensor.cumsum, torch.cumprod, Tensor.cumprod, torch.flip,
    Tensor.flip, torch.roll, Tensor.roll, torch.prod, Tensor.prod,
)  # fmt: skip
def along(func: Any, args: Any, kwargs: Any) -> Any:
    """Functions along one dimension that is whole on every rank."""
    x = args[0]
    name = func.__name__
    where = {"topk": 2, "roll": 2}.get(name, 1)
    default = -1 if name in ("topk", "sort", "argsort") else None
    dim = args[where] if len(args) > where else kwargs.get("dim", kwargs.get("dims", default))
    if dim is None:
        if x.sharding.axes:
            _locally(x, next(d for d, t in enumerate(x.sharding.resolve(len(x.size_)).dims) if t.is_split), name)
        reduces = True
        dims: tuple[int, ...] = tuple(range(len(x.size_)))
    else:
        dims = tuple(_locally(x, d, name) for d in (dim if isinstance(dim, tuple | list) else (dim,)))
        reduces = name in ("argmax", "argmin", "max", "min", "prod")
    out = local_call(func, x.mesh, (x.raw, *args[1:]), kwargs)
    keepdim = kwargs.get("keepdim", len(args) > where + 1 and args[where + 1] is True)

    def place(raw: Tensor) -> ShardedTensor:
        if reduces:
            _, _, layout, shape = reduced_layout(x, dims, keepdim)
        else:
            layout, shape = x.sharding, list(x.size_)
            shape[dims[0]] = raw.shape[dims[0] + (x.mesh.kind == "stacked")]
        return ShardedTensor(raw, layout, torch.Size(shape), x.mesh, x.deferred)

    return type(out)([place(r) for r in out]) if isinstance(out, tuple) else place(out)


@implements(F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, torch.log_softmax, Tensor.log_softmax)
def softmax(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Local over a whole dimension; over a split one a pmax and a psum per row."""
    x, *rest = args
    dim = (rest[0] if rest else kwargs["dim"]) % len(x.size_)
    dtype = kwargs.get("dtype")
    if x.sharding.partial:
        raise partial_escape(func.__name__, x)
    if not x.sharding.resolve(len(x.size_)).dims[dim].is_split:
        run = torch.log_softmax if "log" in func.__name__ else torch.softmax
        return x.like(local_call(run, x.mesh, (x.raw, dim - len(x.size_)), {"dtype": dtype}))
    dtype = x.dtype if dtype is None else dtype
    x = _wide(x, dtype)
    shifted = x - x.detach().amax(dim, keepdim=True)
    if "log" in func.__name__:
        return (shifted - shifted.exp().sum(dim, keepdim=True).log()).to(dtype)
    weight = shifted.exp()
    return (weight / weight.sum(dim, keepdim=True)).to(dtype)


def _wide(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` as what a result in ``dtype`` is computed in: half precision in fp32."""
    return x.to(torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype)


@implements(torch.logsumexp, Tensor.logsumexp)
def logsumexp(func: Any, args: Any, kwargs: Any) -> Tensor:
    """log(sum(exp(x))) with the maximum taken out first."""
    x, dim, keepdim, _ = _arguments(args, kwargs)
    dtype, x = x.dtype, _wide(x, x.dtype)
    top = x.detach().amax(dim, keepdim=True)
    out = ((x - top).exp().sum(dim, keepdim=True).log() + top).to(dtype)
    return out if keepdim else out.squeeze(dim)


@implements(torch.var, Tensor.var, torch.std, Tensor.std)
def variance(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Around the global mean, in two passes."""
    x, dim, keepdim, more = _arguments(args, kwargs)
    unbiased = more.get("correction", more.get("unbiased", True))
    gone, *_, shape = reduced_layout(x, dim, keepdim)
    count = x.size_.numel() // max(1, shape.numel())
    dtype, x = x.dtype, _wide(x, x.dtype)
    centred = x - x.mean(gone, keepdim=True)
    out = (centred * centred).sum(gone, keepdim=keepdim) / (count - int(unbiased))
    return (out.sqrt() if func in (torch.std, Tensor.std) else out).to(dtype)
