"""The predicted step is no shorter than its computation and its links, and no longer than both."""

import math

from hypothesis import given
from hypothesis import strategies as st

from shardlib.tiers.schedule import Uses, loads
from shardlib.tiers.timeline import step_seconds


@given(st.integers(2, 12), st.integers(2, 12), st.integers(0, 3), st.floats(0.1, 10.0))
def test_a_step_lies_between_the_busiest_and_all_in_turn(
    count: int, room: int, depth: int, rate: float
) -> None:
    names = [f"{i:02}" for i in range(count)]
    uses, sizes = Uses(names + names[::-1], names), dict.fromkeys(names, 1)
    computing = [1.0] * count + [2.0] * count
    found = step_seconds(uses, sizes, room, depth, computing, rate)
    up, down = len(loads(uses, sizes, room, depth) or []) / rate, count / rate
    assert max(sum(computing), up, down) - 1e-9 <= found <= sum(computing) + up + down + 1e-9
    # nothing of forward is loaded before all gradients of backward are sent
    assert found >= max(count, count / rate) + max(2 * count, count / rate) - 1e-9
    assert found <= step_seconds(uses, sizes, room, 0, computing, rate) + 1e-9
    assert step_seconds(uses, sizes, room, depth, computing, math.inf) == sum(computing)


@given(st.integers(2, 6), st.floats(0.1, 10.0), st.integers(1, 3), st.integers(0, 40))
def test_rounds_and_what_is_saved_take_no_less_than_their_links(
    count: int, rate: float, rounds: int, saved: int
) -> None:
    names = [f"{i:02}" for i in range(count)]
    uses = Uses((names + names[::-1]) * rounds, names)
    how = dict.fromkeys(names, 1), count, 1, [1.0] * len(uses.order), rate
    last = {at for at in range(len(uses.order)) if at % (2 * count) >= count}
    found = step_seconds(uses, *how, saved, saved, last)
    # each round sends all gradients, each step loads all chunks
    down, up = (rounds * count + saved) / rate, (count + saved) / rate
    assert max(len(uses.order), down, up) - 1e-9 <= found <= len(uses.order) + down + up + 1e-9
    assert found >= step_seconds(uses, *how, 0, 0, last) - 1e-9


def test_frozen_blocks_move_one_way_and_go_on_into_the_next_step() -> None:
    uses, sizes = Uses("abcabc"), dict.fromkeys("abc", 1)
    assert step_seconds(uses, sizes, 3, 2, [1.0] * 6, 0.01) == 6.0
