"""Prices of a pipeline's step: each action of each stage runs once on shapes, then a timeline.

The actions are those of ``PipelineStep``, on a mesh of shapes with all stages, so what is priced is
what runs: operations, bytes moved inside a stage, and tensors that a forward keeps for backward.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib._compat import tree_flatten
from shardlib.collectives import Event, Trace, holds_values, trace
from shardlib.errors import ShardError
from shardlib.grad import GradientSums, frozen
from shardlib.mesh import Link, record, within
from shardlib.microbatches import MicroBatches
from shardlib.modules.paths import Paths
from shardlib.optim.chunk_cache import ChunkCache
from shardlib.optim.tiered import TieredParts
from shardlib.optim.transform import Transform
from shardlib.pipeline.cut import Cut, Inputs, cut_of, on_shapes
from shardlib.pipeline.forward import UnitCall, block_of_output
from shardlib.pipeline.schedules import Action, PipelineSchedule, timeline
from shardlib.pipeline.step import PipelineStep, Traffic, last_gradients
from shardlib.planning.cluster import Cluster
from shardlib.planning.explain import (
    CallRecorder,
    bytes_of,
    gather_work,
    later_buckets,
    new_pool,
    papers,
    sink_of,
    state_of,
    updated,
    using,
)
from shardlib.planning.explanation import PipelineExplanation, PlaceCost, StageCost, TierUse
from shardlib.planning.tier_use import Note, PaperParts, TierReplay
from shardlib.planning.work import Meter, Rates, StepWork


class ActionCost(NamedTuple):
    """Cost of an action: its work, with the transfers inside the stage, and bytes of memory.

    ``kept``   the bytes that it leaves, fewer than 0 where it frees some; ``most`` it needs meanwhile.
    ``notes``  what happens to parameters in memory tiers.
    """

    work: StepWork
    events: list[Event]
    kept: int
    most: int
    notes: list[Note]


class _PaperStep(PipelineStep):
    """A step on shapes, of one micro-batch for each way in which the schedule computes gradients.

    ``groups``   places on the axis that share what they hold: one each, or, in memory tiers, all.
    ``own``      of each group, its parameters; ``parts`` the same in ZeRO's buckets, and ``caches``
                 those in memory tiers.
    ``of_group``  the sums of their gradients.
    """

    def __init__(
        self, asked: "StepPrices", given: Inputs, cuts: Sequence[Cut], table: PipelineSchedule,
        groups: Sequence[range],
    ) -> None:  # fmt: skip
        pipeline, tx = asked.pipeline, asked.tx
        axes = {pipeline.stages.axis: table.size, **pipeline.paper.axes}
        paper = replace(pipeline, mesh=record(**axes), inner=pipeline.paper, ranks=table.ranks)
        paper.first = cuts[0]
        held = paper.holders
        self.group = {r: i for i, some in enumerate(groups) for r in some}
        self.own = [
            {n: x for n, x in paper.whole.items() if not {*held[n]}.isdisjoint(some)}
            for some in groups
        ]
        cut = [tx.shard(x) if tx and asked.parts else x for x in self.own]
        self.caches = [x.cache for x in cut if isinstance(x, TieredParts)]
        self.notes: list[Note] = []
        self.parts = papers(cut, paper.inner, self.notes)
        sinks = [sink_of(tx, x) for x in self.parts]
        self.of_group = [GradientSums(x, (), k) for x, k in zip(self.parts, sinks, strict=True)]
        traffic = Traffic(cuts, table, paper.inner, range(table.size))
        super().__init__(paper, asked.f, traffic, MicroBatches(*given, 1), self.of_group[0])
        self.costs: dict[tuple[str, int], ActionCost] = {}
        self.tx, self.module = tx, pipeline
        # sums over axes are those of a place, not of an action
        traffic.ends = {}

    def rehearse(self) -> None:
        """Price the actions of a micro-batch."""
        for names, total in zip(self.own, self.of_group, strict=True):
            # made here, so that no action makes it
            self.module.completed(names)
            for n, held_back in zip(names, frozen(list(names.values())), strict=True):
                if not held_back:
                    total.of(n)
        kinds = self.traffic.kinds
        with Paths() as paths, trace() as t, Meter(StepWork()) as meter:
            self.watch = CallRecorder(t, self.inner.size, True, paths)
            self.watch.live = self.meter = meter
            self.events = t.events
            for after in [["B"]] * ("B" in kinds) + [["I", "W"]] * ("I" in kinds) or [[]]:
                self.traffic.parted = {(s, 0) for s in range(self.table.stages) if "I" in after}
                for x in filter(_in_tiers, self.parts):
                    x.index.room.activations.count = 0
                for s in range(self.table.stages):
                    self._do(Action("F", s, 0))
                for kind in after:
                    for s in reversed(range(self.table.stages)):
                        self._do(Action(kind, s, 0))

    def _do(self, a: Action) -> None:
        at, m, n = self.group[self.ranks[a.stage]], self.meter, len(self.events)
        self.sums = self.of_group[at]
        self.notes.clear()
        before, m.peak = m.now, m.now
        m.work = work = StepWork()
        self.watch.turn(None)
        with within(watcher=self.watch):
            super()._do(a)
        self.watch.turn(None)
        work.add(self.events[n:])
        if _in_tiers(self.parts[at]):
            self.parts[at].end_action()
        moved = self.events[n:], m.now - before, m.peak - before, [*self.notes]
        cost = ActionCost(work, *moved)
        self.costs[a.kind, a.stage] = cost

    def stage(self, s: int, rates: Rates) -> StageCost:
        """Return the cost of a stage."""
        found = {kind: cost for (kind, at), cost in self.costs.items() if at == s}
        sends: dict[int, int] = defaultdict(int)
        for kind in "FB":
            for label, to in self.traffic.sends[Action(kind, s, 0)]:
                if self.ranks[to] != self.ranks[s]:
                    sends[to] += self.cuts[0].spec(label.output).nbytes
        return StageCost(
            self.cuts[0].named(s), self.ranks[s],
            {k: rates.seconds(c.work) for k, c in found.items()},
            {k: Trace(c.events) for k, c in found.items()}, dict(sends), found["F"].kept,
        )  # fmt: skip

    def in_tiers(self, at: int, rates: Rates, cluster: Cluster, cache: ChunkCache) -> TierUse:
        """Return what a group of places loads, sends and holds with this cache."""
        parts, replay = self.parts[at], TierReplay(cache, True)
        for a in self.traffic.actions:
            if self.group[self.ranks[a.stage]] == at:
                cost = self.costs[a.kind, a.stage]
                replay.run(cost.notes, rates.seconds(cost.work), a.kind, a[1:])
        state = bytes_of(state_of(self.tx, parts))
        return replay.use(parts.index, state, cluster)

    def place(self, r: int, rates: Rates, tiers: TierUse | None) -> PlaceCost:
        """Return the cost of a place on the axis; its sums of gradients end."""
        tx, params, sums = self.tx, self.parts[r], self.of_group[r]
        state = state_of(tx, params)
        with new_pool(sums.sink), Meter(StepWork()) as meter:
            with trace() as t:
                grads, work = sums.finish(), meter.work
            work.add(t.events)
            stay = updated(meter, tx, params, grads, state)
            buckets = meter.now
        nbytes = self.pipeline.nbytes
        names = [n for n, ranks in self.tied.items() if r in ranks for _ in ranks[1:]]
        ties = sum(rates.links[self.axis].seconds(nbytes(n)) for n in names)
        seconds = rates.moving(work.along) + ties
        if tiers is not None:
            # sums and state are in host memory
            return PlaceCost(tiers.device, 0, 0, self._most(r, 0, 0, stay), t, seconds, tiers)
        return PlaceCost(
            bytes_of(params), bytes_of(state), sum(map(nbytes, self.own[r])),
            self._most(r, buckets, meter.peak, stay), t, seconds, gather=gather_work(sums.sink),
        )  # fmt: skip

    def _most(self, r: int, buckets: int, finish: int, stay: bool) -> int:
        """Compute the most bytes on a rank, of what is in flight and of what an action needs.

        ``buckets``  bytes of those of sums, which the first last gradient fills.
        ``finish``   the most bytes while these are sent.
        ``stay``     whether the buckets are there from the step before.
        """
        now, most = 0, finish
        if stay:
            now, buckets = buckets, 0
        kept: dict[tuple[int, int], int] = defaultdict(int)
        row = self.table.tables[r]
        ends = last_gradients(row, self.cuts)
        for a in row:
            cost, key = self.costs[a.kind, a.stage], (a.stage, a.micro)
            if a in ends:
                now, buckets = now + buckets, 0
            most = max(most, now + cost.most)
            # backward frees all that is left
            change = -kept[key] if a.kind in "BW" else cost.kept
            kept[key] += change
            now += change
        return most

    def _add_loss(self, loss: object, micro: int) -> Tensor:
        # blocks have no values: any scalar that depends on the whole result does
        ends = [block_of_output(x) for x in tree_flatten(loss)[0] if isinstance(x, Tensor)]
        return torch.stack([x.sum() for x in ends if x.requires_grad]).sum()


def _in_tiers(parts: object) -> bool:
    return isinstance(parts, PaperParts)


@dataclass(frozen=True)
class StepPrices:
    """Prices of steps of a function of a module in stages, by their first micro-batch on shapes.

    ``params``  those of a process: parts of ZeRO's stage 3, or in memory tiers, or whole.
    """

    pipeline: Any
    f: Callable[..., Any]
    batch: MicroBatches
    cluster: Cluster
    tx: Transform | None = None
    params: Any = None

    @property
    def parts(self) -> bool:
        """Whether the parameters are those of ZeRO's stage 3."""
        return hasattr(self.params, "opened")

    def explained(self, table: PipelineSchedule, cuts: Sequence[Cut]) -> PipelineExplanation:
        """Explain a step, behind the first, whose micro-batches are cut so."""
        groups = [range(r, r + 1) for r in range(table.size)]
        found = self._rehearsed(table, cuts, groups)
        later = later_buckets([sums.sink for sums in found[0].of_group])
        with using(later):
            if later:
                found = self._rehearsed(table, cuts, groups)
            return self._priced(table, cuts, *found)

    def _priced(
        self, table: PipelineSchedule, cuts: Sequence[Cut],
        step: _PaperStep, links: Mapping[str, Link], rates: Rates,
    ) -> PipelineExplanation:  # fmt: skip
        """Return the explanation of a step that was rehearsed."""
        places = range(table.size)
        stages = [step.stage(s, rates) for s in range(table.stages)]
        tiers: Sequence[TierUse | None] = [None] * table.size
        slow = [1.0] * table.size
        if isinstance(self.params, TieredParts):
            if self.tx is None:
                why = "parameters in memory tiers are cut to stages by their transform"
                fix = "sl.explain(loss, params, inputs, tx=tx)"
                raise ShardError(why, op="explain", fix=fix)
            for cache in step.caches:
                cache.depth = self.params.cache.depth
            tiers = [step.in_tiers(r, rates, self.cluster, step.caches[r]) for r in places]
            slow = [t.seconds / (t.computing or 1) for t in tiers]
        costs = [step.place(r, rates, tiers[r]) for r in places]
        line = timeline(
            table,
            lambda a: stages[a.stage].seconds[a.kind] * slow[table.ranks[a.stage]],
            lambda source, to: links[step.axis].seconds(stages[source].sends.get(to, 0)),
            {a.stage: {t for _, t in x} for a, x in step.traffic.receives.items() if a.kind == "F"},
        )
        with trace() as sent:
            step.count()
        top = max(costs, key=lambda p: p.peak)
        return PipelineExplanation(
            step.watch.rows, dict(self.pipeline.mesh.axes), top.parameters,
            top.gradients + top.transient, top.state, tiers=self._tiers(table, cuts, tiers),
            stages=stages, places=costs, schedule=table, line=line, sent=sent,
        )  # fmt: skip

    def _rehearsed(
        self, table: PipelineSchedule, cuts: Sequence[Cut], groups: Sequence[range]
    ) -> tuple[_PaperStep, Mapping[str, Link], Rates]:
        """Run the actions of a micro-batch on paper; return the step, the links, and its rates."""
        mesh, cluster = self.pipeline.mesh, self.cluster
        # links as measured, else those of the cluster
        links = {"one": Link(), **cluster.links(mesh.axes), **mesh.links}
        with on_shapes(self.pipeline.paper, self.batch[0]) as (_, given):
            step = _PaperStep(self, given, cuts, table, groups)
            step.rehearse()
        return step, links, replace(cluster.rates({}), links=links)

    def _tiers(
        self, table: PipelineSchedule, cuts: Sequence[Cut], tiers: Sequence[TierUse | None]
    ) -> TierUse | None:
        """Return what this process loads, sends and holds; of shapes alone, the slowest place."""
        found = [t for t in tiers if t is not None]
        if not found or not holds_values(self.params.mesh):
            return max(found, key=lambda t: t.seconds, default=None)
        here = self.pipeline.here
        if len(here) < table.size:
            return found[min(here)]
        # simulated stages share one budget
        step, _, rates = self._rehearsed(table, cuts, [range(table.size)])
        return step.in_tiers(0, rates, self.cluster, self.params.cache)

    def cut_at(
        self, table: PipelineSchedule, begins: int | Sequence[UnitCall]
    ) -> tuple[Cut, PipelineExplanation]:
        """Cut the function where stages begin; explain a step whose micro-batches are cut so."""
        p = self.pipeline
        cut, _ = cut_of(self.f, p.paper, p.whole, self.batch[0], p.blocks, begins)
        return cut, self.explained(table, [cut] * table.micros)

    def peaks(self, table: PipelineSchedule, begins: Sequence[UnitCall]) -> list[int]:
        """Return the bytes that each rank holds where stages begin so."""
        return [p.peak for p in self.cut_at(table, begins)[1].places]
