from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.layouts import Ring


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["contiguous", "zigzag", "striped"]), st.integers(0, 60), st.integers(1, 9))
def test_positions_are_a_bijection_for_every_length(schedule: str, length: int, size: int) -> None:
    """Also shorter than the ring and not divisible; sizes differ by at most two positions."""
    held = [list(Ring("s", schedule=schedule).positions(r, length, size)) for r in range(size)]
    assert sorted(p for h in held for p in h) == list(range(length))
    assert all(h == sorted(h) for h in held)
    assert max(map(len, held)) - min(map(len, held)) <= (2 if schedule == "zigzag" else 1)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(1, 8))
def test_zigzag_balances_causal_work(chunk: int, size: int) -> None:
    """With even chunks every rank attends to the same number of positions."""
    length = 2 * size * chunk
    work = {sum(p + 1 for p in Ring("s", schedule="zigzag").positions(r, length, size)) for r in range(size)}
    assert len(work) == 1
