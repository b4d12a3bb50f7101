"""Global reductions over whole tensors: each element counts once, in any layout.

A block counts on the first of the ranks that hold copies of it; its padding never counts.  All
tensors of a mesh share one psum of fp64 scalars.  Trees may be ``Buckets``: then a tensor is its
slot, for any cut.
"""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import optree
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
from shardlib.optim.buckets import Buckets
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
        found = _shares(tree, of)
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
        if isinstance(tree, Buckets):
            out = tree.like({k: x.becomes(x.raw.clone()) for k, x in tree.items()})
            scale_in_place(out, numbers)
            return out
        leaves, shape = optree.tree_flatten(tree, none_is_leaf=True)
        done = [x if by is None else _times(x, by) for x, by in zip(leaves, numbers, strict=True)]
        return optree.tree_unflatten(shape, done)


def scale_in_place(tree: Any, numbers: Sequence[Tensor | None]) -> None:
    """Multiply each tensor of the tree in place by its number, in ``totals``' order."""
    if isinstance(tree, Buckets):
        for (number, *_), piece in zip(_numbered(tree), tree.pieces, strict=True):
            by = numbers[number]
            assert by is not None, "slots are never frozen"
            piece.mul_(_factor(by, piece))
        return
    for x, by in zip(optree.tree_leaves(tree, none_is_leaf=True), numbers, strict=True):
        if by is not None:
            raw = x.raw if isinstance(x, ShardedTensor) else x
            raw.mul_(_factor(by, raw))


def _times(x: Tensor, by: Tensor) -> Tensor:
    if isinstance(x, ShardedTensor):
        return x.becomes(x.raw * _factor(by, x.raw))
    return x * _factor(by, x)


def _factor(by: Tensor, x: Tensor) -> Tensor:
    """Convert a scalar to ``x``'s dtype; kernels take one on the CPU without an upload."""
    return by.to(x.dtype) if by.device.type == "cpu" else by.to(x.device, x.dtype)


class _RankCount(NamedTuple):
    """Partial results for one tensor: a scalar for each rank in this process, or None."""

    mesh: Mesh
    device: torch.device
    values: list[Tensor | None]
    to: tuple[Numbers, int] = ([], 0)


def _shares(tree: Any, of: Callable[[Tensor], Tensor]) -> list[_RankCount | Tensor | None]:
    if isinstance(tree, Buckets):
        return _of_buckets(tree, of)
    out: list[_RankCount | Tensor | None] = []
    for x in optree.tree_leaves(tree, none_is_leaf=True):
        if isinstance(x, ShardedTensor):
            first = _firsts(x.mesh, x.sharding.axes)
            parts = blocks(filled(x, 0).raw.detach(), x.mesh)
            values = [of(b) if f and b.numel() else None for f, b in zip(first, parts, strict=True)]
            out.append(_RankCount(x.mesh, x.raw.device, values))
        elif isinstance(x, Tensor):
            out.append(of(x.detach()) if x.numel() else x.new_zeros((), dtype=torch.float64))
        else:
            out.append(None)
    return out


def _of_buckets(tree: Buckets, of: Callable[[Tensor], Tensor]) -> list[_RankCount | Tensor | None]:
    ranks = len(played(tree.mesh))
    out: list[_RankCount | Tensor | None] = [
        _RankCount(tree.mesh, tree[bucket.name].raw.device, [None] * ranks)
        for bucket in tree.index
        for _ in bucket.slots
    ]
    first = {b.name: _firsts(tree.mesh, (*b.axes, *b.over)) for b in tree.index}
    for (number, name, rank), piece in zip(_numbered(tree), tree.pieces, strict=True):
        share = out[number]
        if first[name][rank] and isinstance(share, _RankCount):
            share.values[rank] = of(piece)
    return out


def _numbered(tree: Buckets) -> list[tuple[int, str, int]]:
    """List, per piece, its tensor's number, its bucket's name, and its rank in this process."""
    at, starts = 0, {}
    for bucket in tree.index:
        for slot in bucket.slots:
            starts[bucket.name, slot.offset, slot.leaves] = at
            at += 1
    return [(starts[b.name, p.slot.offset, p.slot.leaves], b.name, i) for b, i, p in tree.held]


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
