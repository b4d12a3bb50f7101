"""Routes: every gradient comes home from every stop."""

from hypothesis import given
from hypothesis import strategies as st

from shardlib.layouts.orders import dealt
from shardlib.ops.attention.engines import BothWays, OneWay
from shardlib.ops.attention.masks import Mask
from tests.ops.attention.test_engine import MASKS, plan_of
from tests.strategies import examples


@examples(60)
@given(
    st.integers(2, 8),
    st.integers(1, 40),
    st.sampled_from(["contiguous", "zigzag"]),
    st.sampled_from(MASKS),
)
def test_each_gradient_gets_home_from_every_stop(p: int, n: int, order: str, mask: Mask) -> None:
    """And nobody sends or receives twice in one transfer."""
    runs = dealt(order, n, p)
    for plan in (plan_of(OneWay(), runs, mask), plan_of(BothWays(), runs, mask)):
        for chunk in plan.chunks:
            home = [
                (o, chunk.place(t - 1, o))
                for t in range(2, len(chunk.at) + 2)
                for _, o in chunk.home_hops(t)
            ]
            assert sorted(o for o, _ in home) == [
                o for o in range(p) if chunk.place(1, o) is not None
            ]
            for t in range(1, len(chunk.at) + 2):
                for pairs in (
                    (chunk.hops(t) if t <= len(chunk.at) else ()),
                    chunk.sum_hops(t),
                    chunk.home_hops(t),
                ):
                    assert len({s for s, _ in pairs}) == len({d for _, d in pairs}) == len(pairs)
