"""Grids of the three-axis product, and the price of a training step on each.

The product (ops/matmul/matmul3d.py) has every known grid as a point (pm, pk, pn): FSDP is pm = P,
Megatron's columns and rows pn = P, TP x FSDP pk = 1, 2D one axis of size 1, the cube all equal.
Layers come in pairs that swap k and n, so nothing is resharded between them, and the axes may have
other roles in MLPs than in attention.

Source: arXiv 2305.13525 (choosing a grid by its cost).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from shardlib.cost import Cost
from shardlib.modules.recipes import MLP_ROLES
from shardlib.ops.matmul.function import DimMove
from shardlib.ops.matmul.matmul3d import price_of_gather
from shardlib.planning.layer_dedup import Layer

PIPE, STAGES = "pipe", 16
"""The axis of a pipeline in plans, and the most stages that are considered."""


@dataclass(frozen=True)
class Grid3:
    """A candidate: sizes of the three axes, saved operands, and the cost of a step per rank.

    ``mlp``     the roles of x, y and z in MLPs, as ``recipes.cube3d`` takes them.
    ``pipe``    stages of a pipeline, each with ``data`` copies of its grid; the cost is that of the
                largest stage.
    ``micros``  micro-batches of a step.

    >>> grid = Grid3(2, 1, 4, "xw", Cost(bytes=2**25), 0.1)
    >>> grid.mesh, grid.name, grid.save, f"{float(grid.cost.bytes) / 2**20:.0f} MiB"
    ({'x': 2, 'y': 4, 'z': 1}, 'TP x FSDP', 'xw', '32 MiB')
    """

    m: int
    k: int
    n: int
    save: str
    cost: Cost
    seconds: float
    mlp: str = "mnk"
    pipe: int = 1
    data: int = 1
    micros: int = 1

    @property
    def mesh(self) -> dict[str, int]:
        """Axis sizes as ``recipes.cube3d`` names them, behind those of a pipeline."""
        outer = {"pipe": self.pipe, "data": self.data} if self.pipe > 1 else {}
        return outer | {"x": self.m, "y": self.n, "z": self.k}

    @property
    def name(self) -> str:
        """The name of this grid in the literature."""
        sizes = {"m": self.m, "k": self.k, "n": self.n}
        grid = _NAMES["".join(axis for axis, size in sizes.items() if size > 1)]
        return grid if self.pipe == 1 else f"{self.pipe} stages, {self.data} x {grid}"


_NAMES = {
    "": "one device",
    "m": "FSDP",
    "n": "TP",
    "mn": "TP x FSDP",
    "k": "TP of the residual",
    **dict.fromkeys(("mk", "kn"), "2D"),
    "mkn": "3D",
}
"""Axes of more than one rank -> the name of the grid."""


def grids_text(table: Sequence[Grid3], rejected: int) -> str:
    """Write the best grids as a table, and how many there are no figures of."""
    best = table[0]
    plain = f": {best.name}"
    if best.name == "TP x FSDP":
        plain = ": TP x FSDP is the best here, no third axis helps"
    how = "" if best.mlp == "mnk" else f'(mlp="{best.mlp}")'
    axes = " ".join(f"{a}={s}" for a, s in best.mesh.items())
    lines = [
        f"mesh {axes}, recipes.cube3d{how}{plain}",
        " x   y   z  mlp  saved  MiB/step  messages  MiB held  seconds",
    ]
    for g in table[:12]:
        moved, held = float(g.cost.bytes) / 2**20, float(g.cost.memory) / 2**20
        axes = f"{g.m:>2} {g.n:>3} {g.k:>3}  {g.mlp}  {g.save or '-':<5}"
        figures = f"{moved:>9.3f} {g.cost.messages:>9} {held:>9.1f}  {g.seconds:.2e}"
        outer = f"  pipe={g.pipe} data={g.data}, {g.micros} micro-batches" if g.pipe > 1 else ""
        lines.append(f"{axes} {figures}{outer}")
    if rejected:
        lines.append(f"{rejected} more do not divide the sizes or exceed the memory")
    return "\n".join(lines)


def candidates(layers: Sequence[Layer], world: int) -> Iterator[tuple[int, int, int, str]]:
    """List every grid (m, k, n) of ``world`` ranks with each of the roles that MLPs may have on it.

    An axis of size 1 keeps its usual role.

    >>> [g for g in candidates([Layer(4, 16, mlp=True)], 2) if g[0] == 1]
    [(1, 1, 2, 'mnk'), (1, 1, 2, 'mmk'), (1, 2, 1, 'mnk'), (1, 2, 1, 'mnn')]
    """
    usual, mixed = "mnk", any(layer.mlp for layer in layers)
    for m, k, n in factorizations(world):
        sizes = (m, n, k)
        roles = (
            "".join(r if s > 1 else u for r, s, u in zip(wanted, sizes, usual, strict=True))
            for wanted in MLP_ROLES
        )
        for mlp in dict.fromkeys(roles) if mixed else (usual,):
            yield m, k, n, mlp


def factorizations(world: int) -> Iterator[tuple[int, int, int]]:
    """List every (m, k, n) with m k n = world."""
    for m in range(1, world + 1):
        if world % m == 0:
            for k in range(1, world // m + 1):
                if world // m % k == 0:
                    yield m, k, world // m // k


def divides(
    layers: Sequence[Layer], m: int, k: int, n: int, mlp: str, batch: int, heads: int | None
) -> bool:
    """Check that every layer, the batch and the heads divide over the grid."""
    if batch % (m * n) or (heads or n) % n:
        return False
    for layer in layers:
        pm, pk, pn = _sizes(layer, m, k, n, mlp)
        into, out, narrow = pk, pn, layer.inputs
        if layer.back:
            into, out, narrow = pn, pk, layer.outputs
        if batch % (pm * pk) or layer.inputs % (into * pm) or layer.outputs % out or narrow % k:
            return False
    return True


def _sizes(layer: Layer, m: int, k: int, n: int, mlp: str) -> tuple[int, int, int]:
    """Return (pm, pk, pn) of a layer, after swapping the roles of x, y and z in MLPs."""
    sizes = list(zip(mlp if layer.mlp else "mnk", (m, n, k), strict=True))
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
    held: int = 1,
) -> Cost:
    """Price every layer on the grid, both passes: bytes, messages, and bytes held at the peak.

    ``held``  the micro-batches whose activations are held at a time.
    """
    p, axes = m * k * n, {"x": m, "y": n, "z": k}
    total, weights, activations, widest = Cost(), 0, Fraction(0), Fraction(0)
    for layer in layers:
        inputs, outputs, back, _, count = layer
        plays = dict(zip(axes, mlp if layer.mlp else "mnk", strict=True))
        x, w, y = (
            Fraction(s * itemsize, p) for s in (tokens * inputs, inputs * outputs, tokens * outputs)
        )
        playing = {a: plays[a] for a, size in axes.items() if size > 1}
        # axes that split the narrow side: gathered before, scattered after
        narrow, wide = _gathers(playing, "n", "xy", "z"), _gathers(playing, "k", "z")
        before, after = (wide, narrow) if back else (narrow, wide)
        moves_x, wide_x = price_of_gather(x, before, axes)
        moves_w, wide_w = price_of_gather(w, _gathers(playing, "m", "xy"), axes)
        moves_y, wide_y = price_of_gather(y, after, axes)
        moved = moves_x + moves_w + moves_y  # forward
        moved += moves_x + moves_w + moves_y  # dX, dW, dY
        saved = x
        if "x" in save:
            saved = wide_x
        else:
            moved += moves_x
        if "w" in save:
            saved += wide_w - w
        else:
            moved += moves_w
        total += times(moved, count)
        weights += count * inputs * outputs
        activations += count * saved
        widest = max(widest, wide_x + wide_w + wide_y)
    memory = Fraction(weights * (2 * itemsize + state), p) + held * activations + widest
    return replace(total, memory=memory)


def in_stages(stage: float, pipe: int, micros: int, hop: float) -> float:
    """Compute the seconds of 1F1B, given those of a micro-batch in a stage and of a message.

    >>> in_stages(1.0, 4, 8, 0.0), in_stages(3.0, 4, 8, 0.5)
    (11.0, 41.0)
    """
    # a round goes and comes once, and the micro-batches of the last one follow one another
    rounds, more = divmod(micros - 1, pipe)
    trips = (pipe - 1) * (rounds + 1) + max(0, more - 1)
    # of two micro-batches, the second's message waits for the first's
    waits = max(0.0, hop - stage) if more == 1 else 0.0
    return stage * (micros + pipe - 1) + 2 * trips * hop + waits


def _gathers(playing: Mapping[str, str], role: str, *dims: str) -> tuple[DimMove, ...]:
    """List the gathers over the axes of each dimension that have this role."""
    found = (tuple(a for a in axes if playing.get(a) == role) for axes in dims)
    return tuple(DimMove(axes, dim) for dim, axes in enumerate(found) if axes)


def times(cost: Cost, count: int) -> Cost:
    """Return the cost of ``count`` equal products, or micro-batches."""
    along = tuple((axes, count * nbytes, count * n) for axes, nbytes, n in cost.along)
    return Cost(count * cost.bytes, count * cost.messages, cost.memory, along)


def stage_counts(ranks: int, depth: int, pipe: int | None = None) -> list[int]:
    """List the numbers of stages to consider for a model of so many equal layers, or ``pipe``."""
    return [n for n in divisors(ranks) if n <= min(depth, STAGES) and pipe in (None, n)]


def hiding(rows: int, pipe: int) -> int:
    """Return the number of equal micro-batches that hides the bubble of so many stages."""
    return max(n for n in divisors(rows) if n <= 4 * pipe)


def divisors(n: int) -> list[int]:
    """List the divisors of a number."""
    return [d for d in range(1, n + 1) if n % d == 0]


# ---------------------------------------------------------------- a lower bound


def lower_bound(m: int, k: int, n: int, ranks: int) -> float:
    """Compute a lower bound of the words that some rank receives for one product [m, k] x [k, n].

    It holds for every algorithm, does not depend on memory, and is tight.

    Source: Al Daas et al., SPAA 2022, theorem 3.

    >>> round(lower_bound(64, 64, 64, 8)), 3 * 64 * 64 // 8
    (1536, 1536)
    """
    a, b, c = sorted((m, k, n))
    p = ranks
    if p * b <= c:
        return (1 - 1 / p) * a * b
    if p * a * a <= b * c:
        return 2 * math.sqrt(a * a * b * c / p) - a * (b + c) / p
    return 3 * (a * b * c / p) ** (2 / 3) - (a * b + b * c + a * c) / p
