"""Ranks hold runs of the last dimension, whatever the number of dimensions."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
def test_blocks_are_consecutive_columns_major_axis_first(x: int, y: int, n: int, more: int) -> None:
    whole = torch.arange(x * y * n * 2**more).reshape(*[2] * more, x * y * n)
    with sl.simulate(x=x, y=y):
        blocks = sl.shard(whole, sl.Col("x", "y")).raw
    assert torch.equal(torch.cat(list(blocks), -1), whole)


def test_a_vector_is_split_alike_by_row_and_by_col() -> None:
    assert sl.Row("x").resolve(1) == sl.Col("x").resolve(1)
    assert sl.Col("x").resolve(2) == sl.Row("x").resolve(2).T
