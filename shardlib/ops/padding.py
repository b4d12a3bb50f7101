"""Padding: the positions of a block that stand for no element.

A tensor whose sizes do not divide over its axes is padded to sizes that do; its place remembers
the true ones.  What the padding holds is never read: an operator that would mix it with elements
fills it first, with the value that changes nothing (zero before a sum, the lowest number before a
maximum), and what is computed there has no gradient.
"""

from typing import Any

import torch
from torch import Tensor

from shardlib.collectives import holds_values, played, storage
from shardlib.errors import Unsupported
from shardlib.layouts import Layout
from shardlib.mesh import Mesh, remember
from shardlib.tensor import ShardedTensor, typeof

__all__ = ["filled", "inside", "last_only", "masked", "padded_to"]


def masked(x: ShardedTensor) -> ShardedTensor:
    """Return the value of the padded sizes, with zeros in the padding and no gradient there."""
    return filled(x, 0)


def filled(x: ShardedTensor, value: float | bool) -> ShardedTensor:
    """Return the value of the padded sizes, with ``value`` in the padding and no gradient there."""
    whole = x.with_padding
    if not x.is_padded or not holds_values(x.mesh):
        return whole
    value = bool(value) if x.raw.dtype == torch.bool else value  # which a number would promote
    return whole.becomes(torch.where(inside(x).raw, x.raw, value))


def inside(x: ShardedTensor) -> ShardedTensor:
    """Return which positions of a padded tensor are elements."""
    # a small table of its own: masks are as large as blocks
    known = x.mesh.plans.setdefault(inside, {})
    key = (x.sharding, x.padded_shape, x.shape, x.raw.device)
    raw = known.get(key)
    if raw is None:
        raw = remember(
            known,
            key,
            _mask(x.sharding, tuple(x.padded_shape), tuple(x.shape), x.mesh, x.raw.device),
            64,
        )
    return ShardedTensor(raw, x.place._replace(true_shape=None, deferred=frozenset()))


def _mask(
    layout: Layout, shape: tuple[int, ...], true: tuple[int, ...], mesh: Mesh, device: torch.device
) -> Tensor:
    key = _mask, layout, shape, true, device
    found = mesh.plans.get(key)
    if found is None:
        with torch.inference_mode(False):  # what is kept may be saved for a backward later
            found = remember(mesh.plans, key, _made(layout, shape, true, mesh, device))
    return found


def _made(
    layout: Layout, shape: tuple[int, ...], true: tuple[int, ...], mesh: Mesh, device: torch.device
) -> Tensor:
    masks = []
    for c in played(mesh):
        here = torch.ones((), dtype=torch.bool, device=device)
        for d, index in enumerate(layout.indices(shape, mesh, c)):
            row = torch.tensor([i < true[d] for i in index], dtype=torch.bool, device=device)
            here = here & row.reshape(-1, *[1] * (len(shape) - 1 - d))
        masks.append(here)
    return storage(masks, mesh)


def padded_to(value: ShardedTensor, true: tuple[int, ...]) -> ShardedTensor:
    """Return a value whose true sizes are ``true``; what lies beyond them is padding."""
    if tuple(value.padded_shape) == tuple(true):
        return value
    return ShardedTensor(value.raw, value.place._replace(true_shape=torch.Size(true)))


def last_only(x: ShardedTensor, func: Any) -> None:
    """Refuse padding in any dimension but the last."""
    if tuple(x.shape[:-1]) != tuple(x.padded_shape[:-1]):
        raise Unsupported(
            f"{func.__name__} takes padding in the last dimension alone",
            op=func.__name__,
            operands={"tensor": typeof(x)},
            mesh=x.mesh,
            fix="sl.shard(sl.unshard(x), '...')",
        )
