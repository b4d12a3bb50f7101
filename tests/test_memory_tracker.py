"""Bytes are those of storages: views add none, what is freed is gone, the peak stays."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib.memory_tracker import Live


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 64)), max_size=12))
def test_the_peak_is_the_most_that_was_alive(steps: list[tuple[bool, int]]) -> None:
    held, now, peak = [], 0, 0
    with Live() as live:
        for free, n in steps:
            if free and held:
                now -= held.pop().nbytes
            else:
                held.append(torch.empty(n))
                now += 4 * n
            peak = max(peak, now)
            assert (live.now, live.peak) == (now, peak)


def test_a_view_is_no_memory_and_keeps_its_storage() -> None:
    with Live() as live:
        x = torch.empty(4, 4)
        y = x[1:].T
        assert live.now == 64
        del x
        assert live.now == 64
        del y
    assert (live.now, live.peak) == (0, 64)


def test_what_was_made_before_is_not_counted_and_paper_counts_only_if_asked() -> None:
    x = torch.empty(8)
    with Live() as live, Live(paper=True) as paper:
        y = x.mul_(2)
        blocks = torch.empty(4, 4, device="meta")
    assert live.peak == 0 and paper.peak == blocks.nbytes == 64 and y is x
