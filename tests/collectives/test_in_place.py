"""Collectives that write into memory give the bits of those that allocate."""

from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.collectives import (
    blocks,
    gather_into,
    played,
    scatter_into,
    storage,
    unwrap,
    wrap,
)
from shardlib.mesh import coordinates, rank_along

FLAT = [({"x": 4}, ("x",)), ({"x": 2, "y": 2}, ("y", "x")), ({"x": 2, "y": 2}, ("y",))]


def round_sum(
    every: list[torch.Tensor], mesh: sl.Mesh, axes: tuple[str, ...], wire: torch.dtype | None
) -> torch.Tensor:
    """Each part summed from its owner's neighbour on round to the owner."""
    p, ranks = mesh.axis_size(axes), coordinates(mesh.axes)
    out = []
    for coord in played(mesh):
        owner, others = rank_along(axes, coord, mesh.axes), {}
        for other, x in zip(ranks, every, strict=True):
            if all(other[a] == coord[a] for a in mesh.names if a not in axes):
                others[rank_along(axes, other, mesh.axes)] = x.view(p, -1)[owner]
        total = torch.zeros(())
        for i in range(1, p + 1):
            one = others[(owner + i) % p]
            one = one if wire is None or i == p else one.to(wire).to(one.dtype)
            total = one if i == 1 else total + one
        out.append(total)
    return storage(out, mesh)


def flat_vectors(axes: tuple[str, ...]) -> list[str]:
    """What differs between the collectives on flat vectors and those that allocate."""
    mesh, wrong = sl.current_mesh(), []
    for n, dtype, wire in [
        (8, torch.float32, None),
        (1 << 17, torch.float32, None),
        ((1 << 17) + 24, torch.float64, None),
        (1 << 17, torch.float32, torch.bfloat16),
        (1 << 17, torch.bfloat16, None),
    ]:
        p = mesh.axis_size(axes)
        g = torch.Generator().manual_seed(n)
        every = [torch.randn(n, generator=g).to(dtype) for _ in range(mesh.size)]
        place = {tuple(c.items()): i for i, c in enumerate(coordinates(mesh.axes))}
        raw = storage([every[place[tuple(c.items())]] for c in played(mesh)], mesh)
        out = torch.empty_like(raw[..., : n // p])
        want = unwrap(sl.psum_scatter(wrap(raw, mesh), axes, 0, wire))
        with sl.trace() as one:
            unwrap(sl.psum_scatter(wrap(raw, mesh), axes, 0, wire))
            unwrap(sl.all_gather(wrap(want, mesh), axes))
        with sl.trace() as two:
            land = torch.empty_like(raw)
            got = scatter_into(raw.clone(), out, mesh, axes, wire=wire, land=land, ahead=True)()
            flat = torch.zeros_like(raw)
            parts = flat.unflatten(-1, (p, -1))
            for view, mine, c in zip(
                blocks(parts, mesh), blocks(got, mesh), played(mesh), strict=True
            ):
                view[rank_along(axes, c, mesh.axes)] = mine
            gather_into(flat, mesh, axes, ahead=True)()
        turned = flat.clone()
        for part, c in zip(blocks(turned, mesh), played(mesh), strict=True):
            mine = rank_along(axes, c, mesh.axes)
            part.view(p, -1)[[i for i in range(p) if i != mine]] = 0
        if not torch.equal(gather_into(turned, mesh, axes)(), flat):
            wrong.append(f"ring gather {n} {dtype}")
        if dtype is not torch.bfloat16 and not torch.equal(got, round_sum(every, mesh, axes, wire)):
            wrong.append(f"sum {n} {dtype} {wire}")
        for room in (None, land, land.view(-1)[: n // 16]):  # in large and small pieces
            again = torch.empty_like(got)
            scatter_into(raw.clone(), again, mesh, axes, wire=wire, land=room)()
            if not torch.equal(again, got):
                wrong.append(f"ring {n} {dtype} {wire} {None if room is None else room.numel()}")
        if not torch.equal(flat, unwrap(sl.all_gather(wrap(got, mesh), axes))):
            wrong.append(f"gather {n} {dtype}")
        if (one.bytes, one.messages) != (two.bytes, two.messages):
            wrong.append(f"counts {n} {dtype} {wire}: {one.bytes} {two.bytes}")
        wide = torch.zeros(*got.shape, dtype=torch.float32)
        if dtype is torch.bfloat16 and not torch.equal(
            scatter_into(raw, wide, mesh, axes)(),
            unwrap(sl.psum_scatter(wrap(raw.float(), mesh), axes)),
        ):
            wrong.append(f"half precision {n}")
    return wrong


@pytest.mark.parametrize(("mesh", "axes"), FLAT)
def test_collectives_on_flat_vectors_are_those_that_allocate(
    mesh: dict[str, int], axes: tuple[str, ...], pool: Any
) -> None:
    with sl.simulate(**mesh):
        assert flat_vectors(axes) == []
    assert pool.run(flat_vectors, axes, **mesh) == [[]] * 4
