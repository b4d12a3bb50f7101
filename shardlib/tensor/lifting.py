"""Plain tensors among sharded ones."""

from typing import Any

from torch import Tensor

from shardlib._compat import Local, under_transform
from shardlib.collectives import holds_values, lead
from shardlib.errors import PlainTensor, ShardError
from shardlib.layouts import Layout
from shardlib.mesh import Mesh, scope, within
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import ShardedTensor, no_transform, typeof

__all__ = ["check_met", "lift", "promoting", "replicated"]


def promoting() -> within:
    """Count plain tensors that a sharded one meets, within it, as the same on every rank."""
    return within(promoting=True)


def check_met(x: Any, mesh: Mesh, op: str) -> None:
    """Refuse an operand on another mesh, and a plain one outside ``promoting`` but a scalar."""
    if isinstance(x, ShardedTensor):
        if x.mesh is not mesh:
            raise ShardError(
                "operands live on different meshes",
                op=op,
                operands={"mesh": str(mesh), "x": typeof(x), "of": f"another mesh, {x.mesh}"},
                fix="sl.shard(sl.unshard(x), '...', mesh=mesh)",
            )
    elif x.ndim > 0 and not scope().promoting:
        raise PlainTensor(
            "a plain tensor met a sharded one, and nothing says where its data sits",
            op=op,
            operands={"t": typeof(x)},
            mesh=mesh,
            fix='sl.shard(t, "...")',
        )


def lift(x: Any, mesh: Mesh, op: str) -> "ShardedTensor":
    """Lift ``x`` to ``mesh``: plain tensors only within ``promoting``, scalars always."""
    check_met(x, mesh, op)
    return x if isinstance(x, ShardedTensor) else replicated(x, mesh)


class _Copies(Local):
    """A copy for each simulated rank; their cotangents are the same, and so is the original's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.unsqueeze(0).repeat(count, *[1] * x.ndim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None if grads[0] is None else _First.apply(grads[0]), None


class _First(Local):
    """One rank's copy of a value all hold; the cotangent goes to every copy."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor) -> Tensor:
        ctx.ranks = raw.shape[0]
        ctx.set_materialize_grads(False)
        return raw[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None if grads[0] is None else _Copies.apply(grads[0], ctx.ranks)


def replicated(x: Tensor, mesh: Mesh) -> ShardedTensor:
    """Wrap a tensor that every rank holds, as it is."""
    if name := under_transform(x):
        raise no_transform(name)
    raw: Any = x
    if lead(mesh):
        raw = _Copies.apply(x, mesh.size)
    elif not holds_values(mesh) and x.device.type != "meta":
        raw = x.to("meta")
    return ShardedTensor(raw, Place(Layout.parse("...").resolve(x.ndim), x.shape, mesh))
