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
    least = solve(columns, counts, room, least=True)
    assert least is not None
    assert least.peak == min(map(peak, choices))
