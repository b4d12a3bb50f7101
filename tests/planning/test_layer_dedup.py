"""A model's distinct layers, once."""

from typing import Any

import pytest
import torch
from torch import nn

from examples.gpt import GPT, GPTConfig
from shardlib.planning.layer_dedup import outline


def size(m: nn.Module) -> int:
    return sum(p.numel() for p in m.parameters())


class Mixed(nn.Module):
    """Two kinds of layers in one stack, and a second stack."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleList([nn.Linear(4, 4, bias=i % 3 == 0) for i in range(7)])
        self.b = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.a:
            x = layer(x)
        return self.b(x)


@pytest.mark.parametrize("make", [lambda: GPT(GPTConfig(layers=5, embed=16)), Mixed])
def test_the_smaller_model_has_each_distinct_layer_once(make: Any) -> None:
    model = make()
    found = outline(model)
    rest = model.get_submodule("")
    counted = size(found.model())
    for path, alike in found.stacks:
        for members in alike:
            layer = rest.get_submodule(path)[members[0]]
            counted += (len(members) - 1) * size(layer)
    assert counted == size(model) > size(found.model())


def test_the_model_is_left_as_it_is() -> None:
    model = Mixed()
    names = [n for n, _ in model.named_modules()]
    smaller = outline(model).model()
    assert [n for n, _ in model.named_modules()] == names
    assert smaller.a[0].weight is model.a[0].weight, "nothing is copied"  # type: ignore[union-attr]


def test_layers_that_differ_in_a_number_are_two() -> None:
    drops = nn.Sequential(*[nn.Dropout(p) for p in (0.1, 0.1, 0.2, 0.2, 0.2)])
    assert outline(drops).stacks == (("", ((0, 1), (2, 3, 4))),) and outline(drops).depth == 3
