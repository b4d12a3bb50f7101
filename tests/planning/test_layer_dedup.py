"""A model's distinct layers, once, and the whole from them."""

import pytest
import torch
from torch import nn

from examples.gpt import GPT, GPTConfig
from shardlib.modules.dim_trace import trace_dimensions
from shardlib.planning.layer_dedup import all_products, outline, products


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
    assert found.total([{"": size(m)} for m in smaller]) == {"": size(model)}
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


def test_figures_grow_key_by_key() -> None:
    found = outline(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]))
    assert found.total([{"x": 2, "y": 1}, {"x": 1, "z": 1}]) == {"x": -1, "y": -2, "z": 3}


class Shared(nn.Module):
    """One linear layer that runs twice, a norm and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(10, 4), nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for _ in range(2):
            x = x + self.down(self.up(self.norm(x)).relu())
        return x


def test_a_weight_that_is_read_twice_is_two_products() -> None:
    found = products(trace_dimensions(Shared()))
    assert sum(found.values()) == 4
    assert {(f.inputs, f.outputs, f.back): n for f, n in found.items()} == {
        (4, 16, False): 2,
        (16, 4, True): 2,
    }


def test_counts_of_repeated_layers_are_those_of_the_whole() -> None:
    deep = nn.Sequential(nn.Linear(4, 8), *[nn.Linear(8, 8) for _ in range(5)])
    small = outline(deep)
    dims = [trace_dimensions(small.model(i)) for i in range(1 + len(small.repeats))]
    found = all_products(small, dims)
    assert sum(f.count for f in found) == 6 == sum(products(trace_dimensions(deep)).values())
    assert sum(f.count for f in found if f.inputs == 8) == 5
