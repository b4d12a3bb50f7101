import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardlib as sl
from shardlib.pipeline.units import blocks_of, dealt, fitting, units_of


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


_block = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
_placed = st.sampled_from([[0], [0, 1], [0, 1, 2], [0, 1, 0], [0, 1, 0, 1], [0, 1, 1, 0]])


@given(st.lists(_block, min_size=4, max_size=7), _placed, st.integers(0, 100))
def test_the_cut_within_a_memory_is_the_fastest_of_all_cuts(
    blocks: list[tuple[int, int, int]], ranks: list[int], memory: int
) -> None:
    """Blocks of drawn seconds, parameters, and bytes kept by each micro-batch in flight, as 1F1B."""
    priced: list[tuple[int, ...]] = []
    parts = len(ranks)

    def runs(begins: tuple[int, ...]) -> list[list[tuple[int, int, int]]]:
        return [blocks[a:b] for a, b in itertools.pairwise((*begins, len(blocks)))]

    def slowest(begins: tuple[int, ...]) -> int:
        return max(sum(seconds for seconds, _, _ in run) for run in runs(begins))

    def peaks(begins: tuple[int, ...]) -> list[int]:
        rows = enumerate(runs(begins))
        each = [sum(own + (parts - s) * kept for _, own, kept in run) for s, run in rows]
        return [sum(each[s] for s in range(parts) if ranks[s] == r) for r in sorted({*ranks})]

    def price(begins: list[int]) -> list[int]:
        priced.append(tuple(begins))
        return peaks(tuple(begins))

    every = [(0, *rest) for rest in itertools.combinations(range(1, len(blocks)), parts - 1)]
    fits = [cut for cut in every if max(peaks(cut)) <= memory]
    within = fitting({i: block[0] for i, block in enumerate(blocks)}, ranks, price)
    found, held = within(memory)
    assert bool(found) == bool(fits) and held == (peaks(tuple(found)) if found else [])
    if found:
        assert tuple(found) in fits and slowest(tuple(found)) == min(map(slowest, fits))
    least = min(max(peaks(cut)) for cut in every)
    assert not within(least - 1)[0] and max(within(least)[1]) == least
    assert len({*priced}) == len(priced)
