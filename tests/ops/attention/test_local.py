"""What ranks are handed is theirs: tables that are remembered cannot be written to by a caller."""

import torch

from shardlib.layouts.orders import Run
from shardlib.ops.attention.local import positions


def test_positions_are_the_caller_s_own() -> None:
    runs, cpu = (Run(3, 2, 4),), torch.device("cpu")
    positions(runs, cpu).zero_()
    assert positions(runs, cpu).tolist() == [3, 5, 7, 9]
