"""A halo moves what the windows reach, whatever the number of ranks."""

from fractions import Fraction

import pytest

import shardlib as sl
from shardlib.layouts.orders import dealt
from shardlib.ops.attention.engines import Halo
from shardlib.ops.attention.masks import Full, Window
from tests.ops.attention.test_engine import SIZES, plan_of


@pytest.mark.parametrize("p", [2, 4, 8, 64])
def test_a_halo_moves_the_window_whatever_the_ring(p: int) -> None:
    runs = dealt("contiguous", 32 * p, p)
    plan = plan_of(Halo(), runs, Window(7, 0))
    rows = 7 * Fraction(p - 1, p)
    assert plan.forward.bytes == rows * SIZES.b * SIZES.g * 32 * 4
    wide = plan_of(Halo(), runs, Window(40, 0)) if p > 4 else None  # reaches past a neighbour
    assert wide is None or wide.forward.bytes == SIZES.b * SIZES.g * 32 * 4 * Fraction(
        32 * (p - 1) + 8 * (p - 2), p
    )


def test_a_halo_is_refused_where_all_see_all() -> None:
    runs = dealt("contiguous", 64, 8)
    with pytest.raises(sl.errors.NoImplementation, match="ends near the diagonal"):
        plan_of(Halo(), runs, Full())
