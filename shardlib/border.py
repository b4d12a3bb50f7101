"""To and from torch's DTensor without a copy: the blocks are shared, gradients flow."""

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardlib.errors import PlainTensor, Unsupported
from shardlib.layouts import Layout
from shardlib.mesh import as_mesh
from shardlib.tensor import ShardedTensor, typeof

__all__ = ["as_dtensor", "from_dtensor"]


def as_dtensor(x: ShardedTensor) -> DTensor:
    """The same blocks as a DTensor.

    Raises: NotExpressible (zigzag, skew, axes out of mesh order), Unsupported under simulate.
    """
    if not isinstance(x, ShardedTensor):
        raise PlainTensor(
            "only sharded tensors become DTensors",
            op="to_dtensor",
            operands={"tensor": typeof(x)},
            fix="sl.to_dtensor(sl.shard(x, '...'))",
        )
    if x.mesh.kind != "dist":
        raise Unsupported("simulated ranks have no DTensor", op="to_dtensor", mesh=x.mesh, fix="sl.unshard(x)")
    placements = x.sharding.placements(x.mesh)
    stride = torch.empty(x.size_, device="meta").stride()
    return DTensor.from_local(x.raw, x.mesh.device_mesh, placements, run_check=False, shape=x.size_, stride=stride)


def from_dtensor(t: DTensor) -> ShardedTensor:
    """A DTensor on a named mesh as a ShardedTensor; no copy, gradients flow.

    Raises: NotExpressible for strided placements, UnevenSplit for uneven ones, MeshError for a
    mesh without names.
    """
    if not isinstance(t, DTensor):
        raise PlainTensor("not a DTensor", op="from_dtensor", operands={"tensor": typeof(t)}, fix="sl.shard(t, '...')")
    layout, mesh = Layout.from_dtensor(t), as_mesh(t.device_mesh)
    layout.check(tuple(t.shape), mesh, op="from_dtensor")
    cotangent = [Replicate() if isinstance(p, Partial) else p for p in t.placements]
    return ShardedTensor(t.to_local(grad_placements=cotangent), layout, t.shape, mesh)
