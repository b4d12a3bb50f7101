"""Recording back end: blocks on the meta device, collectives that compute only shapes.

Temporaries that a collective allocates on real ranks are allocated here too, so that peak memory
can be predicted without running (ops/attention/engine.py).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives.backends.backend import Axes, Finish, Pairs
from shardlib.collectives.backends.stacked import at_once
from shardlib.dtypes import wider
from shardlib.mesh import Mesh, rank_along

holds_values = False
spans_processes = False
lead = 0


def in_streams(mesh: Mesh, axes: Axes) -> bool:
    return False


def played(mesh: Mesh) -> list[dict[str, int]]:
    return [dict(mesh.coord or dict.fromkeys(mesh.names, 0))]


def storage(blocks: Sequence[Tensor], mesh: Mesh) -> Tensor:
    return blocks[0]


def blocks(raw: Tensor, mesh: Mesh) -> list[Tensor]:
    return [raw]


@at_once
def pmax(x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    return x.new_empty(x.shape)


@at_once
def pbroadcast(x: Tensor, mesh: Mesh, axes: Axes, root: int) -> Tensor:
    return x.new_empty(x.shape)


preduce = pbroadcast


def preduce_into(
    target: Tensor, x: Tensor, mesh: Mesh, axes: Axes, root: int, wire: torch.dtype
) -> Finish:
    target.copy_(preduce(x.to(wire), mesh, axes, root)())
    return lambda: target


def ppermutes(
    xs: Sequence[Tensor], mesh: Mesh, axes: Axes, tables: Sequence[Pairs]
) -> list[Finish]:
    def done(out: Tensor) -> Finish:
        return lambda: out

    return [done(x.new_empty(x.shape)) for x in xs]


@at_once
def psum(
    x: Tensor,
    mesh: Mesh,
    axes: Axes,
    out: torch.dtype | None = None,
    wire: torch.dtype | None = None,
) -> Tensor:
    if out is None:
        return x.new_empty(x.shape)
    mine = psum_scatter(
        F.pad(x.flatten(), (0, -x.numel() % mesh.axis_size(axes))), mesh, axes, 0, wire
    )()
    return all_gather(mine.to(out), mesh, axes, 0)()[: x.numel()].view(x.shape)


@at_once
def all_gather(x: Tensor, mesh: Mesh, axes: Axes, dim: int) -> Tensor:
    p = mesh.axis_size(axes)
    out = x.contiguous().new_empty((p, *x.shape))
    return out.movedim(0, dim).flatten(dim, dim + 1)


@at_once
def psum_scatter(
    x: Tensor, mesh: Mesh, axes: Axes, dim: int, wire: torch.dtype | None = None
) -> Tensor:
    parts = _parts(x, mesh, axes, dim)
    sent = parts if wire is None else parts.to(wire)
    came = torch.empty_like(sent)
    wide = wider(x.dtype)
    return came[0].to(wide, copy=True).to(x.dtype)


@at_once
def psum_scatter_into(
    x: Tensor,
    mesh: Mesh,
    axes: Axes,
    out: Tensor,
    wire: torch.dtype | None = None,
    land: Tensor | None = None,
    ahead: bool = False,
) -> Tensor:
    return out


@at_once
def all_gather_into(flat: Tensor, mesh: Mesh, axes: Axes, ahead: bool = False) -> Tensor:
    return flat


@at_once
def pslice(x: Tensor, mesh: Mesh, axes: Axes, dim: int) -> Tensor:
    return x.new_empty(
        [n // mesh.axis_size(axes) if d == dim else n for d, n in enumerate(x.shape)]
    )


@at_once
def place(x: Tensor, mesh: Mesh, axes: Axes, dim: int) -> Tensor:
    return x.new_empty([n * mesh.axis_size(axes) if d == dim else n for d, n in enumerate(x.shape)])


@at_once
def all_to_all(x: Tensor, mesh: Mesh, axes: Axes, split_dim: int, concat_dim: int) -> Tensor:
    came = torch.empty_like(_parts(x, mesh, axes, split_dim))
    return came.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1)


@at_once
def ragged_all_to_all(x: Tensor, mesh: Mesh, axes: Axes, counts: Sequence[Sequence[int]]) -> Tensor:
    return x.new_empty(max(map(sum, zip(*counts, strict=True))))


def axis_index(mesh: Mesh, axes: Axes) -> int:
    return rank_along(axes, played(mesh)[0], mesh.axes)


def _parts(x: Tensor, mesh: Mesh, axes: Axes, dim: int) -> Tensor:
    p = mesh.axis_size(axes)
    return x.unflatten(dim, (p, x.shape[dim] // p)).movedim(dim, 0).contiguous()
