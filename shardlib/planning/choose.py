"""Choose: the plan of one family of grids, for the products of a model alone, by their formulas.

The search of ``plan`` restricted to the grids of the three-axis product (grids.py): every grid,
with gathered operands saved or not, is priced by ``step_cost``, alone and in the stages of a
pipeline, and the fastest that fits is taken.  Attention and norms move little or nothing under
these layouts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import nn

from shardlib.cost import moving, summing
from shardlib.errors import ShardError, Unsupported
from shardlib.mesh import Link
from shardlib.modules.dim_trace import trace_dimensions
from shardlib.planning.grids import Grid3, candidates, divides, in_stages, step_cost, times
from shardlib.planning.layer_dedup import Layer, all_products, elements, outline, width
from shardlib.planning.plan import Plan, Strategy, divisors, hiding, search, stage_counts

_FIX = "sl.choose([(1024, 4096), (4096, 1024)], 8, batch=64)"


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
) -> Plan[Grid3]:
    """Find the fastest grid of ``world`` ranks for one training step of a model's linear layers.

    ``model``   a module, or (inputs, outputs) of its linear layers in turn: expanding, contracting,
                ...
    ``memory``  bytes per rank for weights, gradients, ``state`` bytes per parameter, saved
                activations and the largest gathered pair; None for no limit.
    ``heads``   attention heads, which the axis n must divide.
    ``links``   one Link, or one per axis x (m), y (n), z (k), pipe and data, as ``probe`` measures.
    ``flops``   multiply-adds x 2 per second and rank, to include the products themselves.
    ``pipe``    stages of a pipeline, as ``plan`` takes it; by default every number is considered
                for a module with repeated layers, where ``flops`` says what a bubble costs.

    Each distinct product with a weight is priced once and counted.  ``planning.plan`` runs all of a
    step on the meta device.  Ties go to fewer messages.  Raises: ShardError if no grid divides or
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

    def weigh(way: Strategy) -> list[Grid3]:
        if way.pipe > 1:
            rows = batch // math.prod(way.mesh[a] for a in ("data", "x", "y"))
            way = replace(way, accumulate=hiding(max(1, rows), way.pipe))
        if not step.divides(way, heads):
            raise ShardError("it does not divide the sizes", op="choose")
        grids = [step.grid(way, save) for save in _savings(way)]
        return [g for g in grids if g.cost.memory <= room]

    ways = _ways(layers, world, stage_counts(world, depth if flops or pipe else 1, pipe))
    table, rejected = search(ways, weigh, _order)
    if not table:
        within = f" in {stages} stages" if stages > 1 else ""
        why = f"no grid of {world} ranks{within} divides these sizes"
        if memory is not None:
            why += " within the memory"
        sizes = ", ".join(f"{i} -> {o}" for i, o, *_ in layers[:4])
        operands = {"batch": batch, "layers": sizes}
        fix = f"sl.choose(model, 1, batch={batch})"
        raise ShardError(why, op="choose", operands=operands, fix=fix)
    return Plan(table, memory, len(ways), rejected, batch)


def _ways(layers: Sequence[Layer], world: int, stages: Sequence[int]) -> list[Strategy]:
    """List the grids of ``world`` ranks with these numbers of stages."""
    return [
        Strategy("cube3d", {"pipe": p, "data": d, "x": m, "y": n, "z": k}, mlp=mlp)
        for p in stages
        # without a pipeline m moves as little as copies do, and holds less
        for d in (divisors(world // p) if p > 1 else [1])
        for m, k, n, mlp in candidates(layers, world // p // d)
    ]


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

    def divides(self, way: Strategy, heads: int | None) -> bool:
        """Check that sizes divide over a grid, and rows also over copies and micro-batches."""
        rows, odd = divmod(self.batch, way.mesh["data"] * way.accumulate)
        m, n, k = (way.mesh[a] for a in "xyz")
        return not odd and divides(self.layers, m, k, n, way.mlp, rows, heads)

    def grid(self, way: Strategy, save: str) -> Grid3:
        """Price a step on a grid, in the largest of its stages."""
        p, d, m, n, k = way.mesh.values()
        count, ranks, links = way.accumulate, m * n * k, self.links
        stage = [x._replace(count=-(-x.count // p)) for x in self.layers]
        tokens = self.batch // (d * count) * self.sequence
        held = min(count, p)
        one = step_cost(stage, m, k, n, save, tokens, self.itemsize, self.state, way.mlp, held)
        # 2 flops per multiply-add, in three products: forward, dX, dW
        work = 6 * tokens * elements(stage) / ranks / self.flops if self.flops else 0.0
        crossing = tokens * width(self.layers) * self.itemsize if p > 1 else 0
        hop = moving(("pipe",), Fraction(crossing, ranks), int(p > 1))
        sums = summing(Fraction(elements(stage) * self.itemsize, ranks), ("data",), {"data": d})
        own = one.seconds(links) + work
        seconds = in_stages(own, p, count, hop.seconds(links)) + sums.seconds(links)
        cost = times(one, count) + times(hop, 2 * count) + sums
        return Grid3(m, k, n, save, cost, seconds, way.mlp, p, d, count)


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


def _savings(way: Strategy) -> Iterable[str]:
    """List the operands that may be kept gathered: none, x, w, or both, of those that are."""
    m, n, k = (way.mesh[a] for a in "xyz")
    moves = {"x": max(k, n) > 1, "w": m > 1 or "m" in way.mlp[1:]}
    gathered = [operand for operand, does in moves.items() if does]
    return dict.fromkeys(["", *gathered, "".join(gathered)])


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
