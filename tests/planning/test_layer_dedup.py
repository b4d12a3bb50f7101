"""A model's distinct layers, once, and the whole from them."""

from collections import Counter

import pytest
import torch
from torch import nn

from examples.gpt import GPT, GPTConfig
from shardlib.modules.dim_trace import trace_dimensions
from shardlib.planning.layer_dedup import outline
from shardlib.planning.products import Totals, all_products, products


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
def test_parameters_of_the_whole_come_from_the_smaller_ones(make) -> None:  # type: ignore[no-untyped-def]
    model = make()
    found = outline(model)
    smaller = [found.model(i) for i in range(1 + len(found.repeats))]
    assert found.total([size(m) for m in smaller]) == size(model)
    assert all(size(m) < size(model) for m in smaller)


def test_products_of_the_whole_come_from_the_smaller_ones() -> None:
    model = GPT(GPTConfig(layers=5, embed=16))
    found = outline(model)
    dims = [trace_dimensions(found.model(i)) for i in range(1 + len(found.repeats))]
    counted = {layer._replace(count=1): layer.count for layer in all_products(found, dims)}
    assert counted == dict(products(trace_dimensions(model)))


def test_the_model_is_left_as_it_is() -> None:
    model = Mixed()
    names = [n for n, _ in model.named_modules()]
    smaller = outline(model).model(1)
    assert [n for n, _ in model.named_modules()] == names
    assert smaller.a[0].weight is model.a[0].weight, "nothing is copied"  # type: ignore[union-attr]


def test_layers_that_differ_in_a_number_are_two() -> None:
    drops = nn.Sequential(*[nn.Dropout(p) for p in (0.1, 0.1, 0.2, 0.2, 0.2)])
    assert outline(drops).repeats == (1, 2)


def test_sums_add_and_scale() -> None:
    a, b = Totals(Counter(x=2, y=1)), Totals(Counter(x=1))
    assert (a + 3 * (a - b)).values == Counter(x=5, y=4)
