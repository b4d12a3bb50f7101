"""The size of all gradients together, and clipping by it."""

from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.collectives import played, psum, storage, unwrap, wrap
from shardlib.mesh import Mesh, bind
from shardlib.optim.transform import Step, Transform
from shardlib.optim.trees import EmptyState, each, ready
from shardlib.tensor import ShardedTensor

__all__ = ["clip_by_global_norm", "global_norm"]


def global_norm(tree: Any) -> Tensor:
    """Euclidean norm of all leaves together, each element counted once whatever its layout.

    Squares accumulate in fp64; one collective over the whole mesh.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     global_norm({"a": sl.shard(torch.ones(4, 4), "x y"), "b": sl.shard(torch.ones(9), ".")})
    tensor(5., dtype=torch.float64)
    """
    ready(tree, "global_norm")
    total = torch.zeros((), dtype=torch.float64)
    per_mesh: dict[Mesh, Tensor] = {}
    for x in optree.tree_leaves(tree):
        if not isinstance(x, ShardedTensor):
            total = (
                total.to(x.device)
                + torch.linalg.vector_norm(x.detach(), dtype=torch.float64).square()
            )
            continue
        copies = x.mesh.size
        for axis in x.sharding.axes:
            copies //= x.mesh.axes[axis]
        flat = x.raw.detach().reshape(len(played(x.mesh)), -1)
        squares = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).square() / copies
        per_mesh[x.mesh] = per_mesh[x.mesh] + squares if x.mesh in per_mesh else squares
    for mesh, squares in per_mesh.items():
        local = storage(list(squares), mesh)
        with bind(mesh):
            total = (
                total.to(squares.device)
                + unwrap(psum(wrap(local, mesh), mesh.names)).reshape(-1)[0]
            )
    return total.sqrt()


def clip_by_global_norm(max_norm: float) -> Transform:
    """Scale all updates so that their global norm is at most ``max_norm``."""

    def scale(norm: Tensor) -> Tensor:
        return ((norm + 1e-6) / max_norm).clamp(min=1.0)

    def update(grads: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        by = scale(global_norm(grads))
        return each(lambda g: g / by.to(g.device, g.dtype), grads), state

    def rescale(grads: Any, state: EmptyState, params: Any, step: Step) -> EmptyState:
        norm = global_norm(grads) if step.scale is None else global_norm(grads) / step.scale
        step.norm = norm
        step.divide(scale(norm))
        return state

    return Transform(lambda params: EmptyState(), update, "norm", rescale=rescale)
