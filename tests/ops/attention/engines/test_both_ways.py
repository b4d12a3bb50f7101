"""Keys both ways round move no more than the mask has need of."""

from fractions import Fraction

import pytest

from shardlib.layouts.orders import dealt
from shardlib.ops.attention.engines import BothWays, OneWay
from shardlib.ops.attention.engines.ring import busiest
from shardlib.ops.attention.masks import Causal
from tests.ops.attention.test_engine import plan_of


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_zigzag_causal_needs_three_quarters(p: int) -> None:
    runs = dealt("zigzag", 16 * p, p)
    less, full = plan_of(BothWays(), runs, Causal()), plan_of(OneWay(), runs, Causal())
    for way in ("forward", "backward"):
        assert getattr(less, way).bytes == Fraction(3, 4) * getattr(full, way).bytes


@pytest.mark.parametrize("p", [3, 4, 8])
def test_the_busiest_rank_of_zigzag_saves_nothing(p: int) -> None:
    """Rank 0 needs all late chunks and all early ones: what is saved
    is saved elsewhere, and the price says so.
    """
    runs = dealt("zigzag", 16 * p, p)
    less, full = plan_of(BothWays(), runs, Causal()), plan_of(OneWay(), runs, Causal())
    assert busiest(less)[0] == busiest(full)[0] == full.forward.bytes
