"""A model's distinct layers: repeated layers are planned once and counted.

A stack of equal layers costs as much as one of them times their number.  The model with each
distinct layer once, and the same with one layer more, differ by exactly that layer: bytes,
messages, operations and the tensors saved for backward grow by the difference.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Outline", "outline"]


@dataclass(frozen=True)
class Outline:
    """A model by its distinct layers.

    ``model(0)`` has every distinct layer once; ``model(i)`` has the i-th repeated layer twice.

    ``repeats``  further copies of each repeated layer, the first not counted.
    """

    base: nn.Module
    repeats: tuple[int, ...]
    stacks: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]

    def model(self, more: int = 0) -> nn.Module:
        """Build the smaller model, on the tensors of the original."""
        # deepcopy shares what is in the memo: the copies use the original tensors
        memo: dict[int, Any] = {id(t): t for t in (*self.base.parameters(), *self.base.buffers())}
        at, small = 0, {}
        for path, kinds in self.stacks:
            kept: list[int] = []
            for members in kinds:
                at += len(members) > 1
                kept += members[: 1 + (len(members) > 1 and at == more)]
            stack: Any = self.base.get_submodule(path)
            layers = [copy.deepcopy(stack[i], dict(memo)) for i in sorted(kept)]
            made = type(stack)(layers) if isinstance(stack, nn.ModuleList) else type(stack)(*layers)
            small[id(stack)] = made.train(stack.training)
        return copy.deepcopy(self.base, memo | small)

    def total(self, values: Sequence[Any]) -> Any:
        """Compute the original model's figure from those of ``model(0)``, ``model(1)``, ..."""
        first, *others = values
        added = first
        for count, value in zip(self.repeats, others, strict=True):
            added = added + count * (value - first)
        return added


def outline(model: nn.Module) -> Outline:
    """Find the stacks of a model, and the equal layers in each.

    >>> mlp = nn.Sequential(nn.Linear(4, 4), *[nn.Linear(4, 4) for _ in range(5)], nn.Linear(4, 2))
    >>> found = outline(mlp)
    >>> found.repeats, len(found.model()), len(found.model(1))
    ((5,), 2, 3)
    """
    stacks, repeats = [], []
    inside: list[str] = []
    for path, m in model.named_modules():
        if not isinstance(m, nn.ModuleList | nn.Sequential) or any(
            path.startswith(f"{p}.") for p in inside
        ):
            continue
        kinds: dict[Any, list[int]] = {}
        for i, layer in enumerate(m):
            kinds.setdefault(_signature(layer), []).append(i)
        if all(len(k) == 1 for k in kinds.values()):
            continue
        inside.append(path)
        stacks.append((path, tuple(tuple(k) for k in kinds.values())))
        repeats += [len(k) - 1 for k in kinds.values() if len(k) > 1]
    return Outline(model, tuple(repeats), tuple(stacks))


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


def _plain(key: str, value: Any) -> bool:
    # attributes that number equal layers
    number = key in ("layer_idx", "layer_id", "layer_number", "training", "block_idx")
    return isinstance(value, int | float | str) and not number and not key.startswith("_")
