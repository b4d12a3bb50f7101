"""ZeRO: any elementwise optimizer with its state split over the data axis.

``zero(tx, axis)`` lays the parameters' local blocks, whatever their tensor-parallel layout, end
to end in flat buckets; each rank along ``axis`` updates its own 1/N of every bucket and the
updates are gathered.  A bucket's shard is itself a ShardedTensor, a vector split over the
parameters' axes and ``axis``, so the inner transforms (clipping too) see ordinary values.

Per step, with P bytes of parameters on a rank: gradients pending over ``axis`` are
reduce-scattered, (N-1)/N P, and updates gathered, (N-1)/N P.

Source: Rajbhandari et al., arXiv 1910.02054, section 5.1 (stage 1, P_os).
"""

from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.collectives import all_gather, pslice, psum_scatter, unwrap, wrap
from shardlib.errors import PartialEscape, PlainTensor, ShardError, Unsupported
from shardlib.grad import frozen
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh, bind
from shardlib.optim.buckets import Bucket, Buckets, Item, flatten, index, unflatten
from shardlib.optim.transform import Transform
from shardlib.optim.trees import trainable
from shardlib.tensor import Place, ShardedTensor, typeof

__all__ = ["zero"]


def zero(tx: Transform, axis: str, stage: int = 1, *, bucket_mb: float = 25.0) -> Transform:
    """Split ``tx``'s state over mesh axis ``axis``; parameters and gradients keep their layouts.

    ``tx``  elementwise, or with a global norm inside
            (``chain(clip_by_global_norm(1), adamw(..))``).
    Gradients come ``+ sum(axis)`` (``value_and_grad(..., pending=axis)``: reduce-scattered here)
    or already summed (sliced, nothing moves).  Frozen parameters are in no bucket.  Updates equal
    ``tx``'s own, bit for bit, given the same reduced gradient.
    Raises: Unsupported for stages other than 1 and for transforms of the tree's structure.

    >>> import shardlib as sl
    >>> with sl.simulate(data=2, x=2):
    ...     params = {"w": sl.shard(torch.ones(4, 6), "x .")}
    ...     tx = sl.optim.zero(sl.optim.adamw(0.1), axis="data")
    ...     state = tx.init(params)
    ...     updates, state = tx.update(params, state, params)
    >>> sl.typeof(updates["w"]), *(sl.typeof(m) for m in state.mu.values())  # one bucket
    ('f32[4@x, 6]', 'f32[24@(x data)]')
    """
    if stage != 1:
        raise Unsupported(
            f"stage {stage} is not built; stage 1 is",
            op="zero",
            fix=f"sl.optim.zero(tx, axis={axis!r}, stage=1)",
        )
    if tx.trait == "tree":
        raise Unsupported(
            "this transform looks at single parameters, and zero shows it flat buckets",
            op="zero",
            fix=f"sl.optim.chain(masked, sl.optim.zero(rest, axis={axis!r}))",
        )

    def init(params: Any) -> Any:
        leaves = optree.tree_leaves(trainable(params))
        mesh, buckets = _index(leaves, axis, bucket_mb)
        return tx.init(_shards(leaves, mesh, buckets, axis, pending=False))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ShardError(
                "zero needs the parameters", op="zero", fix="tx.update(grads, state, params)"
            )
        every, tree = optree.tree_flatten(params)
        held = frozen(every)
        leaves = [p for p, f in zip(every, held, strict=True) if not f]
        given = [g for g, f in zip(tree.flatten_up_to(grads), held, strict=True) if not f]
        _lie_alike(leaves, given)
        mesh, buckets = _index(leaves, axis, bucket_mb)
        with torch.no_grad():
            parts = _shards(given, mesh, buckets, axis, pending=_pending(given, axis))
            updates, state = tx.update(
                parts, state, _shards(leaves, mesh, buckets, axis, pending=False)
            )
            blocks: dict[int, Tensor] = {}
            with bind(mesh):
                for bucket in buckets:
                    whole = all_gather(wrap(updates[bucket.name].raw, mesh), axis, 0)
                    blocks.update(unflatten(whole, bucket))
        out = iter([p.becomes(unwrap(blocks[i])) for i, p in enumerate(leaves)])
        return optree.tree_unflatten(tree, [None if f else next(out) for f in held]), state

    return Transform(init, update, tx.trait)


