"""Plain tensors as operands of sharded ones: refused, or lifted to replicated values."""

from typing import Any

from torch import Tensor

from shardlib._compat import Local, under_transform
from shardlib.collectives import holds_values, lead, spans_processes, verify
from shardlib.errors import PlainTensor, ShardError
from shardlib.layouts import Layout
from shardlib.mesh import Entered, Mesh, Scope, scope, within
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import ShardedTensor, no_transform, typeof

__all__ = ["check_met", "constants", "lift", "promoting", "replicated"]


class constants(Entered):
    """Treat plain tensors used with sharded ones as constants: the same values on every rank.

    ``sl.parallelize`` does this in forward; here ``with sl.constants():`` or a decorator.  A tensor
    does not record where its values come from: ``torch.arange(8)`` and a batch read by this rank
    alone look alike, so outside this scope a plain tensor is refused.  On real ranks the values are
    compared, once for each line and every time in check mode, and moved to the mesh's device.  If
    one requires grad, it gets its whole gradient on every rank.
    Raises: RankFailed where the ranks hold different values.
    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2), sl.constants():
    ...     x = sl.shard(torch.ones(4, 8), "x .")
    ...     sl.typeof(x * torch.arange(8.0).cos() + torch.linspace(0, 1, 4)[:, None])
    'f32[4@x, 8]'
    """

    def changes(self, now: Scope) -> dict[str, Any]:
        return {"promoting": "verified"}


def promoting() -> within:
    """Treat plain operands of sharded ones as replicated inside this scope."""
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
    elif x.ndim > 0 and not (counts := scope().promoting):
        raise PlainTensor(
            "a plain tensor met a sharded one, and nothing says where its data sits",
            op=op,
            operands={"t": typeof(x)},
            mesh=mesh,
            fix='sl.shard(t, "...")  # or, of constants: with sl.constants():',
        )
    elif x.ndim > 0 and counts == "verified" and spans_processes(mesh):
        raw = x.detach()
        verify(
            op,
            mesh,
            {f"the plain {typeof(x)}": (raw, _WHOLE.resolve(x.ndim))},
            "sl.shard(t, '...', src=0)",
        )


def lift(x: Any, mesh: Mesh, op: str) -> "ShardedTensor":
    """Lift ``x`` to ``mesh``: plain tensors only within ``promoting``, scalars always."""
    check_met(x, mesh, op)
    return x if isinstance(x, ShardedTensor) else replicated(x, mesh)


class _Copies(Local):
    """One copy for each simulated rank; all copies have the same cotangent as the original."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.unsqueeze(0).repeat(count, *[1] * x.ndim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None if grads[0] is None else _First.apply(grads[0]), None


class _First(Local):
    """Rank 0's copy of a replicated value; the cotangent goes to every copy."""

    @staticmethod
    def forward(ctx: Any, raw: Tensor) -> Tensor:
        ctx.ranks = raw.shape[0]
        ctx.set_materialize_grads(False)
        return raw[0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None if grads[0] is None else _Copies.apply(grads[0], ctx.ranks)


def replicated(x: Tensor, mesh: Mesh) -> ShardedTensor:
    """Wrap a plain tensor that every rank holds as a replicated value."""
    if name := under_transform(x):
        raise no_transform(name)
    raw: Any = x
    if lead(mesh):
        raw = _Copies.apply(x, mesh.size)
    elif x.device.type == "meta":
        pass  # a module without values, whose values a loader will fill in
    elif not holds_values(mesh):
        raw = x.to("meta")
    elif x.ndim and not x.is_meta and x.device.type != mesh.device.type and spans_processes(mesh):
        raw = x.to(mesh.device)
    return ShardedTensor(raw, Place(_WHOLE.resolve(x.ndim), x.shape, mesh))


_WHOLE = Layout.parse("...")
