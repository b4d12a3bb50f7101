"""Plain tensors as operands of sharded ones: refused, or lifted to replicated values."""

from functools import partial
from typing import Any

from torch import Tensor

from shardlib._compat import under_transform
from shardlib.collectives import holds_values, lead, spans_processes, verify
from shardlib.errors import PlainTensor, ShardError
from shardlib.layouts import Layout
from shardlib.mesh import Entered, Mesh, Scope, scope, within
from shardlib.tensor.gradients import mapped
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import ShardedTensor, call_error, no_transform, typeof


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
            why = "operands live on different meshes"
            fix = "sl.shard(sl.unshard(x), '...', mesh=mesh)"
            if scope().call.stage is not None:
                why = "a value of the whole mesh met one of a stage; a step takes it as an argument"
                fix = "sl.value_and_grad(lambda p, *args: loss(p, *args), microbatches=4)"
            raise call_error(
                ShardError, why, op, fix, mesh=str(mesh), x=x, of=f"another mesh, {x.mesh}"
            )
    elif x.ndim > 0:
        _check_plain(x, mesh, op)


def _check_plain(x: Tensor, mesh: Mesh, op: str) -> None:
    """Refuse a plain operand outside ``promoting``; compare the ranks' copies of a constant."""
    counts = scope().call.promoting
    if scope().call.body and not counts:
        fix = "sl.shard_map(f, in_layouts=sl.layout_of((x, w)), out_layouts=sl.layout_of(x))(x, w)"
        why = "a block of the body of shard_map met a sharded value from outside"
        raise PlainTensor(why, op=op, mesh=mesh, fix=fix)
    if not counts:
        why = "a plain tensor met a sharded one, and nothing says where its data sits"
        fix = 'sl.shard(t, "...")  # or, of constants: with sl.constants():'
        raise PlainTensor(why, op=op, operands={"t": typeof(x)}, mesh=mesh, fix=fix)
    if counts == "verified" and spans_processes(mesh):
        blocks = {f"the plain {typeof(x)}": (x.detach(), _WHOLE.resolve(x.ndim))}
        verify(op, mesh, blocks, "sl.shard(t, '...', src=0)")


def lift(x: Any, mesh: Mesh, op: str) -> "ShardedTensor":
    """Lift ``x`` to ``mesh``: plain tensors only within ``promoting``, scalars always."""
    check_met(x, mesh, op)
    return replicated(x, mesh)


def lifted(op: str, *values: Any) -> list[ShardedTensor]:
    """Lift the operands of a call to the mesh of the first sharded one."""
    ours = [x for x in values if isinstance(x, ShardedTensor)]
    mesh = ours[0].place.mesh
    return [lift(x, mesh, op) for x in values]


def copies(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the storage of a tensor that every rank holds; its copies have the same cotangent."""
    if not lead(mesh):
        return x
    return mapped(
        x, partial(one_copy, mesh=mesh), lambda t: t.unsqueeze(0).repeat(mesh.size, *[1] * t.ndim)
    )


def one_copy(raw: Tensor, mesh: Mesh) -> Tensor:
    """Return the tensor of which a storage holds every rank's copy; its cotangent goes to each."""
    return mapped(raw, partial(copies, mesh=mesh), lambda t: t[0].clone()) if lead(mesh) else raw


def replicated(x: Tensor, mesh: Mesh) -> ShardedTensor:
    """Wrap a plain tensor that every rank holds as a replicated value; a sharded one stays."""
    if isinstance(x, ShardedTensor):
        return x
    if name := under_transform(x):
        raise no_transform(name)
    if x.requires_grad:
        refuse_blocks(x)
    raw = x
    if not holds_values(mesh):
        raw = x.to("meta")
    elif x.is_meta:
        # a module without values, whose values a loader will fill in
        raw = copies(x, mesh)
    elif spans_processes(mesh):
        if x.ndim and x.device.type != mesh.device.type:
            raw = x.to(mesh.device)
    else:
        # torch takes a 0-dim operand of the host with those of a device; a stack of them is none
        raw = copies(x if x.ndim else x.to(mesh.device), mesh)
    return ShardedTensor(raw, Place(_WHOLE.resolve(x.ndim), x.shape, mesh))


def whole_now(x: Tensor) -> Tensor:
    """Note that a plain tensor is a function of a whole value, as ``unshard`` gives it."""
    if x.grad_fn is not None:
        known: Any = x.grad_fn.metadata
        known[_OUT] = True
    return x


def leaf_of(x: ShardedTensor) -> Tensor:
    """Return the block of a value, or what stands for it in a graph, if it is in another memory tier."""
    leaf = getattr(x.facts and x.facts.read, "leaf", None)
    return x.raw if leaf is None else leaf()


def tiles_of(x: object) -> tuple[ShardedTensor, ...]:
    """Return the values of the rows of a table that is read one tile after another; else none."""
    return x.facts.tiles if isinstance(x, ShardedTensor) and x.facts is not None else ()


def leaf_block(raw: Tensor) -> Tensor:
    """Note that a leaf of autograd's is the block of a value."""
    raw.shardlib_block = True
    return raw


_OUT = "shardlib: unshard"


def refuse_blocks(x: Tensor) -> None:
    """Refuse a plain tensor of the function that is differentiated, if it was made of blocks.

    Each rank would differentiate its own value, and nothing would be summed.  Such a tensor has an
    autograd graph that leads to a leaf that is a block, and not through ``unshard``.
    """
    if not scope().call.differentiated:
        return
    left: list[Any] = [x.grad_fn]
    seen: set[Any] = {None}
    found = hasattr(x, "shardlib_block")
    while left and not found:
        node = left.pop()
        if node not in seen and _OUT not in node.metadata:
            seen.add(node)
            found = hasattr(getattr(node, "variable", None), "shardlib_block")
            left += [n for n, _ in node.next_functions]
    if found:
        why = (
            "a plain tensor was made of the block of a value whose gradient is taken (p.raw, "
            "p.local): each rank would differentiate its own block"
        )
        fix = (
            "sl.unshard(p)  # whole; code of blocks: sl.shard_map(f, in_layouts=, out_layouts=)(p)"
        )
        raise call_error(PlainTensor, why, "value_and_grad", fix, t=x)


_WHOLE = Layout.parse("...")