def _lie_alike(params: list[Any], grads: list[Any]) -> None:
    """Blocks go into the buckets by position: each gradient must be split as its parameter is."""
    for p, g in zip(params, grads, strict=True):
        alike = isinstance(g, ShardedTensor) and isinstance(p, ShardedTensor) and g.mesh is p.mesh
        if (
            not alike
            or g.dims != p.dims
            or g.sharding.skew != p.sharding.skew
            or g.shape != p.shape
        ):
            bare = isinstance(p, ShardedTensor)
            raise ShardError(
                "a gradient lies otherwise than its parameter"
                if g is not None
                else "a parameter has no gradient",
                op="zero",
                operands={
                    "parameter": typeof(p),
                    "gradient": typeof(g) if isinstance(g, Tensor) else str(g),
                },
                mesh=p.mesh if bare else None,
                fix="sl.value_and_grad(loss)(params)",
            )


def _pending(grads: list[Any], axis: str) -> bool:
    """Whether the gradients' sum over ``axis`` is still to be done: all of them or none."""
    partial = {g.sharding.partial if isinstance(g, ShardedTensor) else () for g in grads}
    if partial <= {()}:
        return False
    if partial == {(axis,)}:
        return True
    odd = next(g for g in grads if g.sharding.partial != (axis,))
    raise PartialEscape(
        f"every gradient must be pending over {axis!r} alone, or none pending at all",
        op="zero",
        operands={"gradient": typeof(odd)},
        mesh=odd.mesh,
        fix=f"sl.value_and_grad(loss, pending={axis!r})",
    )


def _index(leaves: list[Any], axis: str, bucket_mb: float) -> tuple[Mesh, tuple[Bucket, ...]]:
    items, values = [], {}
    for i, p in enumerate(leaves):
        if not isinstance(p, ShardedTensor):
            raise PlainTensor(
                "zero splits sharded parameters; this one is plain",
                op="zero",
                operands={"parameter": typeof(p)},
                fix="params = sl.shard(params, '...')",
            )
        ways = p.mesh.axis_size(axis)
        if axis in p.sharding.axes:
            whole = tuple(Dim() if axis in d.axes else d for d in p.dims)
            raise ShardError(
                f"a parameter is split over {axis!r} already, which zero is to split",
                op="zero",
                operands={"x": typeof(p)},
                mesh=p.mesh,
                fix=f"sl.reshard(x, {str(Layout(whole))!r})",
            )
        axes = tuple(a for a in p.mesh.names if a in p.sharding.axes)
        shape = p.sharding.local_shape(tuple(p.padded_shape), p.mesh)
        place = f"{p.sharding} of {list(p.padded_shape)} on {p.mesh.axes}"
        items.append(Item(str(i), shape, p.raw.dtype, axes, values.setdefault(id(p), i), place))
    if not leaves:
        raise ShardError("there are no parameters", op="zero", fix="tx.init(params)")
    mesh = leaves[0].mesh
    return mesh, index(tuple(items), ways, int(bucket_mb * 2**20))


def _shards(
    leaves: list[Any], mesh: Mesh, buckets: tuple[Bucket, ...], axis: str, *, pending: bool
) -> Buckets:
    """This rank's part of every bucket."""
    out = {}
    with torch.no_grad(), bind(mesh):
        blocks = [x.local for x in leaves]
        for bucket in buckets:
            flat = flatten(blocks, bucket)
            part = psum_scatter(flat, axis, 0) if pending else pslice(flat, axis, 0)
            split = (*bucket.axes, axis)
            size = bucket.length * mesh.axis_size(bucket.axes)
            out[bucket.name] = ShardedTensor(
                unwrap(part), Place(Layout((Dim(split),)), torch.Size([size]), mesh)
            )
    return Buckets(out, buckets, (axis,), mesh)
