"""Recording: blocks on the meta device, collectives that only say what shape comes back."""

from collections.abc import Sequence

from torch import Tensor

from shardlib.mesh import Mesh

__all__: list[str] = []


def _same(x: Tensor, mesh: Mesh, axes: Sequence[str], *_: object) -> Tensor:
    return x.new_empty(x.shape)


psum = pmax = pbroadcast = preduce = ppermute = _same


def all_gather(x: Tensor, mesh: Mesh, axes: Sequence[str], dim: int) -> Tensor:
    return _scaled(x, dim, mesh.axis_size(tuple(axes)))


def psum_scatter(x: Tensor, mesh: Mesh, axes: Sequence[str], dim: int, wire: object = None) -> Tensor:
    return x.new_empty([n // mesh.axis_size(tuple(axes)) if d == dim else n for d, n in enumerate(x.shape)])


pslice = psum_scatter
place = all_gather


def all_to_all(x: Tensor, mesh: Mesh, axes: Sequence[str], split_dim: int, concat_dim: int) -> Tensor:
    return _scaled(psum_scatter(x, mesh, axes, split_dim), concat_dim, mesh.axis_size(tuple(axes)))


def axis_index(mesh: Mesh, axes: Sequence[str]) -> int:
    return 0


def _scaled(x: Tensor, dim: int, by: int) -> Tensor:
    return x.new_empty([n * by if d == dim else n for d, n in enumerate(x.shape)])
