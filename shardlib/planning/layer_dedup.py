"""A model's distinct layers: repeated layers are planned once and counted.

A stack of equal layers costs as much as one of them times their number.
"""

import itertools
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardlib.modules.weightless_copy import copied


@dataclass(frozen=True)
class Outline:
    """A model by its distinct layers.

    ``stacks``  path of a stack -> for each distinct layer in it the places of its equals.
    """

    base: nn.Module
    stacks: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]

    @property
    def depth(self) -> int:
        """The number of equal layers, of the kind that has most: stages have one each at the least."""
        return max((len(k) for _, alike in self.stacks for k in alike), default=1)

    def model(self) -> nn.Module:
        """Build the model that has every distinct layer once, on the tensors of the original."""
        small = copied(self.base, {})[id(self.base)]
        for path, alike in self.stacks:
            stack: Any = small.get_submodule(path)
            first = sorted(members[0] for members in alike)
            vars(stack)["_modules"] = {str(at): stack[i] for at, i in enumerate(first)}
        return small

    def apart(self, paths: Collection[str]) -> "Outline":
        """Return the outline in which no layers of these stacks count as equal.

        >>> outline(nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])).apart([""]).stacks
        (('', ((0,), (1,), (2,))),)
        """
        alone = {
            path: tuple((i,) for i in sorted(itertools.chain(*alike))) if path in paths else alike
            for path, alike in self.stacks
        }
        return replace(self, stacks=tuple(alone.items()))


def outline(model: nn.Module) -> Outline:
    """Find the stacks of a model, and the equal layers in each.

    >>> mlp = nn.Sequential(nn.Linear(4, 4), *[nn.Linear(4, 4) for _ in range(5)], nn.Linear(4, 2))
    >>> found = outline(mlp)
    >>> found.depth, len(found.model())
    (6, 2)
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
