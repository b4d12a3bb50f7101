"""A plan of a training step: layouts of all parameters, remat per layer and ZeRO, found together.

The step's calls are recorded once (calls.py) and priced under every layout by what runs them
(strategies.py).  For each mesh, split of the batch and stage of ZeRO, the best ways through each
part of the step (pareto.py) are columns of one integer program (program.py).  The plan that it
finds is explained whole; where the explanation needs more bytes than the program thought, the
difference is taken from the room and the program solved again.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardlib.errors import ShardError
from shardlib.mesh import record
from shardlib.modules import parallelize
from shardlib.modules.dim_trace import trace_dimensions
from shardlib.modules.rules import stars
from shardlib.optim.sink import Sink
from shardlib.optim.tiered import Tiers
from shardlib.optim.transform import Transform
from shardlib.optim.zero import zero
from shardlib.pipeline.stages import Stages
from shardlib.placing import shard
from shardlib.planning.calls import Call, StepCalls, calls_of
from shardlib.planning.candidates import (
    PIPE,
    RECIPES,
    Candidates,
    RecipeLayouts,
    recipe_meshes,
    rules_of,
    side_by_side,
)
from shardlib.planning.cluster import Cluster
from shardlib.planning.explain import bytes_of, explain, sink_of
from shardlib.planning.explanation import Explanation, PipelineExplanation
from shardlib.planning.layer_dedup import Outline, outline
from shardlib.planning.pareto import Alive, Holding, Search, State, Way
from shardlib.planning.program import Column, Solution, solve
from shardlib.planning.strategies import Table
from shardlib.planning.work import StepWork

WHOLE = ("...",)
"""Layout in the rule of a parameter that is whole on all ranks."""

NEAR = 1.05
"""Share of the best plan's seconds to which a program may think that a plan takes."""

GAP = 1e-3
"""Share of its seconds by which a program's plan may be slower than its best: to prove less takes long."""

ENOUGH = 1.01
"""A way that takes at most so much longer than the best in any memory needs no more of it."""

ROUNDS = 3
"""Times that a plan that needs more than was thought is taken back, and the program solved again."""


@dataclass(frozen=True)
class Part:
    """StepCalls that follow one another: one layer of a stack of equal ones, or what is between stacks.

    ``path``     of the layer; ``layers`` paths of all layers like it.
    """

    calls: tuple[Call, ...]
    path: str = ""
    layers: tuple[str, ...] = ("",)

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


def placed(
    module: nn.Module, pipe: int, rules: Sequence[tuple[str, ...]], remat: Sequence[tuple[str, str]]
) -> tuple[Any, dict[str, Any]]:
    """Return ``(apply, params)`` on the ambient mesh, in so many stages."""
    stages = Stages(PIPE) if pipe > 1 else None
    return parallelize(module, rules, pad=True, remat=remat, stages=stages)


