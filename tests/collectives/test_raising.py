"""A sample of tests/collectives/raising.py: every algorithm once, simulated and on real ranks."""

from typing import Any

import pytest

import shardlib as sl
from tests.collectives.raising import ALGORITHMS, drawn, play

CASES = drawn(list(ALGORITHMS), len(ALGORITHMS), seed=1)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_after_an_exception_that_all_ranks_catch_the_next_step_equals_dense(
    name: str, pool: Any
) -> None:
    algorithm = ALGORITHMS[name]
    with sl.simulate(**algorithm.mesh):
        assert play(name, CASES[name]) == []
    found = pool.run(play, name, CASES[name], seconds=30.0, **algorithm.mesh)
    assert found == [[]] * len(found)
