"""A composed operator is torch's, moves what its parts move, and refuses what torch refuses."""

from typing import Any

import pytest
import torch

import shardlib as sl

A = torch.arange(24.0).reshape(4, 6)
CASES: dict[str, Any] = {
    "hstack": lambda a: torch.hstack([a, a]),
    "dstack": lambda a: torch.dstack([a, 2 * a]),
    "column_stack": lambda a: torch.column_stack([a, a]),
    "fliplr": torch.fliplr,
    "fill": lambda a: torch.fill(a, 3.0),
    "hsplit": lambda a: torch.hsplit(a, 3)[1],
    "msort": lambda a: torch.msort(a.mT),
    "adjoint": torch.adjoint,
    "sum_to_size": lambda a: a.sum_to_size(4, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_torchs_and_rows_stay_where_they_are(name: str) -> None:
    with sl.simulate(x=2):
        a = sl.shard(A, "x .")
        with sl.trace() as t:
            out = CASES[name](a)
        assert torch.equal(sl.unshard(out), CASES[name](A)) and t.bytes == 0
    assert out.sharding.axes == ("x",)


def test_what_torch_refuses_is_refused_with_torchs_words() -> None:
    with sl.simulate(x=2):
        a = sl.shard(torch.arange(4.0), "x")
        with pytest.raises(RuntimeError) as theirs:
            torch.fliplr(torch.arange(4.0))
        with pytest.raises(sl.errors.BadArgument, match="torch refuses") as ours:
            torch.fliplr(a)
    assert str(theirs.value).splitlines()[0] in str(ours.value)
