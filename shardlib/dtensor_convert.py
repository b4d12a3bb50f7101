"""DTensor conversion without a copy, both ways: the blocks are shared, gradients flow."""

from typing import TYPE_CHECKING

import torch

from shardlib._compat import is_dtensor
from shardlib.collectives import spans_processes
from shardlib.errors import PlainTensor, Unsupported
from shardlib.layouts import Layout
from shardlib.mesh import as_mesh
from shardlib.tensor import Place, ShardedTensor, settle, typeof

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def as_dtensor(x: ShardedTensor) -> "DTensor":
    """Share the blocks as a DTensor.

    Raises: NotExpressible (blocks that are not contiguous, or are nested in another order than
    the mesh's axes), Unsupported under simulate.
    """
    if not isinstance(x, ShardedTensor):
        why = "only sharded tensors become DTensors"
        fix = "sl.dtensor.to_dtensor(sl.shard(x, '...'))"
        raise PlainTensor(why, op="to_dtensor", operands={"tensor": typeof(x)}, fix=fix)
    if not spans_processes(x.mesh):
        why = "simulated ranks have no DTensor"
        raise Unsupported(why, op="to_dtensor", mesh=x.mesh, fix="sl.unshard(x)")
    # DTensor's use is one more use of x, and its gradient comes summed
    x = settle(x)
    from torch.distributed.tensor import DTensor

    placements = x.sharding.placements(x.mesh)
    stride = torch.empty(x.padded_shape, device="meta").stride()
    return DTensor.from_local(
        x.raw, x.mesh.device_mesh, placements, run_check=False, shape=x.padded_shape, stride=stride
    )


def from_dtensor(t: "DTensor") -> ShardedTensor:
    """Convert a DTensor on a named mesh to a ShardedTensor; no copy, gradients flow.

    Raises: NotExpressible for strided placements and for pending averages, maxima and norms;
            UnevenSplit for uneven splits; MeshError for a mesh without names.

    >>> import shardlib as sl
    >>> with sl.make_mesh(x=1, device="cpu"):
    ...     a = sl.shard(torch.ones(4, 4), "x .")
    ...     b = sl.dtensor.from_dtensor(sl.dtensor.to_dtensor(a))
    ...     sl.typeof(b), b.local.data_ptr() == a.local.data_ptr()
    ('f32[4@x, 4]', True)
    >>> torch.distributed.destroy_process_group()
    """
    if not is_dtensor(t):
        why = "not a DTensor"
        given = {"tensor": typeof(t)}
        raise PlainTensor(why, op="from_dtensor", operands=given, fix="sl.shard(t, '...')")
    layout, mesh = Layout.from_dtensor(t), as_mesh(t.device_mesh)
    layout.check(tuple(t.shape), mesh, op="from_dtensor")
    from torch.distributed.tensor import Partial, Replicate

    cotangent = [Replicate() if isinstance(p, Partial) else p for p in t.placements]
    local = t.to_local(grad_placements=cotangent)
    # an async result of DTensor
    local = local.wait() if hasattr(local, "wait") else local
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        why = f"its blocks are no plain tensors but {type(local).__name__}"
        given = {"dtensor": typeof(t)}
        fix = "sl.shard(t.full_tensor(), '...')"
        raise Unsupported(why, op="from_dtensor", operands=given, fix=fix)
    return ShardedTensor(local, Place(layout, t.shape, mesh))
