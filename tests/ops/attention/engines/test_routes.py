"""Areas cover the pairs that a mask allows, and the busiest rank sets the pace."""

import pytest
import torch

import shardlib as sl
from shardlib.layouts.orders import dealt
from shardlib.ops.attention.case import Sizes
from shardlib.ops.attention.engine import AttentionPlan
from shardlib.ops.attention.engines import BothWays, DoubleRing, OneWay
from shardlib.ops.attention.engines.ring import Routes, busiest
from tests.ops.cases import case_on_paper

SIZES = Sizes(1, 2, 2, 8, 8, 4, 4, 4, 4)
ENGINES = [OneWay(), BothWays(), DoubleRing(2)]


def plan(engine: Routes, mask: sl.masks.Mask, order: str = "zigzag") -> AttentionPlan:
    runs = dealt(order, 32, 4)
    made = engine.plan(case_on_paper(runs, runs, mask, SIZES))  # type: ignore[attr-defined]
    assert isinstance(made, AttentionPlan)
    return made


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    "mask", [sl.masks.Full(), sl.masks.Causal(), sl.masks.Window(5, 0)], ids=str
)
def test_areas_cover_the_pairs_that_are_allowed(engine: Routes, mask: sl.masks.Mask) -> None:
    """Exactly for triangles and boxes; of a window, the boxes around it."""
    at = torch.arange(32)
    apart = at[:, None] - at
    allowed = {"F": apart > -99, "C": apart >= 0, "W": (apart >= 0) & (apart <= 5)}[str(mask)[0]]
    found, least = sum(map(sum, engine.areas(plan(engine, mask)))), int(allowed.sum())
    assert found == least or (str(mask)[0] == "W" and least < found < 32 * 32 / 2)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda e: type(e).__name__)
def test_the_busiest_rank_moves_at_least_the_mean_and_forward_half_of_backward(
    engine: Routes,
) -> None:
    made = plan(engine, sl.masks.Full(), "contiguous")
    moves = engine.moves(made)
    forward, backward = (
        float(sum(m.bytes for m in way)) for way in (moves.forward, moves.backward)
    )
    assert 0 < forward <= busiest(made)[0] and backward <= busiest(made)[1]
    assert 2 * forward <= backward, "keys again, and sums of their gradients"
