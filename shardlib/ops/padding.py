"""Padding: positions beyond a tensor's true sizes, filled with zero before a sum.

A tensor whose sizes do not divide over its axes is padded to sizes that do; its place keeps the
true ones.  Values in the padding are never read: an operator that would mix them with elements
fills the padding first with a neutral value (zero before a sum, the lowest number before a
maximum), and results there have no gradient.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.collectives import holds_values, played, storage
from shardlib.errors import Unsupported
from shardlib.layouts import Layout
from shardlib.mesh import Mesh
from shardlib.opspec import Args, Func, Kwargs
from shardlib.tensor import ShardedTensor, Unfit, call_error

__all__ = [
    "beside",
    "filled",
    "inside",
    "last_only",
    "masked",
    "of_true_sizes",
    "padded_to",
    "the_dim",
    "with_zeros",
]


def masked(x: ShardedTensor) -> ShardedTensor:
    """Return the value of the padded sizes, with zeros in the padding and no gradient there."""
    return filled(x, 0)


def filled(x: ShardedTensor, value: float | bool) -> ShardedTensor:
    """Return the value of the padded sizes, with ``value`` in the padding and no gradient there."""
    whole = x.with_padding
    if not x.is_padded or not holds_values(x.mesh):
        return whole
    value = bool(value) if x.raw.dtype == torch.bool else value  # a number would promote the dtype
    return whole.becomes(torch.where(inside(x).raw, x.raw, value))


def inside(x: ShardedTensor) -> ShardedTensor:
    """Return a mask of a padded tensor: True for elements, False for padding."""
    key = (x.sharding, x.padded_shape, x.shape, x.raw.device)
    # few: masks are as large as blocks
    raw = x.mesh.memo("mask", key, lambda: _mask(*key, x.mesh), most=64)
    return ShardedTensor(raw, x.place._replace(true_shape=None, deferred=frozenset()))


def _mask(
    layout: Layout, shape: torch.Size, true: torch.Size, device: torch.device, mesh: Mesh
) -> Tensor:
    masks = []
    with torch.inference_mode(False):  # cached, so a later backward may save it
        for c in played(mesh):
            here = torch.ones((), dtype=torch.bool, device=device)
            for d, index in enumerate(layout.indices(shape, mesh, c)):
                row = torch.tensor([i < true[d] for i in index], dtype=torch.bool, device=device)
                here = here & row.reshape(-1, *[1] * (len(shape) - 1 - d))
            masks.append(here)
        return storage(masks, mesh)


def padded_to(value: ShardedTensor, true: Sequence[int]) -> ShardedTensor:
    """Return a value whose true sizes are ``true``; positions beyond them are padding."""
    if tuple(value.padded_shape) == tuple(true):
        return value
    return ShardedTensor(value.raw, value.place._replace(true_shape=torch.Size(true)))


def with_zeros(value: ShardedTensor, true: Sequence[int]) -> ShardedTensor:
    """Return a value whose true sizes are ``true``, with zeros and no gradient in its padding."""
    out = padded_to(value, true)
    return padded_to(filled(out, 0), true) if out.is_padded else out


def beside(along: Callable[..., Iterable[int]]) -> Callable[..., Any]:
    """Return a handler of padded operands for a function that works along some dimensions and
    treats the positions of all others independently.

    ``along(*args, **kwargs)``  returns those dimensions, of which none may be padded.
    """

    def serve(run: Any, func: Func, args: Args, kwargs: Kwargs) -> Any:
        leaves: list[Any] = optree.tree_leaves((args, kwargs), none_is_leaf=True)  # type: ignore[arg-type]
        given = [v for v in leaves if isinstance(v, Tensor) and v.ndim]
        padded = [v for v in given if isinstance(v, ShardedTensor) and v.is_padded]
        chosen = {d % x.ndim for d in along(*args, **kwargs) for x in padded}
        for x in padded:
            if any(x.shape[d] != x.padded_shape[d] for d in chosen):
                raise Unfit("positions of a padded dimension")
        kept = {_sizes(x, chosen) for x in given if x.ndim == padded[0].ndim}
        if len(kept) > 1 or len({x.sharding for x in padded}) > 1:
            raise Unfit("operands that are padded otherwise")
        return of_true_sizes(run, func, args, kwargs)

    return serve


def the_dim(signature: Callable[..., dict[str, Any]]) -> Callable[..., list[int]]:
    """Return the ``along`` of ``beside`` for functions with a ``dim``, bound by their signature."""

    def along(*args: Any, **kwargs: Any) -> list[int]:
        dim = signature(*args, **kwargs).get("dim")
        if dim is None:
            raise Unfit("the flattened tensor, whose positions padding moves")
        return [dim]

    return along


def _sizes(x: Tensor, but: set[int]) -> tuple[tuple[int, int], ...]:
    """List the true and the padded sizes of all dimensions but some."""
    padded = x.padded_shape if isinstance(x, ShardedTensor) else x.shape
    return tuple((x.shape[d], padded[d]) for d in range(x.ndim) if d not in but)


def of_true_sizes(run: Any, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run an implementation on the padded sizes; results get the sizes for the true ones."""

    def bare(v: Any) -> Any:
        sized = isinstance(v, ShardedTensor) or (isinstance(v, Tensor) and v.ndim > 0)
        return torch.empty(v.shape, dtype=v.dtype, device="meta") if sized else v

    def whole(v: Any) -> Any:
        return v.with_padding if isinstance(v, ShardedTensor) else v

    leaves, tree = optree.tree_flatten((args, kwargs), none_is_leaf=True)  # type: ignore[arg-type]
    a, k = optree.tree_unflatten(tree, list(map(bare, leaves)))
    try:
        with torch.no_grad():
            true: list[Any] = optree.tree_leaves(func(*a, **k))
    except (RuntimeError, IndexError, TypeError, ValueError):
        raise Unfit("what torch refuses, or sizes that hang on values") from None
    a, k = optree.tree_unflatten(tree, list(map(whole, leaves)))
    found, shape = optree.tree_flatten(run(func, a, k))
    if len(found) != len(true) or any(y.ndim != t.ndim for y, t in zip(found, true, strict=True)):
        raise Unfit("a dimension of one element, and of more with its padding")
    each = [padded_to(y, tuple(t.shape)) for y, t in zip(found, true, strict=True)]
    return optree.tree_unflatten(shape, each)


def last_only(x: ShardedTensor, func: Any) -> None:
    """Refuse padding in any dimension but the last."""
    if tuple(x.shape[:-1]) != tuple(x.padded_shape[:-1]):
        why = f"{func.__name__} takes padding in the last dimension alone"
        raise call_error(Unsupported, why, func, "sl.shard(sl.unshard(x), '...')", tensor=x)
