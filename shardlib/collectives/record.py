"""Recording: blocks on the meta device, collectives that only say what shape comes back.

What a collective allocates on real ranks beside its result is allocated here too, so that peak
memory can be counted on paper (ops/attention/peak.py).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.mesh import Mesh

__all__: list[str] = []


def _same(x: Tensor, mesh: Mesh, axes: Sequence[str], *_: object) -> Tensor:
    return x.new_empty(x.shape)


pmax = pbroadcast = preduce = ppermute = _same


def psum(
    x: Tensor, mesh: Mesh, axes: Sequence[str], out: torch.dtype | None = None, wire: torch.dtype | None = None
) -> Tensor:
    if out is None:
        return x.new_empty(x.shape)
    mine = psum_scatter(F.pad(x.flatten(), (0, -x.numel() % mesh.axis_size(tuple(axes)))), mesh, axes, 0, wire)
    return all_gather(mine.to(out), mesh, axes, 0)[: x.numel()].view(x.shape)


def all_gather(x: Tensor, mesh: Mesh, axes: Sequence[str], dim: int) -> Tensor:
    p = mesh.axis_size(tuple(axes))
    out = x.contiguous().new_empty((p, *x.shape))
    return out.movedim(0, dim).flatten(dim, dim + 1) if x.ndim else out


def psum_scatter(x: Tensor, mesh: Mesh, axes: Sequence[str], dim: int, wire: torch.dtype | None = None) -> Tensor:
    parts = _parts(x, mesh, axes, dim)
    sent = parts if wire is None else parts.to(wire)
    came = torch.empty_like(sent)
    wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    return came[0].to(wide, copy=True).to(x.dtype)


def pslice(x: Tensor, mesh: Mesh, axes: Sequence[str], dim: int) -> Tensor:
    return x.new_empty([n // mesh.axis_size(tuple(axes)) if d == dim else n for d, n in enumerate(x.shape)])


def place(x: Tensor, mesh: Mesh, axes: Sequence[str], dim: int) -> Tensor:
    return x.new_empty([n * mesh.axis_size(tuple(axes)) if d == dim else n for d, n in enumerate(x.shape)])


def all_to_all(x: Tensor, mesh: Mesh, axes: Sequence[str], split_dim: int, concat_dim: int) -> Tensor:
    came = torch.empty_like(_parts(x, mesh, axes, split_dim))
    return came.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1)


def axis_index(mesh: Mesh, axes: Sequence[str]) -> int:
    return 0


def _parts(x: Tensor, mesh: Mesh, axes: Sequence[str], dim: int) -> Tensor:
    p = mesh.axis_size(tuple(axes))
    return x.unflatten(dim, (p, x.shape[dim] // p)).movedim(dim, 0).contiguous()
