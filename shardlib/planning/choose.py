"""Choose a grid of the three-axis product (grids.py) for the products of a model, by formulas alone.

Every grid, with gathered operands saved or not, is priced by ``step_cost``, alone and in the stages
of a pipeline, and the fastest that fits is taken.  Attention and norms move little or nothing under
these layouts.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from shardlib.cost import moving, summing
from shardlib.errors import ShardError, Unsupported
from shardlib.mesh import Link
from shardlib.modules import recipes
from shardlib.modules.dim_trace import trace_dimensions
from shardlib.planning.grids import (
    Grid3,
    candidates,
    divides,
    divisors,
    grids_text,
    hiding,
    in_stages,
    stage_counts,
    step_cost,
    times,
)
from shardlib.planning.layer_dedup import Layer, all_products, elements, outline, width

_FIX = "sl.choose([(1024, 4096), (4096, 1024)], 8, batch=64)"


@dataclass(frozen=True)
class Grids:
    """The grids that fit, the best first.

    ``mesh``      axis sizes of the best, for ``make_mesh(**found.mesh)``.
    ``recipe``    the best's function of ``shardlib.modules.recipes``.
    ``save``      operands that it keeps gathered; if any, train within ``sl.saving()``.
    ``rejected``  how many do not divide the sizes, or do not fit.

    >>> found = choose([(64, 256), (256, 64)], 4, batch=64)
    >>> found.mesh == found.best.mesh, found.best is found.table[0]
    (True, True)
    """

    table: tuple[Grid3, ...]
    rejected: int

    @property
    def best(self) -> Grid3:
        """The fastest grid that fits."""
        return self.table[0]

    @property
    def mesh(self) -> dict[str, int]:
        """The axis sizes of the best grid."""
        return dict(self.best.mesh)

    @property
    def recipe(self) -> Callable[..., recipes.Recipe]:
        """The recipe that lays a model out as the best grid does."""
        mlp = self.best.mlp
        return recipes.cube3d if mlp == "mnk" else partial(recipes.cube3d, mlp=mlp)

    @property
    def save(self) -> str:
        """The operands that the best grid keeps gathered."""
        return self.best.save

    def __str__(self) -> str:
        return grids_text(self.table, self.rejected)

    __repr__ = __str__


def choose(
    model: nn.Module | Sequence[tuple[int, int]],
    world: int,
    *,
    batch: int,
    sequence: int = 1,
    memory: float | None = None,
    heads: int | None = None,
    itemsize: int = 4,
    state: int = 12,
    links: Link | Mapping[str, Link] | None = None,
    flops: float | None = None,
    pipe: int | None = None,
) -> Grids:
    """Find the fastest grid of ``world`` ranks for one training step of a model's linear layers.

    ``model``   a module, or (inputs, outputs) of its linear layers in turn: expanding, contracting,
                ...
    ``memory``  bytes per rank for weights, gradients, ``state`` bytes per parameter, saved
                activations and the largest gathered pair; None for no limit.
    ``heads``   attention heads, which the axis n must divide.
    ``links``   one Link, or one per axis x (m), y (n), z (k), pipe and data, as ``probe`` measures.
    ``flops``   multiply-adds x 2 per second and rank, to include the products themselves.
    ``pipe``    stages of a pipeline over an axis of this name; by default every number is considered
                for a module with repeated layers, where ``flops`` says what a bubble costs.

    Each distinct product with a weight is priced once and counted.  ``sl.plan`` prices all of a
    step.  Ties go to fewer messages.  Raises: ShardError if no grid divides or
    fits.

    >>> mlp = [(1024, 4096), (4096, 1024)]
    >>> for sequence in (1, 64, 1024):
    ...     found = choose(mlp, 8, batch=64, sequence=sequence)
    ...     print(found.mesh, found.best.name)
    {'x': 1, 'y': 4, 'z': 2} 2D
    {'x': 2, 'y': 4, 'z': 1} TP x FSDP
    {'x': 8, 'y': 1, 'z': 1} FSDP
    """
    layers, depth = _layers(model)
    stages = 1 if pipe is None else pipe
    _check_counts(layers, world=world, batch=batch, sequence=sequence, pipe=stages)
    if isinstance(links, Link):
        links = {a: links for a in ("pipe", "data", "x", "y", "z")}
    room = math.inf if memory is None else memory
    step = _Step(layers, batch, sequence, itemsize, state, links, flops)

    found, rejected = [], 0
    for split in _splits(
        layers, world, batch, stage_counts(world, depth if flops or pipe else 1, pipe)
    ):
        if step.divides(split, heads):
            grids = [step.grid(split, save) for save in _savings(split)]
            found += [g for g in grids if g.cost.memory <= room]
        else:
            rejected += 1
    if not found:
        within = f" in {stages} stages" if stages > 1 else ""
        why = f"no grid of {world} ranks{within} divides these sizes"
        if memory is not None:
            why += " within the memory"
        sizes = ", ".join(f"{i} -> {o}" for i, o, *_ in layers[:4])
        operands = {"batch": batch, "layers": sizes}
        fix = f"sl.choose(model, 1, batch={batch})"
        raise ShardError(why, op="choose", operands=operands, fix=fix)
    return Grids(tuple(sorted(found, key=_order)), rejected)


class _Split(NamedTuple):
    """Axis sizes, roles in MLPs and micro-batches, as ``Grid3`` has them."""

    m: int
    k: int
    n: int
    mlp: str
    pipe: int
    data: int
    micros: int


def _splits(
    layers: Sequence[Layer], world: int, batch: int, stages: Sequence[int]
) -> Iterator[_Split]:
    """List the grids of ``world`` ranks with these numbers of stages."""
    for p in stages:
        # without a pipeline m moves as little as copies do, and holds less
        for d in divisors(world // p) if p > 1 else [1]:
            for m, k, n, mlp in candidates(layers, world // p // d):
                micros = hiding(max(1, batch // (d * m * n)), p) if p > 1 else 1
                yield _Split(m, k, n, mlp, p, d, micros)


@dataclass(frozen=True)
class _Step:
    """A training step of a model's products, to be priced on grids; fields as in ``choose``."""

    layers: Sequence[Layer]
    batch: int
    sequence: int
    itemsize: int
    state: int
    links: Mapping[str, Link] | None
    flops: float | None

    def divides(self, split: _Split, heads: int | None) -> bool:
        """Check that sizes divide over a grid, and rows also over copies and micro-batches."""
        m, k, n, mlp, _, data, micros = split
        rows, odd = divmod(self.batch, data * micros)
        return not odd and divides(self.layers, m, k, n, mlp, rows, heads)

    def grid(self, split: _Split, save: str) -> Grid3:
        """Price a step on a grid, in the largest of its stages."""
        m, k, n, mlp, p, d, count = split
        ranks, links = m * n * k, self.links
        stage = [x._replace(count=-(-x.count // p)) for x in self.layers]
        tokens = self.batch // (d * count) * self.sequence
        held = min(count, p)
        one = step_cost(stage, m, k, n, save, tokens, self.itemsize, self.state, mlp, held)
        # 2 flops per multiply-add, in three products: forward, dX, dW
        work = 6 * tokens * elements(stage) / ranks / self.flops if self.flops else 0.0
        crossing = tokens * width(self.layers) * self.itemsize if p > 1 else 0
        hop = moving(("pipe",), Fraction(crossing, ranks), int(p > 1))
        sums = summing(Fraction(elements(stage) * self.itemsize, ranks), ("data",), {"data": d})
        own = one.seconds(links) + work
        seconds = in_stages(own, p, count, hop.seconds(links)) + sums.seconds(links)
        cost = times(one, count) + times(hop, 2 * count) + sums
        return Grid3(m, k, n, save, cost, seconds, mlp, p, d, count)


def _order(g: Grid3) -> tuple[Any, ...]:
    """Sort by seconds, then messages; of equal ones the usual form comes first."""
    return g.seconds, g.cost.messages, g.cost.memory, len(g.save), g.mlp != "mnk"


def _check_counts(layers: Sequence[Layer], **counts: int) -> None:
    wrong = [f"{n}={v!r}" for n, v in counts.items() if type(v) is not int]
    if wrong:
        raise ShardError(f"counts are integers: {', '.join(wrong)}", op="choose", fix=_FIX)
    what = "" if layers else "the model has no linear layer"
    if min(counts.values()) < 1 and layers:
        what = ", ".join(f"{n}={v}" for n, v in counts.items())
    if what:
        raise ShardError(f"nothing to choose for: {what}", op="choose", fix=_FIX)


def _savings(split: _Split) -> list[str]:
    """List the operands that may be kept gathered: none, x, w, or both, of those that are."""
    moves = {"x": max(split.k, split.n) > 1, "w": split.m > 1 or "m" in split.mlp[1:]}
    gathered = [operand for operand, does in moves.items() if does]
    return list(dict.fromkeys(["", *gathered, "".join(gathered)]))


def _layers(model: nn.Module | Sequence[tuple[int, int]]) -> tuple[list[Layer], int]:
    """List the linear layers in order, and count the blocks that stages can be made of.

    ``mlp`` is set only if the model has other layers too.
    """
    found, depth = _of_module(model) if isinstance(model, nn.Module) else (_of_sizes(model), 1)
    if all(layer.mlp for layer in found):
        found = [layer._replace(mlp=False) for layer in found]
    return found, depth


def _of_sizes(sizes: Sequence[tuple[int, int]]) -> list[Layer]:
    """List layers that expand and contract in turn; an MLP widens and comes back."""
    found = []
    for turn, (inputs, outputs) in enumerate(sizes):
        pair = sizes[turn - turn % 2 : turn - turn % 2 + 2]
        mlp = len(pair) == 2 and pair[1][0] > pair[1][1]
        found.append(Layer(inputs, outputs, turn % 2 == 1, mlp))
    return found


def _of_module(model: nn.Module) -> tuple[list[Layer], int]:
    """List the distinct products of a model with their counts, and count its equal layers.

    Raises: Unsupported where it cannot be run without inputs.
    """
    sizes = [(p.shape[1], p.shape[0]) for p in model.parameters() if p.ndim == 2]
    if not sizes:
        return [], 1
    found = outline(model)
    try:
        dims = [trace_dimensions(m) for m in found.models]
    except Unsupported as e:
        fix = f"sl.choose({sizes[:4]}, 8, batch=64)  # (inputs, outputs) of each product"
        raise Unsupported(e.message, op="choose", fix=fix) from None
    return all_products(found, dims), found.depth
