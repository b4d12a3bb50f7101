"""Products are counted as they run: shared weights twice, lookups and norms not at all."""

import torch
from torch import nn

from shardlib.modules.dim_trace import trace_dimensions
from shardlib.planning.layer_dedup import outline
from shardlib.planning.products import Layer, Totals, all_products, products


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


def test_totals_add_and_subtract_key_by_key() -> None:
    a, b = Totals({"x": 1, "y": 2}), Totals({"y": 3})
    assert (a + b).values == {"x": 1, "y": 5} and (2 * a - b).values == {"x": 2, "y": 1}
    assert Layer(4, 8).count == 1
