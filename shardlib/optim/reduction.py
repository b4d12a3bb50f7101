"""Gradients given to ``zero``, and their reduction to each rank's parts.

They come in one of three forms: a tree, summed or pending; whole buckets with pending sums, which a
sink of stage 1 collected; or parts, which a sink of stage 2 has reduced already.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.errors import PartialEscape, ShardError
from shardlib.mesh import Mesh
from shardlib.optim.buckets import Buckets, Index
from shardlib.optim.flat import parts_of
from shardlib.optim.index import Indexed, changed
from shardlib.optim.memory import Memory
from shardlib.optim.sink import Sink
from shardlib.optim.trees import given_for, wide
from shardlib.optim.zero_stage import ZeroSettings
from shardlib.tensor import ShardedTensor, typeof

__all__ = ["check_summed", "given_to", "reduced", "same_index", "sink_for"]


def given_to(grads: Any, at: Indexed) -> Any:
    """Return the trained leaves' gradients: a list, or Buckets."""
    if isinstance(grads, Buckets):
        return grads
    every = zip(given_for(at.tree, grads, "zero"), at.held, strict=True)
    given = [g for g, f in every if not f]
    for p, g in zip(at.leaves, given, strict=True):
        _check_layout(p, g)
    return given


def reduced(given: Any, where: Index, mesh: Mesh, how: ZeroSettings, memory: Memory) -> Buckets:
    """Return the parts of the summed gradients."""
    if isinstance(given, Buckets):
        same_index(given.index, where, mesh)
        partial = {a for g in given.values() for a in g.sharding.partial}
        if not partial:
            return given
        flats = [given[b.name].raw for b in where]
        also = tuple(sorted(partial - set(how.cut)))
        sink = sink_for(how, where, mesh, flats, memory, also=also)
        sink.begin(flats)
        return sink.finish()
    pending = _pending(given, how.cut)
    if pending is None:
        return parts_of(given, where, mesh, grads=True)
    firsts = [given[b.slots[0].leaves[0]].raw for b in where]
    also = tuple(a for a in pending if a not in how.cut)
    sink = sink_for(how, where, mesh, firsts, memory, also=also)
    for b in where:
        for slot in b.slots:
            for i in slot.leaves:
                sink.take(i, given[i].raw)
    return sink.finish()


def sink_for(
    how: ZeroSettings,
    where: Index,
    mesh: Mesh,
    like: Sequence[Tensor],
    memory: Memory,
    **more: Any,
) -> Sink:
    """Make a sink for gradients with the dtypes of ``like``, one leaf of each bucket."""
    wire = how.reduce_dtype
    # a sum sent in half precision is not worth fp32 parts
    exact = wire is None or wire == torch.float32
    dtypes = [(t.dtype, wide(t.dtype) if exact else t.dtype) for t in like]
    if {t.dtype for t in like} == {wire}:
        wire = None
    return Sink(where, mesh, memory, dtypes, device=like[0].device, wire=wire, **more)


def same_index(theirs: Index, ours: Index, mesh: Mesh) -> None:
    """Refuse gradients in other buckets than the state's."""
    if theirs == ours:
        return
    if theirs.items != ours.items:
        raise changed(ours.items, theirs.items, mesh)
    raise ShardError(
        "the gradients lie in other buckets than the state",
        op="zero",
        mesh=mesh,
        fix="loss, grads = sl.value_and_grad(f, into=tx)(params)",
    )


def check_summed(grads: Buckets) -> None:
    """Refuse gradients of parts whose sum is pending."""
    odd = next((g for g in grads.values() if g.place.layout.partial), None)
    if odd is not None:
        raise PartialEscape(
            "the gradient of a part is summed already, and this one is pending",
            op="zero",
            operands={"gradient": typeof(odd)},
            mesh=odd.mesh,
            fix="loss, grads = sl.value_and_grad(f)(params)",
        )


def _check_layout(p: Any, g: Any) -> None:
    """Refuse a gradient split otherwise than its parameter: blocks are combined by position."""
    sharded = isinstance(p, ShardedTensor)
    if sharded and isinstance(g, ShardedTensor) and g.mesh is p.mesh:
        mine, theirs = ((x.dims, x.sharding.skew, x.shape) for x in (p, g))
        if mine == theirs:
            return
    raise ShardError(
        "a parameter has no gradient"
        if g is None
        else "a gradient lies otherwise than its parameter",
        op="zero",
        operands={
            "parameter": typeof(p),
            "gradient": typeof(g) if isinstance(g, Tensor) else str(g),
        },
        mesh=p.mesh if sharded else None,
        fix="sl.value_and_grad(loss)(params)",
    )


def _pending(grads: list[Any], axes: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the axes over which gradients are pending; None if they are summed.

    Each gradient must be pending over all of them, without those that split its leaf, and ``axes``
    must be among them; or none may be pending.
    """
    every = {a for g in grads if isinstance(g, ShardedTensor) for a in g.sharding.partial}
    if not every:
        return None
    asked = every | set(axes)
    odd = next((g for g in grads if asked - set(g.sharding.axes) != set(g.sharding.partial)), None)
    if odd is None:
        return tuple(sorted(asked))
    names = axes[0] if len(axes) == 1 else axes
    raise PartialEscape(
        f"every gradient must be pending over {names!r}, or none pending at all",
        op="zero",
        operands={"gradient": typeof(odd)},
        mesh=odd.mesh,
        fix=f"sl.value_and_grad(loss, pending={names!r})",
    )
