"""Ranks hold runs of the first dimension, in the order of their axes, the first one major."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
def test_blocks_are_consecutive_rows_major_axis_first(x: int, y: int, n: int, more: int) -> None:
    whole = torch.arange(x * y * n * 2**more).reshape(x * y * n, *[2] * more)
    with sl.simulate(x=x, y=y):
        blocks = sl.shard(whole, sl.Row("x", "y")).raw
    assert torch.equal(blocks.reshape(-1, *whole.shape[1:]), whole)