@dataclass(frozen=True)
class Question:
    """Question that a plan answers: the step of a module, and what may be used for it.

    ``loss``     called with (apply, params, *inputs); ``room`` bytes of one rank.
    ``axes``     mesh sizes, or None: every mesh of ``ranks``.
    ``micros``   micro-batches of a step, or None: as many as fit, and as hide the idle time of
                 stages; ``pipe`` stages, or None: any number.
    ``recipes``  those whose layouts alone are weighed, or None: every layout on one or two axes,
                 the cubes on three, and the ring where there are fewer rows than ranks.
    ``refused``  parameter -> layouts that are not considered.
    ``host``     bytes of host memory of one rank for memory tiers; None: there are none.
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
        return [{a: n for a, n in self.axes.items() if a != PIPE}]

    def laid(self, pipe: int, rows: int) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield the recipes to weigh, with the meshes of a stage; ``rows`` of a micro-batch."""
        wanted = {a: n for a, n in (self.axes or {}).items() if a != PIPE and n > 1}
        for recipe in RECIPES if self.recipes is None else self.recipes:
            for axes in recipe_meshes(recipe, self.ranks // pipe):
                if self.axes is not None and wanted != {a: n for a, n in axes.items() if n > 1}:
                    continue
                cube = recipe == "cube3d" and min(axes.values()) > 1
                ring = recipe == "ring" and rows % (self.ranks // pipe)
                if self.recipes is not None or cube or ring:
                    yield recipe, axes

    def transform(self, how: Mapping[str, Any], tiers: Mapping[str, Any]) -> Transform:
        """Return the optimizer's transform under ``zero`` with these arguments, if there are any."""
        if not how:
            return self.optimizer
        return zero(self.optimizer, **how, tiers=Tiers(**tiers) if tiers else None)


def _order(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what solutions are explained by: seconds, and of equal ones those of fewer axes first."""
    seconds, number, setting, *_ = found
    return float(f"{seconds:.9g}"), len(setting.holding.sizes), number


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


class Setting(NamedTuple):
    """A mesh, the split of the batch and ZeRO: what is fixed before the program is made.

    ``recipe``  the one that lays all out; "" where every layout is weighed.
    """

    search: Search
    batch: str
    recipe: str = ""

    @property
    def name(self) -> tuple[object, ...]:
        """The recipe, the mesh, the split of the batch, and the axes and stage of ZeRO."""
        holding = self.holding
        return self.recipe, *holding.sizes.items(), self.batch, holding.axes, holding.stage

    @property
    def holding(self) -> Holding:
        """The bytes that parameters take."""
        return self.search.holding


class Study:
    """The calls of one step, their strategies on each mesh, and the plans that these make."""

    def __init__(self, asked: Question, micros: int = 1) -> None:
        self.asked, self.micros, self.cluster = asked, micros, asked.cluster
        # of one micro-batch
        self.rows = asked.rows // micros
        self.inputs = [x.detach().to("meta")[: self.rows] for x in asked.inputs]
        self._record(outline(asked.module))
        ends = [p.path.rpartition(".")[0] for p in self.parts if not p.goes_on(self.step)]
        if ends:
            # a residual that is added outside of its layer: each layer is a part of its own
            self._record(self.outline.apart(ends))
        self.parameters = dict(self.small.named_parameters())
        self.dims = _traced(self.small)
        self.groups = side_by_side(self.small, self.dims)
        self.state = _state(asked.optimizer, next(iter(self.parameters.values())).dtype)
        self.total = sum(p.nbytes for p in asked.module.parameters())
        self.counts = [len(p.layers) for p in self.parts]
        self.ideal = self._ideal()
        # seconds of the best way that a program found, and the best in any memory
        self.thought = math.inf
        self.free: Solution | None = None
        # name of a setting -> its seconds in any memory
        self.least_seconds: dict[Any, float] = {}
        # recipe, sizes of axes -> what does not depend on their order
        self.tables: dict[Any, tuple[Table, Candidates]] = {}

    def _record(self, found: Outline) -> None:
        """Record the calls of the smaller model of an outline, and cut them into parts."""
        asked, self.outline = self.asked, found
        self.small = found.model()
        stacks = stacks_of(found)
        # equal layers are one in the smaller model, and lie alike where one of them is refused
        self.refused: dict[str, frozenset[str]] = {}
        for name, texts in asked.refused.items():
            known = self.refused.get(small := small_name(name, stacks), frozenset())
            self.refused[small] = known | texts
        self.step = calls_of(
            self.small, self.inputs, asked.loss, lambda module: _layer(module, stacks)
        )
        self.parts = parts_of(stacks, self.step)

    def settings(self, pipe: int = 1, host: bool = False) -> list[Setting]:
        """List the settings of all meshes, of each of so many stages; those of recipes, few, first.

        ``host``  those with parameters in host memory.
        """
        ways = [*self.asked.laid(pipe, self.rows)]
        if self.asked.recipes is None:
            ways += [("", axes) for axes in self.asked.meshes(pipe)]
        found: list[Setting] = []
        for recipe, axes in ways:
            # a recipe may have no layouts for a module, or none on a mesh
            with suppress(*[ShardError] * bool(recipe)):
                found += self._settings(recipe, axes, pipe, host)
        return found

    def _settings(
        self, recipe: str, axes: Mapping[str, int], pipe: int, host: bool
    ) -> Iterator[Setting]:
        table, candidates = self._table(recipe, axes)
        rates = self.cluster.rates({PIPE: pipe, **axes})
        for batch in reversed(candidates.batches(self.rows)):
            inputs = candidates.inputs(batch, self.inputs)
            split = next(iter(inputs.values())).place.layout.axes
            every = (), split, tuple(a for a, n in axes.items() if n > 1)
            # what holds least is first: its seconds are a bound where memory is what limits
            for over in dict.fromkeys(every[::-1] if self.asked.zero else every[:1]):
                stage = 3 if host else 2 * bool(over)
                holding = Holding(axes, over, stage, self.state, self.micros, pipe, self.total)
                search = Search(self.step, table, candidates, rates, holding, inputs)
                yield Setting(search, batch, recipe)

    def _table(self, recipe: str, axes: Mapping[str, int]) -> tuple[Table, Candidates]:
        key = recipe, frozenset(axes.items())
        if key not in self.tables:
            with record(**dict(sorted(axes.items()))) as mesh:
                if recipe:
                    rules = rules_of(recipe, self.small, mesh, self.dims)
                    found = RecipeLayouts(self.step, mesh, self.parameters, rules, self.refused)
                else:
                    found = Candidates(self.step, mesh, self.parameters, self.groups, self.refused)
                self.tables[key] = Table(self.step, mesh), found
        return self.tables[key]

    def best(
        self, pipe: int = 1, known: Strategy | None = None, less: Mapping[Any, float] | None = None
    ) -> Strategy | None:
        """Return the fastest way that fits, explained, or what was known where none is faster.

        ``less``  seconds that a setting takes at the least, by its name: of fewer micro-batches.
        """
        settings = self.settings(pipe)
        best = self.among(settings, known, less or {})
        if self.asked.host is not None and pipe == 1 and not self.enough:
            # in host memory nothing is faster than what fits into any memory
            settings += (tiered := self.settings(host=True))
            best = self.among(tiered, best, less or {})
        if best is None or best.peak > self.asked.room:
            # what a program thought to fit and be fast does not: slower ways were not looked at
            best = self.among(settings, best, less or {}, bounded=False)
        # prices take memory, and are found again for the few questions that come back
        self.tables.clear()
        return best

    def among(
        self, settings: Sequence[Setting], best: Strategy | None, less: Mapping[Any, float],
        bounded: bool = True,
    ) -> Strategy | None:  # fmt: skip
        """Return the fastest way of these settings that fits, or what is known if it is better.

        ``less``     seconds that a setting takes at the least.
        ``bounded``  whether ways are left out that a program thinks slower than others.
        """
        room, bound, found = self.asked.room, math.inf, []
        if best is not None and best.peak <= room:
            bound = best.seconds / NEAR
        for setting in settings:
            if less.get(setting.name, 0.0) > NEAR * NEAR * bound:
                continue
            # a program thinks that a plan takes at most NEAR less than it does, or more
            limit = NEAR * NEAR * bound
            columns = self.columns(setting.search, limit)
            free = solve(columns, self.counts)
            if free is None:
                self.least_seconds.setdefault(setting.name, limit)
                continue
            if self.free is None or free.seconds < self.free.seconds:
                self.free = free
            name = setting.name
            self.least_seconds[name] = min(free.seconds, self.least_seconds.get(name, math.inf))
            solution: Solution | None = free
            if free.peak > room:
                solution = solve(columns, self.counts, room, limit=limit, gap=GAP)
            if solution is not None:
                seconds = max(solution.seconds, self._moving(solution, setting.holding))
                bound = min(bound, seconds) if bounded else bound
                found.append((seconds, len(found), setting, columns, solution))
        self.thought = min([self.thought, *(f[0] for f in found)])
        seen: set[tuple[str, str]] = set()
        for seconds, _, setting, columns, solution in sorted(found, key=_order):
            if best is not None and best.peak <= room and seconds >= NEAR * best.seconds:
                break
            # the same layouts over one axis and over two that make it up, but for rounding
            figures = f"{seconds:.9g}", f"{solution.peak:.9g}"
            if figures not in seen:
                best = self.planned(setting, columns, solution, best)
            seen.add(figures)
        return best

    def _moving(self, found: Solution, holding: Holding) -> float:
        """Return the seconds of the link to the host, at the least: 2 L - C of L parts, of which C stay."""
        if not holding.host:
            return 0.0
        parts = sum(n * holding.loaded(c.way[0].choices()) for c, n in found.counts)
        return holding.micros * max(parts, 2 * parts - self.asked.room) / self.cluster.host

    @property
    def enough(self) -> bool:
        """Whether more memory would hardly make a step faster."""
        return self.free is None or self.thought <= ENOUGH * self.free.seconds

    @property
    def wanted(self) -> float:
        """The number of micro-batches by which the fastest way in any memory would nearly fit."""
        if self.free is None:
            return 1.0
        # what a batch saves is cut, what parameters take is not, and sums of gradients are held
        kept = sum(n * c.kept for c, n in self.free.counts)
        room = max(self.asked.room - 1.5 * kept, self.asked.room / 8, 1.0)
        return max((self.free.peak - kept) / room, 2.0)

    def faster(self, known: Strategy | None) -> bool:
        """Return whether a way in any memory is faster than a known one that fits."""
        if known is None or known.peak > self.asked.room:
            return True
        return self.free is not None and self.free.seconds < known.seconds

    def layouts(self, name: str) -> list[str]:
        """List the layouts of a parameter that are weighed on the first mesh."""
        _, candidates = self._table("", self.asked.meshes(self.asked.pipe or 1)[0])
        return candidates.matrices(small_name(name, stacks_of(self.outline)))

    def least(self, pipe: int = 1) -> Strategy | None:
        """Return the way of least bytes, whatever its seconds; of those that fit, the fastest."""
        room, found = self.asked.room, []
        settings = self.settings(pipe)
        if self.asked.host is not None and pipe == 1:
            settings += self.settings(host=True)
        for setting in settings:
            solution = solve(self.columns(setting.search), self.counts, room, least=True)
            if solution is not None:
                found.append((solution.peak, len(found), solution, setting))
        best: Strategy | None = None
        ways = (self.explained(f[2], f[3]) for f in sorted(found, key=lambda f: f[:2]))
        for made in itertools.islice(filter(None, ways), ROUNDS):
            if made.better(best, room):
                best = made
        return best

    def planned(
        self, setting: Setting, columns: Sequence[Column], found: Solution | None,
        best: Strategy | None,
    ) -> Strategy | None:  # fmt: skip
        """Return the best way of a setting that fits, explained, or what is known if it is better.

        ``found``  what the program found.
        """
        room, tried = self.asked.room, set()
        for _ in range(1 + ROUNDS):
            if found is None or (way := self.written(found)) in tried:
                break
            tried.add(way)
            made, thought = self.explained(found, setting), found.peak
            if made is None:
                break
            if made.better(best, room):
                best = made
            if made.peak <= room and thought <= NEAR * made.peak:
                break
            limit = math.inf
            if best is not None and best.peak <= room:
                limit = NEAR * best.seconds
            less = room - (made.peak - thought)
            found = solve(columns, self.counts, less, limit=limit, gap=GAP) if less > 0 else None
        return best

    def columns(self, search: Search, limit: float = math.inf) -> list[Column]:
        """Return the best ways through each part, from every state that it may begin in.

        ``limit``  seconds of the whole step, beyond which no way is of use.
        """
        ranks = math.prod(search.holding.sizes.values())
        # states that the next part may begin in, with the least seconds until then
        reached = {self._begin(search): 0.0}
        found: list[Column] = []
        for number, part in enumerate(self.parts):
            ends: dict[State, float] = {}
            layers, rest = len(part.layers), sum(self.ideal[number + 1 :]) / ranks
            for (begin, spent), remat in itertools.product(reached.items(), self._policies(part)):
                own = (limit - spent - rest) / layers
                for after, ways in search.run(part.calls, begin, remat, own).items():
                    # what is computed again is saved by none, but what a single layer reads
                    end = after
                    if remat:
                        read = begin.saved | (_roots(part.calls, begin) if layers == 1 else set())
                        end = after._replace(saved=frozenset(read & {x.root for x in after.alive}))
                    if layers > 1 and not _repeats(begin, end):
                        continue
                    made = [_column(number, begin, end, way, remat, search.holding) for way in ways]
                    found += undominated(made)
                    least = spent + layers * min(c.seconds for c in made)
                    ends[end] = min(least, ends.get(end, math.inf))
            reached = ends
        return found

    def _policies(self, part: Part) -> tuple[str, ...]:
        """Return the policies of remat to weigh: layers may be computed again, what is around them not."""
        module: Any = type(self.small.get_submodule(part.path))
        runs = part.path and module.forward is not nn.Module.forward
        return ("", "full") if self.asked.remat and runs else ("",)

    def _ideal(self) -> list[float]:
        """Return the seconds that each part takes at the least, on one rank and without transfers."""
        with record(one=1) as mesh:
            candidates = Candidates(self.step, mesh, self.parameters, self.groups)
        inputs = candidates.inputs(".", self.inputs)
        rates = self.cluster.rates({})
        search = Search(
            self.step, Table(self.step, mesh), candidates, rates, Holding({"one": 1}), inputs
        )
        found, state = [], self._begin(search)
        for part in self.parts:
            ends = search.run(part.calls, state)
            if not ends:
                why = [x for x in search.table.known.values() if isinstance(x, str)][-1]
                raise ShardError(
                    f"a call of {part.path or 'the step'} cannot be priced: {why}", op="plan"
                )
            ((state, ways),) = ends.items()
            found.append(len(part.layers) * min(w.forward + w.back for w in ways))
        return found

    def _begin(self, search: Search) -> State:
        """Return the state that the step begins in: where its inputs lie.

        Where layers of a stack read them, they count as what later layers read, which has gradients.
        """
        stacked = len(self.parts[0].layers) > 1
        found = []
        for number, operand in search.inputs.items():
            of_layers = stacked and operand.dtype.is_floating_point
            begin = replace(operand, trained=of_layers)
            found.append(Alive(number, begin, number, operand.nbytes))
        return State(tuple(found))

    def explained(self, found: Solution, setting: Setting) -> Strategy | None:
        """Return a solution as a way to train, with the cost of its whole step.

        Nothing is returned where the host is too small.
        """
        search, holding, asked = setting.search, setting.holding, self.asked
        rules, remat = self.written(found)
        texts = tuple(
            str(search.inputs[n].place.layout)
            for n in sorted(self.step.inputs, key=self.step.inputs.__getitem__)
        )
        how: dict[str, Any] = {}
        if holding.stage:
            how = {"axis": holding.axes, "stage": holding.stage}
        axes = dict(holding.sizes)
        if holding.pipe > 1:
            axes = {PIPE: holding.pipe, **axes}
        tiers: dict[str, Any] = {}
        with record(**axes):
            apply, params = placed(asked.module, holding.pipe, rules, remat)
            given = [
                shard(x.detach().to("meta"), text)
                for x, text in zip(asked.inputs, texts, strict=True)
            ]
            run = partial(
                explain, lambda p, *x: asked.loss(apply, p, *x), inputs=tuple(given),
                cluster=self.cluster, microbatches=self.micros if self.micros > 1 else None,
            )  # fmt: skip
            late = StepWork()
            if holding.host:
                whole, tiers = self._in_tiers(run, params, how)
            else:
                tx = asked.transform(how, tiers)
                whole, late = run(params, tx=tx), update_work(sink_of(tx, params), holding.pipe)
        if isinstance(whole, PipelineExplanation):
            along, seconds = whole.along, whole.seconds + search.rates.seconds(late)
        else:
            work = replace(whole.work, along=dict(whole.work.along))
            work.join(late)
            along, seconds = work.along, search.rates.seconds(work)
            if whole.tiers is not None:
                seconds = whole.tiers.seconds
                if asked.host is None or sum(whole.tiers.host.values()) > asked.host:
                    return None
        return Strategy(
            axes, rules, texts, remat, how, self.micros, seconds, whole.peak, along, whole,
            setting.recipe, tiers, self._largest(found),
        )  # fmt: skip

    def _in_tiers(
        self, run: Callable[..., Explanation], params: object, how: Mapping[str, Any]
    ) -> tuple[Explanation, dict[str, Any]]:
        """Explain a step in memory tiers, of which the device's has what the step leaves of its room.

        Where that is less than one block needs, the explanation is that of a device which has it all.
        """
        room, found = math.floor(self.asked.room), None
        device = room
        for _ in range(ROUNDS):
            tiers: dict[str, Any] = {"device": device}
            tx = self.asked.transform(how, tiers)
            try:
                found = run(tx.shard(params), tx=tx)
            except ShardError as e:
                if e.op != "tiers":
                    raise
                break
            if found.peak <= room:
                return found, {**tiers, "host": int(self.asked.host or 0)}
            device -= found.peak - room
        if found is None:
            tx = self.asked.transform(how, {"device": 1 << 60})
            found = run(tx.shard(params), tx=tx)
        return found, {}

    def _largest(self, found: Solution) -> tuple[tuple[str, int], ...]:
        """List a rank's tensors of a solution, largest first: parameters, and what calls make."""
        sizes: Counter[str] = Counter()
        for column, _ in found.counts:
            # equal layers have one name
            name = stars if self.parts[column.part].path else str
            for call, strategy, choice in column.way[0].steps():
                for i, leaf in choice.items():
                    sizes |= Counter({name(self.step.parameters[i]): leaf.operand.nbytes})
                result = " of ".join(filter(None, (call.name, name(call.module))))
                own = zip(strategy.outs, strategy.shares, strict=True)
                sizes |= Counter({result: max((x.nbytes for x, i in own if i < 0), default=0)})
        return tuple(sizes.most_common())

    def written(
        self, found: Solution
    ) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, str], ...]]:
        """Write a solution's layouts and remat as rules; what most layers of a stack have, last.

        Vectors that are whole have one rule behind all others, where none of these is theirs too.
        """
        said: dict[str, dict[int, tuple[str, ...]]] = defaultdict(dict)
        rules: list[tuple[str, ...]] = []
        remat: list[tuple[str, str]] = []
        again: dict[tuple[str, str], list[int]] = defaultdict(list)
        at: Counter[int] = Counter()
        for column, count in found.counts:
            part, begin = self.parts[column.part], at[column.part]
            at[column.part] += count
            layers = part.layers[begin : begin + count]
            way, policy = column.way
            for number, leaf in way.choices().items():
                name = self.step.parameters[number]
                if not part.path:
                    rules.append((name, *leaf.said))
                    continue
                for layer in layers:
                    stack, dot, index = layer.rpartition(".")
                    pattern = f"{stack}{dot}{{}}{name.removeprefix(part.path)}"
                    said[pattern][int(index)] = leaf.said
            if policy:
                stack = layers[0].rpartition(".")[0]
                again[stack, policy] += [int(layer.rpartition(".")[2]) for layer in layers]
        for pattern, of_layers in said.items():
            rules += _folded(pattern, of_layers)
        for (stack, policy), numbers in again.items():
            remat += [(f"{stack}.{n}".lstrip("."), policy) for n in patterns(numbers)]
        others = [rule for rule in rules if rule[1:] != WHOLE]
        one = (
            others
            if all(rule in others or not _first(others, rule[0]) for rule in rules)
            else rules
        )
        return (*one, *[("*", *WHOLE)] * (one != rules)), tuple(remat)


