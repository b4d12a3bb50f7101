import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.layouts import Ring

BORDERS = st.lists(st.integers(0, 12), min_size=1, max_size=6).map(lambda n: (0, *itertools.accumulate(n)))


@st.composite
def rings(draw: Any) -> tuple[Ring, int, int]:
    """A ring in any order, a length it fits and a size; lengths also shorter than the ring and not divisible."""
    size = draw(st.integers(1, 9))
    schedule = draw(st.sampled_from(["contiguous", "zigzag", "striped", "documents", "runs"]))
    if schedule == "documents":
        borders = draw(BORDERS)
        return Ring("s", schedule="documents", cu_seqlens=borders), borders[-1], size
    length = draw(st.integers(0, 60))
    if schedule != "runs":
        return Ring("s", schedule=schedule), length, size
    cuts = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=8))})
    owners = [draw(st.integers(0, size - 1)) for _ in cuts[1:]]
    ranges = [[range(a, b) for (a, b), o in zip(itertools.pairwise(cuts), owners, strict=True) if o == r]
              for r in range(size)]  # fmt: skip
    return Ring("s", schedule=ranges), length, size


@settings(max_examples=400, deadline=None)
@given(rings())
def test_positions_are_a_bijection_for_every_length(case: tuple[Ring, int, int]) -> None:
    """Each position once, in rising order on each rank, and no rank holds more than its block has room for."""
    ring, length, size = case
    held = [ring.positions(r, length, size) for r in range(size)]
    assert sorted(p for h in held for p in h) == list(range(length))
    assert all(h == sorted(h) for h in held)
    assert max(map(len, held)) <= ring.block(length, size)
    assert all(run.length > 0 for r in range(size) for run in ring.runs(r, length, size))


@settings(max_examples=300, deadline=None)
@given(rings())
def test_shares_are_balanced(case: tuple[Ring, int, int]) -> None:
    """A block is at most the even share, rounded up to chunks."""
    ring, length, size = case
    bound = {"zigzag": 2 * math.ceil(length / (2 * size)), "documents": math.ceil(length / size) + 1}
    if isinstance(ring.schedule, str):
        assert ring.block(length, size) <= bound.get(ring.schedule, math.ceil(length / size))


@settings(max_examples=200, deadline=None)
@given(rings())
def test_unshard_inverts_shard_in_every_order(case: tuple[Ring, int, int]) -> None:
    ring, length, size = case
    x = torch.arange(2 * length).reshape(2, length)
    with sl.simulate(s=size):
        y = sl.shard(x, ring, pad=True)
        assert torch.equal(sl.unshard(y), x)
        assert sl.Layout.parse(str(y.sharding)) == y.sharding
        for r in range(size):
            held = ring.positions(r, length, size)
            assert torch.equal(y.raw[r][:, : len(held)], x[:, held])


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.integers(1, 8))
def test_zigzag_balances_causal_work(chunk: int, size: int) -> None:
    """With even chunks every rank attends to the same number of positions."""
    length = 2 * size * chunk
    work = {sum(p + 1 for p in Ring("s", schedule="zigzag").positions(r, length, size)) for r in range(size)}
    assert len(work) == 1


def test_an_order_in_groups_is_that_order_in_each() -> None:
    """``zigzag(2 s)`` of a flattened [2, n] is ``. zigzag(s)`` of [2, n]."""
    with sl.simulate(data=2, s=2):
        x = torch.arange(32).reshape(4, 8)
        y = sl.shard(x, "data zigzag(s)")
        flat = y.view(32)
        assert str(flat.sharding) == "zigzag(data 2 s)"
        assert torch.equal(sl.unshard(flat), x.view(32))
        assert torch.equal(flat.raw, sl.shard(x.view(32), "zigzag(data 2 s)").raw)
        assert flat.view(4, 8).sharding == y.sharding
        whole = sl.reshard(sl.shard(x.view(32), "data"), "zigzag(data 2 s)")
        assert torch.equal(whole.raw, flat.raw)
        assert (sl.Layout.parse("data") >> flat.sharding).bytes((32,), {"data": 2, "s": 2}) == 0


@pytest.mark.parametrize(
    "mistake",
    [
        {"schedule": "zigzga"},
        {"schedule": "documents"},
        {"cu_seqlens": (0, 4)},
        {"schedule": "documents", "cu_seqlens": (1, 4)},
        {"schedule": ([range(0, 2)], [range(1, 4)])},
    ],
)
def test_a_mistaken_ring_says_how_to_write_it(mistake: dict[str, Any]) -> None:
    with pytest.raises(sl.errors.LayoutSyntax) as error:
        Ring("s", **mistake)
    eval(error.value.fix, {"sl": sl})
