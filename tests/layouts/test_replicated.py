"""A replicated value is whole on every rank; of a partial one the blocks are summands."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl


@given(st.integers(0, 3), st.integers(1, 4))
def test_every_rank_holds_the_whole(ndim: int, ranks: int) -> None:
    whole = torch.randn([2] * ndim)
    with sl.simulate(x=ranks):
        held = sl.shard(whole, sl.Replicated())
        assert all(torch.equal(block, whole) for block in held.raw)
    assert not held.sharding.axes and not held.sharding.partial


@given(st.integers(1, 4))
def test_the_value_of_a_partial_is_the_sum_of_its_blocks(ranks: int) -> None:
    with sl.simulate(x=ranks):
        x = sl.from_local(sl.shard(torch.arange(2.0 * ranks), "x").local, sl.Partial("x"))
        assert torch.equal(sl.unshard(x), x.raw.sum(0))
