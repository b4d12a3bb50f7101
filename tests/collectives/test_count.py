"""What is counted is the stated formula, and one rank alone moves nothing."""

from fractions import Fraction

import pytest
import torch

import shardlib as sl
from shardlib.collectives import ragged_all_to_all
from tests.collectives.primitives import (
    PRIMITIVES,
    cost,
    stacked_input,
)


@pytest.mark.parametrize("name", [n for n, (*_, kind) in PRIMITIVES.items() if kind])
def test_counts_follow_the_stated_formula(name: str) -> None:
    for p in (2, 4):
        with sl.simulate(x=p, y=2) as m, sl.trace() as t:
            PRIMITIVES[name][0](stacked_input(m), "x")
        nbytes, messages = cost(PRIMITIVES[name][2], 24 * 8, p)
        assert (float(t.bytes), t.messages) == (nbytes, messages)


NAMES_A_SECOND_RANK = {
    "pbroadcast 1",
    "pbroadcast of a view",
    "preduce 1",
    "ppermute partial",
    "ppermute swap",
    "start pbroadcast",
}


@pytest.mark.parametrize("name", [n for n in PRIMITIVES if n not in NAMES_A_SECOND_RANK])
def test_one_sized_axes_move_nothing(name: str) -> None:
    with sl.simulate(x=1, y=2) as m, sl.trace() as t:
        PRIMITIVES[name][0](stacked_input(m), "x")
    assert (t.bytes, t.messages) == (0, 0)


def test_ragged_parts_count_what_leaves_its_rank() -> None:
    counts = ((5, 1, 0), (2, 0, 3), (0, 4, 0))
    with sl.simulate(x=3, y=2), sl.trace() as t:
        ragged_all_to_all(torch.zeros(6), "x", counts)
    assert t.bytes == Fraction(4 * (1 + 5 + 4), 3) and t.messages == 2
    with sl.record(x=3), sl.trace() as on_paper:
        ragged_all_to_all(torch.zeros(6, device="meta"), "x", counts)
    assert on_paper.bytes == t.bytes
