"""What moving values between layouts may never depend on."""

import torch

import shardlib as sl


def test_a_sum_is_made_pending_on_any_number_of_ranks() -> None:
    """All ranks but the first hold zeros; tables are as long as the axis."""
    with sl.simulate(x=4200):
        pending = sl.reshard(sl.shard(torch.ones(2), "."), ". + sum(x)")
        assert sl.typeof(pending) == "f32[2]{sum:x}"
        assert torch.equal(sl.unshard(pending), torch.ones(2))
