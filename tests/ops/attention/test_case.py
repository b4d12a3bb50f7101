"""A case of operands is the case on paper of their positions, and holds no tensor."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.layouts.orders import dealt
from shardlib.ops.attention.case import Sizes, case_of_values, length
from tests.ops.cases import case_on_paper


@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from(["contiguous", "zigzag", "striped"]))
def test_positions_on_paper_are_the_operands(p: int, n: int, schedule: str) -> None:
    size = 2 * p * n
    with sl.record(s=p):
        q = sl.shard(torch.empty(1, 4, size, 8, device="meta"), sl.Ring("s", 2, schedule))
        k = sl.shard(torch.empty(1, 2, size, 8, device="meta"), sl.Ring("s", 2, schedule))
        found = case_of_values(q, k, k, sl.masks.Causal())
    runs = dealt(schedule, size, p)
    paper = case_on_paper(runs, runs, sl.masks.Causal(), Sizes(1, 4, 2, 2 * n, 2 * n, 8, 8, 4, 4))
    assert (found.q_runs, found.k_runs, found.mask, found.sizes) == (
        paper.q_runs,
        paper.k_runs,
        paper.mask,
        paper.sizes,
    )
    assert hash(found) == hash(found) and found.p == p
    assert sum(length(r) for r in found.q_runs) == size


def test_whole_keys_need_no_ring() -> None:
    with sl.record(s=2):
        q = sl.shard(torch.empty(1, 2, 8, 4, device="meta"), sl.Ring("s", 2))
        k = sl.shard(torch.empty(1, 2, 8, 4, device="meta"), "...")
        found = case_of_values(q, k, k, sl.masks.Full())
    assert found.rows == 0 and "whole already" in found.unsplit()
