"""Global reductions over whole tensors: each element counts once, in any layout.

A block counts on the first of the ranks that hold copies of it; its padding never counts.  All
tensors of a mesh share one psum of fp64 scalars.  A tensor in a bucket
of ``zero`` counts for any cut.
"""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import (
    blocks,
    lead,
    played,
    pmax,
    psum,
    psum_scatter,
    storage,
    unwrap,
    wrap,
)
from shardlib.kernels import active
from shardlib.kernels.apex import apex
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh, bind
from shardlib.ops.padding import filled
from shardlib.optim.trees import TensorView, by_tensor, cleared, each
from shardlib.tensor import Place, ShardedTensor

__all__ = ["norms", "scale_in_place", "scaled", "squares", "summed", "totals"]

BLOCK = 1 << 16
"""Elements that are summed in fp64 at a time, so that no full fp64 copy is made."""

Numbers = list[Tensor | None]


def squares(x: Tensor) -> Tensor:
    """Sum the squares of a block's elements, in fp64.

    fp32 would lose all but three digits of a sum over 20 M elements.
    """
    flat = (torch.view_as_real(x) if x.is_complex() else x).reshape(-1)
    if (not x.is_cpu or active.cpu) and (norm := apex("l2norm", flat)) is not None:
        return norm([flat]).double().square().sum()
    if not x.is_cpu:  # the kernel widens while it reads, and adds in a tree
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square()
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    for part in flat.split(BLOCK):
        wide = part.double()
        total += wide.dot(wide)
    return total


