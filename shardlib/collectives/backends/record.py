"""Recording back end: blocks on the meta device, collectives that compute only shapes.

Temporaries that a collective allocates on real ranks are allocated here too, so that peak memory
can be predicted without running (ops/attention/engine.py).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlib.collectives.backends.backend import AxisGroup, Finish, Landing, Pairs
from shardlib.collectives.backends.stacked import at_once
from shardlib.dtypes import wider
from shardlib.mesh import Axes, Mesh, rank_along

holds_values = False
spans_processes = False
lead = 0


def in_streams(g: AxisGroup) -> bool:
    return False


def group(mesh: Mesh, axes: Axes) -> AxisGroup:
    index = rank_along(axes, mesh.coord or dict.fromkeys(mesh.names, 0), mesh.axes)
    return AxisGroup(mesh, axes, mesh.axis_size(axes), index)


@at_once
def pmax(x: Tensor, g: AxisGroup) -> Tensor:
    return x.new_empty(x.shape)


@at_once
def pbroadcast(x: Tensor, g: AxisGroup, root: int) -> Tensor:
    return x.new_empty(x.shape)


preduce = pbroadcast


def preduce_into(target: Tensor, x: Tensor, g: AxisGroup, root: int, wire: torch.dtype) -> Finish:
    target.copy_(preduce(x.to(wire), g, root)())
    return lambda: target


def ppermutes(xs: Sequence[Tensor], g: AxisGroup, tables: Sequence[Pairs]) -> list[Finish]:
    def done(out: Tensor) -> Finish:
        return lambda: out

    return [done(x.new_empty(x.shape)) for x in xs]


psum = pmax


@at_once
def all_gather(x: Tensor, g: AxisGroup, dim: int) -> Tensor:
    out = x.contiguous().new_empty((g.size, *x.shape))
    return out.movedim(0, dim).flatten(dim, dim + 1)


@at_once
def psum_scatter(x: Tensor, g: AxisGroup, dim: int, wire: torch.dtype | None = None) -> Tensor:
    parts = _parts(x, g, dim)
    sent = parts if wire is None else parts.to(wire)
    came = torch.empty_like(sent)
    return came[0].to(wider(x.dtype), copy=True).to(x.dtype)


@at_once
def psum_scatter_into(x: Tensor, g: AxisGroup, to: Landing) -> Tensor:
    return to.out


@at_once
def all_gather_into(flat: Tensor, g: AxisGroup, ahead: bool = False) -> Tensor:
    return flat


@at_once
def pslice(x: Tensor, g: AxisGroup, dim: int) -> Tensor:
    return x.new_empty([n // g.size if d == dim else n for d, n in enumerate(x.shape)])


@at_once
def place(x: Tensor, g: AxisGroup, dim: int) -> Tensor:
    return x.new_empty([n * g.size if d == dim else n for d, n in enumerate(x.shape)])


@at_once
def all_to_all(x: Tensor, g: AxisGroup, split_dim: int, concat_dim: int) -> Tensor:
    came = torch.empty_like(_parts(x, g, split_dim))
    return came.movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1)


@at_once
def ragged_all_to_all(x: Tensor, g: AxisGroup, counts: Sequence[Sequence[int]]) -> Tensor:
    return x.new_empty(max(map(sum, zip(*counts, strict=True))))


def _parts(x: Tensor, g: AxisGroup, dim: int) -> Tensor:
    return x.unflatten(dim, (g.size, x.shape[dim] // g.size)).movedim(dim, 0).contiguous()
