"""Choose: the plan of one family of grids, for the products of a model alone, by their formulas.

The search of ``plan`` restricted to the grids of the three-axis product (grids.py): every grid,
with gathered operands saved or not, is priced by ``step_cost``, and the fastest that fits is taken.
Attention and norms move little or nothing under these layouts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from shardlib.errors import ShardError, Unsupported
from shardlib.mesh import Link
from shardlib.modules.dim_trace import trace_dimensions
from shardlib.planning.grids import Grid3, candidates, divides, step_cost
from shardlib.planning.layer_dedup import Layer, all_products, elements, outline
from shardlib.planning.plan import Plan, Strategy, search

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
) -> Plan[Grid3]:
    """Find the fastest grid of ``world`` ranks for one training step of a model's linear layers.

    ``model``   a module, or (inputs, outputs) of its linear layers in turn: expanding, contracting,
                ...
    ``memory``  bytes per rank for weights, gradients, ``state`` bytes per parameter, saved
                activations and the largest gathered pair; None for no limit.
    ``heads``   attention heads, which the axis n must divide.
    ``links``   one Link, or one per axis x (m), y (n), z (k), as ``probe`` measures.
    ``flops``   multiply-adds x 2 per second and rank, to include the products themselves.

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
    layers = _layers(model)
    _check_counts(layers, world=world, batch=batch, sequence=sequence)
    # 2 flops per multiply-add, in three products: forward, dX, dW
    work = 6 * batch * sequence * elements(layers) / world / flops if flops else 0.0
    known = dict.fromkeys("xyz", links) if isinstance(links, Link) else links
    room = math.inf if memory is None else memory

    def weigh(way: Strategy) -> list[Grid3]:
        m, n, k = way.mesh.values()
        if not divides(layers, m, k, n, way.mlp, batch, heads):
            raise ShardError("it does not divide the sizes", op="choose")
        found = []
        for save in _savings(m, k, n, way.mlp):
            cost = step_cost(layers, m, k, n, save, batch * sequence, itemsize, state, way.mlp)
            found.append(Grid3(m, k, n, save, cost, cost.seconds(known) + work, way.mlp))
        return [g for g in found if g.cost.memory <= room]

    ways = [
        Strategy("cube3d", {"x": m, "y": n, "z": k}, mlp=mlp)
        for m, k, n, mlp in candidates(layers, world)
    ]
    table, rejected = search(ways, weigh, _order)
    if not table:
        why = f"no grid of {world} ranks divides these sizes"
        if memory is not None:
            why += " within the memory"
        sizes = ", ".join(f"{i} -> {o}" for i, o, *_ in layers[:4])
        operands = {"batch": batch, "layers": sizes}
        fix = f"sl.choose(model, 1, batch={batch})"
        raise ShardError(why, op="choose", operands=operands, fix=fix)
    return Plan(table, memory, len(ways), rejected, batch)


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


def _savings(m: int, k: int, n: int, mlp: str) -> Iterable[str]:
    """List the operands that may be kept gathered: none, x, w, or both, of those that are."""
    moves = {"x": max(k, n) > 1, "w": m > 1 or "m" in mlp[1:]}
    gathered = [operand for operand, does in moves.items() if does]
    return dict.fromkeys(["", *gathered, "".join(gathered)])


def _layers(model: nn.Module | Sequence[tuple[int, int]]) -> list[Layer]:
    """List the linear layers in order; ``mlp`` is set only if the model has other layers too."""
    found = _of_module(model) if isinstance(model, nn.Module) else _of_sizes(model)
    if all(layer.mlp for layer in found):
        return [layer._replace(mlp=False) for layer in found]
    return found


def _of_sizes(sizes: Sequence[tuple[int, int]]) -> list[Layer]:
    """List layers that expand and contract in turn; an MLP widens and comes back."""
    found = []
    for turn, (inputs, outputs) in enumerate(sizes):
        pair = sizes[turn - turn % 2 : turn - turn % 2 + 2]
        mlp = len(pair) == 2 and pair[1][0] > pair[1][1]
        found.append(Layer(inputs, outputs, turn % 2 == 1, mlp))
    return found


def _of_module(model: nn.Module) -> list[Layer]:
    """List the distinct products of a model with their counts.

    Raises: Unsupported where it cannot be run without inputs.
    """
    sizes = [(p.shape[1], p.shape[0]) for p in model.parameters() if p.ndim == 2]
    if not sizes:
        return []
    found = outline(model)
    try:
        dims = [trace_dimensions(m) for m in found.models]
    except Unsupported as e:
        fix = f"sl.choose({sizes[:4]}, 8, batch=64)  # (inputs, outputs) of each product"
        raise Unsupported(e.message, op="choose", fix=fix) from None
    return all_products(found, dims)
