"""No grid moves less than the bound, and the grid that matches the shape moves no more."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.ops.matmul.matmul3d import cube_words
from shardlib.planning.grids import factorizations

sizes = st.integers(1, 64).map(lambda n: 8 * n)


@given(sizes, sizes, sizes, st.sampled_from([1, 2, 4, 8, 9, 12, 16, 64, 512]))
def test_no_grid_moves_less_than_the_bound(m: int, k: int, n: int, p: int) -> None:
    """Counted on average over ranks, with every operand and the result held once."""
    least = min(cube_words(m, k, n, *grid) for grid in factorizations(p))
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
