"""Any divisor makes inner rings; every rank sees every key once, in p - 1 hops."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlib.layouts.orders import dealt
from shardlib.ops.attention.case import Sizes
from shardlib.ops.attention.engine import AttentionPlan
from shardlib.ops.attention.engines import DoubleRing
from tests.ops.cases import case_on_paper


def plan(p: int, inner: int | None) -> AttentionPlan | str:
    runs = dealt("contiguous", 8 * p, p)
    return DoubleRing(inner).plan(case_on_paper(runs, runs, sizes=Sizes(1, 2, 2, 8, 8, 4, 4, 4, 4)))


@given(st.integers(2, 12), st.data())
def test_every_owners_keys_pass_every_rank_once(p: int, data: st.DataObject) -> None:
    inner = data.draw(st.sampled_from([i for i in range(1, p + 1) if p % i == 0]))
    made = plan(p, inner)
    assert isinstance(made, AttentionPlan) and made.steps == p - 1
    for rank in range(p):
        seen = [c.owner(step, rank) for c in made.chunks for step in range(1, p)]
        assert sorted(o for o in seen if o is not None) == [o for o in range(p) if o != rank]


@pytest.mark.parametrize(
    ("p", "inner", "why"), [(5, None, "no rings within"), (6, 4, "one of 3 does")]
)
def test_what_does_not_divide_says_what_does(p: int, inner: int | None, why: str) -> None:
    assert why in str(plan(p, inner))
