"""Question that a plan answers, and a way to train, of which the best is the answer."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from shardlib.optim.tiered import Tiers
from shardlib.optim.transform import Transform
from shardlib.optim.zero import zero
from shardlib.planning.candidates import PIPE, RECIPES, meshes_of, recipe_meshes
from shardlib.planning.cluster import Cluster
from shardlib.planning.explanation import Explanation


@dataclass(frozen=True)
class Question:
    """Question that a plan answers: the step of a module, and what may be used for it.

    ``loss``     called with (apply, params, *inputs); ``room`` bytes of one rank.
    ``axes``     mesh sizes, or None: every mesh of ``ranks``.
    ``micros``   micro-batches of a step, or None: as many as fit, and as hide the idle time of
                 stages; ``pipe`` stages, or None: any number.
    ``recipes``  those whose layouts alone are weighed, or None: every layout on one or two axes, and
                 the cubes on three.
    ``refused``  parameter -> layouts that are not considered.
    ``host``     bytes of host memory of one rank, for memory tiers and for what layers save; None:
                 neither is weighed.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    loss: Callable[..., Any]
    optimizer: Transform
    cluster: Cluster
    room: float
    ranks: int
    axes: Mapping[str, int] | None = None
    micros: int | None = None
    pipe: int | None = None
    remat: bool = True
    zero: bool = True
    recipes: tuple[str, ...] | None = None
    refused: Mapping[str, frozenset[str]] = field(default_factory=dict)
    host: float | None = None

    @property
    def rows(self) -> int:
        """The rows of a batch."""
        return self.inputs[0].shape[0]

    def meshes(self, pipe: int) -> list[dict[str, int]]:
        """List the meshes of a stage."""
        if self.axes is None:
            return meshes_of(self.ranks // pipe, self.cluster)
        # a mesh of stages alone has one rank in each
        return [{a: n for a, n in self.axes.items() if a != PIPE} or {"a": 1}]

    def laid(self, pipe: int) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield the recipes to weigh, with the meshes of a stage."""
        wanted = {a: n for a, n in (self.axes or {}).items() if a != PIPE and n > 1}
        for recipe in RECIPES if self.recipes is None else self.recipes:
            for axes in recipe_meshes(recipe, self.ranks // pipe):
                if self.axes is not None and wanted != {a: n for a, n in axes.items() if n > 1}:
                    continue
                cube = recipe == "cube3d" and min(axes.values()) > 1
                if self.recipes is not None or cube:
                    yield recipe, axes

    def transform(self, how: Mapping[str, Any], tiers: Mapping[str, Any]) -> Transform:
        """Return the optimizer's transform under ``zero`` with these arguments, if there are any."""
        if not how:
            return self.optimizer
        return zero(self.optimizer, **how, tiers=Tiers(**tiers) if tiers else None)


@dataclass(frozen=True)
class Strategy:
    """A way to train a module, with the cost of a step: fields as ``sl.planning.Plan`` has them."""

    mesh: Mapping[str, int]
    rules: tuple[tuple[str, ...], ...]
    inputs: tuple[str, ...]
    remat: tuple[tuple[str, str], ...]
    zero: Mapping[str, Any]
    microbatches: int
    seconds: float
    peak: int
    along: Mapping[str, tuple[float, float]]
    explained: Explanation = field(repr=False)
    recipe: str = ""
    tiers: Mapping[str, Any] = field(default_factory=dict)
    largest: tuple[tuple[str, int], ...] = field(default=(), repr=False)
    whole: tuple[str, ...] = ()

    def better(self, other: "Strategy | None", room: float) -> bool:
        """Return whether it fits where another does not, or is faster, or the smaller of two."""
        if other is None:
            return True
        fits = self.peak <= room, other.peak <= room
        if all(fits):
            return (self.seconds, self.peak) < (other.seconds, other.peak)
        return fits[0] or (not fits[1] and self.peak < other.peak)

    @property
    def pipe(self) -> int:
        """The number of stages of a pipeline."""
        return self.mesh.get(PIPE, 1)
