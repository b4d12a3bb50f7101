import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardlib as sl
from shardlib.pipeline.schedules import placing
from shardlib.pipeline.units import Fitting, blocks_of, dealt, units_of


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.body.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4)


def test_units_are_the_blocks_and_the_modules_around_them() -> None:
    net = _Net()
    blocks = blocks_of(net)
    assert blocks == [f"body.layers.{i}" for i in range(3)]
    assert units_of(net, blocks) == ["embed", *blocks, "body.norm", "head"]


def test_blocks_with_parametrized_weights_are_alike() -> None:
    """torch gives each of them a class of its own."""
    normed = nn.utils.parametrizations.weight_norm
    model = nn.ModuleDict({"h": nn.ModuleList(normed(nn.Linear(4, 4)) for _ in range(3))})
    assert blocks_of(model) == ["h.0", "h.1", "h.2"]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 7))
def test_blocks_are_dealt_with_the_least_largest_sum(costs: list[int], parts: int) -> None:
    if parts > len(costs):
        with pytest.raises(sl.ShardError, match="cannot be"):
            dealt(costs, parts)
        return

    def worst(begins: tuple[int, ...]) -> float:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((*begins, len(costs))))

    every = ((0, *rest) for rest in itertools.combinations(range(1, len(costs)), parts - 1))
    found = dealt(costs, parts)
    assert found[0] == 0 and sorted(set(found)) == found and len(found) == parts
    assert worst(tuple(found)) == min(map(worst, every))


_chains = st.lists(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), min_size=4, max_size=7
)


@pytest.mark.parametrize(("name", "size"), [("1f1b", 3), ("interleaved", 2), ("zbv", 2)])
@given(
    blocks=_chains,
    budget=st.integers(0, 100),
    flying=st.lists(st.integers(1, 4), min_size=4, max_size=4),
)
def test_the_cut_within_a_memory_is_the_fastest_of_all_cuts(
    name: str, size: int, blocks: list[tuple[int, int, int]], budget: int, flying: list[int]
) -> None:
    """Blocks of drawn seconds, parameters and bytes kept, of so many micro-batches at each stage."""
    ranks, priced = placing(name, size, 4 // size), []
    costs = [c for c, _, _ in blocks]

    def runs(begins: tuple[int, ...]) -> list[tuple[int, int]]:
        return list(itertools.pairwise((*begins, len(blocks))))

    def slowest(begins: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in runs(begins))

    def peaks(begins: tuple[int, ...]) -> list[int]:
        held = [0] * size
        for s, (a, b) in enumerate(runs(begins)):
            held[ranks[s]] += sum(own + flying[s] * kept for _, own, kept in blocks[a:b])
        return held

    def price(begins: list[int]) -> list[int]:
        priced.append(tuple(begins))
        return peaks(tuple(begins))

    every = [(0, *c) for c in itertools.combinations(range(1, len(blocks)), len(ranks) - 1)]
    fits = [c for c in every if max(peaks(c)) <= budget]
    chain = Fitting(costs, ranks, price)
    found = tuple(chain.within(budget))
    assert bool(found) == bool(fits)
    if found:
        assert max(peaks(found)) <= budget and slowest(found) == min(map(slowest, fits))
    least, begins = chain.least()
    assert least == min(max(peaks(c)) for c in every) == max(peaks(tuple(begins)))
    assert len(set(priced)) == len(priced)
