"""Check mode: ranks that part ways are told apart before anything moves; off, nothing is added."""

from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.collectives import checking, digest
from tests import faults


@pytest.mark.parametrize(
    ("fault", "who"), [("swap", 1), ("other dtype", 2), ("other number", 3), ("a thread", 0)]
)
def test_ranks_that_part_ways_say_where(fault: str, who: int) -> None:
    told = faults.play(fault, who, 2, check=True)
    assert faults.wrong(fault, who, told, check=True) == []
    assert max(t.seconds for t in told) < 3.0  # sooner than the timeout


def test_a_right_program_runs_alike_under_check(pool: Any) -> None:
    for plain, checked in pool.run(_both, x=2, y=2):
        assert plain == checked


def _both() -> tuple[Any, Any]:
    found = []
    for mode in (sl.trace(), sl.check()):
        torch.manual_seed(3)
        with mode, sl.trace() as t:
            w = sl.shard(torch.randn(8, 8), "x y").requires_grad_()
            v = sl.shard(torch.randn(8, 8), ". y")
            loss = (torch.dropout(v @ w.T, 0.5, True) * 1.5).softmax(-1).square().sum()
            loss.backward()
            body = sl.shard_map(lambda b: sl.psum(b.sum(0), "x"), in_layouts="x y", out_layouts="y")
            out = sl.unshard(body(w.detach()))
        assert w.grad is not None
        found.append((loss.item(), sl.unshard(w.grad).tolist(), out.tolist(), t.bytes, t.messages))
    return found[0], found[1]


def test_check_is_ambient_and_outside_it_nothing_listens() -> None:
    assert checking() is None
    with sl.simulate(x=2), sl.check():
        assert checking() is not None
        assert sl.unshard(sl.shard(torch.arange(4.0), "x") * 2).tolist() == [0.0, 2.0, 4.0, 6.0]
    assert checking() is None


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_a_digest_tells_values_apart(dtype: torch.dtype) -> None:
    x = (torch.rand(40, 50, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)
    y = x.clone()
    y[0, 0] = not y[0, 0] if dtype is torch.bool else y[0, 0] + 3
    assert digest(x) == digest(x.clone()) != digest(y)
    assert digest(x) == digest(x.T.contiguous().T)
    assert digest(torch.empty(0)) == ""
