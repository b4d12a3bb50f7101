"""The depth of reading ahead is the least that hides the loads which can be hidden."""

import random

import pytest

from shardlib.tiers.depth import MOST, depth_of


def waited(uses: list[float], loads: list[float], depth: int) -> list[int]:
    """Uses that wait, where each load has a link of its own and is posted so many uses early."""
    return [j for j, load in enumerate(loads) if sum(uses[max(j - depth, 0) : j]) < load]


@pytest.mark.parametrize("seed", range(50))
def test_one_use_less_leaves_a_wait_that_a_greater_depth_hides(seed: int) -> None:
    r = random.Random(seed)
    uses = [r.choice([1.0, 2.0]) for _ in range(12)]
    loads = [r.choice([0.0, 0.5, 1.5, 3.5]) for _ in uses]
    # one is for a load that waits for the one before it
    found = depth_of(uses, loads) - 1
    best = waited(uses, loads, len(uses))
    assert waited(uses, loads, found) == best
    assert found == 1 or waited(uses, loads, found - 1) != best


def test_a_link_that_is_never_hidden_is_bounded() -> None:
    assert depth_of([1.0] * 100, [90.0] * 100) == MOST
    assert depth_of([], []) == depth_of([1.0], [0.0, 2.0]) == 2
