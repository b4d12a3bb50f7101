import itertools
import re
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl


def _net(n: int = 4) -> nn.Module:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(n)])


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"axis": "pip"}, "did you mean 'pipe'"),
        ({"axis": "pipe", "cut": 3}, "does not give the 2 stages"),
        ({"axis": "pipe", "cut": ["0", "nine"]}, "no block 'nine' is called"),
        ({"axis": "pipe", "memory": "8GB"}, "as example= the arguments"),
        ({"axis": "pipe", "memory": "8 boxes"}, "no number of bytes"),
        ({"axis": "pipe", "blocks": ["nine"]}, "has no submodule 'nine'"),
        ({"axis": "pipe", "schedule": "fastest"}, "schedule"),
    ],
)
def test_a_mistake_in_each_argument_is_told(how: dict[str, Any], said: str) -> None:
    with sl.simulate(pipe=2), pytest.raises(sl.ShardError, match=said):
        sl.parallelize(_net(), [("*", "...")], stages=sl.Stages(**how))


def test_a_cut_by_names_begins_stages_there() -> None:
    with sl.simulate(pipe=2):
        apply, _ = sl.parallelize(_net(), [("*", "...")], stages=sl.Stages("pipe", cut=["0", "3"]))
    assert str(apply.stages) == "2 stages on pipe=2, 1f1b: 0 to 2 | 3"


def test_a_forward_through_all_stages_is_the_modules_own() -> None:
    net, x = _net().double(), torch.randn(2, 4, dtype=torch.float64)
    with sl.simulate(pipe=4):
        apply, params = sl.parallelize(net, [("*", "...")], stages=sl.Stages("pipe"))
        with torch.no_grad():
            assert torch.allclose(sl.unshard(apply(params, x)), net(x))
        with pytest.raises(sl.ShardError, match="gradients of a module in stages"):
            apply(params, x)


def test_statistics_of_a_batch_are_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with sl.simulate(pipe=2):
        example = (torch.zeros(4, 4),)
        apply, params = sl.parallelize(
            net, [("*", "...")], stages=sl.Stages("pipe", example=example)
        )
        step = sl.value_and_grad(lambda p, x: apply(p, x).square().mean(), microbatches=2)
        with pytest.raises(sl.ShardError, match="BatchNorm1d in training"):
            step(params, torch.zeros(4, 4))


def test_why_lists_every_schedule_with_its_cost() -> None:
    slow = sl.planning.Link(1e-5, 1e-8)
    cluster = sl.planning.Cluster(1e9, 1e8, inside=slow, between=slow)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])
    with sl.simulate(pipe=2):
        apply, params = sl.parallelize(model, [("*", "...")], stages=sl.Stages("pipe"))
        f = lambda p, x: apply(p, x).square().mean()  # noqa: E731
        found = sl.why("pipeline", f, params, torch.ones(12, 32), 6, cluster)
        told = sl.explain(f, params, torch.ones(12, 32), microbatches=6, cluster=cluster)
    lines = dict(found.verdicts)
    assert found.chosen == "1f1b" and lines["1f1b"] == told.summary(1e9)
    assert {"gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev"} <= {*lines}
    text = str(found)
    assert (
        "-> 1f1b" in text
        and "2 stages begin at 0, 3" in text
        and "4 stages begin at 0, 1, " in text
    )
    assert "the fastest: sl.Stages('pipe', per_rank=" in text
    few = sl.why("pipeline", f, params, torch.ones(12, 32), 3, "h100")
    assert "take micro-batches 2 at a time" in dict(few.verdicts)["interleaved"]
    tight = sl.planning.Cluster(1e3, 1e8)
    with pytest.raises(sl.ShardError, match="not those of a module in stages"):
        sl.why("pipeline", f, {"w": torch.ones(2)})
    assert "more than 1000 B" in str(sl.why("pipeline", f, params, torch.ones(12, 32), 6, tight))


class _Worded(nn.Module):
    """Blocks that keep unlike numbers of bytes, between a large embedding and its tied head."""

    def __init__(self, wide: list[int]) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, n), nn.Tanh(), nn.Linear(n, 8)) for n in wide
        )
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _within(**how: Any) -> tuple[Any, Any, torch.Tensor]:
    """A module of unlike blocks in stages, and a micro-batch."""
    model, ids = _Worded([64, 128, 256, 64, 128, 16]), torch.zeros(8, 4, dtype=torch.int64)
    stages, inputs = sl.Stages("pipe", example=(ids,), **how), {"ids": "data ."}
    return *sl.parallelize(model, [("*", "...")], inputs=inputs, stages=stages), ids


