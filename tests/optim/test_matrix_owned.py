"""Numbers of a matrix are kept by its owner alone, and named by parameter they come back."""

import math

import pytest
import torch

import shardlib as sl
from shardlib.optim.matrix_owned import Kind, Owned
from shardlib.optim.matrix_owners import deal, laid

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
        kept = empty.filled(want)
        for name, found in kept.by_parameter():
            whole = sl.unshard(found) if isinstance(found, sl.ShardedTensor) else found
            assert torch.equal(whole, want[name]) and kept.shape(name) == SIDES[kind][name]
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
    assert kept.paths_held == ["b", "c"] and kept.vector.numel() == 2 * 16 + 16
