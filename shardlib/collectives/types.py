"""Local blocks as values: the storage that holds them on this kind of mesh, and their type.

Along a mesh axis a block is varying or replicated; docs/block_types.md tells what each verb takes
and gives, and what its gradient is.
"""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from shardlib.collectives.backends import BACKENDS
from shardlib.collectives.simulate import Stacked, of
from shardlib.collectives.varying import Varies
from shardlib.mesh import Mesh, current_mesh

__all__ = [
    "Axis", "blocks", "each_rank", "following", "held", "holds_values", "lead", "mesh_of", "played",
    "spans_processes", "storage", "unwrap", "wrap",
]  # fmt: skip

Axis = str | tuple[str, ...]


def wrap(raw: Tensor, mesh: Mesh) -> Tensor:
    """Wrap a storage as a local block: unchanged, or Stacked under simulate."""
    return Stacked(raw, mesh) if mesh.kind == "stacked" else raw


def unwrap(local: Tensor) -> Tensor:
    """Return the storage of a local block."""
    return local.ranks if type(local) is Stacked else local


def mesh_of(local: Tensor) -> Mesh:
    """Return the mesh of a local block, which is the one in scope on real ranks."""
    return local.mesh if type(local) is Stacked else current_mesh()


def held(local: Tensor, mesh: Mesh) -> Tensor:
    """Return the storage of a local block, or of a plain tensor that every rank holds."""
    return of(local, mesh) if mesh.kind == "stacked" else local


def played(mesh: Mesh) -> list[dict[str, int]]:
    """List the coordinates of the ranks that run in this process.

    >>> import shardlib as sl
    >>> played(sl.simulate(x=2)), played(sl.record(x=1000))
    ([{'x': 0}, {'x': 1}], [{'x': 0}])
    """
    return BACKENDS[mesh.kind].played(mesh)


def storage(blocks: Sequence[Tensor], mesh: Mesh) -> Tensor:
    """Join the blocks of this process's ranks to a storage: stacked, or the only one."""
    return BACKENDS[mesh.kind].storage(blocks, mesh)


def blocks(raw: Tensor, mesh: Mesh) -> list[Tensor]:
    """List the block of each rank of this process, as views: writes go to the storage."""
    return BACKENDS[mesh.kind].blocks(raw, mesh)


def lead(mesh: Mesh) -> int:
    """Count the dimensions that a storage has in front of a block's.

    1 where one process simulates several ranks.
    """
    return BACKENDS[mesh.kind].lead


def holds_values(mesh: Mesh) -> bool:
    """Check whether blocks hold values, not shapes only."""
    return BACKENDS[mesh.kind].holds_values


def spans_processes(mesh: Mesh) -> bool:
    """Check whether other processes run the other ranks, and may hold other values."""
    return BACKENDS[mesh.kind].spans_processes


def each_rank(mesh: Mesh) -> Iterator[tuple[dict[str, int], Callable[[Tensor], Tensor]]]:
    """Yield (coordinate, view) of every rank in this process; view(raw) is its block of a storage.

    For local code that differs between ranks in more than values; writes to the views go to the
    storage.
    """
    for i, coord in enumerate(played(mesh)):
        yield coord, lambda raw, i=i: raw[i] if lead(mesh) else raw


def following(raw: Tensor, mesh: Mesh, varies: Varies | None) -> Stacked:
    out = Stacked(raw, mesh)
    out.varies = varies
    return out