def _first(rules: Sequence[tuple[str, ...]], pattern: str) -> bool:
    """Return whether a rule applies to names of a pattern."""
    return any(fnmatchcase(pattern.replace("*", "0"), rule[0]) for rule in rules)


def _folded(pattern: str, said: Mapping[int, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return rules for the layers that differ from most, then one for all others.

    >>> _folded("h.{}.w", {0: ("x .",), 1: (". x",), 2: (". x",)})
    [('h.0.w', 'x .'), ('h.*.w', '. x')]
    """
    layers: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, text in said.items():
        layers[text].append(i)
    (usual, _), *others = sorted(layers.items(), key=lambda kind: -len(kind[1]))
    found = [(pattern.format(p), *text) for text, own in others for p in patterns(own)]
    return [*found, (pattern.format("*"), *usual)]


def patterns(numbers: Iterable[int]) -> list[str]:
    """Write patterns, as of ``fnmatch``, which these numbers match and no others.

    >>> patterns(range(4, 32)), patterns([7]), patterns([0, 1, 2, 5])
    (['[4-9]', '[1-2]?', '3[0-1]'], ['7'], ['[0-25]'])
    """
    texts = sorted(map(str, numbers), key=lambda t: (len(t), t))
    return [p for _, some in itertools.groupby(texts, len) for p in _digits([*some])]


def _digits(texts: Sequence[str]) -> list[str]:
    """Write patterns of numbers with the same count of digits."""
    if not texts[0]:
        return [""]
    tails: dict[str, list[str]] = defaultdict(list)
    for text in texts:
        tails[text[0]].append(text[1:])
    firsts: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for digit, rest in tails.items():
        firsts[tuple(rest)].append(int(digit))
    return [_class(own) + p for rest, own in firsts.items() for p in _digits(rest)]


def _class(digits: Sequence[int]) -> str:
    if len(digits) in (1, 10):
        return str(digits[0]) if len(digits) == 1 else "?"
    runs: list[list[int]] = []
    for d in digits:
        if not runs or d != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(d)
    return "[" + "".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs) + "]"


def _column(part: int, begin: State, end: State, way: Way, remat: str, holding: Holding) -> Column:
    seconds, saved = way.forward + way.back, way.saved
    if remat:
        seconds += way.forward
        after = {x.root for x in end.alive}
        left = after - end.saved
        borders = {x.root: x.nbytes for x in begin.alive if x.counts and x.root not in left}
        saved = sum(n for root, n in borders.items() if root not in begin.saved)
    states = _key(begin), _key(end)
    held = holding.flying * saved
    # while it runs it holds as much beside what it saved as it would in a pipeline of one stage
    most = way.most - saved + held
    return Column(part, *states, seconds, way.kept, way.gradients, held, most, way=(way, remat))


def _roots(calls: Sequence[Call], begin: State) -> set[int]:
    """Return the values of a state that calls read and that count."""
    read = {n for c in calls for n in c.reads}
    return {x.root for x in begin.alive if x.number in read and x.counts}


def _places(state: State) -> Counter[Any]:
    return Counter((x.operand.place, x.operand.dtype) for x in state.alive)


def _repeats(begin: State, end: State) -> bool:
    """Return whether a layer ends as the next one begins: what is new lies as what is gone did.

    What only layers read, as positions, is gone behind the one layer that stands for all.
    """
    before, after = ({x.number: x for x in state.alive} for state in (begin, end))
    gone = State(tuple(x for n, x in before.items() if n not in after))
    new = State(tuple(x for n, x in after.items() if n not in before))
    return bool(new.alive) and _places(new) <= _places(gone)


def _key(state: State) -> Any:
    """Return what columns of consecutive parts must agree in."""
    saved = Counter((x.operand.place, x.root in state.saved) for x in state.alive)
    return tuple(sorted(map(str, (*_places(state).items(), *saved.items()))))


def undominated(columns: Sequence[Column]) -> list[Column]:
    """Return the columns that no other beats in seconds and every kind of bytes."""
    found: list[Column] = []
    for c in sorted(columns, key=lambda c: (c.seconds, c.kept + c.saved + c.most)):
        if not any(
            d.kept <= c.kept and d.saved <= c.saved and d.most <= c.most
            and d.gradients <= c.gradients for d in found
        ):  # fmt: skip
            found.append(c)
    return found


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
    for path, calls in itertools.groupby(step.calls, lambda c: _layer(c.module, stacks)):
        found.append(Part(tuple(calls), path, stacks.get(path, ("",))))
    return found


def _layer(module: str, stacks: Mapping[str, object]) -> str:
    return next((s for s in stacks if module == s or module.startswith(s + ".")), "")


def update_work(sink: Sink | None, pipe: int = 1) -> StepWork:
    """Return what ZeRO gathers behind the update, where an explanation ends with backward."""
    work = StepWork()
    for bucket in sink.index.buckets if sink is not None else ():
        if bucket.ways > 1:
            # half of a sum
            messages = (bucket.ways - 1) / pipe
            part = bucket.part_length * bucket.dtype.itemsize
            work.receive(bucket.over, messages * part, messages)
    return work


def _traced(module: nn.Module) -> object:
    """Trace a module for recipes; None where it cannot be run by itself, and they refuse it."""
    try:
        return trace_dimensions(module)
    except ShardError:
        return None


def _state(optimizer: Transform, dtype: torch.dtype) -> float:
    """Return the bytes of an optimizer's state per byte of a parameter, of a square matrix."""
    with record(one=1) as mesh:
        w = shard(torch.empty(64, 64, dtype=dtype, device="meta"), "...", mesh)
        w.requires_grad_()
        return bytes_of(optimizer.init({"w": w})) / bytes_of({"w": w})
