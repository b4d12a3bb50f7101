"""Prices of a pipeline's step: each action of each stage runs once on shapes, then a timeline.

The actions are those of ``PipelineStep``, on a mesh of shapes with all stages, so what is priced is
what runs: operations, bytes moved inside a stage, and tensors that a forward keeps for backward.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib._compat import tree_flatten
from shardlib.collectives import Event, Trace, trace
from shardlib.grad import GradientSums, frozen
from shardlib.mesh import Link, record, within
from shardlib.microbatches import MicroBatches
from shardlib.modules.paths import Paths
from shardlib.optim.buckets import Buckets
from shardlib.optim.transform import Transform
from shardlib.pipeline.cut import Cut, Inputs, cut_of, on_shapes
from shardlib.pipeline.forward import UnitCall, block_of_output
from shardlib.pipeline.schedules import Action, PipelineSchedule, timeline
from shardlib.pipeline.step import PipelineStep, Traffic, last_gradients
from shardlib.planning.cluster import Cluster
from shardlib.planning.explain import CallRecorder, bytes_of, new_pool, sink_of, updated
from shardlib.planning.explanation import PipelineExplanation, PlaceCost, StageCost
from shardlib.planning.work import Meter, Rates, StepWork


class ActionCost(NamedTuple):
    """Cost of an action: its work, with the transfers inside the stage, and bytes of memory.

    ``kept``  the bytes that it leaves, fewer than 0 where it frees some; ``most`` it needs meanwhile.
    """

    work: StepWork
    events: list[Event]
    kept: int
    most: int


class _PaperStep(PipelineStep):
    """A step on shapes, of one micro-batch for each way in which the schedule computes gradients.

    ``own``      of each place on the axis, its parameters; ``parts`` the same in ZeRO's buckets.
    ``of_place``  the sums of their gradients.
    """

    def __init__(
        self, asked: "StepPrices", given: Inputs, cuts: Sequence[Cut], table: PipelineSchedule
    ) -> None:
        pipeline, tx = asked.pipeline, asked.tx
        axes = {pipeline.stages.axis: table.size, **pipeline.paper.axes}
        paper = replace(pipeline, mesh=record(**axes), inner=pipeline.paper, ranks=table.ranks)
        paper.first = cuts[0]
        places, held = range(table.size), paper.holders
        self.own = [{n: x for n, x in paper.whole.items() if r in held[n]} for r in places]
        self.parts = [tx.shard(x) if tx and asked.parts else x for x in self.own]
        sinks = [None if tx is None else sink_of(tx, x) for x in self.parts]
        self.of_place = [GradientSums(x, (), k) for x, k in zip(self.parts, sinks, strict=True)]
        traffic = Traffic(cuts, table, paper.inner, places)
        super().__init__(paper, asked.f, traffic, MicroBatches(*given, 1), self.of_place[0])
        self.costs: dict[tuple[str, int], ActionCost] = {}
        self.tx, self.module = tx, pipeline
        # sums over axes are those of a place, not of an action
        traffic.ends = {}

    def rehearse(self) -> None:
        """Price the actions of a micro-batch."""
        for names, total in zip(self.own, self.of_place, strict=True):
            # made here, so that no action makes it
            self.module.completed(names)
            for n, held_back in zip(names, frozen(list(names.values())), strict=True):
                if not held_back:
                    total.of(n)
        kinds = self.traffic.kinds
        with Paths() as paths, trace() as t, Meter(StepWork()) as meter:
            self.watch = CallRecorder(t, self.inner.size, True, paths)
            self.meter, self.events = meter, t.events
            for after in [["B"]] * ("B" in kinds) + [["I", "W"]] * ("I" in kinds) or [[]]:
                self.traffic.parted = {(s, 0) for s in range(self.table.stages) if "I" in after}
                for s in range(self.table.stages):
                    self._do(Action("F", s, 0))
                for kind in after:
                    for s in reversed(range(self.table.stages)):
                        self._do(Action(kind, s, 0))

    def _do(self, a: Action) -> None:
        self.sums, m, n = self.of_place[self.ranks[a.stage]], self.meter, len(self.events)
        before, m.peak = m.now, m.now
        m.work = work = StepWork()
        self.watch.turn(None)
        with within(watcher=self.watch):
            super()._do(a)
        self.watch.turn(None)
        work.add(self.events[n:])
        cost = ActionCost(work, self.events[n:], m.now - before, m.peak - before)
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

    def place(self, r: int, rates: Rates) -> PlaceCost:
        """Return the cost of a place on the axis; its sums of gradients end."""
        tx, params, sums = self.tx, self.parts[r], self.of_place[r]
        state = None if tx is None else tx.init(params)
        with new_pool(sums.sink), Meter(StepWork()) as meter:
            with trace() as t:
                grads, work = sums.finish(), meter.work
            work.add(t.events)
            if tx is not None and isinstance(grads, Buckets):
                updated(meter, tx, params, grads, state)
            buckets = meter.now
        nbytes = self.pipeline.nbytes
        names = [n for n, ranks in self.tied.items() if r in ranks for _ in ranks[1:]]
        ties = sum(rates.links[self.axis].seconds(nbytes(n)) for n in names)
        return PlaceCost(
            bytes_of(params), bytes_of(state), sum(map(nbytes, self.own[r])),
            self._most(r, buckets, meter.peak), t, rates.moving(work.along) + ties,
        )  # fmt: skip

    def _most(self, r: int, buckets: int, finish: int) -> int:
        """Compute the most bytes on a rank, of what is in flight and of what an action needs.

        ``buckets``  bytes of those of sums, which the first last gradient fills; those of ZeRO are
                     there from the step before.
        ``finish``   the most bytes while these are sent.
        """
        now, most = 0, finish
        if self.of_place[r].sink is not None:
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


@dataclass(frozen=True)
class StepPrices:
    """Prices of steps of a function of a module in stages, by their first micro-batch on shapes.

    ``parts``  whether the parameters are those of ZeRO's stage 3.
    """

    pipeline: Any
    f: Callable[..., Any]
    batch: MicroBatches
    cluster: Cluster
    tx: Transform | None = None
    parts: bool = False

    def explained(self, table: PipelineSchedule, cuts: Sequence[Cut]) -> PipelineExplanation:
        """Explain a step whose micro-batches are cut so."""
        with on_shapes(self.pipeline.paper, self.batch[0]) as (_, given):
            step = _PaperStep(self, given, cuts, table)
            step.rehearse()
            # links as measured, else those of the cluster
            mesh, cluster = self.pipeline.mesh, self.cluster
            links = {"one": Link(), **cluster.links(mesh.axes), **mesh.links}
            rates = replace(cluster.rates({}), links=links)
            stages = [step.stage(s, rates) for s in range(table.stages)]
            places = [step.place(r, rates) for r in range(table.size)]
        line = timeline(
            table,
            lambda a: stages[a.stage].seconds[a.kind],
            lambda source, to: links[step.axis].seconds(stages[source].sends.get(to, 0)),
            {a.stage: {t for _, t in x} for a, x in step.traffic.receives.items() if a.kind == "F"},
        )
        with trace() as sent:
            step.count()
        top = max(places, key=lambda p: p.peak)
        return PipelineExplanation(
            step.watch.rows, dict(mesh.axes), top.parameters, top.gradients + top.transient,
            top.state, stages=stages, places=places, schedule=table, line=line, sent=sent,
        )  # fmt: skip

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
