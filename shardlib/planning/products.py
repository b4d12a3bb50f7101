"""The distinct products of a model, and how often each runs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardlib.modules.dim_factors import length
from shardlib.modules.dim_trace import Dimensions
from shardlib.modules.param_roles import deep, kinds
from shardlib.planning.layer_dedup import Outline

__all__ = ["Layer", "Totals", "all_products", "products"]


class Layer(NamedTuple):
    """A product with a weight.

    ``back``   whether it contracts.
    ``mlp``    whether it belongs to an MLP, in a model that has attention.
    ``count``  how many of them there are.
    """

    inputs: int
    outputs: int
    back: bool = False
    mlp: bool = False
    count: int = 1


def products(dims: Dimensions) -> Counter[Layer]:
    """Count the products in a run of a model, whichever modules hold their weights.

    >>> from torch import nn
    >>> from shardlib.modules.dim_trace import trace_dimensions
    >>> mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4), nn.Linear(4, 16))
    >>> found = products(trace_dimensions(mlp))
    >>> sum(n for layer, n in found.items() if (layer.inputs, layer.outputs) == (4, 16))
    2
    """
    found, known = Counter[Layer](), kinds(dims)
    for r in dims.reads:
        if r.kind != "product" or not r.inputs or not r.outputs:
            continue
        ins, outs = known.row(r.name, r.inputs), known.row(r.name, r.outputs)
        back = known.of(ins) == "inner" and known.of(outs) != "inner"
        wide = ins if back else outs
        mlp = bool(known.mlp & {id(a) for a in deep(wide)})
        found[Layer(length(ins), length(outs), back, mlp)] += 1
    return found


@dataclass
class Totals:
    """Figures that can be added and subtracted key by key, for ``Outline.total``."""

    values: dict[Any, float] = field(default_factory=dict)

    def __add__(self, other: "Totals") -> "Totals":
        return self._with(other, 1)

    def __sub__(self, other: "Totals") -> "Totals":
        return self._with(other, -1)

    def __rmul__(self, by: float) -> "Totals":
        return Totals({k: by * v for k, v in self.values.items()})

    def _with(self, other: "Totals", by: float) -> "Totals":
        out = dict(self.values)
        for k, v in other.values.items():
            out[k] = out.get(k, 0) + by * v
        return Totals(out)


def all_products(outline: Outline, dims: Sequence[Dimensions]) -> list[Layer]:
    """List the distinct products of the original model, with counts, from its smaller ones."""
    whole: Totals = outline.total([Totals(dict(products(d))) for d in dims])
    return [layer._replace(count=int(n)) for layer, n in whole.values.items() if n]
