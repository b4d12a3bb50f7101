"""Set-up is verified on every run: copies that differ are refused, and nothing moves for it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.collectives import agreed
from tests import faults


@pytest.mark.parametrize(("fault", "who"), [("unseeded weights", 2), ("another batch", 1)])
def test_copies_that_differ_at_set_up_are_refused(fault: str, who: int) -> None:
    told = faults.play(fault, who, 0, check=False)
    assert faults.wrong(fault, who, told, check=False) == []
    assert max(t.seconds for t in told) < 3.0


def test_rank_0_may_give_the_values_and_nothing_else_moves(pool: Any) -> None:
    values = pool.run(_from_rank_0, x=2, y=2)
    assert values[1:] == values[:1] * 3


def _from_rank_0() -> Any:
    mine = torch.Generator().manual_seed(dist.get_rank())
    layer = torch.nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.rand(4, 4, generator=mine))
    rules = [("weight", "x ."), ("bias", ".")]
    with sl.trace() as t:
        _, params = sl.parallelize(layer, rules, src=0)
    found = [sl.unshard(p).tolist() for p in params.values()]
    with sl.trace() as same:
        sl.parallelize(torch.nn.Linear(4, 4), [("weight", "x y"), ("bias", "(x y)")])
        sl.shard(torch.ones(4), "x")
        sl.shard(torch.rand(4, generator=mine), "(x y)")  # each its own block: there are no copies
    assert t.by_kind().keys() == {"pbroadcast"} and same.bytes == 0
    return found


def test_what_one_rank_places_makes_nobody_wait(pool: Any) -> None:
    assert pool.run(_alone, x=2, y=2) == [4.0] * 4


def _alone() -> float:
    if dist.get_rank() == 2:
        sl.shard(torch.rand(3, 3), "...")
    return float(sl.psum(torch.ones(1), ("x", "y")))


def test_ranks_agree_on_what_one_of_them_says(pool: Any) -> None:
    """And nothing is counted; the next call under the same name is another question."""
    for first, second, moved in pool.run(_agreed, x=2, y=2):
        assert moved == 0 and first in [(r, 7) for r in range(4)] and second == (1, 2)
    assert len({first for first, *_ in pool.run(_agreed, x=2, y=2)}) == 1
    with sl.simulate(x=2) as mesh:
        assert agreed("a number", mesh, [3]) == (3,)


def _agreed() -> Any:
    mesh = sl.current_mesh()
    with sl.trace() as t:
        first, second = (
            agreed("a number", mesh, numbers) for numbers in ([dist.get_rank(), 7], [1, 2])
        )
    return first, second, t.bytes
