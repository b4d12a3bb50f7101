"""The calls of a step, recorded once, are the step's."""

from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.planning.calls import calls_of


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        x = x + self.gate(x).sigmoid() * self.up(x)
        return x @ self.table.weight.T


def loss(apply: Any, params: Any, ids: Any) -> Any:
    return apply(params, ids).square().mean()


def test_calls_run_again_give_what_the_module_gives() -> None:
    torch.manual_seed(0)
    module, ids = Tied(), torch.arange(12).reshape(4, 3)
    step = calls_of(module, (ids,), loss)
    with sl.simulate(one=1):
        apply, params = sl.parallelize(module, [("*", "...")])
        given = sl.shard(ids, "...")
        values: dict[int, Any] = {i: params[n] for i, n in step.parameters.items()}
        values |= {i: given for i in step.inputs}
        for call in step.calls:
            values |= dict(zip(call.gives, call.run([values[r] for r in call.reads]), strict=True))
        assert torch.equal(values[step.loss].raw, loss(apply, params, given).raw)


def test_products_that_read_one_value_are_one_call() -> None:
    step = calls_of(Tied(), (torch.arange(12).reshape(4, 3),), loss)
    (product,) = [c for c in step.calls if c.name == "linear"]
    assert len(product.gives) == 2
    assert [step.parameters[r] for r in product.reads if r in step.parameters] == [
        "gate.weight", "gate.bias", "up.weight", "up.bias",
    ]  # fmt: skip


def test_equal_calls_have_one_key() -> None:
    twice = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 8))
    step = calls_of(twice, (torch.empty(2, 4),), loss)
    first, second, third = [c.key for c in step.calls if c.name == "linear"]
    assert first == second == third


@pytest.mark.parametrize("lets_go", [False, True])
def test_a_value_ends_when_python_lets_it_go(lets_go: bool) -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(x)
            z = y.relu()
            if lets_go:
                del y
            return (z * 2).sum()

    step = calls_of(Holding(), (torch.empty(6, 4),), lambda apply, params, x: apply(params, x))
    names = [c.name for c in step.calls]
    (made,) = step.calls[names.index("linear")].gives
    assert names[step.ends[made]] == ("relu" if lets_go else "sum")
    assert step.ends[step.loss] == len(names)
