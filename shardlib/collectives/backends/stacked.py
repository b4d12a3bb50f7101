"""Simulation back end: storages are ``[ranks, *block]``, collectives are reshapes and sums."""

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives.backends.backend import Axes, Finish, Pairs
from shardlib.dtypes import wide
from shardlib.mesh import Mesh, coordinates, rank_along, uploaded

P = ParamSpec("P")

holds_values = True
spans_processes = False
lead = 1


def in_streams(mesh: Mesh, axes: Axes) -> bool:
    return True


def played(mesh: Mesh) -> list[dict[str, int]]:
    return coordinates(mesh.axes)


def storage(blocks: Sequence[Tensor], mesh: Mesh) -> Tensor:
    return torch.stack(list(blocks))


def blocks(raw: Tensor, mesh: Mesh) -> list[Tensor]:
    return [raw[rank] for rank in range(len(raw))]


def _split(x: Tensor, mesh: Mesh, axes: Axes) -> tuple[Tensor, list[int]]:
    """[P, *local] -> [groups, p, *local], and the permutation applied to the mesh axes."""
    n = len(mesh.names)
    at = [mesh.names.index(a) for a in axes]
    order = [i for i in range(n) if i not in at] + at
    y = x.reshape(*mesh.sizes, *x.shape[1:]).permute(*order, *range(n, n + x.ndim - 1))
    p = math.prod(mesh.sizes[i] for i in at)
    return y.reshape(mesh.size // p, p, *x.shape[1:]), order


def _merge(y: Tensor, mesh: Mesh, order: list[int]) -> Tensor:
    """[groups, p, *local] -> [P, *local], in memory of its own."""
    n, local = len(order), y.shape[2:]
    y = y.reshape(*[mesh.sizes[i] for i in order], *local)
    back = [order.index(i) for i in range(n)]
    return y.permute(*back, *range(n, n + len(local))).reshape(mesh.size, *local).contiguous()


def at_once(run: Callable[P, Tensor]) -> Callable[P, Finish]:
    """Turn a synchronous function into a collective that is done when it is posted."""

    @wraps(run)
    def post(*args: P.args, **kwargs: P.kwargs) -> Finish:
        out = run(*args, **kwargs)
        return lambda: out

    return post


@at_once
def psum(
    x: Tensor,
    mesh: Mesh,
    axes: Axes,
    out: torch.dtype | None = None,
    wire: torch.dtype | None = None,
) -> Tensor:
    if out is not None:
        flat = F.pad(x.reshape(len(x), -1), (0, -x[0].numel() % mesh.axis_size(axes)))
        mine = psum_scatter(flat, mesh, axes, 0, wire)().to(out)
        return all_gather(mine, mesh, axes, 0)()[:, : x[0].numel()].reshape(x.shape)
    y, order = _split(x, mesh, axes)
    return _merge(y.sum(1, keepdim=True, dtype=y.dtype).expand_as(y), mesh, order)


@at_once
def pmax(x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    y, order = _split(x, mesh, axes)
    return _merge(y.amax(1, keepdim=True).expand_as(y), mesh, order)


@at_once
def all_gather(x: Tensor, mesh: Mesh, axes: Axes, dim: int) -> Tensor:
    y, order = _split(x, mesh, axes)
    whole = y.movedim(1, dim + 1).flatten(dim + 1, dim + 2).unsqueeze(1)
    return _merge(whole.expand(-1, y.shape[1], *[-1] * (whole.ndim - 2)), mesh, order)


@at_once
def psum_scatter(
    x: Tensor, mesh: Mesh, axes: Axes, dim: int, wire: torch.dtype | None = None
) -> Tensor:
    y, order = _split(x, mesh, axes)
    tiles = dim + 2, (y.shape[1], y.shape[dim + 2] // y.shape[1])
    parts = y.unflatten(*tiles)
    if wire is not None:  # a rank's own part is not sent, so it is not rounded
        own, parts = parts.diagonal(dim1=1, dim2=dim + 2), y.to(wire).to(x.dtype).unflatten(*tiles)
        parts.diagonal(dim1=1, dim2=dim + 2).copy_(own)
    return _merge(parts.sum(1, dtype=y.dtype).movedim(dim + 1, 1), mesh, order)


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
    y, order = _split(wide(x), mesh, axes)  # [groups, p, n]
    p = y.shape[1]
    parts = y.unflatten(-1, (p, -1))  # [groups, rank, part, n / p]
    owner = torch.arange(p, device=x.device)
    total = None
    for i in range(1, p + 1):  # the owner's own part comes last, as in the ring of dist.py
        term = parts[:, (owner + i) % p, owner]
        term = term if wire is None or i == p else term.to(wire).to(y.dtype)
        total = term if total is None else total + term
    assert total is not None, "axes have one rank at least"
    return out.copy_(_merge(total, mesh, order))


@at_once
def all_gather_into(flat: Tensor, mesh: Mesh, axes: Axes, ahead: bool = False) -> Tensor:
    return flat.copy_(all_gather(pslice(flat, mesh, axes, 0)(), mesh, axes, 0)())


@at_once
def pslice(x: Tensor, mesh: Mesh, axes: Axes, dim: int) -> Tensor:
    y, order = _split(x, mesh, axes)
    p = y.shape[1]
    cut = y.unflatten(dim + 2, (p, y.shape[dim + 2] // p))
    return _merge(cut.diagonal(dim1=1, dim2=dim + 2).movedim(-1, 1), mesh, order)


@at_once
def place(x: Tensor, mesh: Mesh, axes: Axes, dim: int) -> Tensor:
    y, order = _split(x, mesh, axes)
    p = y.shape[1]
    out = y.new_zeros(*y.shape[: dim + 2], p, *y.shape[dim + 2 :])
    out.diagonal(dim1=1, dim2=dim + 2).copy_(y.movedim(1, -1))
    return _merge(out.flatten(dim + 2, dim + 3), mesh, order)


def ppermutes(
    xs: Sequence[Tensor], mesh: Mesh, axes: Axes, tables: Sequence[Pairs]
) -> list[Finish]:
    return [_ppermute(x, mesh, axes, pairs) for x, pairs in zip(xs, tables, strict=True)]


@at_once
def _ppermute(x: Tensor, mesh: Mesh, axes: Axes, pairs: Pairs) -> Tensor:
    y, order = _split(x, mesh, axes)
    out = torch.zeros_like(y, memory_format=torch.contiguous_format)
    if pairs:
        source, target = (uploaded(tuple(s), x.device) for s in zip(*pairs, strict=True))
        out[:, target] = y[:, source]
    return _merge(out, mesh, order)


@at_once
def all_to_all(x: Tensor, mesh: Mesh, axes: Axes, split_dim: int, concat_dim: int) -> Tensor:
    y, order = _split(x, mesh, axes)
    p = y.shape[1]
    sent = y.unflatten(split_dim + 2, (p, y.shape[split_dim + 2] // p)).movedim(split_dim + 2, 1)
    return _merge(
        sent.movedim(2, concat_dim + 2).flatten(concat_dim + 2, concat_dim + 3), mesh, order
    )


@at_once
def ragged_all_to_all(x: Tensor, mesh: Mesh, axes: Axes, counts: Sequence[Sequence[int]]) -> Tensor:
    y, order = _split(x, mesh, axes)
    p = y.shape[1]
    out = y.new_zeros(len(y), p, max(map(sum, zip(*counts, strict=True))))
    at = [0] * p
    for i, row in enumerate(counts):
        for j, part in enumerate(y[:, i, : sum(row)].split(list(row), -1)):
            out[:, j, at[j] : at[j] + row[j]] = part
            at[j] += row[j]
    return _merge(out, mesh, order)


@at_once
def pbroadcast(x: Tensor, mesh: Mesh, axes: Axes, root: int) -> Tensor:
    y, order = _split(x, mesh, axes)
    return _merge(y[:, root : root + 1].expand_as(y), mesh, order)


@at_once
def preduce(x: Tensor, mesh: Mesh, axes: Axes, root: int) -> Tensor:
    y, order = _split(x, mesh, axes)
    out = torch.zeros_like(y, memory_format=torch.contiguous_format)
    out[:, root] = y.sum(1, dtype=y.dtype)
    return _merge(out, mesh, order)


def preduce_into(
    target: Tensor, x: Tensor, mesh: Mesh, axes: Axes, root: int, wire: torch.dtype
) -> Finish:
    places = [rank_along(axes, coord, mesh.axes) for coord in played(mesh)]
    roots = uploaded(tuple(i for i, place in enumerate(places) if place == root), x.device)
    parts = x.to(wire).to(x.dtype)
    if x.dtype != wire:  # the root's own part is not sent; it and the sum are rounded once
        parts[roots] = x[roots]
    target[roots] = preduce(parts, mesh, axes, root)()[roots].to(target.dtype)
    return lambda: target


def axis_index(mesh: Mesh, axes: Axes) -> Tensor:
    places = tuple(rank_along(axes, coord, mesh.axes) for coord in played(mesh))
    return uploaded(places, mesh.device).clone()
