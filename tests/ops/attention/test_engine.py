"""Plans are values: what they move follows from positions alone."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shardlib.layouts.orders import dealt
from shardlib.ops.attention.case import Runs, Sizes
from shardlib.ops.attention.engine import AttentionPlan, Engine, planned
from shardlib.ops.attention.engines import BothWays, DoubleRing, OneWay
from shardlib.ops.attention.kernels import pieces
from shardlib.ops.attention.masks import Causal, Full, Mask, Window
from tests.ops.cases import case_on_paper
from tests.strategies import examples

SIZES = Sizes(1, 4, 2, 8, 8, 16, 16, 4, 4)
MASKS = [Full(), Causal(), Window(5, 0), Window(3, 2), Causal() & Window(40)]


def plan_of(engine: Engine, runs: Runs, mask: Mask) -> AttentionPlan:
    return planned(case_on_paper(runs, runs, mask, SIZES), engine).run


def covered(plan: AttentionPlan) -> set[tuple[int, int, int]]:
    """(rank, owner, row) that a rank sees at some step; each at most once."""
    seen = [(r, r, row) for r in range(plan.p) for row in range(64)]
    for chunk in plan.chunks:
        for step in range(1, len(chunk.at) + 1):
            held = [chunk.owner(step, r) for r in range(plan.p)]
            seen += [
                (r, o, row)
                for r, o in enumerate(held)
                if o is not None
                for row in range(chunk.lo, chunk.hi)
            ]
    assert len(seen) == len(set(seen))
    return set(seen)


@examples(60)
@given(
    st.integers(1, 8),
    st.integers(1, 40),
    st.sampled_from(["contiguous", "zigzag", "striped"]),
    st.sampled_from(MASKS),
)
def test_every_rank_sees_the_keys_that_its_mask_allows(
    p: int, n: int, order: str, mask: Mask
) -> None:
    runs = dealt(order, n, p)
    plans = [plan_of(OneWay(), runs, mask), plan_of(BothWays(), runs, mask)]
    plans += [plan_of(DoubleRing(i), runs, mask) for i in range(1, p + 1) if p % i == 0]
    for plan in plans:
        seen = covered(plan)
        for r, o in itertools.product(range(p), range(p)):
            if r != o:
                for piece in pieces(runs[r], runs[o], mask):
                    assert all((r, o, row) in seen for row in range(piece.k0, piece.k1)), (
                        plan.algorithm
                    )
