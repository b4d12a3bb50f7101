"""Every matrix has one owner, no owner much more than its share, and what is sent comes back."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib.layouts import Layout
from shardlib.optim.matrix_owners import Spread, deal, laid, listed

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
