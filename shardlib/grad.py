"""Gradients of functions of sharded parameters, as values."""

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.errors import ShardError, Unsupported
from shardlib.tensor import PaddedTensor, ShardedTensor, gradient_of, settle, typeof

__all__ = ["grad", "value_and_grad"]


def value_and_grad(
    f: Callable[..., Any], argnums: int = 0, *, has_aux: bool = False, pending: str | Sequence[str] = ()
) -> Callable[..., tuple[Any, Any]]:
    """``value_and_grad(loss)(params, ...) -> (loss, grads)``; grads in the parameters' layouts.

    ``argnums``  the argument to differentiate, any pytree of tensors.
    ``has_aux``  f returns (loss, aux); the result is then ((loss, aux), grads).
    ``pending``  mesh axes over which gradients are left unsummed: they come back ``+ sum(axis)``,
                 which ``zero(..., axis)`` reduce-scatters instead of all-reducing.

    A leaf that the loss does not use gets zeros.  Where some leaves require grad, the others are frozen: their
    gradient is None, nothing is computed or moved for it, and transforms leave them alone.
    Raises: ShardError if the loss is no scalar.

    >>> import shardlib as sl
    >>> with sl.simulate(data=2, x=2):
    ...     w = sl.shard(torch.ones(4), "x")
    ...     v = sl.shard(torch.arange(8.0).reshape(2, 4), "data x")
    ...     loss, g = sl.value_and_grad(lambda w: (v * w).sum())(w)
    ...     _, later = sl.value_and_grad(lambda w: (v * w).sum(), pending="data")(w)
    >>> loss.item(), sl.typeof(g), sl.typeof(later), sl.unshard(g).tolist()
    (28.0, 'f32[4@x]', 'f32[4@x]{sum:data}', [4.0, 6.0, 8.0, 10.0])
    """
    axes = (pending,) if isinstance(pending, str) else tuple(pending)

    def run(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        leaves, tree = optree.tree_flatten(args[argnums], none_is_leaf=False)
        frozen = any(x.requires_grad for x in leaves)  # a tree that asks nowhere is asked for everywhere
        frozen_at = [frozen and not x.requires_grad for x in leaves]
        ours = [x.detach() if f else _leaf(x, axes) for x, f in zip(leaves, frozen_at, strict=True)]
        inner = optree.tree_unflatten(tree, ours)
        with torch.enable_grad():
            out = f(*args[:argnums], inner, *args[argnums + 1 :], **kwargs)
            loss, aux = out if has_aux else (out, None)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise ShardError(
                    f"the loss is {typeof(loss) if isinstance(loss, Tensor) else type(loss).__name__}, not a scalar",
                    op="value_and_grad",
                    fix="sl.value_and_grad(lambda p: f(p).mean())(params)",
                )
            raw = _ready(loss)
        asked = [x for x, f in zip(ours, frozen_at, strict=True) if not f]
        wanted = [x.raw if isinstance(x, ShardedTensor) else x for x in asked]
        found = torch.autograd.grad(raw.sum(), wanted, allow_unused=True) if raw.requires_grad else [None] * len(wanted)
        each = iter([_grad(x, r, g) for x, r, g in zip(asked, wanted, found, strict=True)])
        grads = [None if f else next(each) for f in frozen_at]
        value = loss.detach()
        return ((value, aux) if has_aux else value), optree.tree_unflatten(tree, grads)

    return run


def grad(f: Callable[..., Any], argnums: int = 0, *, pending: str | Sequence[str] = ()) -> Callable[..., Any]:
    """``value_and_grad`` without the value."""
    both = value_and_grad(f, argnums, pending=pending)
    return lambda *args, **kwargs: both(*args, **kwargs)[1]


def _leaf(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    if not x.is_floating_point():
        raise ShardError(
            f"only floating point leaves have gradients, this is {typeof(x)}", op="value_and_grad", fix="x.float()"
        )
    if not isinstance(x, ShardedTensor):
        return x.detach().requires_grad_()
    for a in axes:
        x.mesh.axis_size(a)  # raises where there is none
    apart = frozenset(a for a in axes if a not in x.sharding.axes)
    if isinstance(x, PaddedTensor):
        if apart:
            raise Unsupported(
                "a padded parameter's gradient cannot be left pending",
                op="value_and_grad",
                operands={"parameter": typeof(x)},
                mesh=x.mesh,
                fix="sl.value_and_grad(loss)(params)",
            )
        return x.like(x.raw.detach().requires_grad_())
    leaf = ShardedTensor(x.raw.detach().requires_grad_(), x.sharding, x.size_, x.mesh, apart)
    leaf.yields = x.yields
    return leaf


def _ready(loss: Tensor) -> Tensor:
    if not isinstance(loss, ShardedTensor):
        return loss
    if loss.sharding.partial or loss.sharding.axes:
        raise ShardError(
            "the loss must be the same on every rank",
            op="value_and_grad",
            operands={"loss": typeof(loss)},
            mesh=loss.mesh,
            fix="sl.reshard(loss, '...')",
        )
    return settle(loss).raw


def _grad(x: Tensor, raw: Tensor, found: Tensor | None) -> Tensor:
    found = torch.zeros_like(raw) if found is None else found
    return gradient_of(x, found) if isinstance(x, ShardedTensor) else found
