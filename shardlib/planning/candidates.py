"""The layouts that a plan weighs: of a step's inputs, of parameters, and of products' results."""

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from shardlib.errors import ShardError
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh, record
from shardlib.modules import recipes
from shardlib.modules.rules import match_rules
from shardlib.placing import shard
from shardlib.planning.calls import Call, StepCalls
from shardlib.planning.cluster import Cluster
from shardlib.planning.strategies import Operand, operand_of

WIDE = 8192
"""Sizes from which a dimension of a parameter is padded where it does not divide: vocabularies."""

PRODUCTS = "linear", "addmm", "matmul"
"""Names of the calls that multiply by a parameter."""

PIPE, STAGES = "pipe", 16
"""The axis of a pipeline in plans, and the most stages that are considered."""


class Leaf(NamedTuple):
    """A parameter under a layout.

    ``text``  its layout; ``out`` that of the product it is multiplied in, "" where that follows.
    """

    text: str
    out: str
    operand: Operand

    @property
    def said(self) -> tuple[str, ...]:
        """The layouts as a rule has them behind the parameter's name."""
        return tuple(filter(None, (self.text, self.out)))


class Candidates:
    """The layouts to weigh on a mesh.

    ``groups``   (parameter, dimension) -> matrices that lie side by side in it, as q, k and v may.
    ``refused``  parameter -> layouts that it may not have.

    >>> import torch
    >>> from shardlib.planning.calls import calls_of
    >>> linear = nn.Linear(4, 8, bias=False)
    >>> step = calls_of(linear, (torch.empty(6, 4),), lambda apply, params, x: apply(params, x).sum())
    >>> with record(x=2) as mesh:
    ...     found = Candidates(step, mesh, dict(linear.named_parameters()), {})
    >>> found.batches(6), found.matrices("weight")
    (['.', 'x'], ['. .', 'x .', '. x'])
    """

    def __init__(
        self, step: StepCalls, mesh: Mesh, parameters: Mapping[str, Tensor],
        groups: Mapping[tuple[str, int], int], refused: Mapping[str, Collection[str]] | None = None,
    ) -> None:  # fmt: skip
        self.step, self.mesh, self.parameters, self.groups = step, mesh, parameters, groups
        self.refused = refused or {}
        self.axes = [a for a, n in mesh.axes.items() if n > 1]
        self.known: dict[tuple[str, str, str], Operand | None] = {}

    def batches(self, rows: int, given: Sequence[Tensor] = ()) -> list[str]:
        """List the layouts of an input: its rows are split over each set of axes that divides them.

        Where there are fewer rows than ranks, sequences of tokens are split too, each over one axis.
        """
        sets = [c for k in range(len(self.axes) + 1) for c in itertools.combinations(self.axes, k)]
        sets = [c for c in sets if rows % math.prod(self.mesh.axes[a] for a in c) == 0]
        found = [token(c) for c in sets]
        lengths = [x.shape[1] for x in given if _are_tokens(x)]
        if rows % math.prod(self.mesh.axes.values()) == 0 or not lengths:
            return found
        for c, a in itertools.product(sets, self.axes):
            # two pieces of each rank, so that causal attention has equal work
            if a not in c and not any(n % (2 * self.mesh.axes[a]) for n in lengths):
                found.append(f"{token(c)} zigzag({a})")
        return found

    def inputs(self, batch: str, given: Sequence[Tensor]) -> dict[int, Operand]:
        """Return the operands of the step's inputs, of which a batch lies so."""
        found = {}
        tokens = [*map(str, Layout.parse(batch).dims)]
        for number, i in self.step.inputs.items():
            x = given[i].detach().to("meta")
            own = tokens[: 1 + _are_tokens(x)]
            text = " ".join([*own, *"." * (x.ndim - len(own))][: x.ndim]) or "..."
            found[number] = operand_of(shard(x, text, self.mesh))
        return found

    def constants(self) -> dict[int, Operand]:
        """Return the operands of what the module makes itself: whole on every rank."""
        return {
            number: operand_of(x.at(x.place._replace(mesh=self.mesh)))
            for number, x in self.step.constants.items()
        }

    def matrices(self, name: str) -> list[str]:
        """List layouts of a parameter with several dimensions: each axis on the first, the last, none."""
        ndim = self.parameters[name].ndim
        first, last = (self.groups.get((name, d), 1) for d in (0, ndim - 1))
        found = []
        for sides in itertools.product((None, 0, 1), repeat=len(self.axes)):
            own = [[a for a, s in zip(self.axes, sides, strict=True) if s == d] for d in (0, 1)]
            found.append(" ".join([token(own[0], first), *"." * (ndim - 2), token(own[1], last)]))
        return found

    def leaf(self, name: str, text: str, out: str = "") -> Leaf | None:
        """Return a parameter under a layout, or None where it does not divide."""
        key = name, text, out
        if text in self.refused.get(name, ()):
            return None
        if key not in self.known:
            p = self.parameters[name]
            layout = Layout.parse(text).resolve(p.ndim)
            self.known[key] = None
            try:
                x = shard(p.detach().to("meta"), layout, self.mesh, pad=self._padded(p, layout))
            except ShardError:
                return None
            x.requires_grad_(p.requires_grad)
            found = operand_of(x)
            if out:
                place = found.place._replace(out_layout=Layout.parse(out))
                found = replace(found, place=place)
            self.known[key] = found
        operand = self.known[key]
        return operand and Leaf(text, out, operand)

    def _padded(self, p: Tensor, layout: Layout) -> bool:
        """Return whether every dimension that does not divide is wide."""
        parts = [math.prod(self.mesh.axes[a] for a in d.axes) for d in layout.dims]
        return all(n % k == 0 or n >= WIDE for n, k in zip(p.shape, parts, strict=True))

    def of_call(
        self, call: Call, fresh: Sequence[int], have: Mapping[int, Operand]
    ) -> Iterator[dict[int, Leaf]]:
        """Yield every way to lay out the matrices that a call reads first; vectors are ``beside``.

        Matrices of one shape, as of gate and up, lie alike; others lie as the largest or whole.
        """
        shapes: dict[tuple[int, ...], list[str]] = defaultdict(list)
        numbers = {self.step.parameters[i]: i for i in fresh}
        for name, i in numbers.items():
            if len(self.step.shapes[i]) > 1:
                shapes[self.step.shapes[i]].append(name)
        kinds = sorted(shapes.items(), key=lambda kind: -math.prod(kind[0]))
        if not kinds:
            yield {}
            return
        for text in self.matrices(kinds[0][1][0]):
            for out in ["", *self._outs(call, have, text)]:
                ways = [[(text, out)], *([(text, out), ("...", "")] for _ in kinds[1:])]
                for way in itertools.product(*ways):
                    found = {
                        numbers[name]: self.leaf(name, *said)
                        for (_, names), said in zip(kinds, way, strict=True)
                        for name in names
                    }
                    if all(found.values()):
                        yield found  # type: ignore[misc]

    def beside(self, vectors: Sequence[int], around: Sequence[tuple[int, Dim]]) -> dict[int, Leaf]:
        """Lay vectors out as the first dimension around that is split and of their size."""
        found = {}
        for i in vectors:
            name = self.step.parameters[i]
            texts = [str(d) for n, d in around if (n,) == self.step.shapes[i][-1:] and d.is_split]
            if texts and (leaf := self.leaf(name, texts[0])):
                found[i] = leaf
        return found

    def _outs(self, call: Call, have: Mapping[int, Operand], text: str) -> list[str]:
        """List layouts that a product may be asked for: its sums scattered onto rows or columns."""
        x = next((o for o in have.values() if o.dtype.is_floating_point), None)
        if x is None or call.name not in PRODUCTS or x.place.layout.partial:
            return []
        weight = Layout.parse(text)
        inner, outer = weight.dims[0], weight.dims[-1]
        if call.name == "linear":
            inner, outer = outer, inner
        rows = self._rows(x)
        if rows is None or len(weight.dims) != 2:
            return []
        summed = dict.fromkeys((*inner.axes, *x.place.dims[-1].axes))
        sums = [a for a in summed if a not in outer.axes and a not in rows[0]]
        columns = [a for a in outer.axes if a not in rows[0]]
        group = next((p for p in outer.parts if isinstance(p, int)), 1)
        found = []
        for k in range(1, len(sums) + 1):
            for some in itertools.combinations(sums, k):
                onto = [*rows[0], *some], [*columns, *some]
                found.append([token(onto[0]), *rows[1], token(columns, group)])
                found.append([token(rows[0]), *rows[1], token(onto[1], group)])
        return list(dict.fromkeys(" ".join(f) for f in found))

    def _rows(self, x: Operand) -> tuple[list[str], list[str]] | None:
        """Return the axes of a value's rows and the tokens of the whole dimensions behind them."""
        dims, merged = x.place.dims, x.place.merged_from
        if merged:
            behind = ["."] * (len(merged) - 1)
            axes = list(itertools.takewhile(lambda p: isinstance(p, str), dims[0].parts))
            plain = len(axes) == len(dims[0].axes)
        else:
            behind = ["."] * (len(dims) - 2)
            axes = list(dims[0].axes)
            plain = not any(d.is_split for d in dims[1:-1])
        if not plain or any(d.is_dealt for d in dims):
            return None
        return axes, behind  # type: ignore[return-value]


