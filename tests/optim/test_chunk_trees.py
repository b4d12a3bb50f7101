"""Trees of chunks: what their updates change together is what one update of all changes."""

from typing import Any

import shardlib as sl
from tests.optim.test_tiered import differing, run

o = sl.optim


def groups() -> Any:
    """Two transforms with numbers of their own, of which the last block has one alone."""
    some = {"a": o.adamw(o.warmup_cosine(0.01, 2, 5)), "b": o.sgd(0.05, 0.9)}
    return o.partition(some, [("h.1.up.*", "a"), ("*", "b")])


def test_numbers_of_the_state_are_those_of_all_chunks() -> None:
    with sl.simulate(data=2, x=1):
        want = run(groups(), None)
        for update in ("host", "device"):
            assert differing(want, run(groups(), o.Tiers(update=update))) == []
