"""Recording back end: blocks on the meta device, collectives that compute only shapes.

Memory that a collective of dist.py takes over gloo is taken here too, from when it is posted until
it is waited for, so that peak memory can be predicted without running (planning/explain.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardlib.collectives.backends.backend import (
    LARGE,
    AxisGroup,
    Finish,
    Landing,
    Pairs,
    lands_alone,
    padded,
    swaps_whole,
)
from shardlib.collectives.backends.stacked import at_once
from shardlib.dtypes import is_half, wider
from shardlib.mesh import Axes, Mesh, rank_along

holds_values = False
spans_processes = False
lead = 0


@dataclass(frozen=True, eq=False)
class _PaperGroup(AxisGroup):
    """Axes of ranks on paper: ``placed`` if real ones would be in the order of their process group."""

    placed: bool


def in_streams(g: AxisGroup) -> bool:
    return False


def group(mesh: Mesh, axes: Axes) -> _PaperGroup:
    index = rank_along(axes, mesh.coord or dict.fromkeys(mesh.names, 0), mesh.axes)
    at = [mesh.names.index(a) for a in axes if mesh.axes[a] > 1]
    return _PaperGroup(mesh, axes, mesh.axis_size(axes), index, at == sorted(at))


def _later(run: Callable[[], Tensor], *_held: Tensor) -> Finish:
    """Return a transfer that holds memory until it is waited for."""
    return lambda _held=_held: run()


def _later_of(out: Tensor, *held: Tensor) -> Finish:
    return _later(lambda: out, *held)


def pmax(x: Tensor, g: _PaperGroup) -> Finish:
    if not x.is_floating_point() or not x.numel():
        return _later_of(x.new_empty(x.shape))
    parts = padded(x.flatten(), g.size).view(g.size, -1)
    came = torch.empty_like(parts)

    def finish() -> Tensor:
        _mine = came.amax(0)
        return x.new_empty(parts.numel())[: x.numel()].view(x.shape)

    return _later(finish, parts)


@at_once
def pbroadcast(x: Tensor, g: _PaperGroup, root: int) -> Tensor:
    return x.new_empty(x.shape)


preduce = pbroadcast


def preduce_into(target: Tensor, x: Tensor, g: _PaperGroup, root: int, wire: torch.dtype) -> Finish:
    target.copy_(preduce(x.to(wire), g, root)())
    return lambda: target


def ppermutes(xs: Sequence[Tensor], g: _PaperGroup, tables: Sequence[Pairs]) -> list[Finish]:
    return [_later_of(x.new_empty(x.shape), x.contiguous()) for x in xs]


def psum(x: Tensor, g: _PaperGroup) -> Finish:
    if swaps_whole(x, g.size):
        x = x.contiguous()
    return _later_of(x.new_empty(x.shape), x)


def all_gather(x: Tensor, g: _PaperGroup, dim: int) -> Finish:
    x = x.contiguous()
    out = x.new_empty((g.size, *x.shape))
    if dim == 0 and g.placed:
        return _later_of(out.flatten(0, 1), x)
    return _later(lambda: _joined(out, g, dim), x)


def psum_scatter(x: Tensor, g: _PaperGroup, dim: int, wire: torch.dtype | None = None) -> Finish:
    parts, dtype = _parts(x, g, dim), x.dtype
    sent = parts if wire is None else parts.to(wire)
    came = torch.empty_like(sent)
    return _later(lambda: came[0].to(wider(dtype), copy=True).to(dtype), parts, sent)


def psum_scatter_into(x: Tensor, g: _PaperGroup, to: Landing) -> Finish:
    parts, out = x.view(g.size, -1), to.out
    held, land = [x], to.land
    if lands_alone(parts, to):
        if g.size > 2 and land is None:
            held.append(x.new_empty((g.size - 2) * (parts.shape[1] + 1)))
        return _later_of(out, *held)
    sent = _placed(parts, g).to(to.wire or parts.dtype)
    if land is None or land.dtype != sent.dtype or land.numel() < sent.numel():
        held.append(torch.empty_like(sent))
    wide = torch.float32 if is_half(x) else x.dtype
    if is_half(x) or {sent.dtype, x.dtype} != {out.dtype}:
        return _later(lambda: out.copy_(sent[0].to(wide, copy=True)), *held)
    return _later_of(out, sent, *held)


def all_gather_into(flat: Tensor, g: _PaperGroup, ahead: bool = False) -> Finish:
    mine = flat.view(g.size, -1)[0]
    if mine.nbytes >= LARGE:
        return _later_of(flat)
    if g.placed:
        return _later_of(flat, mine.clone())
    later = all_gather(mine.clone(), g, 0)
    return lambda: flat.copy_(later())


@at_once
def pslice(x: Tensor, g: _PaperGroup, dim: int) -> Tensor:
    return x.new_empty([n // g.size if d == dim else n for d, n in enumerate(x.shape)])


@at_once
def place(x: Tensor, g: _PaperGroup, dim: int) -> Tensor:
    return x.new_empty([n * g.size if d == dim else n for d, n in enumerate(x.shape)])


def all_to_all(x: Tensor, g: _PaperGroup, split_dim: int, concat_dim: int) -> Finish:
    parts = _parts(x, g, split_dim)
    came = torch.empty_like(parts)
    return _later(lambda: _joined(came, g, concat_dim), parts)


def ragged_all_to_all(x: Tensor, g: _PaperGroup, counts: Sequence[Sequence[int]]) -> Finish:
    out = x.new_empty(max(map(sum, zip(*counts, strict=True))))
    return _later_of(out, x.contiguous())


def _placed(parts: Tensor, g: _PaperGroup) -> Tensor:
    if g.placed:
        return parts
    return torch.empty_like(parts)


def _parts(x: Tensor, g: _PaperGroup, dim: int) -> Tensor:
    parts = x.unflatten(dim, (g.size, x.shape[dim] // g.size)).movedim(dim, 0)
    return _placed(parts, g).contiguous()


def _joined(parts: Tensor, g: _PaperGroup, dim: int) -> Tensor:
    return _placed(parts, g).movedim(0, dim).flatten(dim, dim + 1)
