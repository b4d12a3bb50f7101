"""An order deals every position to one rank, in balanced shares."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.layouts import Ring
from tests.layouts.test_ring import rings


@settings(max_examples=400, deadline=None)
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


@settings(max_examples=300, deadline=None)
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


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(1, 8))
def test_zigzag_balances_causal_work(chunk: int, size: int) -> None:
    """With even chunks every rank attends to the same number of positions."""
    length = 2 * size * chunk
    work = {
        sum(p + 1 for p in Ring("s", schedule="zigzag").positions(r, length, size))
        for r in range(size)
    }
    assert len(work) == 1
