"""Seconds of a cost follow from the links: latency per message, time per byte."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.planning.candidates import recipe_meshes
from tests.ops.cases import cube_words

sizes = st.integers(1, 64).map(lambda n: 8 * n)


def test_a_slow_axis_costs_more() -> None:
    with sl.simulate(x=2, y=2) as mesh:
        a, b = sl.shard(torch.zeros(64, 64), "x y"), sl.shard(torch.zeros(64, 64), "x y")
        cost = dict(sl.why("matmul", a, b).verdicts)["summa"].cost  # type: ignore[union-attr]
        mesh.links["x"] = sl.planning.Link(alpha=1.0, beta=0.0)
        assert cost.seconds(mesh.links) >= 1.0 > cost.seconds()


def test_a_link_that_is_slow_to_start_prefers_fewer_messages() -> None:
    with sl.simulate(x=3, y=3) as mesh:
        a, b = sl.shard(torch.zeros(9, 9), "x y"), sl.shard(torch.zeros(9, 9), "x y")
        prices = {
            n: m.cost
            for n, m in sl.why("matmul", a, b).verdicts
            if isinstance(m, sl.extend.Match) and not m.gathered
        }
        for axis in mesh.names:
            mesh.links[axis] = sl.planning.Link(alpha=1.0, beta=0.0)
        mesh.memo.forget()
        fewest = min(c.messages for c in prices.values())
        assert prices[sl.why("matmul", a, b).chosen].messages == fewest
        for axis in mesh.names:
            mesh.links[axis] = sl.planning.Link(alpha=0.0, beta=1.0)
        assert prices[sl.why("matmul", a, b).chosen].bytes == min(c.bytes for c in prices.values())


@given(sizes, sizes, sizes, st.sampled_from([1, 2, 4, 8, 9, 12, 16, 64, 512]))
def test_no_grid_moves_less_than_the_bound(m: int, k: int, n: int, p: int) -> None:
    """Counted on average over ranks, with every operand and the result held once."""
    grids = ((g["x"], g["z"], g["y"]) for g in recipe_meshes("cube3d", p))
    least = min(cube_words(m, k, n, *grid) for grid in grids)
    assert float(least) >= sl.planning.lower_bound(m, k, n, p) * (1 - 1e-12)


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((4096, 64, 64), (8, 1, 1)),
        ((64, 4096, 64), (1, 8, 1)),
        ((64, 64, 4096), (1, 1, 8)),
        ((512, 64, 512), (4, 1, 4)),
        ((512, 1024, 64), (4, 8, 1)),
        ((64, 64, 64), (2, 2, 2)),
        ((96, 96, 96), (3, 3, 3)),
        ((128, 64, 64), (4, 2, 2)),
        ((256, 128, 128), (16, 8, 8)),
        ((512, 512, 512), (8, 8, 8)),
    ],
)
def test_the_matching_grid_attains_the_bound(
    shape: tuple[int, int, int], grid: tuple[int, int, int]
) -> None:
    assert float(cube_words(*shape, *grid)) == pytest.approx(
        sl.planning.lower_bound(*shape, math.prod(grid)), rel=1e-12
    )
