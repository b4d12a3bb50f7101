"""The plane is one of blocks: row and column of a rank say which it holds."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([(), (2,), (2, 1)]))
def test_rank_r_c_holds_block_r_c(rows: int, cols: int, inner: tuple[int, ...]) -> None:
    whole = torch.arange(2 * rows * 3 * cols * max(inner, default=1))
    whole = whole.reshape(2 * rows, *inner, 3 * cols)
    with sl.simulate(x=rows, y=cols):
        blocks = sl.shard(whole, sl.Layout2D("x", "y")).raw
    for r in range(rows):
        for c in range(cols):
            here = whole[2 * r : 2 * r + 2, ..., 3 * c : 3 * c + 3]
            assert torch.equal(blocks[r * cols + c], here)


def test_products_of_blocks_stay_blocks() -> None:
    plane = sl.Layout2D("x", "y")
    with sl.simulate(x=2, y=2):
        a, b = (sl.shard(torch.randn(4, 4), plane) for _ in range(2))
        assert (a @ b).sharding == plane.resolve(2)


def test_skewed_blocks_are_cannons() -> None:
    """Row r of A is turned left by r places, column c of B up by c, so that blocks match."""
    whole = torch.arange(4).reshape(2, 2)
    with sl.simulate(x=2, y=2):
        a, b = (sl.shard(whole, sl.Layout2D("x", "y", skew=s)).raw.flatten() for s in "ab")
    assert a.tolist() == [0, 1, 3, 2] and b.tolist() == [0, 3, 2, 1]
