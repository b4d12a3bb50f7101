"""An order deals every position to one rank, in balanced shares."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.layouts import Ring
from tests.layouts.test_ring import rings
from tests.strategies import examples


@examples(150)
@given(rings())
def test_positions_are_a_bijection_for_every_length(case: tuple[Ring, int, int]) -> None:
    """Each position once, in rising order on each rank, and no
    rank holds more than its block has room for.
    """
    ring, length, size = case
    held = [ring.positions(r, length, size) for r in range(size)]
    assert sorted(p for h in held for p in h) == list(range(length))
    assert all(h == sorted(h) for h in held)
    assert max(map(len, held)) <= ring.block(length, size)
    assert all(run.length > 0 for r in range(size) for run in ring.runs(r, length, size))


@examples(100)
@given(rings())
def test_shares_are_balanced(case: tuple[Ring, int, int]) -> None:
    """A block is at most the even share, rounded up to chunks."""
    ring, length, size = case
    bound = {
        "zigzag": 2 * math.ceil(length / (2 * size)),
        "documents": math.ceil(length / size) + 1,
    }
    if isinstance(ring.schedule, str):
        assert ring.block(length, size) <= bound.get(ring.schedule, math.ceil(length / size))


@examples(100)
@given(st.integers(1, 12), st.integers(1, 8))
def test_zigzag_balances_causal_work(chunk: int, size: int) -> None:
    """With even chunks every rank attends to the same number of positions."""
    length = 2 * size * chunk
    work = {
        sum(p + 1 for p in Ring("s", schedule="zigzag").positions(r, length, size))
        for r in range(size)
    }
    assert len(work) == 1


@pytest.mark.parametrize(
    ("text", "n", "which"),
    [("runs(s; 0:2 | 1:3)", 4, "1 twice"), ("runs(s; 0:2 | 3:5)", 4, "2 by nobody")],
)
def test_runs_that_do_not_cover_are_refused_though_their_sizes_fit(
    text: str, n: int, which: str
) -> None:
    x = torch.arange(float(n))
    with sl.simulate(s=2):
        with pytest.raises(sl.errors.UnevenSplit, match=f"holds position {which}") as e:
            sl.shard(x, text)
        assert torch.equal(sl.unshard(eval(e.value.fix, {"sl": sl, "x": x})), x)
