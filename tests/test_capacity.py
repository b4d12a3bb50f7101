"""What would need more memory than there is is refused before anything is made."""

from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.capacity import available


@pytest.mark.parametrize("verb", [sl.parallelize, sl.init])
def test_a_module_that_does_not_fit_is_refused_before_it_begins(verb: Any) -> None:
    left = available(torch.device("cpu"))
    assert left is not None and left > 0
    with torch.device("meta"):
        model = nn.Linear(1 << 20, left >> 21, bias=False)  # twice what is left, on 2 ranks
    with sl.simulate(x=2), pytest.raises(sl.ShardError, match="GiB are needed") as caught:
        verb(model, [("*", "...")])
    assert "sl.record" in str(caught.value)
    with sl.record(x=2):
        sl.parallelize(model, [("*", "...")])


def test_a_tensor_that_does_not_fit_is_refused_before_it_is_copied() -> None:
    left = available(torch.device("cpu"))
    assert left is not None
    wide = torch.zeros(1).expand(left // 6)  # four bytes of it, and two ranks
    with sl.simulate(x=2), pytest.raises(sl.ShardError, match="GiB are needed"):
        sl.shard(wide, "...")


@pytest.mark.parametrize("tx", [sl.optim.adamw(0.1), sl.optim.lion(0.1), sl.optim.ema(0.9)])
def test_moments_that_do_not_fit_are_refused_before_they_are_made(tx: Any) -> None:
    left = available(torch.device("cpu"))
    assert left is not None
    n = left // 6  # of four bytes, on two ranks
    with sl.simulate(x=2):
        x = sl.shard(torch.zeros(2), "...")
        wide = x.becomes(torch.zeros(1).expand(2, n), shape=(n,))
        with pytest.raises(sl.ShardError, match=r"init: .* GiB are needed"):
            tx.init({"w": wide})
