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