def _begins(**how: Any) -> tuple[str, ...]:
    return tuple(map(str, _within(**how)[0].stages.first.begins))


def _cut_of(pipe: int = 3, **how: Any) -> tuple[tuple[str, ...], list[float], Any]:
    """Where stages begin, the seconds of each block, and a step of micro-batches as the example."""
    with sl.simulate(pipe=pipe, data=2):
        apply, params, ids = _within(**how)
        said = sl.explain(apply, params, ids.repeat(2 * pipe, 1), microbatches=2 * pipe)
    first = apply.stages.first
    return tuple(map(str, first.begins)), [*first.chain.values()], said


def test_all_ranks_find_the_cut_within_a_memory_that_simulated_ones_find(pool: Any) -> None:
    with sl.simulate(pipe=2, data=2):
        found = _zbv_begins(180_000)
        assert found != _begins(schedule="zbv")
    assert pool.run(_zbv_begins, 180_000, pipe=2, data=2) == [found] * 4


def _zbv_begins(memory: int) -> tuple[str, ...]:
    return _begins(schedule="zbv", memory=memory)


@pytest.mark.parametrize(
    ("schedule", "pipe", "per_rank"), [("1f1b", 3, 1), ("interleaved", 2, 2), ("zbv", 2, 2)]
)
def test_the_cut_within_a_memory_is_the_fastest_that_is_explained_to_fit(
    schedule: str, pipe: int, per_rank: int
) -> None:
    how: Any = {"pipe": pipe, "per_rank": per_rank, "schedule": schedule}
    every = {}
    for rest in itertools.combinations(range(1, 6), pipe * per_rank - 1):
        begins, costs, said = _cut_of(cut=[f"blocks.{i}" for i in (0, *rest)], **how)
        slowest = max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *rest, 6)))
        every[begins] = slowest, said.peak
    # the fastest that fits -> the least memory in which it is that
    least: dict[float, float] = {}
    for memory in sorted((peak for _, peak in every.values()), reverse=True):
        least[min(slow for slow, peak in every.values() if peak <= memory)] = memory
    assert len(least) > 1
    for slowest, memory in least.items():
        begins, _, said = _cut_of(memory=memory, **how)
        assert every[begins] == (slowest, said.peak) and said.peak <= memory


@pytest.mark.parametrize("how", [{}, {"pipe": 2, "schedule": "zbv"}])
def test_a_memory_that_no_cut_keeps_to_is_refused_with_the_least(how: Any) -> None:
    with pytest.raises(sl.ShardError, match=r"every cut holds more than 1,000 B") as e:
        _cut_of(memory=1000, **how)
    found = re.search(
        r"the least is ([\d,]+) B, at pipe=(\d) where stages begin at (.*)", str(e.value)
    )
    assert found
    least, place, begins = int(found[1].replace(",", "")), int(found[2]), found[3].split(", ")
    assert f"memory={least}" in str(e.value)
    held = [p.peak for p in _cut_of(cut=begins, **how)[2].places]
    assert held[place] == max(held) == least == _cut_of(memory=least, **how)[2].peak


def test_why_lists_a_cut_that_fits_with_the_optimizer_where_that_in_use_does_not() -> None:
    tx, x, rules = sl.optim.adamw(1e-2), torch.ones(32, 4), [("*", "...")]
    f = lambda p, x: apply(p, x).square().mean()  # noqa: E731
    with sl.simulate(pipe=2):
        apply, params = sl.parallelize(_net(), rules, stages=sl.Stages("pipe", cut=["0", "2"]))
        cluster = sl.planning.Cluster(1e9, 1e8)
        fits = sl.explain(f, params, x, microbatches=4, tx=tx, cluster=cluster)
        apply, params = sl.parallelize(_net(), rules, stages=sl.Stages("pipe", cut=["0", "3"]))
        tight = sl.planning.Cluster(fits.peak, 1e8)
        text = str(sl.why("pipeline", f, params, x, 4, tight, tx))
    assert f"1f1b cut at 0, 2  {fits.summary(1e9)}\n" in text
    assert "sl.Stages('pipe', cut=['0', '2'], per_rank=1, schedule='1f1b')" in text
