"""A plan of a training step: layouts of all parameters, remat per layer and ZeRO, found together.

The step's calls are recorded once (calls.py) and priced under every layout by what runs them
(strategies.py).  For each mesh, split of the batch and stage of ZeRO, the best ways through each
part of the step (pareto.py) are columns of one integer program (program.py).  The plan that it
finds is explained whole; where the explanation needs more bytes than the program thought, the
difference is taken from the room and the program solved again.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from shardlib.errors import ShardError, Unsupported
from shardlib.mesh import record
from shardlib.modules import parallelize
from shardlib.modules.dim_trace import trace_dimensions
from shardlib.modules.rules import stars
from shardlib.pipeline.stages import Stages
from shardlib.placing import shard
from shardlib.planning.calls import Call, calls_of
from shardlib.planning.candidates import (
    PIPE,
    Candidates,
    RecipeLayouts,
    rules_of,
    side_by_side,
)
from shardlib.planning.columns import columns_of
from shardlib.planning.explain import explain, gather_work, sink_of, state_ratio
from shardlib.planning.explanation import Explanation, PipelineExplanation
from shardlib.planning.layer_dedup import Outline, outline
from shardlib.planning.layer_rules import rules_and_remat
from shardlib.planning.pareto import Alive, Holding, Search, State, Way
from shardlib.planning.parts import Part, layer_of, parts_of, small_name, stacks_of
from shardlib.planning.program import Column, Solution, solve
from shardlib.planning.question import Question, Strategy
from shardlib.planning.strategies import Table
from shardlib.planning.work import StepWork, update_work

NEAR = 1.05
"""Share of the best plan's seconds to which a program may think that a plan takes."""

SURE = 0.01
"""Share by which plans of one step differ from what a program thought, more than one of them does."""

GAP = 1e-3
"""Share of its seconds by which a program's plan may be slower than its best: to prove less takes long."""

ENOUGH = 1.01
"""A way that takes at most so much longer than the best in any memory needs no more of it."""

DEEPER = 2.0
"""Factor of the seconds, from those without transfers on, within which a first way is looked for."""

ROUNDS = 3
"""Times that a plan that needs more than was thought is taken back, and the program solved again."""


def placed(
    module: nn.Module, pipe: int, rules: Sequence[tuple[str, ...]], remat: Sequence[tuple[str, str]]
) -> tuple[Any, dict[str, Any]]:
    """Return ``(apply, params)`` on the ambient mesh, in so many stages."""
    stages = Stages(PIPE) if pipe > 1 else None
    return parallelize(module, rules, pad=True, remat=remat, stages=stages)


def _figures(found: Solution, setting: "Setting") -> tuple[object, ...]:
    """Return the figures by which a solution is known again."""
    holding = setting.holding
    return f"{found.seconds:.9g}", f"{found.peak:.9g}", holding.pipe, holding.host


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


