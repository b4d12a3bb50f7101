"""The ledger is the limit: no entry exceeds a budget, and a refusal names the size that would do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.tiers.ledger import KINDS, Ledger


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 50), st.booleans())))
def test_what_is_held_never_exceeds_the_budget(entries: list[tuple[str, int, bool]]) -> None:
    ledger, held = Ledger(device=100), dict.fromkeys(KINDS, 0)
    peak = 0
    for kind, n, stays in entries:
        if sum(held.values()) + n > 100:
            with pytest.raises(sl.ShardError):
                ledger.enter("device", kind, n)
            continue
        ledger.enter("device", kind, n)
        held[kind] += n
        peak = max(peak, sum(held.values()))
        if not stays:
            ledger.leave("device", kind, n)
            held[kind] -= n
        assert ledger.left("device") == 100 - sum(held.values())
    assert ledger.peak["device"] == peak <= 100
    assert {k: n for k, n in ledger.held["device"].items() if n} == {
        k: n for k, n in held.items() if n
    }


def test_a_refusal_names_the_size_that_would_do() -> None:
    ledger = Ledger(device=100)
    ledger.enter("device", "gradients", 60)
    with pytest.raises(sl.ShardError, match=r"Tiers\(device=130\)"):
        ledger.enter("device", "parameters", 70)
    assert ledger.held["device"].total() == 60


@pytest.mark.parametrize("size", [0, -1, "", "8 apples", True, "nan", float("nan"), float("inf")])
def test_what_is_no_size_is_refused(size: object) -> None:
    with pytest.raises(sl.errors.BadArgument):
        Ledger(device=size)  # type: ignore[arg-type]
