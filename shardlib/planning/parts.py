"""Parts of a step: the layers of stacks of equal ones, and what is before, between and behind them.

Of equal layers the smaller model of an outline has one, whose part stands for all.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardlib.planning.calls import Call, StepCalls
from shardlib.planning.layer_dedup import Outline


@dataclass(frozen=True)
class Part:
    """Calls that follow one another: one layer of a stack of equal ones, or what is between stacks.

    ``path``     of the layer; ``layers`` paths of all layers like it.
    """

    calls: tuple[Call, ...]
    path: str = ""
    layers: tuple[str, ...] = ("",)

    def seconds(self, calls: Mapping[Call, tuple[float, float]]) -> float:
        """Add the seconds of both passes of all its layers, of those of its calls."""
        return len(self.layers) * sum(sum(calls[c]) for c in self.calls)

    def goes_on(self, step: StepCalls) -> bool:
        """Return whether an equal layer may follow: what is new has sizes of what is gone."""
        if len(self.layers) == 1:
            return True
        behind = step.calls[step.calls.index(self.calls[-1]) + 1 :]
        later = {step.loss, *(n for c in behind for n in c.reads)}
        made = {n for c in self.calls for n in c.gives}
        read = {n for c in self.calls for n in c.reads} - made - {*step.parameters}
        new, gone = (Counter(step.shapes[n] for n in some) for some in (made & later, read - later))
        return bool(new) and new <= gone


def stacks_of(outline: Outline) -> dict[str, tuple[str, ...]]:
    """Return, for each distinct layer of the smaller model, the paths of all layers like it."""
    stacks: dict[str, tuple[str, ...]] = {}
    for path, alike in outline.stacks:
        for at, members in enumerate(alike):
            # a module that is a stack itself has the path ""
            layer = f"{path}.".lstrip(".")
            stacks[f"{layer}{at}"] = tuple(f"{layer}{i}" for i in members)
    return stacks


def small_name(name: str, stacks: Mapping[str, Sequence[str]]) -> str:
    """Return the name that a parameter has in the smaller model, of these stacks of equal layers.

    >>> small_name("h.7.w", {"h.0": ("h.0",), "h.1": ("h.1", "h.7")}), small_name("head.w", {})
    ('h.1.w', 'head.w')
    """
    for small, layers in stacks.items():
        for layer in layers:
            if name.startswith(f"{layer}."):
                return small + name.removeprefix(layer)
    return name


def parts_of(stacks: Mapping[str, tuple[str, ...]], step: StepCalls) -> list[Part]:
    """Cut the calls of a step into layers of stacks, and what is before, between and behind them."""
    found: list[Part] = []
    for path, calls in itertools.groupby(step.calls, lambda c: layer_of(c.module, stacks)):
        found.append(Part(tuple(calls), path, stacks.get(path, ("",))))
    return found


def layer_of(module: str, stacks: Mapping[str, object]) -> str:
    return next((s for s in stacks if module == s or module.startswith(s + ".")), "")
