"""A ring's transfers: one per neighbour forward, two back."""

import pytest

from shardlib.layouts.orders import dealt
from shardlib.ops.attention.engines import DoubleRing, OneWay
from shardlib.ops.attention.masks import Full
from tests.ops.attention.test_engine import plan_of


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_a_ring_takes_three_transfers_per_neighbour(p: int) -> None:
    runs = dealt("zigzag", 16 * p, p)
    for plan in (plan_of(OneWay(), runs, Full()), plan_of(DoubleRing(1), runs, Full())):
        assert plan.forward.messages == p - 1 and plan.backward.messages == 2 * (p - 1)