class Proposal(NamedTuple):
    """The fastest way of a setting that fits, as a program finds it.

    ``seconds``  that the program thinks it takes.
    """

    seconds: float
    study: "Study"
    setting: Setting
    columns: Sequence[Column]
    found: Solution

    @property
    def order(self) -> tuple[float, int]:
        """The key by which ways are explained: seconds, of equal ones those of fewer axes first."""
        return float(f"{self.seconds:.9g}"), len(self.setting.holding.sizes)


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
        self.state = state_ratio(asked.optimizer, next(iter(self.parameters.values())).dtype)
        self.total = sum(p.nbytes for p in asked.module.parameters())
        self.counts = [len(p.layers) for p in self.parts]
        # call -> seconds of both passes on one rank, without transfers; and those of each part
        self.alone = self._alone()
        self.ideal = [len(p.layers) * sum(sum(self.alone[c]) for c in p.calls) for p in self.parts]
        # seconds of the best way that a program found, and the best in any memory
        self.thought = math.inf
        self.free: Solution | None = None
        # stage of ZeRO -> bytes that a plan took more than a program thought
        self.missing: dict[int, float] = {}
        # seconds of plans over those that a program thought
        self.shares: list[float] = []
        # figures of the solutions that were explained -> the bytes that they took
        self.judged: dict[Any, int] = {}
        # name of a setting -> its seconds in any memory
        self.least_seconds: dict[Any, float] = {}
        self.small_ways: dict[Any, Solution] = {}
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
        try:
            self.step = calls_of(
                self.small, self.inputs, asked.loss, lambda module: layer_of(module, stacks)
            )
        except Unsupported as e:
            why = f"the step does not run on shapes alone, by which it is priced: {e.message}"
            fix = "apply, params = sl.parallelize(model, sl.recipes.ddp(model))"
            raise Unsupported(why, op="plan", fix=fix) from e
        self.parts = parts_of(stacks, self.step)

    def settings(self, pipe: int = 1, host: bool = False) -> list[Setting]:
        """List the settings of all meshes, of each of so many stages; those of recipes, few, first.

        ``host``  those with parameters in host memory.
        """
        ways = [*self.asked.laid(pipe)]
        if self.asked.recipes is None:
            ways += [("", axes) for axes in self.asked.meshes(pipe)]
        found: list[Setting] = []
        for recipe, axes in ways:
            # a recipe may have no layouts for a module, or none on a mesh
            with suppress(*[ShardError] * bool(recipe)):
                found += self._settings(recipe, axes, pipe, host)
        return found

    def every(self, pipe: int) -> list[Setting]:
        """List the settings, also those with parameters in host memory where there is any."""
        settings = self.settings(pipe)
        if self.asked.host is not None:
            settings += self.settings(pipe, host=True)
        return settings

    def _settings(
        self, recipe: str, axes: Mapping[str, int], pipe: int, host: bool
    ) -> Iterator[Setting]:
        table, candidates = self._table(recipe, axes)
        rates = self.cluster.rates({PIPE: pipe, **axes})
        for batch in reversed(candidates.batches(self.rows, self.inputs)):
            inputs = candidates.inputs(batch, self.inputs)
            split = next(iter(inputs.values())).place.layout.axes
            every = (), split, tuple(a for a, n in axes.items() if n > 1)
            # what holds least is first: its seconds are a bound where memory is what limits
            for over in dict.fromkeys(every[::-1] if self.asked.zero else every[:1]):
                stage = 3 if host else 2 * bool(over)
                holding = Holding(axes, over, stage, self.state, self.micros, pipe, self.total)
                given = holding, inputs, self.asked.room, self.asked.host or 0.0
                search = Search(self.step, table, candidates, rates, *given)
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

    def weighed(
        self, settings: Sequence[Setting], bound: float, less: Mapping[Any, float],
        bounded: bool = True,
    ) -> list[Proposal]:  # fmt: skip
        """Return the fastest way of each setting that a program thinks to fit.

        ``bound``    seconds of the best way so far.
        ``less``     seconds that a setting takes at the least, by its name: of fewer micro-batches.
        ``bounded``  whether ways are left out that a program thinks slower than others.
        """
        found: list[Proposal] = []
        for setting in settings:
            if less.get(setting.name, 0.0) > NEAR * NEAR * bound:
                continue
            columns, solution = self._solved(setting, bound, bounded)
            if solution is not None:
                seconds = self._seconds(solution, setting.holding)
                bound = min(bound, seconds) if bounded else bound
                found.append(Proposal(seconds, self, setting, columns, solution))
        self.thought = min([self.thought, *(f.seconds for f in found)])
        return found

    def _solved(
        self, setting: Setting, bound: float, bounded: bool
    ) -> tuple[list[Column], Solution | None]:
        """Return the columns of a setting, and the fastest solution that fits.

        ``bound``  seconds of the best way so far.
        """
        room, name = self.asked.room, setting.name
        columns, solution, limit = [], None, math.inf
        deeper = not bounded
        for limit in self._limits(setting.holding, bound, bounded):
            # slower ways are many, and looked for only where the smallest fits
            if deeper and self.free and self.smallest(setting).peak > NEAR * room:
                break
            deeper = True
            # what is computed again is slower, and of use where all does not fit
            columns = self.columns(setting.search, limit, remat=False)
            solution = free = solve(columns, self.counts)
            least = limit if free is None else free.seconds
            self.least_seconds[name] = max(least, self.least_seconds.get(name, 0.0))
            if free is not None and (self.free is None or free.seconds < self.free.seconds):
                self.free = free
            if free is not None and free.peak > (less := room - self._missed(free, setting)):
                # where nothing has fitted yet, nothing may
                if bound == math.inf and self.smallest(setting).peak > NEAR * room:
                    solution = None
                    break
                columns = self.columns(setting.search, limit)
                solution = solve(columns, self.counts, less, limit=limit, gap=GAP)
            if solution is not None:
                break
        if solution is not None and limit < NEAR * NEAR * solution.seconds < NEAR * NEAR * bound:
            # where it needs more memory than was thought, slower ways are looked at
            columns = self.columns(setting.search, NEAR * NEAR * solution.seconds)
        setting.search.known.clear()
        return columns, solution

    def _limits(self, holding: Holding, bound: float, bounded: bool) -> Iterator[float]:
        """Yield limits of a step's seconds within which to look for a way, one after the other."""
        least = holding.share * sum(self.ideal)
        if bounded and bound == math.inf:
            yield from (least * DEEPER**k for k in range(1, 4))
        # a program thinks that a plan takes at most NEAR less than it does, or more
        yield NEAR * NEAR * bound

    def _seconds(self, found: Solution, holding: Holding) -> float:
        """Return the seconds that a program thinks, or of the link to the host where these are more.

        These are at the least of 2 L - C bytes of L parts, of which C stay.
        """
        if not holding.host:
            return found.seconds
        parts = sum(n * holding.loaded(c.way[0].choices()) for c, n in found.counts) / holding.pipe
        moved = holding.micros * max(parts, 2 * parts - self.asked.room)
        return max(found.seconds, moved / self.cluster.host)

    def _missed(self, found: Solution, setting: Setting) -> float:
        """Return the bytes that a program does not count: as many as in other plans, or of buckets.

        Those are ZeRO's, and in memory tiers what the largest block needs.
        """
        holding = setting.holding
        if holding.stage in self.missing:
            return self.missing[holding.stage]
        layers = [([*c.way[0].choices().values()], n) for c, n in found.counts]
        if holding.host:
            return max((holding.block(leaves) for leaves, _ in layers), default=0.0)
        return holding.pool([leaf for leaves, n in layers for leaf in leaves * n])

    @property
    def enough(self) -> bool:
        """Whether more memory would hardly make a step faster."""
        return self.free is None or self.thought <= ENOUGH * self.free.seconds

    @property
    def misfits(self) -> bool:
        """Whether ways were explained, and none of them fits."""
        return bool(self.judged) and min(self.judged.values()) > self.asked.room

    @property
    def wanted(self) -> float:
        """The number of micro-batches by which the fastest way in any memory would nearly fit."""
        if self.free is None:
            return 1.0
        # what a batch saves is cut, what parameters take is not, and sums of gradients are held
        kept = 0.0
        if self.asked.host is None:
            kept = sum(n * c.kept for c, n in self.free.counts)
        room = max(self.asked.room - 1.5 * kept, self.asked.room / 8, 1.0)
        return max((self.free.peak - kept) / room, 2.0)

    def faster(self, seconds: float) -> bool:
        """Return whether a way in any memory takes less than so many seconds."""
        return self.free is not None and self.free.seconds < seconds

    def layouts(self, name: str) -> list[str]:
        """List the layouts of a parameter that are weighed on the first mesh."""
        _, candidates = self._table("", self.asked.meshes(self.asked.pipe or 1)[0])
        return candidates.matrices(small_name(name, stacks_of(self.outline)))

    def least(self, pipe: int = 1) -> Strategy | None:
        """Return the way of least bytes, whatever its seconds; of those that fit, the fastest."""
        room, found = self.asked.room, []
        for setting in self.every(pipe):
            solution = self.smallest(setting)
            if solution.counts:
                found.append((solution.peak, len(found), solution, setting))
        best: Strategy | None = None
        ways = (self.explained(f[2], f[3]) for f in sorted(found, key=lambda f: f[:2]))
        for made in itertools.islice(filter(None, ways), ROUNDS):
            if made.better(best, room):
                best = made
        return best

    def planned(self, proposal: Proposal, best: Strategy | None) -> Strategy | None:
        """Return the best way of a setting that fits, explained, or what is known if it is better."""
        setting, columns, room = proposal.setting, proposal.columns, self.asked.room
        found: Solution | None = proposal.found
        if (less := room - self._missed(found, setting)) < found.peak <= room:
            found = solve(columns, self.counts, less, gap=GAP) or found
        rounds, tried = 0, set()
        while rounds <= ROUNDS:
            # the same layouts over one axis and over two that make it up, but for rounding
            if found is None or (figures := _figures(found, setting)) in tried:
                break
            tried.add(figures)
            took, better = self.judged.get(figures), False
            if took is None:
                made = self.explained(found, setting)
                if made is None:
                    break
                took = self.judged[figures] = made.peak
                self.shares.append(made.seconds / self._seconds(found, setting.holding))
                if better := made.better(best, room):
                    best = made
            if took <= room and found.peak <= NEAR * took:
                break
            # one that needs less than was thought, and is better, leaves room for more
            rounds += not better or took > room
            limit = math.inf
            if best is not None and best.peak <= room:
                limit = NEAR * best.seconds
            self.missing[setting.holding.stage] = took - found.peak
            less = room - self._missed(found, setting)
            found = solve(columns, self.counts, less, limit=limit, gap=GAP) if less > 0 else None
        return best

    def smallest(self, setting: Setting) -> Solution:
        """Return the way of least bytes, found once; without any, one of no layers and all memory."""
        name = *setting.name, setting.holding.pipe
        if name not in self.small_ways:
            columns = self.columns(setting.search, least=True)
            found = solve(columns, self.counts, self.asked.room, least=True)
            self.small_ways[name] = found or Solution((), math.inf, math.inf)
        return self.small_ways[name]

    def columns(
        self, search: Search, limit: float = math.inf, least: bool = False, remat: bool = True
    ) -> list[Column]:
        """Return the best ways through each part, or those of least bytes.

        ``limit``  seconds that a step takes at most; ``remat``  whether layers may be computed again.
        """
        policies = partial(self._policies, remat=remat)
        begin = self._begin(search)
        return columns_of(self.parts, search, begin, self.alone, policies, limit, least)

    def _policies(self, part: Part, remat: bool) -> tuple[str, ...]:
        """Return the policies of remat to weigh: layers may be computed again, what is around them not."""
        module: Any = type(self.small.get_submodule(part.path))
        runs = part.path and module.forward is not nn.Module.forward
        if not (remat and self.asked.remat and runs):
            return ("",)
        return ("", "products", "full", *["host"] * bool(self.asked.host))

    def _alone(self) -> dict[Call, tuple[float, float]]:
        """Return the seconds of both passes of each call on one rank."""
        with record(one=1) as mesh:
            candidates = Candidates(self.step, mesh, self.parameters, self.groups)
        inputs = candidates.inputs(".", self.inputs)
        rates = self.cluster.rates({})
        # in host memory: the update, which is done once for all micro-batches, is not in it
        holding = Holding({"one": 1}, stage=3)
        search = Search(self.step, Table(self.step, mesh), candidates, rates, holding, inputs)
        found, state = {}, self._begin(search)
        for part in self.parts:
            ends = search.run(part.calls, state)
            if not ends:
                why = [x for x in search.table.known.values() if isinstance(x, str)][-1]
                raise ShardError(
                    f"a call of {part.path or 'the step'} cannot be priced: {why}", op="plan"
                )
            ((state, ways),) = ends.items()
            at: Way | None = ways[0]
            while at is not None and at.step is not None and at.before is not None:
                found[at.step.call] = at.forward - at.before.forward, at.back - at.before.back
                at = at.before
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
        rules, remat = rules_and_remat(found, self.parts, self.step.parameters)
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
            rates, late = search.rates, StepWork()
            if holding.host:
                whole, tiers = self._in_tiers(run, params, how)
            else:
                tx = asked.transform(how, tiers)
                whole = run(params, tx=tx)
                if holding.pipe == 1:
                    late = gather_work(sink_of(tx, params))
        held = [whole.tiers]
        if isinstance(whole, PipelineExplanation):
            held = [place.tiers for place in whole.places]
            work, seconds = StepWork(dict(whole.along)), whole.seconds
            for place in whole.places:
                late.join(place.gather, 1 / len(whole.places))
        else:
            work = replace(whole.work, along=dict(whole.work.along))
            seconds = rates.seconds(work)
            if whole.tiers is not None:
                seconds = whole.tiers.seconds
        if not holding.host:
            late.join(update_work(whole.parameters, whole.state, self.state))
        work.join(late)
        seconds += rates.seconds(late)
        if any(t is not None and sum(t.host.values()) > (asked.host or 0) for t in held):
            return None
        return Strategy(
            axes, rules, texts, remat, how, self.micros, seconds, whole.peak, work.along, whole,
            setting.recipe, tiers, self._largest(found), self._whole(found, search.table),
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
            try:
                tx = self.asked.transform(how, tiers)
                parts = tx.shard(params)
                found = run(parts, tx=tx)
            except ShardError as e:
                # that of a stage has it as its cause
                if "tiers" not in (e.op, getattr(e.__cause__, "op", "")):
                    raise
                break
            if found.peak <= room:
                return found, {**tiers, "host": int(self.asked.host or 0)}
            # where it has more than all parameters, that goes first
            device += room - found.peak + found.parameters - parts.cache.most
        if found is None:
            tx = self.asked.transform(how, {"device": 1 << 60})
            found = run(tx.shard(params), tx=tx)
        return found, {}

    def _whole(self, found: Solution, table: Table) -> tuple[str, ...]:
        """List the calls that take no split operand, with the reason."""
        steps = (step for column, _ in found.counts for step in column.way[0].steps())
        reasons = {call: table.unsplit(call) for call in dict.fromkeys(s.call for s in steps)}
        return tuple(f"{call.at(call.module)}: {why}" for call, why in reasons.items() if why)

    def _largest(self, found: Solution) -> tuple[tuple[str, int], ...]:
        """List a rank's tensors of a solution, largest first: parameters, and what calls make."""
        sizes: Counter[str] = Counter()
        for column, _ in found.counts:
            # equal layers have one name
            name = stars if self.parts[column.part].path else str
            for call, strategy, choice in column.way[0].steps():
                for i, leaf in choice.items():
                    sizes |= Counter({name(self.step.parameters[i]): leaf.operand.nbytes})
                result = call.at(name(call.module))
                own = zip(strategy.outs, strategy.shares, strict=True)
                sizes |= Counter({result: max((x.nbytes for x, i in own if i < 0), default=0)})
        return tuple(sizes.most_common())


def _traced(module: nn.Module) -> object:
    """Trace a module for recipes; None where it cannot be run by itself, and they refuse it."""
    try:
        return trace_dimensions(module)
    except ShardError:
        return None
