"""Simulation back end: storages are ``[ranks, *block]``, collectives are reshapes and sums."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

from shardlib.collectives.backends.backend import AxisGroup, Finish, Landing, Pairs
from shardlib.dtypes import wider
from shardlib.mesh import Axes, Mesh, coordinates, rank_along, uploaded

P = ParamSpec("P")

holds_values = True
spans_processes = False
lead = 1


def in_streams(g: AxisGroup) -> bool:
    return True


@dataclass(frozen=True, eq=False)
class _StackedGroup(AxisGroup):
    """Axes of simulated ranks: ``places`` of the ranks along them.

    ``order``  the mesh's axes by number, these last.
    """

    places: tuple[int, ...]
    order: list[int]

    def split(self, x: Tensor) -> Tensor:
        """[P, *local] -> [groups, p, *local]."""
        sizes = self.mesh.sizes
        n = len(self.order)
        y = x.reshape(*sizes, *x.shape[1:]).permute(*self.order, *range(n, n + x.ndim - 1))
        return y.reshape(self.mesh.size // self.size, self.size, *x.shape[1:])

    def merge(self, y: Tensor) -> Tensor:
        """[groups, p, *local] -> [P, *local], in memory of its own."""
        n = len(self.order)
        local = y.shape[2:]
        y = y.reshape(*[self.mesh.sizes[i] for i in self.order], *local)
        back = [self.order.index(i) for i in range(n)]
        y = y.permute(*back, *range(n, n + len(local)))
        return y.reshape(self.mesh.size, *local).contiguous()


def group(mesh: Mesh, axes: Axes) -> _StackedGroup:
    at = [mesh.names.index(a) for a in axes]
    order = [i for i in range(len(mesh.names)) if i not in at] + at
    places = tuple(rank_along(axes, coord, mesh.axes) for coord in coordinates(mesh.axes))
    index = uploaded(places, mesh.device)
    return _StackedGroup(mesh, axes, mesh.axis_size(axes), index, places, order)


def at_once(run: Callable[P, Tensor]) -> Callable[P, Finish]:
    """Turn a synchronous function into a collective that is done when it is posted."""

    @wraps(run)
    def post(*args: P.args, **kwargs: P.kwargs) -> Finish:
        out = run(*args, **kwargs)
        return lambda: out

    return post


@at_once
def psum(x: Tensor, g: _StackedGroup) -> Tensor:
    y = g.split(x)
    return g.merge(y.sum(1, keepdim=True, dtype=y.dtype).expand_as(y))


@at_once
def pmax(x: Tensor, g: _StackedGroup) -> Tensor:
    y = g.split(x)
    return g.merge(y.amax(1, keepdim=True).expand_as(y))


@at_once
def all_gather(x: Tensor, g: _StackedGroup, dim: int) -> Tensor:
    y = g.split(x)
    whole = y.movedim(1, dim + 1).flatten(dim + 1, dim + 2).unsqueeze(1)
    return g.merge(whole.expand(-1, y.shape[1], *[-1] * (whole.ndim - 2)))


@at_once
def psum_scatter(x: Tensor, g: _StackedGroup, dim: int, wire: torch.dtype | None = None) -> Tensor:
    y = g.split(x)
    tiles = dim + 2, (y.shape[1], y.shape[dim + 2] // y.shape[1])
    parts = y.unflatten(*tiles)
    if wire is not None:
        # a rank's own part is not sent, so it is not rounded
        own, parts = parts.diagonal(dim1=1, dim2=dim + 2), y.to(wire).to(x.dtype).unflatten(*tiles)
        parts.diagonal(dim1=1, dim2=dim + 2).copy_(own)
    return g.merge(parts.sum(1, dtype=y.dtype).movedim(dim + 1, 1))


@at_once
def psum_scatter_into(x: Tensor, g: _StackedGroup, to: Landing) -> Tensor:
    y = g.split(x.to(wider(x.dtype)))  # [groups, p, n]
    p = y.shape[1]
    parts = y.unflatten(-1, (p, -1))  # [groups, rank, part, n / p]
    owner = torch.arange(p, device=x.device)
    total = None
    for i in range(1, p + 1):
        # the owner's own part comes last, as in the ring of dist.py
        term = parts[:, (owner + i) % p, owner]
        term = term if to.wire is None or i == p else term.to(to.wire).to(y.dtype)
        total = term if total is None else total + term
    assert total is not None, "axes have one rank at least"
    return to.out.copy_(g.merge(total))


@at_once
def all_gather_into(flat: Tensor, g: _StackedGroup, ahead: bool = False) -> Tensor:
    return flat.copy_(all_gather(pslice(flat, g, 0)(), g, 0)())


@at_once
def pslice(x: Tensor, g: _StackedGroup, dim: int) -> Tensor:
    y = g.split(x)
    p = y.shape[1]
    cut = y.unflatten(dim + 2, (p, y.shape[dim + 2] // p))
    return g.merge(cut.diagonal(dim1=1, dim2=dim + 2).movedim(-1, 1))


@at_once
def place(x: Tensor, g: _StackedGroup, dim: int) -> Tensor:
    y = g.split(x)
    p = y.shape[1]
    out = y.new_zeros(*y.shape[: dim + 2], p, *y.shape[dim + 2 :])
    out.diagonal(dim1=1, dim2=dim + 2).copy_(y.movedim(1, -1))
    return g.merge(out.flatten(dim + 2, dim + 3))


def ppermutes(xs: Sequence[Tensor], g: _StackedGroup, tables: Sequence[Pairs]) -> list[Finish]:
    return [_ppermute(x, g, pairs) for x, pairs in zip(xs, tables, strict=True)]


@at_once
def _ppermute(x: Tensor, g: _StackedGroup, pairs: Pairs) -> Tensor:
    y = g.split(x)
    out = torch.zeros_like(y, memory_format=torch.contiguous_format)
    if pairs:
        source, target = (uploaded(tuple(s), x.device) for s in zip(*pairs, strict=True))
        out[:, target] = y[:, source]
    return g.merge(out)


@at_once
def all_to_all(x: Tensor, g: _StackedGroup, split_dim: int, concat_dim: int) -> Tensor:
    y = g.split(x)
    p = y.shape[1]
    sent = y.unflatten(split_dim + 2, (p, y.shape[split_dim + 2] // p)).movedim(split_dim + 2, 1)
    return g.merge(sent.movedim(2, concat_dim + 2).flatten(concat_dim + 2, concat_dim + 3))


@at_once
def ragged_all_to_all(x: Tensor, g: _StackedGroup, counts: Sequence[Sequence[int]]) -> Tensor:
    y = g.split(x)
    p = y.shape[1]
    out = y.new_zeros(len(y), p, max(map(sum, zip(*counts, strict=True))))
    at = [0] * p
    for i, row in enumerate(counts):
        for j, part in enumerate(y[:, i, : sum(row)].split(list(row), -1)):
            out[:, j, at[j] : at[j] + row[j]] = part
            at[j] += row[j]
    return g.merge(out)


@at_once
def pbroadcast(x: Tensor, g: _StackedGroup, root: int) -> Tensor:
    y = g.split(x)
    return g.merge(y[:, root : root + 1].expand_as(y))


@at_once
def preduce(x: Tensor, g: _StackedGroup, root: int) -> Tensor:
    y = g.split(x)
    out = torch.zeros_like(y, memory_format=torch.contiguous_format)
    out[:, root] = y.sum(1, dtype=y.dtype)
    return g.merge(out)


def preduce_into(
    target: Tensor, x: Tensor, g: _StackedGroup, root: int, wire: torch.dtype
) -> Finish:
    roots = uploaded(tuple(i for i, place in enumerate(g.places) if place == root), x.device)
    parts = x.to(wire).to(x.dtype)
    if x.dtype != wire:
        # the root's own part is not sent; it and the sum are rounded once
        parts[roots] = x[roots]
    target[roots] = preduce(parts, g, root)()[roots].to(target.dtype)
    return lambda: target
