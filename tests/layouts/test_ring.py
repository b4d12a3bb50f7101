import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.layouts import Ring
from tests.strategies import examples

BORDERS = st.lists(st.integers(0, 12), min_size=1, max_size=6).map(
    lambda n: (0, *itertools.accumulate(n))
)


@st.composite
def rings(draw: Any) -> tuple[Ring, int, int]:
    """A ring in any order, a length it fits and a size; lengths also
    shorter than the ring and not divisible.
    """
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


@examples(80)
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
