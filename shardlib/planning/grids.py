"""The choice of a mesh for a model, by cost, before anything runs.

The three-axis product (ops/matmul/matmul3d.py) has every known grid as a point (pm, pk, pn): FSDP
is pm = P, Megatron's columns and rows pn = P, TP x FSDP pk = 1, 2D one axis of size 1, the cube all
equal.  Layers come in pairs that swap k and n, so nothing is resharded between them, and the axes
may have other roles in MLPs than in attention.  ``choose`` prices all of them, with gathered
operands saved or not, and takes the cheapest that fits.

Source: arXiv 2305.13525 (choosing a grid by its cost).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from torch import nn

from shardlib.cost import Cost, moving
from shardlib.errors import ShardError, Unsupported
from shardlib.mesh import Link
from shardlib.modules import recipes
from shardlib.modules.dim_trace import trace_dimensions
from shardlib.planning.layer_dedup import outline
from shardlib.planning.products import Layer, all_products

__all__ = ["Choice", "Grid3", "Layer", "choose", "factorizations", "step_cost"]


@dataclass(frozen=True)
class Grid3:
    """A candidate: sizes of the three axes, saved operands, and the cost of a step per rank.

    ``mlp``  the roles of x, y and z in MLPs, as ``recipes.cube3d`` takes them.

    >>> best = choose([(1024, 4096), (4096, 1024)], 8, batch=64, sequence=64).best
    >>> best.mesh, best.name, best.save, f"{float(best.cost.bytes) / 2**20:.0f} MiB"
    ({'x': 2, 'y': 4, 'z': 1}, 'TP x FSDP', 'xw', '32 MiB')
    """

    m: int
    k: int
    n: int
    save: str
    cost: Cost
    seconds: float
    mlp: str = "mnk"

    @property
    def mesh(self) -> dict[str, int]:
        """Axis sizes as ``recipes.cube3d`` names them."""
        return {"x": self.m, "y": self.n, "z": self.k}

    @property
    def name(self) -> str:
        """The name of this grid in the literature."""
        sizes = [s for s in (self.m, self.k, self.n) if s > 1]
        if not sizes:
            return "one device"
        if self.k == 1:
            return "FSDP" if self.n == 1 else "TP" if self.m == 1 else "TP x FSDP"
        return "TP of the residual" if len(sizes) == 1 else "2D" if len(sizes) == 2 else "3D"


@dataclass(frozen=True)
class Choice:
    """The best grid, and every other with its price.

    ``mesh``      axis sizes for ``make_mesh(**choice.mesh)``.
    ``recipe``    a function of ``shardlib.modules.recipes``.
    ``save``      operands to keep gathered; if any, train within ``sl.saving()``.
    ``table``     all candidates, best first.
    ``rejected``  number of grids that do not divide the sizes or do not fit into memory.

    >>> found = choose([(512, 2048), (2048, 512)], 4, batch=64)
    >>> found.mesh, found.best.name, len(found.table)
    ({'x': 1, 'y': 4, 'z': 1}, 'TP', 16)
    """

    best: Grid3
    table: tuple[Grid3, ...]
    rejected: int

    @property
    def mesh(self) -> dict[str, int]:
        """The axis sizes of the best grid."""
        return self.best.mesh

    @property
    def recipe(self) -> Callable[..., recipes.Recipe]:
        """The recipe that lays a model out on the best grid."""
        return (
            recipes.cube3d if self.best.mlp == "mnk" else partial(recipes.cube3d, mlp=self.best.mlp)
        )

    @property
    def save(self) -> str:
        """The operands that the best grid keeps gathered."""
        return self.best.save

    def __str__(self) -> str:
        b = self.best
        if b.k == 1 and b.n > 1 and b.m > 1:
            plain = ": TP x FSDP is the best here, no third axis helps"
        else:
            plain = f": {b.name}"
        how = "" if b.mlp == "mnk" else f'(mlp="{b.mlp}")'
        lines = [
            f"mesh {' '.join(f'{a}={s}' for a, s in b.mesh.items())}, recipes.cube3d{how}{plain}"
        ]
        lines.append(" x   y   z  mlp  saved  MiB/step  messages  MiB held  seconds")
        for g in self.table[:12]:
            moved, held = float(g.cost.bytes) / 2**20, float(g.cost.memory) / 2**20
            axes = f"{g.m:>2} {g.n:>3} {g.k:>3}  {g.mlp}  {g.save or '-':<5}"
            lines.append(f"{axes} {moved:>9.3f} {g.cost.messages:>9} {held:>9.1f}  {g.seconds:.2e}")
        if self.rejected:
            lines.append(f"{self.rejected} more do not divide the sizes or exceed the memory")
        return "\n".join(lines)

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
) -> Choice:
    """Find the fastest grid of ``world`` ranks for one training step of a model's linear layers.

    ``model``   a module, or (inputs, outputs) of its linear layers in turn: expanding, contracting,
                ...
    ``memory``  bytes per rank for weights, gradients, ``state`` bytes per parameter, saved
                activations and the largest gathered pair; None for no limit.
    ``heads``   attention heads, which the axis n must divide.
    ``links``   one Link, or one per axis x (m), y (n), z (k), as ``probe`` measures.
    ``flops``   multiply-adds x 2 per second and rank, to include the products themselves.

    Each distinct product with a weight is priced once and counted; attention and norms move little
    or nothing under these layouts.  ``planning.plan`` runs all of a step on the meta device.  Ties
    go to fewer messages.  Raises: ShardError if no grid divides or fits.

    >>> mlp = [(1024, 4096), (4096, 1024)]
    >>> for sequence in (1, 64, 1024):
    ...     best = choose(mlp, 8, batch=64, sequence=sequence)
    ...     print(best.mesh, best.best.name)
    {'x': 1, 'y': 4, 'z': 2} 2D
    {'x': 2, 'y': 4, 'z': 1} TP x FSDP
    {'x': 8, 'y': 1, 'z': 1} FSDP
    """
    layers = _layers(model)
    wrong = {n: v for n, v in (("world", world), ("batch", batch), ("sequence", sequence))
             if type(v) is not int}  # fmt: skip
    if wrong:
        raise ShardError(
            f"counts are integers: {', '.join(f'{n}={v!r}' for n, v in wrong.items())}",
            op="choose",
            fix="sl.choose([(1024, 4096), (4096, 1024)], 8, batch=64)",
        )
    if world < 1 or batch < 1 or sequence < 1 or not layers:
        what = (
            f"world={world}, batch={batch}, sequence={sequence}"
            if layers
            else "the model has no linear layer"
        )
        raise ShardError(
            f"nothing to choose for: {what}",
            op="choose",
            fix="sl.choose([(1024, 4096), (4096, 1024)], 8, batch=64)",
        )
    table, rejected = [], 0
    known = {a: links for a in "xyz"} if isinstance(links, Link) else links
    # 2 flops per multiply-add, in three products: forward, dX, dW
    work = (
        6
        * batch
        * sequence
        * sum(layer.inputs * layer.outputs * layer.count for layer in layers)
        / world
    )
    for m, k, n in factorizations(world):
        for mlp in _mlp_roles(layers, m, k, n):
            if not _divides(layers, m, k, n, mlp, batch, heads):
                rejected += 1
                continue
            gathered = ("x" if max(k, n) > 1 else "") + ("w" if m > 1 or "m" in mlp[1:] else "")
            for save in ("", "x", "w", "xw"):
                if not set(save) <= set(gathered):
                    continue
                cost = step_cost(layers, m, k, n, save, batch * sequence, itemsize, state, mlp)
                if memory is None or cost.memory <= memory:
                    seconds = cost.seconds(known) + (work / flops if flops else 0.0)
                    table.append(Grid3(m, k, n, save, cost, seconds, mlp))
    if not table:
        raise ShardError(
            f"no grid of {world} ranks divides these sizes"
            + (" within the memory" if memory is not None else ""),
            op="choose",
            operands={
                "batch": batch,
                "layers": ", ".join(f"{i} -> {o}" for i, o, *_ in layers[:4]),
            },
            fix=f"sl.choose(model, 1, batch={batch})",
        )
    table.sort(
        key=lambda g: (g.seconds, g.cost.messages, g.cost.memory, len(g.save), g.mlp != "mnk")
    )
    return Choice(table[0], tuple(table), rejected)


def _layers(model: nn.Module | Sequence[tuple[int, int]]) -> list[Layer]:
    """List the linear layers in order; ``mlp`` is set only if the model has other layers too."""
    if not isinstance(model, nn.Module):
        pairs = [model[turn - turn % 2 : turn - turn % 2 + 2] for turn in range(len(model))]
        found = [
            Layer(i, o, turn % 2 == 1, len(pair) == 2 and pair[1][0] > pair[1][1])
            for turn, ((i, o), pair) in enumerate(zip(model, pairs, strict=True))
        ]
    else:
        found = _of_module(model)
    return (
        [layer._replace(mlp=False) for layer in found]
        if all(layer.mlp for layer in found)
        else found
    )


def _of_module(model: nn.Module) -> list[Layer]:
    """List the distinct products of a model with their counts.

    Raises: Unsupported where it cannot be run without inputs.
    """
    sizes = [(p.shape[1], p.shape[0]) for p in model.parameters() if p.ndim == 2]
    if not sizes:
        return []
    plan = outline(model)
    try:
        dims = [trace_dimensions(plan.model(i)) for i in range(1 + len(plan.repeats))]
    except Unsupported as e:
        fix = f"sl.choose({sizes[:4]}, 8, batch=64)  # (inputs, outputs) of each product"
        raise Unsupported(e.message, op="choose", fix=fix) from None
    return all_products(plan, dims)


def _mlp_roles(layers: Sequence[Layer], m: int, k: int, n: int) -> list[str]:
    """List the possible roles of x, y and z in MLPs; an axis of size 1 keeps its usual role."""
    if not any(layer.mlp for layer in layers):
        return ["mnk"]
    usual, sizes = "mnk", (m, n, k)
    said = (
        "".join(r if s > 1 else u for r, s, u in zip(w, sizes, usual, strict=True))
        for w in recipes.MLP_ROLES
    )
    return list(dict.fromkeys(said))


def factorizations(world: int) -> Iterator[tuple[int, int, int]]:
    """List every (m, k, n) with m k n = world."""
    for m in range(1, world + 1):
        if world % m == 0:
            for k in range(1, world // m + 1):
                if world // m % k == 0:
                    yield m, k, world // m // k


def _divides(
    layers: Sequence[Layer], m: int, k: int, n: int, mlp: str, batch: int, heads: int | None
) -> bool:
    if batch % (m * n) or (heads or n) % n:
        return False
    for layer in layers:
        pm, pk, pn = _sizes(layer, m, k, n, mlp)
        if batch % (pm * pk):
            return False
        into, out = (pn, pk) if layer.back else (pk, pn)
        if (
            layer.inputs % (into * pm)
            or layer.outputs % out
            or (layer.outputs if layer.back else layer.inputs) % k
        ):
            return False
    return True


def _sizes(layer: Layer, m: int, k: int, n: int, mlp: str) -> tuple[int, int, int]:
    """Return (pm, pk, pn) of a layer, after swapping the roles of x, y and z in MLPs."""
    if not layer.mlp or mlp == "mnk":
        return m, k, n
    sizes = list(zip(mlp, (m, n, k), strict=True))
    pm, pk, pn = (math.prod(s for role, s in sizes if role == wanted) for wanted in "mkn")
    return pm, pk, pn


def step_cost(
    layers: Sequence[Layer],
    m: int,
    k: int,
    n: int,
    save: str,
    tokens: int,
    itemsize: int,
    state: int,
    mlp: str = "mnk",
) -> Cost:
    """Price every layer on the grid, both passes: bytes, messages, and bytes held at the peak."""
    p, axes = m * k * n, {"x": m, "y": n, "z": k}
    total, weights, activations, widest = Cost(), 0, Fraction(0), Fraction(0)
    for layer in layers:
        inputs, outputs, back, _, count = layer
        roles = mlp if layer.mlp else "mnk"
        x, w, y = (
            Fraction(s * itemsize, p) for s in (tokens * inputs, inputs * outputs, tokens * outputs)
        )
        plays = dict(zip(axes, roles, strict=True))
        # axes that split the narrow side: gathered before, scattered after
        rows = tuple(a for a in "xy" if plays[a] == "n")
        narrow = [rows, ("z",) if plays["z"] == "n" else ()]
        wide = [("z",) if plays["z"] == "k" else ()]
        moves_x, wide_x = _moved(x, wide if back else narrow, axes)
        moves_w, wide_w = _moved(w, [tuple(a for a in "xy" if plays[a] == "m")], axes)
        moves_y, wide_y = _moved(y, narrow if back else wide, axes)
        moved = moves_x + moves_w + moves_y  # forward
        moved += moves_x + moves_w + moves_y  # dX, dW, dY
        moved += Cost() if "x" in save else moves_x
        moved += Cost() if "w" in save else moves_w
        total += _times(moved, count)
        weights += count * inputs * outputs
        activations += count * ((wide_x if "x" in save else x) + (wide_w - w if "w" in save else 0))
        widest = max(widest, wide_x + wide_w + wide_y)
    held = Fraction(weights * (2 * itemsize + state), p) + activations + widest
    return Cost(total.bytes, total.messages, held, total.along)


def _times(cost: Cost, count: int) -> Cost:
    """Return the cost of ``count`` equal products."""
    along = tuple((axes, count * nbytes, count * n) for axes, nbytes, n in cost.along)
    return Cost(count * cost.bytes, count * cost.messages, cost.memory, along)


def _moved(
    nbytes: Fraction, moves: Sequence[tuple[str, ...]], sizes: Mapping[str, int]
) -> tuple[Cost, Fraction]:
    """Price gathering a block, dimension by dimension; return the cost and the gathered bytes."""
    cost = Cost()
    for names in moves:
        axes = tuple(a for a in names if sizes[a] > 1)
        if axes:
            p = math.prod(sizes[a] for a in axes)
            cost += moving(axes, (p - 1) * nbytes, p - 1)
            nbytes *= p
    return cost, nbytes
