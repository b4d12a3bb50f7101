"""Every matrix has one owner, no owner much more than its share, and what is sent comes back."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.layouts import Layout
from shardlib.optim.matrix_owners import Kind, Owned, Spread, deal, laid, listed

shapes = st.lists(
    st.tuples(st.sampled_from([4, 8, 16]), st.sampled_from([4, 8])), min_size=1, max_size=9
)


@given(shapes, st.sampled_from(["x .", ". x", ". ."]))
def test_work_is_dealt_evenly_and_results_return(given_: list[tuple[int, int]], text: str) -> None:
    spreads = tuple(Spread(Layout.parse(text), s, s) for s in given_)
    plan = deal(spreads, (("x", 4),))
    work = [s.flops for s in spreads]
    assert sum(plan.load) == sum(work)
    assert max(plan.load) - min(plan.load) <= max(work), "the next goes to the rank with least"
    there, back = plan.there, plan.back
    assert len(there) == len(back) == 4
    if text != ". .":
        elements = sum(a * b for a, b in given_)
        assert sum(map(sum, there)) == elements == sum(map(sum, back))
        assert [list(r) for r in there] == [list(r) for r in zip(*back, strict=True)]


def test_vectors_are_left_out_and_runs_are_views() -> None:
    tree = {"w": torch.zeros(2, 3), "b": torch.zeros(3)}
    (item,) = laid(tree)
    item.runs[0].fill_(1)
    assert item.path == "w" and bool((tree["w"] == 1).all()) and not bool(tree["b"].any())


def test_one_pattern_is_a_list_of_one() -> None:
    assert listed("conv*") == ("conv*",) and listed(None) == () and listed(["a", "b"]) == ("a", "b")


SHAPES = {"a": (4, 6), "b": (2, 6, 4), "c": (4, 4)}
SIDES: dict[Kind, dict[str, tuple[int, ...]]] = {
    "mn": SHAPES,
    "mm": {"a": (4, 4), "b": (2, 6, 6), "c": (4, 4)},
    "nn": {"a": (6, 6), "b": (2, 4, 4), "c": (4, 4)},
}


@pytest.mark.parametrize("kind", SIDES)
@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 2, "y": 2}])
def test_numbers_named_by_parameter_come_back(kind: Kind, axes: dict[str, int]) -> None:
    with sl.simulate(**axes):
        tree = {n: sl.shard(torch.zeros(s), "... x") for n, s in SHAPES.items()}
        items = laid(tree)
        plan = deal(tuple(i.spread for i in items), tuple(axes.items()))
        empty = Owned.zeros(items, plan, kind, torch.float64, math.inf)
        want = {n: torch.randn(s).double() for n, s in SIDES[kind].items()}
        kept = empty.with_values(want)
        for name, found in kept.by_parameter():
            whole = sl.unshard(found) if isinstance(found, sl.ShardedTensor) else found
            assert torch.equal(whole, want[name]) and kept.kinds()[name] == (
                SIDES[kind][name],
                torch.float64,
            )
        assert not sl.unshard(empty.vector).any(), "the one that was filled is a copy"
        held = [
            sum(v.numel() for v in kept.views(r).values()) for r in range(math.prod(axes.values()))
        ]
    assert sum(held) == sum(w.numel() for w in want.values()), "each number has one owner"
    assert max(held) == kept.held.length


def test_sides_that_are_too_long_keep_nothing() -> None:
    items = laid({n: torch.zeros(s) for n, s in SHAPES.items()})
    plan = deal(tuple(i.spread for i in items), ())
    kept = Owned.zeros(items, plan, "nn", torch.float32, most=4)
    assert list(kept.kinds()) == ["b", "c"] and kept.vector.numel() == 2 * 16 + 16
