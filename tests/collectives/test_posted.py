"""A posted transfer gives its result once."""

import pytest
import torch

import shardlib as sl
from shardlib.collectives import (
    wrap,
)


def test_a_transfer_is_waited_for_once() -> None:
    with sl.simulate(x=2) as m:
        later = sl.collectives.start(sl.collectives.shift, wrap(torch.ones(2, 1), m), "x")
        later.wait()
        with pytest.raises(sl.ShardError, match="waited for already"):
            later.wait()