class RecipeLayouts(Candidates):
    """The layouts that a recipe gives a step, one of each parameter and input.

    >>> import torch
    >>> from shardlib.planning.calls import calls_of
    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> step = calls_of(mlp, (torch.empty(6, 4),), lambda apply, params, x: apply(params, x).sum())
    >>> with record(x=2) as mesh:
    ...     found = RecipeLayouts(step, mesh, dict(mlp.named_parameters()), recipes.megatron1d(mlp))
    >>> found.leaf("0.weight").text, found.leaf("2.bias").text, found.batches(6)
    ('x .', '.', ['.'])
    """

    def __init__(
        self, step: StepCalls, mesh: Mesh, parameters: Mapping[str, Tensor], recipe: recipes.Recipe,
        refused: Mapping[str, Collection[str]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(step, mesh, parameters, {}, refused)
        self.recipe = recipe
        self.layouts, self.outs = match_rules(parameters, recipe, None, True)

    def batches(self, rows: int, given: Sequence[Tensor] = ()) -> list[str]:
        """List the one token of an input's rows, where it divides them."""
        dim = Layout.parse(self.recipe.tokens).dims[0]
        return [] if rows % math.prod(self.mesh.axes[a] for a in dim.axes) else [str(dim)]

    def inputs(self, batch: str, given: Sequence[Tensor]) -> dict[int, Operand]:
        """Return the operands of the step's inputs: of several integer ones the last is the labels.

        Others than tokens and labels [B, S] are split by rows.
        Raises: ShardError for a length that does not divide, or where no input has a sequence.
        """
        columns = Layout.parse(self.recipe.tokens).dims[1]
        if columns.is_split and not any(map(_are_tokens, given)):
            raise ShardError(f"no input has a sequence that {columns} could split", op="plan")
        found = {}
        for number, i in self.step.inputs.items():
            x = given[i].detach().to("meta")
            text = " ".join([batch, *"." * (x.ndim - 1)][: x.ndim]) or "..."
            if _are_tokens(x):
                text = self.recipe.labels if i == len(given) - 1 > 0 else self.recipe.tokens
            found[number] = operand_of(shard(x, text, self.mesh))
        return found

    def leaf(self, name: str, text: str = "", out: str = "") -> Leaf | None:
        """Return a parameter as the recipe lays it out, or None where it does not divide."""
        own = self.outs.get(name, "")
        return super().leaf(name, str(self.layouts[name]), str(own))

    def of_call(
        self, call: Call, fresh: Sequence[int], have: Mapping[int, Operand]
    ) -> Iterator[dict[int, Leaf]]:
        """Yield the one way to lay out the matrices that a call reads first."""
        matrices = [i for i in fresh if len(self.step.shapes[i]) > 1]
        found = {i: self.leaf(self.step.parameters[i]) for i in matrices}
        if all(found.values()):
            yield found  # type: ignore[misc]

    def beside(self, vectors: Sequence[int], around: Sequence[tuple[int, Dim]]) -> dict[int, Leaf]:
        """Return nothing: vectors lie as the recipe says, not as what is around them."""
        return {}


def _are_tokens(x: Tensor) -> bool:
    return x.ndim == 2 and not x.is_floating_point()


RECIPES = {
    "ddp": ("data",),
    "megatron1d": ("data", "x"),
    "optimus2d": ("data", "x", "y"),
    "tesseract": ("data", "d", "x", "y"),
    "cube3d": ("x", "y", "z"),
    "ring": ("data", "s"),
}
"""Recipes that plans weigh, with the axes of their meshes."""


def recipe_meshes(recipe: str, ranks: int) -> Iterator[dict[str, int]]:
    """Yield the meshes of so many ranks for a recipe, its last axis of ranks that are near.

    An axis "data" may be missing, and those of a cube may have one rank.

    >>> list(recipe_meshes("megatron1d", 4))
    [{'x': 4}, {'data': 2, 'x': 2}]
    """
    axes = RECIPES[recipe]
    for sizes in itertools.product(divisors(ranks), repeat=len(axes)):
        mesh = dict(zip(axes, sizes, strict=True))
        least = min((n for a, n in mesh.items() if a != "data"), default=ranks)
        if math.prod(sizes) == ranks and (least > 1 or recipe == "cube3d" or ranks == 1):
            yield {a: n for a, n in mesh.items() if a != "data" or n > 1 or axes == ("data",)}


def meshes_of(ranks: int, cluster: Cluster) -> list[dict[str, int]]:
    """List the meshes of so many ranks with at most two axes, the larger named "a".

    The last axis joins ranks that are near; where both axes have the same links, their order is one.

    >>> from shardlib.planning.cluster import cluster_of
    >>> meshes_of(16, cluster_of("h100"))
    [{'a': 4, 'b': 4}, {'a': 8, 'b': 2}, {'b': 2, 'a': 8}, {'a': 16}]
    >>> meshes_of(8, cluster_of("h100"))
    [{'a': 4, 'b': 2}, {'a': 8}]
    """
    found = [{"a": ranks}]
    for n in range(2, math.isqrt(ranks) + 1):
        if ranks % n == 0:
            near, far = {"a": ranks // n, "b": n}, {"b": n, "a": ranks // n}
            found.append(near)
            if n * n < ranks and cluster.links(near) != cluster.links(far):
                found.append(far)
    # bounds are found early where axes are alike, and loops over one long axis are priced last
    return sorted(found, key=lambda m: max(m.values()))


def rules_of(recipe: str, module: nn.Module, mesh: Mesh, dims: object) -> recipes.Recipe:
    """Return a recipe's rules; ``dims``  the module as it was traced.  Raises: ShardError."""
    traced = {} if recipe in ("ddp", "ring") else {"inputs": dims}
    return getattr(recipes, recipe)(module, mesh, **traced)


def columns_of(operand: Operand, turned: bool = False) -> tuple[int, Dim]:
    """Return the size and the token of a value's last dimension; of a product with a weight.

    ``turned``  whether the operand is a weight stored (outputs, inputs).
    """
    place = operand.place
    dims = place.dims[::-1] if turned else place.dims
    if place.out_layout is not None:
        dims = place.out_layout.dims
    return place.shape[0 if turned else -1], dims[-1]


def token(axes: Sequence[str], group: int = 1) -> str:
    """Write the token of a dimension that is split over axes, in groups of matrices side by side.

    >>> token([]), token("x"), token("xy"), token("x", 3)
    ('.', 'x', '(x y)', '(3 x)')
    """
    parts = list(axes)
    if not parts:
        return "."
    if group > 1:
        parts.insert(0, str(group))
    if len(parts) == 1:
        return parts[0]
    return f"({' '.join(parts)})"


def side_by_side(module: nn.Module, dims: object = None) -> dict[tuple[str, int], int]:
    """Find which dimensions of parameters hold matrices side by side, as the 1D recipe reads them."""
    named = dict(module.named_parameters())
    try:
        with record(x=2) as mesh:
            layouts, _ = match_rules(
                named, recipes.megatron1d(module, mesh, inputs=dims), None, True
            )
    except ShardError:
        return {}
    found: dict[tuple[str, int], int] = {}
    for name, layout in layouts.items():
        for d, dim in enumerate(layout.dims):
            if dim.parts and isinstance(dim.parts[0], int):
                found[name, d] = dim.parts[0]
    return found


def stage_counts(ranks: int, depth: int) -> list[int]:
    """List the numbers of stages to consider for a model of so many equal layers."""
    return [n for n in divisors(ranks) if n <= min(depth, STAGES)]


def hiding(rows: int, pipe: int) -> int:
    """Return the number of equal micro-batches that hides the bubble of so many stages."""
    return max(n for n in divisors(rows) if n <= 4 * pipe)


def divisors(n: int) -> list[int]:
    """List the divisors of a number."""
    return [d for d in range(1, n + 1) if n % d == 0]


Choice = dict[int, Leaf]
"""Value -> the leaf chosen for it."""
