"""The integer program against every choice there is."""

from itertools import combinations_with_replacement, product
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.planning.program import Column, peak, solve

NUMBERS = st.integers(1, 9)


@st.composite
def programs(draw: Any) -> tuple[list[Column], list[int], int]:
    counts = [1, draw(st.integers(1, 3)), 1]
    borders = draw(st.integers(1, 2))
    columns = []
    for part in range(3):
        for border in range(borders):
            for _ in range(draw(st.integers(1, 2))):
                begin, end = (0 if part == 0 else border), (0 if part == 2 else border)
                seconds, *sizes = (draw(NUMBERS) for _ in range(5))
                columns.append(Column(part, begin, end, seconds, *sizes))
    return columns, counts, draw(st.integers(10, 80))


def every(columns: list[Column], counts: list[int]) -> Any:
    """Every choice of columns whose states meet."""
    parts = [
        combinations_with_replacement([c for c in columns if c.part == part], count)
        for part, count in enumerate(counts)
    ]
    for first, middle, last in product(*map(list, parts)):
        meets = {c.end for c in first} == {c.begin for c in middle}
        if (
            meets
            and {c.end for c in middle} == {c.begin for c in last}
            and len({c.end for c in middle}) == 1
        ):
            taken = [*first, *middle, *last]
            yield [(c, taken.count(c)) for c in dict.fromkeys(taken)]


@settings(max_examples=40, deadline=None)
@given(programs())
def test_the_program_finds_what_every_choice_has_best(case: Any) -> None:
    columns, counts, room = case
    choices = list(every(columns, counts))
    fitting = [sum(c.seconds * n for c, n in x) for x in choices if peak(x) <= room]
    found = solve(columns, counts, room)
    assert (found is None) == (not fitting)
    if found is not None:
        assert found.seconds == min(fitting)
        assert found.peak == peak(found.counts) <= room
    free = solve(columns, counts)
    assert free is not None and free.peak == peak(free.counts)
    assert free.seconds == min(sum(c.seconds * n for c, n in x) for x in choices)
    least = solve(columns, counts, room, least=True)
    assert least is not None
    assert least.peak == min(map(peak, choices))


# part, states, seconds and bytes of ways through a step of two equal layers, as a search found them
WAYS = [
    (0, 0, 1, 0.007635, 2176, 1088, 3072, 8192),
    (0, 0, 1, 0.008825, 1664, 576, 3072, 13312),
    (0, 0, 1, 0.010188, 1664, 576, 3200, 11392),
    (0, 0, 3, 0.007894, 1792, 640, 3072, 11264),
    (0, 0, 0, 0.005475, 2304, 1152, 3072, 7680),
    (0, 0, 0, 0.007962, 1792, 640, 3200, 13696),
    (0, 0, 0, 0.009348, 1792, 640, 3072, 9728),
    (1, 1, 1, 0.005746, 2176, 1088, 4096, 10528),
    (1, 1, 1, 0.010601, 2176, 1088, 3072, 8704),
    (1, 1, 1, 0.007416, 2176, 1088, 2048, 10528),
    (1, 1, 1, 0.014888, 2176, 1088, 2048, 8704),
    (1, 3, 3, 0.012921, 3328, 1664, 3328, 13312),
    (1, 3, 3, 0.019678, 1280, 128, 5120, 25600),
    (1, 3, 3, 0.018398, 3328, 1664, 4096, 13312),
    (1, 3, 3, 0.027002, 1280, 128, 4096, 25600),
    (1, 0, 0, 0.005273, 2816, 1152, 3072, 6720),
    (1, 0, 0, 0.006081, 1280, 128, 3072, 7680),
    (1, 0, 0, 0.00676, 2816, 1152, 2048, 6720),
    (1, 0, 0, 0.008461, 1280, 128, 2048, 7680),
    (2, 1, 2, 0.003821, 1024, 512, 2176, 8064),
    (2, 1, 2, 0.006076, 1024, 512, 2176, 7552),
    (2, 1, 2, 0.009013, 1024, 512, 2048, 19456),
    (2, 1, 2, 0.016057, 512, 0, 2048, 35840),
    (2, 3, 2, 0.00357, 1024, 512, 4096, 13568),
    (2, 3, 2, 0.010444, 512, 0, 4096, 17408),
    (2, 0, 2, 0.006202, 1024, 512, 2048, 9216),
    (2, 0, 2, 0.007044, 512, 0, 2048, 27776),
]


def test_no_budget_is_lost_to_rounding() -> None:
    columns = [Column(*way) for way in WAYS]
    choices = [(sum(c.seconds * n for c, n in x), peak(x)) for x in every(columns, [1, 2, 1])]
    for room in range(26880, 27392, 9):
        found = solve(columns, [1, 2, 1], room)
        assert found is not None
        assert abs(found.seconds - min(s for s, most in choices if most <= room)) < 1e-12
