"""Local blocks as values: their storage on this kind of mesh, and the axes along which they vary.

Along a mesh axis a block is varying or replicated; docs/block_types.md tells what each verb takes
and gives, and what its gradient is.  Under simulate, in a body of ``shard_map``, it is tracked:

A block of an operand varies over the axes that split it and over those whose sum is pending.  The
result of a torch function varies over all axes over which its operands vary; ``psum``, ``pmax``,
``all_gather`` and ``pbroadcast`` remove axes, ``axis_index``, ``pslice``, ``preduce``,
``psum_scatter`` and ``all_to_all`` add them.  So a body that returns a varying block as replicated,
or sums a replicated one, is refused by the name of the axis, whatever the values are.

Blocks created outside the body are untracked (None) and never refused.

Source: the varying manual axes of JAX's shard_map (check_vma).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib.collectives.backends import BACKENDS
from shardlib.collectives.backends.backend import AxisGroup
from shardlib.collectives.simulate import Stacked, Varies, of
from shardlib.errors import WrongAxes, axes_text
from shardlib.mesh import GROUPS, Axes, Mesh, coordinates, current_mesh


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
    if lead(mesh):
        return coordinates(mesh.axes)
    return [dict(mesh.coord or dict.fromkeys(mesh.names, 0))]


def storage(blocks: Sequence[Tensor], mesh: Mesh) -> Tensor:
    """Join the blocks of this process's ranks to a storage: stacked, or the only one."""
    return torch.stack(list(blocks)) if lead(mesh) else blocks[0]


def blocks(raw: Tensor, mesh: Mesh) -> list[Tensor]:
    """List the block of each rank of this process, as views: writes go to the storage."""
    return [raw[rank] for rank in range(len(raw))] if lead(mesh) else [raw]


def group(mesh: Mesh, axes: Axes) -> Any:
    """Return the back end's group of one axis or several, made once and kept on the mesh."""
    found = mesh.memo[GROUPS].get(axes)
    if found is None:
        found = mesh.memo[GROUPS][axes] = BACKENDS[mesh.kind].group(mesh, axes)
    return found


def lead(mesh: Mesh) -> int:
    """Count the dimensions that a storage has in front of a block's.

    1 where one process simulates several ranks.
    """
    return BACKENDS[mesh.kind].lead


def storage_shape(mesh: Mesh, *block: int) -> tuple[int, ...]:
    """Return the shape of a storage whose blocks have this shape.

    >>> import shardlib as sl
    >>> storage_shape(sl.simulate(x=2), 3, 4), storage_shape(sl.record(x=2), 3, 4)
    ((2, 3, 4), (3, 4))
    """
    return (mesh.size,) * lead(mesh) + block


def block_shape(raw: Tensor, mesh: Mesh) -> torch.Size:
    """Return the shape of the blocks of a storage."""
    return first_block(raw, mesh).shape


def first_block(raw: Tensor, mesh: Mesh) -> Tensor:
    """Return the block of a storage's first rank, a view."""
    return raw[0] if lead(mesh) else raw


def flat_blocks(raw: Tensor, mesh: Mesh) -> Tensor:
    """Flatten each block of a storage to a vector; a block of no dimensions to one of one element."""
    return raw.reshape(storage_shape(mesh, -1))


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
    many = lead(mesh)
    for i, coord in enumerate(played(mesh)):
        yield coord, lambda raw, i=i: raw[i] if many else raw


def following(raw: Tensor, mesh: Mesh, varies: Varies | None) -> Stacked:
    out = Stacked(raw, mesh)
    out.varies = varies
    return out


# ---------------------------------------------------------------- varying axes


def real(mesh: Mesh, axes: Collection[str]) -> frozenset[str]:
    """Return the axes that have more than one rank."""
    return frozenset(a for a in axes if mesh.axes[a] > 1)


def public_name(name: str) -> str:
    """Return a collective's public name: the common ones are in ``sl`` itself."""
    return f"sl.{name}" if name in _EVERY_DAY else f"sl.collectives.{name}"


_EVERY_DAY = frozenset(
    {"psum", "pmean", "pmax", "all_gather", "psum_scatter", "all_to_all", "ppermute"}
)

_ENDS = frozenset(["psum", "pmax", "all_gather", "pbroadcast"])
_BEGINS = frozenset(["pslice", "place", "preduce", "psum_scatter", "all_to_all", "pvary"])
_SUMS = frozenset(["psum", "psum_scatter", "preduce"])


def _varies_over(x: Tensor, axes: Sequence[str]) -> frozenset[str] | None:
    """Return the axes over which an operand varies, at most ``axes`` for a plain tensor."""
    if type(x) is not Stacked:
        return frozenset(axes)
    return x.varies and x.varies.axes


def after_move(op: str, x: Tensor, g: AxisGroup, params: tuple) -> Varies | None:
    """Return the axes over which the result of a collective varies; None if ``x`` is untracked.

    On real ranks nothing is tracked.
    A tensor that a body made without a block, such as torch.ones, counts as varying over the axes
    of the collective, since its sum counts ranks.
    Raises: WrongAxes for a sum over an axis along which every rank holds the same.
    """
    if g.mesh.kind != "stacked" or (now := _varies_over(x, g.axes)) is None:
        return None
    over = real(g.mesh, g.axes)
    if op in _SUMS and over - now:
        raise _whole(op, x, g, now)
    if op in _ENDS:
        return Varies(now - over)
    # ranks that receive nothing have zeros, so the result varies
    begins = op in _BEGINS or (op == "ppermute" and len(params[0]) != g.size)
    return Varies(now | over if begins else now)


def _whole(op: str, x: Tensor, g: AxisGroup, now: frozenset[str]) -> WrongAxes:
    mesh = g.mesh
    whole = [a for a in mesh.names if a in real(mesh, g.axes) - now]
    copies = mesh.axis_size(tuple(whole))
    right = [a for a in g.axes if a in now] or [a for a in mesh.names if a in now]
    varies = f"varies over {', '.join(sorted(now))} only" if now else "is the same on every rank"
    return WrongAxes(
        f"the block {varies}, and a sum over {', '.join(map(repr, whole))} would add the same "
        f"value {copies} times",
        op=op,
        operands={"block": f"{x.dtype} {list(x.shape)}"},
        mesh=mesh,
        fix=f"{public_name(op)}(x, {axes_text(right)})" if right else "x",
    )


def differing(raw: Tensor, mesh: Mesh, axes: Sequence[str]) -> str | None:
    """Find the first axis along which simulated blocks differ by more than their rounding.

    A sum taken in another order on each rank may differ by its rounding.
    """
    if raw.is_meta or not raw.numel():
        return None
    blocks = raw.detach().unflatten(0, mesh.sizes)
    inexact = raw.is_floating_point() or raw.is_complex()
    slack = 64 * torch.finfo(raw.dtype).eps if inexact else 0.0
    for axis in axes:
        first = blocks.narrow(mesh.names.index(axis), 0, 1).expand_as(blocks)
        if not torch.allclose(blocks, first, rtol=slack, atol=slack, equal_nan=True):
            return axis
    return None
