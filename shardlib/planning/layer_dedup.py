"""A model's distinct layers: repeated layers are planned once and counted.

A stack of equal layers costs as much as one of them times their number.  The model with each
distinct layer once, and the same with one layer more, differ by exactly that layer: bytes,
messages, operations and the tensors saved for backward grow by the difference.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import nn

from shardlib.modules.dim_factors import length
from shardlib.modules.dim_trace import Dimensions
from shardlib.modules.param_roles import ids, kinds

K = TypeVar("K")


@dataclass(frozen=True)
class Outline:
    """A model by its distinct layers.

    ``model(0)`` has every distinct layer once; ``model(i)`` has the i-th repeated layer twice.

    ``stacks``  path of a stack -> for each distinct layer in it the places of its equals.
    """

    base: nn.Module
    stacks: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]

    @property
    def repeats(self) -> tuple[int, ...]:
        """Further copies of each repeated layer, the first not counted."""
        return tuple(len(k) - 1 for _, alike in self.stacks for k in alike if len(k) > 1)

    @property
    def depth(self) -> int:
        """The number of equal layers, of the kind that has most: stages have one each at the least."""
        return 1 + max(self.repeats, default=0)

    @property
    def models(self) -> list[nn.Module]:
        """The smaller models whose figures make up the original's, see ``total``."""
        return [self.model(i) for i in range(1 + len(self.repeats))]

    def model(self, more: int = 0) -> nn.Module:
        """Build the smaller model, on the tensors of the original."""
        # deepcopy shares what is in the memo: the copies use the original tensors
        memo: dict[int, Any] = {id(t): t for t in (*self.base.parameters(), *self.base.buffers())}
        at, small = 0, {}
        for path, alike in self.stacks:
            kept: list[int] = []
            for members in alike:
                at += len(members) > 1
                kept += members[: 1 + (len(members) > 1 and at == more)]
            stack: Any = self.base.get_submodule(path)
            layers = [copy.deepcopy(stack[i], dict(memo)) for i in sorted(kept)]
            made = type(stack)(layers) if isinstance(stack, nn.ModuleList) else type(stack)(*layers)
            small[id(stack)] = made.train(stack.training)
        return copy.deepcopy(self.base, memo | small)

    def total(self, values: Sequence[Mapping[K, float]]) -> dict[K, float]:
        """Compute the original model's figures from those of ``model(0)``, ``model(1)``, ..."""
        first, *others = values
        added = dict(first)
        for count, value in zip(self.repeats, others, strict=True):
            for k in {**first, **value}:
                grown = value.get(k, 0) - first.get(k, 0)
                added[k] = added.get(k, 0) + count * grown
        return added


def outline(model: nn.Module) -> Outline:
    """Find the stacks of a model, and the equal layers in each.

    >>> mlp = nn.Sequential(nn.Linear(4, 4), *[nn.Linear(4, 4) for _ in range(5)], nn.Linear(4, 2))
    >>> found = outline(mlp)
    >>> found.repeats, len(found.model()), len(found.model(1))
    ((5,), 2, 3)
    """
    stacks: dict[str, tuple[tuple[int, ...], ...]] = {}
    for path, m in model.named_modules():
        inside = any(path.startswith(f"{p}.") for p in stacks)
        if inside or not isinstance(m, nn.ModuleList | nn.Sequential):
            continue
        alike: dict[Any, list[int]] = {}
        for i, layer in enumerate(m):
            alike.setdefault(_signature(layer), []).append(i)
        if len(alike) < len(m):
            stacks[path] = tuple(map(tuple, alike.values()))
    return Outline(model, tuple(stacks.items()))


def _signature(layer: nn.Module) -> Any:
    """Return a key that is equal for layers that compute the same on the same shapes."""
    modules = tuple(
        (n, type(m), tuple((k, v) for k, v in sorted(vars(m).items()) if _plain(k, v)))
        for n, m in layer.named_modules()
    )
    tensors = tuple(
        (n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in layer.named_parameters()
    )
    return modules, tensors


def _plain(key: str, value: object) -> bool:
    # attributes that number equal layers
    number = key in ("layer_idx", "layer_id", "layer_number", "training", "block_idx")
    return isinstance(value, int | float | str) and not number and not key.startswith("_")


# ---------------------------------------------------------------- products


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


def elements(layers: Iterable[Layer]) -> int:
    """Count the elements of all weights.

    >>> elements([Layer(2, 3, count=2), Layer(4, 5)])
    32
    """
    return sum(layer.inputs * layer.outputs * layer.count for layer in layers)


def width(layers: Iterable[Layer]) -> int:
    """Return the features of what passes between equal layers.

    >>> width([Layer(8, 24, count=2), Layer(8, 2, count=4), Layer(8, 4)])
    8
    """
    return max(min(layer.inputs, layer.outputs) for layer in layers if layer.count > 1)


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
    for r in dims.products:
        ins, outs = known.sides(r)
        back = known.of(ins) == "inner" and known.of(outs) != "inner"
        wide = ins if back else outs
        mlp = bool(known.mlp & ids(wide))
        found[Layer(length(ins), length(outs), back, mlp)] += 1
    return found


def all_products(outline: Outline, dims: Sequence[Dimensions]) -> list[Layer]:
    """List the distinct products of the original model, with counts, from its smaller ones."""
    whole = outline.total([products(d) for d in dims])
    return [layer._replace(count=int(n)) for layer, n in whole.items() if n]
