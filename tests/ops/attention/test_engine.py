"""Plans are values: what they move follows from positions alone."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.layouts.orders import dealt
from shardlib.ops.attention.case import Runs, Sizes, case_on_paper
from shardlib.ops.attention.choose import planned
from shardlib.ops.attention.engine import Engine, Plan
from shardlib.ops.attention.engines import BothWays, DoubleRing, Halo, OneWay
from shardlib.ops.attention.engines.routes import busiest
from shardlib.ops.attention.masks import Causal, Full, Mask, Window
from shardlib.ops.attention.pieces import pieces

SIZES = Sizes(1, 4, 2, 8, 8, 16, 16, 4, 4)
MASKS = [Full(), Causal(), Window(5, 0), Window(3, 2), Causal() & Window(40)]


def plan_of(engine: Engine, runs: Runs, mask: Mask) -> Plan:
    return planned(case_on_paper(runs, runs, mask, SIZES), engine).run


def covered(plan: Plan) -> set[tuple[int, int, int]]:
    """(rank, owner, row) that a rank sees at some step; each at most once."""
    seen = [(r, r, row) for r in range(plan.p) for row in range(64)]
    for chunk in plan.chunks:
        for step in range(1, len(chunk.at) + 1):
            held = [chunk.owner(step, r) for r in range(plan.p)]
            seen += [(r, o, row) for r, o in enumerate(held) if o is not None for row in range(chunk.lo, chunk.hi)]
    assert len(seen) == len(set(seen))
    return set(seen)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 8), st.integers(1, 40), st.sampled_from(["contiguous", "zigzag", "striped"]), st.sampled_from(MASKS)
)
def test_every_rank_sees_the_keys_that_its_mask_allows(p: int, n: int, order: str, mask: Mask) -> None:
    runs = dealt(order, n, p)
    plans = [plan_of(OneWay(), runs, mask), plan_of(BothWays(), runs, mask)]
    plans += [plan_of(DoubleRing(i), runs, mask) for i in range(1, p + 1) if p % i == 0]
    for plan in plans:
        seen = covered(plan)
        for r, o in itertools.product(range(p), range(p)):
            if r != o:
                for piece in pieces(runs[r], runs[o], mask):
                    assert all((r, o, row) in seen for row in range(piece.k0, piece.k1)), plan.algorithm


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 8), st.integers(1, 40), st.sampled_from(["contiguous", "zigzag"]), st.sampled_from(MASKS))
def test_each_gradient_gets_home_from_every_stop(p: int, n: int, order: str, mask: Mask) -> None:
    """And nobody sends or receives twice in one transfer."""
    runs = dealt(order, n, p)
    for plan in (plan_of(OneWay(), runs, mask), plan_of(BothWays(), runs, mask)):
        for chunk in plan.chunks:
            home = [(o, chunk.place(t - 1, o)) for t in range(2, len(chunk.at) + 2) for _, o in chunk.home_hops(t)]
            assert sorted(o for o, _ in home) == [o for o in range(p) if chunk.place(1, o) is not None]
            for t in range(1, len(chunk.at) + 2):
                for pairs in ((chunk.hops(t) if t <= len(chunk.at) else ()), chunk.sum_hops(t), chunk.home_hops(t)):
                    assert len({s for s, _ in pairs}) == len({d for _, d in pairs}) == len(pairs)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_a_ring_takes_three_transfers_per_neighbour(p: int) -> None:
    runs = dealt("zigzag", 16 * p, p)
    for plan in (plan_of(OneWay(), runs, Full()), plan_of(DoubleRing(1), runs, Full())):
        assert plan.forward.messages == p - 1 and plan.backward.messages == 2 * (p - 1)


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_zigzag_causal_needs_three_quarters(p: int) -> None:
    runs = dealt("zigzag", 16 * p, p)
    less, full = plan_of(BothWays(), runs, Causal()), plan_of(OneWay(), runs, Causal())
    for way in ("forward", "backward"):
        assert getattr(less, way).bytes == Fraction(3, 4) * getattr(full, way).bytes


@pytest.mark.parametrize("p", [3, 4, 8])
def test_the_busiest_rank_of_zigzag_saves_nothing(p: int) -> None:
    """Rank 0 needs all late chunks and all early ones: what is saved is saved elsewhere, and the price says so."""
    runs = dealt("zigzag", 16 * p, p)
    less, full = plan_of(BothWays(), runs, Causal()), plan_of(OneWay(), runs, Causal())
    assert busiest(less)[0] == busiest(full)[0] == full.forward.bytes


@pytest.mark.parametrize("p", [2, 4, 8, 64])
def test_a_halo_moves_the_window_whatever_the_ring(p: int) -> None:
    runs = dealt("contiguous", 32 * p, p)
    plan = plan_of(Halo(), runs, Window(7, 0))
    rows = 7 * Fraction(p - 1, p)
    assert plan.forward.bytes == rows * SIZES.b * SIZES.g * 32 * 4
    wide = plan_of(Halo(), runs, Window(40, 0)) if p > 4 else None  # reaches past a neighbour
    assert wide is None or wide.forward.bytes == SIZES.b * SIZES.g * 32 * 4 * Fraction(32 * (p - 1) + 8 * (p - 2), p)


def test_a_halo_is_refused_where_all_see_all() -> None:
    runs = dealt("contiguous", 64, 8)
    with pytest.raises(sl.errors.NoRule, match="ends near the diagonal"):
        plan_of(Halo(), runs, Full())
