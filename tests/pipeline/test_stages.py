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
    net, x = _net(), torch.randn(2, 4)
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
    assert "takes micro-batches 2 at a time" in dict(few.verdicts)["interleaved"]
    tight = sl.planning.Cluster(1e3, 1e8)
    with pytest.raises(sl.ShardError, match="not those of a module in stages"):
        sl.why("pipeline", f, {"w": torch.ones(2)})
    assert "more than 1000 B" in str(sl.why("pipeline", f, params, torch.ones(12, 32), 6, tight))
