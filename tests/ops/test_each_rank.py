"""A function on each simulated rank's blocks is what each rank of its own would compute."""

import pytest
import torch

import shardlib as sl
from shardlib.ops.each_rank import each, flat


def total(block: torch.Tensor) -> float:
    return block.sum().item()


BLOCKS = torch.arange(12.0).reshape(2, 2, 3)  # of two ranks


def test_the_ranks_answers_are_stacked() -> None:
    with sl.simulate(x=2) as mesh:
        leaves, tree = flat((BLOCKS,), {"dim": 0})
        found = each(torch.cumsum, mesh, leaves, [0], tree)
    assert torch.equal(found, BLOCKS.cumsum(1))


def test_equal_views_of_each_block_are_one_view_of_all_blocks() -> None:
    with sl.simulate(x=2) as mesh:
        leaves, tree = flat((BLOCKS, 0, 1), {})
        found = each(torch.select, mesh, leaves, [0], tree)
    assert torch.equal(found, BLOCKS[:, 1]) and found._base is not None
    assert found.untyped_storage().data_ptr() == BLOCKS.untyped_storage().data_ptr()


def test_what_each_rank_writes_is_written_to_its_block() -> None:
    mine = BLOCKS.clone()
    with sl.simulate(x=2) as mesh:
        leaves, tree = flat((mine, 1.0), {})
        assert each(torch.Tensor.add_, mesh, leaves, [0], tree) is mine
    assert torch.equal(mine, BLOCKS + 1)


def test_numbers_that_differ_from_rank_to_rank_are_refused() -> None:
    with sl.simulate(x=2) as mesh, pytest.raises(sl.ShardError, match="answers differ"):
        leaves, tree = flat((BLOCKS,), {})
        each(total, mesh, leaves, [0], tree)
