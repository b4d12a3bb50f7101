"""A function on each simulated rank's blocks is what each rank of its own would compute."""

import pytest
import torch

import shardlib as sl
from shardlib.ops.each_rank import FlatCall, each
from shardlib.tensor import Unfit


def total(block: torch.Tensor) -> float:
    return block.sum().item()


BLOCKS = torch.arange(12.0).reshape(2, 2, 3)  # of two ranks


def test_the_ranks_answers_are_stacked() -> None:
    with sl.simulate(x=2) as mesh:
        found = each(FlatCall.of(torch.cumsum, BLOCKS, dim=0), mesh)
    assert torch.equal(found, BLOCKS.cumsum(1))


def test_equal_views_of_each_block_are_one_view_of_all_blocks() -> None:
    with sl.simulate(x=2) as mesh:
        found = each(FlatCall.of(torch.select, BLOCKS, 0, 1), mesh)
    assert torch.equal(found, BLOCKS[:, 1]) and found._base is not None
    assert found.untyped_storage().data_ptr() == BLOCKS.untyped_storage().data_ptr()


def test_what_each_rank_writes_is_written_to_its_block() -> None:
    mine = BLOCKS.clone()
    with sl.simulate(x=2) as mesh:
        assert each(FlatCall.of(torch.Tensor.add_, mine, 1.0), mesh) is mine
    assert torch.equal(mine, BLOCKS + 1)


def test_numbers_that_differ_from_rank_to_rank_are_refused() -> None:
    with sl.simulate(x=2) as mesh, pytest.raises(sl.ShardError, match="answers differ"):
        each(FlatCall.of(total, BLOCKS), mesh)


def test_the_sizes_of_results_are_found_without_values() -> None:
    call = FlatCall.of(torch.cat, [torch.ones(2, 3), torch.ones(4, 3)], dim=0)
    assert call.shapes([(2, 5), (1, 5)]) == [(3, 5)]
    with pytest.raises(Unfit):
        call.shapes([(2, 5), (1, 6)])