def powers(p: float) -> Callable[[Tensor], Tensor]:
    """Return a function that sums a block's p-th powers, or finds its largest for p = inf."""
    if p == 2:
        return squares

    def of(x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        for part in x.reshape(-1).split(BLOCK):
            size = part.abs().double()
            total = torch.maximum(total, size.amax()) if p == math.inf else total + (size**p).sum()
        return total

    return of


def totals(
    *trees: Any, of: Callable[[Tensor], Tensor] = squares, most: bool = False
) -> list[Numbers]:
    """Sum ``of`` (or find its largest, ``most``) over each tensor of each tree; None stays None.

    ``of``  a block -> a 0-dim fp64 tensor.
    Moves one psum (pmax) per mesh, of 8 bytes per tensor.
    """
    out: list[Numbers] = []
    shares: dict[Mesh, list[_RankCount]] = {}
    for tree in trees:
        found = [t and _share(t, of) for t in by_tensor(cleared(tree))]
        out.append([None] * len(found))
        for i, share in enumerate(found):
            if isinstance(share, _RankCount):
                shares.setdefault(share.mesh, []).append(share._replace(to=(out[-1], i)))
            else:
                out[-1][i] = share
    for mesh, mine in shares.items():
        zero = torch.zeros((), dtype=torch.float64, device=mine[0].device)
        rows = []
        for rank in range(len(played(mesh))):
            values = [s.values[rank] for s in mine]
            rows.append(torch.stack([zero if v is None else v for v in values]))
        with bind(mesh):
            joined = (pmax if most else psum)(wrap(storage(rows, mesh), mesh), mesh.names)
        all_of = blocks(unwrap(joined), mesh)[0]
        for share, value in zip(mine, all_of.unbind(), strict=True):
            share.to[0][share.to[1]] = value
    return out


def norms(*trees: Any) -> list[Numbers]:
    """Compute the Euclidean norm of each tensor of each tree, in fp64; see ``totals``."""
    return [[None if t is None else t.sqrt() for t in row] for row in totals(*trees)]


def scaled(tree: Any, numbers: Sequence[Tensor | None]) -> Any:
    """Multiply each tensor of the tree by its number, in ``totals``' order."""
    with torch.no_grad():
        out = each(torch.clone, tree)
        scale_in_place(out, numbers)
        return out


def scale_in_place(tree: Any, numbers: Sequence[Tensor | None]) -> None:
    """Multiply each tensor of the tree in place by its number, in ``totals``' order."""
    for one, by in zip(by_tensor(tree), numbers, strict=True):
        if one is None or by is None:
            continue
        for x in one.parts:
            if x is not None:
                x.mul_(_factor(by, x))


def _factor(by: Tensor, x: Tensor) -> Tensor:
    """Convert a scalar to ``x``'s dtype; kernels take one on the CPU without an upload."""
    return by.to(x.dtype) if by.device.type == "cpu" else by.to(x.device, x.dtype)


class _RankCount(NamedTuple):
    """Partial results for one tensor: a scalar for each rank in this process, or None."""

    mesh: Mesh
    device: torch.device
    values: list[Tensor | None]
    to: tuple[Numbers, int] = ([], 0)


def _share(one: TensorView, of: Callable[[Tensor], Tensor]) -> _RankCount | Tensor:
    if one.mesh is None:
        x = one.parts[0]
        return one.like.new_zeros((), dtype=torch.float64) if x is None or not x.numel() else of(x)
    first = _firsts(one.mesh, one.axes)
    rows = zip(first, one.parts, strict=True)
    values = [of(x) if f and x is not None and x.numel() else None for f, x in rows]
    return _RankCount(one.mesh, one.like.device, values)


def _firsts(mesh: Mesh, axes: Sequence[str]) -> list[bool]:
    """Return, per rank in this process, whether it is the first of those with the same block."""
    others = [a for a in mesh.names if a not in axes]
    return [not any(c[a] for a in others) for c in played(mesh)]


# ---------------------------------------------------------------- pending sums

MOST_BYTES = 25 << 20
"""The most bytes of one reduce-scatter of pending values."""


def summed(leaves: Sequence[Any]) -> list[Any]:
    """Sum the pending leaves, as vectors of which each rank holds a part.

    Half precision is summed in fp32.  Moves (N-1)/N of the pending bytes, one psum_scatter per
    25 MiB.
    """
    pending = [x for x in leaves if isinstance(x, ShardedTensor) and x.sharding.partial]
    out = [x for x in leaves if not (isinstance(x, ShardedTensor) and x.sharding.partial)]

    def kind(x: ShardedTensor) -> Any:
        split = [a in x.sharding.axes for a in x.mesh.names]
        return id(x.mesh), x.sharding.partial, split, str(x.dtype)

    for _, alike in groupby(sorted(pending, key=kind), key=kind):
        batch: list[ShardedTensor] = []
        for x in alike:
            if batch and sum(b.raw.nbytes for b in (*batch, x)) > MOST_BYTES:
                out.append(_scattered(batch))
                batch = []
            # one collective for many leaves, in bounded memory
            batch.append(x)
        out.append(_scattered(batch))
    return out


def _scattered(batch: Sequence[ShardedTensor]) -> ShardedTensor:
    mesh, over = batch[0].mesh, batch[0].sharding.partial
    front = lead(mesh)
    with torch.no_grad(), bind(mesh):
        rows = [x.raw.detach() if not x.is_padded else filled(x, 0).raw.detach() for x in batch]
        flat = torch.cat([r.reshape(*r.shape[:front], -1) for r in rows], -1)
        ways = mesh.axis_size(over)
        # zeros at the end count in no norm
        flat = F.pad(flat, (0, -flat.shape[-1] % ways))
        half = flat.dtype in (torch.bfloat16, torch.float16)
        wide, wire = (flat.float(), flat.dtype) if half else (flat, None)
        part = unwrap(psum_scatter(wrap(wide, mesh), over, 0, wire))
    axes = (*(a for a in mesh.names if a in batch[0].sharding.axes), *over)
    size = flat.shape[-1] * mesh.axis_size(axes) // ways
    return ShardedTensor(part, Place(Layout((Dim(axes),)), torch.Size([size]), mesh))
