"""Stages of a module along a mesh axis: ``sl.parallelize(module, rules, stages=sl.Stages("pipe"))``.

``Stages`` says how a module is cut and in which order micro-batches run.  ``Pipeline`` is a module
that was cut: which rank runs which stage, and the cut of each function of it, kept by the shapes of
its inputs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import optree
import torch
from torch import Tensor, nn

from shardlib.capacity import bytes_in
from shardlib.collectives import spans_processes
from shardlib.dtypes import wider
from shardlib.errors import ShardError, Unsupported
from shardlib.grad import GradientSums, frozen
from shardlib.layouts import Layout
from shardlib.mesh import Memo, Mesh, record, within
from shardlib.microbatches import MicroBatches
from shardlib.modules.apply import Apply
from shardlib.modules.dim_trace import called_with, example_inputs
from shardlib.modules.parallelize import placed
from shardlib.ops.registry import Why, case_of
from shardlib.opspec import Args, Kwargs
from shardlib.optim.transform import Transform
from shardlib.pipeline.cut import Cut, Params, cut_of, tells
from shardlib.pipeline.forward import UnitCall, spec_of
from shardlib.pipeline.prices import StepPrices
from shardlib.pipeline.schedules import (
    Action,
    PipelineSchedule,
    offered,
    placing,
    schedule,
)
from shardlib.pipeline.step import PipelineStep, Traffic
from shardlib.pipeline.units import blocks_of, fitting, units_of
from shardlib.planning.cluster import Cluster, cluster_of
from shardlib.planning.constant_folding import Answers
from shardlib.planning.explain import Inputs, call_of_stages, on_paper
from shardlib.planning.explanation import PipelineExplanation
from shardlib.tensor import ShardedTensor


@dataclass(frozen=True)
class Stages:
    """Cut of a module into stages along a mesh axis, and the order in which micro-batches run.

    ``axis``      the mesh axis; layouts use the others.
    ``cut``       "auto": as many stages as the schedule places on the axis, with blocks dealt so
                  that the slowest stage takes as little time as possible; a number of stages; or
                  the name of the first block of each.
    ``per_rank``  stages on each rank: more than one for "interleaved".
    ``schedule``  "gpipe", "1f1b", "interleaved", "zb", "zbv", "dualpipev", or one of your own, see
                  ``sl.extend.schedule``.
    ``example``   forward's arguments, a tuple or a dict, where the module's configuration or first
                  layer does not say what it accepts.
    ``blocks``    names of the submodules between which it may be cut; by default the items of its
                  lists of alike modules.
    ``memory``    the most that a rank may hold under cut="auto", in bytes or as "8GB": parameters,
                  gradients and what all micro-batches in flight keep, of which ``example`` is one.
                  What an optimizer and a loss around the module hold is not known to it;
                  ``sl.why("pipeline", ...)`` counts these too.

    >>> import torch, shardlib as sl; from torch import nn
    >>> model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    >>> with sl.simulate(pipe=2, data=2):
    ...     rules = [("*", "...")]
    ...     apply, params = sl.parallelize(
    ...         model, rules, inputs={"input": "data ."}, stages=sl.Stages("pipe"))
    ...     step = sl.value_and_grad(lambda p, x: apply(p, x).square().mean(), microbatches=4)
    ...     loss, grads = step(params, torch.ones(8, 8))
    >>> print(apply.stages)
    2 stages on pipe=2, 1f1b: 0 to 2 | 3
    """

    axis: str
    cut: str | int | Sequence[str] = "auto"
    per_rank: int = 1
    schedule: str = "1f1b"
    example: object = None
    blocks: Sequence[str] | None = None
    memory: float | str | None = None

    def parallelized(
        self, module: nn.Module, rules: Any, *, mesh: Mesh, src: int | None,
        blank: bool = False, **given: Any,
    ) -> tuple[Apply, dict[str, ShardedTensor]]:  # fmt: skip
        """Implement ``parallelize`` with stages: place the parameters that this rank's stages read."""
        mesh.axis_size(self.axis, "parallelize", "sl.Stages({})")
        inner = mesh.without(self.axis)
        paper = record(device=inner.device_type, **inner.axes)
        drafted, whole = placed(module, rules, mesh=paper, blank=True, **given)
        ranks = placing(self.schedule, mesh.axes[self.axis], self.per_rank)
        pipeline = Pipeline(self, mesh, inner, paper, ranks, whole, self._blocks(module))
        drafted.staged(pipeline, units_of(module, pipeline.blocks))
        pipeline.first = pipeline.first_cut(drafted, self._count(len(ranks)))
        if self.memory is not None:
            begins = pipeline.begins_within(drafted, bytes_in(self.memory))
            pipeline.first = pipeline.first_cut(drafted, begins)
        # its memory is the caller's
        pipeline.stages = replace(self, example=None)
        own = [n for n, at in pipeline.holders.items() if not pipeline.here.isdisjoint(at)]
        trained = {n for n, x in whole.items() if x.requires_grad}
        if own and spans_processes(mesh):
            inner = pipeline.inner = inner.for_model(bool(trained) and trained.isdisjoint(own))
        apply, params = placed(module, rules, mesh=inner, src=src, only=own, blank=blank, **given)
        pipeline.apply = apply
        apply.staged(pipeline, units_of(module, pipeline.blocks))
        assert inner.outer is not None
        inner.outer.staged = True
        if spans_processes(mesh):
            holders = {n: pipeline.holders[n] for n in own}
            inner.outer.hold(pipeline, holders, min(pipeline.here))
        return apply, params

    def _blocks(self, module: nn.Module) -> list[str]:
        names = list(self.blocks or blocks_of(module))
        known = dict(module.named_modules())
        for n in names:
            if n not in known:
                fix = "sl.Stages('pipe', blocks=[n for n, _ in model.named_children()])"
                raise _error(f"blocks: {type(module).__name__} has no submodule {n!r}", fix)
        if not names:
            why = f"{type(module).__name__} has no list of alike modules to cut between"
            raise _error(why, "sl.Stages('pipe', blocks=['encoder', 'decoder'])")
        return names

    def _count(self, number: int) -> int | Sequence[str]:
        """Return the number of stages, or their first blocks; ``number``: as many as are placed."""
        if self.cut == "auto":
            return number
        count = self.cut if isinstance(self.cut, int) else len(self.cut)
        if isinstance(self.cut, str) or count != number:
            why = f"cut={self.cut!r} does not give the {number} stages of {self.schedule!r}"
            raise _error(why, f"sl.Stages({self.axis!r}, cut={number})")
        return self.cut


def _error(why: str, fix: str) -> ShardError:
    return ShardError(why, op="parallelize", fix=fix)


@dataclass(eq=False)
class Pipeline:
    """A module cut into stages; ``print`` shows which blocks each stage has.

    ``mesh``    the whole mesh; ``inner`` that of one stage; ``paper`` the same for shapes alone.
    ``ranks``   of each stage, its place on the axis.
    ``whole``   all parameters of the module, as shapes.
    ``apply``   the call of the module.
    ``first``   the cut of its forward on example inputs.
    ``memo``    the cuts of a function on inputs of some shapes; the messages of a step's cuts; what
                stands for other stages' parameters on a mesh.
    ``on_values``  whether the module calls functions of sharded values, so that blocks will not do.
    """

    stages: Stages
    mesh: Mesh
    inner: Mesh
    paper: Mesh
    ranks: Sequence[int]
    whole: Params
    blocks: Sequence[str]
    apply: Any = None
    first: Cut = field(init=False)
    memo: Memo = field(default_factory=Memo)
    on_values: bool = False

    @property
    def here(self) -> set[int]:
        """Places on the axis whose stages this process runs: all of them under simulate."""
        if not spans_processes(self.mesh):
            return set(self.ranks)
        assert self.mesh.coord is not None
        return {self.mesh.coord[self.stages.axis]}

    def __str__(self) -> str:
        axis, size = self.stages.axis, self.mesh.axes[self.stages.axis]
        parts = " | ".join(self.first.named(s) for s in range(self.first.stages))
        return f"{self.first.stages} stages on {axis}={size}, {self.stages.schedule}: {parts}"

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Parameters -> the places on the axis whose stages read them, by first stage.

        One that is read by none is at the first place.
        """
        placed = [*zip(self.ranks, self.first.params, strict=True)]
        readers = {n: dict.fromkeys(r for r, read in placed if n in read) for n in self.whole}
        return {n: tuple(at or self.ranks[:1]) for n, at in readers.items()}

    @cached_property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Those of ``holders`` at several places."""
        return {n: at for n, at in sorted(self.holders.items()) if len(at) > 1}

    def tied(self, number: Mapping[str, int | None]) -> dict[str, tuple[int, ...]]:
        """Return those of ``shared`` that are trained: here now, or elsewhere when they were cut.

        ``number``  of the leaf of each parameter held here, None of a frozen one.
        """
        held = dict(zip(self.whole, frozen(list(self.whole.values())), strict=True))
        held |= {n: i is None for n, i in number.items()}
        return {n: ranks for n, ranks in self.shared.items() if not held[n]}

    def nbytes(self, name: str) -> int:
        """Return the bytes of one rank's block of a parameter's gradient."""
        x = self.whole[name]
        return x.raw.numel() * wider(x.dtype).itemsize

    def first_cut(self, apply: Apply, stages: int | Sequence[str | UnitCall]) -> Cut:
        """Cut forward on example inputs, where every axis has one rank, so that any size divides."""
        alone = record(device=self.inner.device_type, **dict.fromkeys(self.inner.axes, 1))
        params = {n: on_paper(x, alone) for n, x in self.whole.items()}
        failed: Exception | None = None
        module, own = apply.module, self.stages.example
        _refuse_in_training(module, only_calls=True)
        for example in example_inputs(module) if own is None else [own]:
            args, kwargs = called_with(example)
            if own is None:
                # guessed inputs have as many dimensions as their layouts
                layouts = map(apply.inputs.get, apply.named(len(args)))
                args = tuple(map(_of_its_rank, args, layouts))
            try:
                return cut_of(apply, alone, params, (args, kwargs), self.blocks, stages)[0]
            except Exception as e:
                # the module's own code may raise anything, and guessed inputs may not fit
                failed = failed or e
        if isinstance(failed, ShardError):
            raise failed
        cause = f"{type(failed).__name__}: {failed}" if failed else "no example inputs are known"
        why = f"the stages of {type(module).__name__} are not known: {cause}".splitlines()[0]
        raise Unsupported(why, op="parallelize", fix="sl.Stages('pipe', example=(inputs,))")

    def cuts_for(self, f: Callable[..., Any], batch: MicroBatches) -> tuple[Cut, ...]:
        """Return the cut of ``f(params, *args)`` for each micro-batch."""
        self.apply.copies.follow()
        # which submodules train, and which have hooks that take outputs
        modes = [(m.training, bool(m._forward_hooks)) for m in self.apply.module.modules()]
        # micro-batches differ in values alone
        key = f, batch.tree, tuple(spec_of(parts[0]) for parts in batch.parts), tuple(modes)
        return tuple(self._cut_for(f, key, batch, k) for k in range(batch.count))

    def _cut_for(self, f: Callable[..., Any], key: Any, batch: MicroBatches, k: int) -> Cut:
        """Return the cut for these shapes, and the branches that these values take."""
        told = [parts[k] for parts in batch.parts if tells(parts[k])]
        # of each branch: its cut, and values that are asked for, how they are computed and which
        branches: list[tuple[Cut, Answers, object]] = self.memo("cuts", key, list, 64)
        for cut, answers, values in branches:
            if answers.of(told) == values:
                return cut
        _refuse_in_training(self.apply.module)
        begins = self.first.begins
        cut, answers = cut_of(f, self.paper, self.whole, batch[k], self.blocks, begins)
        self._refuse_unheld(cut)
        branches[:] = [(cut, answers, answers.of(told)), *branches[:63]]
        return cut

    def begins_within(self, f: Callable[..., Any], memory: float) -> Sequence[UnitCall]:
        """Return where stages begin in the fastest cut of ``f`` that takes no more memory.

        Of twice as many micro-batches as ranks: more take no more, but under gpipe.
        Raises: ShardError where no cut does, with the least that one takes.
        """
        how, size = self.stages, self.mesh.axes[self.stages.axis]
        order = f"per_rank={how.per_rank}, schedule={how.schedule!r}"
        mine = f"sl.Stages({how.axis!r}, {order}, memory={how.memory!r}, example=(inputs,))"
        if how.cut != "auto" or how.example is None:
            why = "memory= takes cut='auto', and as example= the arguments for a micro-batch"
            raise _error(why, mine)
        batch = MicroBatches(*called_with(how.example), 1, stage=self.inner)
        peaks = partial(StepPrices(self, f, batch, cluster_of("h100")).peaks, self._table(2 * size))
        within = fitting(self.first.chain, self.ranks, peaks)
        found, held = within(memory)
        if found:
            return found
        limit = math.inf
        while (more := within(limit))[0]:
            found, held = more
            limit = max(held) - 1
        most, at = max(held), ", ".join(map(str, found))
        why = (
            f"every cut holds more than {memory:,.0f} B; the least is {most:,} B, at {how.axis}="
            f"{held.index(most)} where stages begin at {at}"
        )
        raise _error(why, mine.replace(f"memory={how.memory!r}", f"memory={most}"))

    def _refuse_unheld(self, cut: Cut) -> None:
        """Refuse a function in which a stage reads a parameter that its rank does not hold."""
        for rank, read in zip(self.ranks, cut.params, strict=True):
            for name in (n for n in read if rank not in self.holders[n]):
                where = f"{self.stages.axis}={rank}"
                why = f"the function reads {name!r} at {where}, and the module does not"
                fix = "loss = lambda params, *batch: apply(params, *batch).mean()"
                raise ShardError(why, op="value_and_grad", mesh=self.mesh, fix=fix)

    def _table(self, micros: int) -> PipelineSchedule:
        """Return the schedule of so many micro-batches.  Raises: ShardError for other ranks."""
        name, axis = self.stages.schedule, self.stages.axis
        table = schedule(name, self.mesh.axes[axis], micros, self.stages.per_rank)
        if table.ranks != tuple(self.ranks):
            why = f"{name!r} was registered anew, with stages on other ranks than in the cut"
            fix = f"sl.parallelize(module, rules, stages=sl.Stages({axis!r}, schedule={name!r}))"
            raise ShardError(why, op="value_and_grad", mesh=self.mesh, fix=fix)
        return table

    def completed(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the parameters with NaN for those of other stages, in the memory of one element."""
        if len(params) == len(self.whole):
            return params
        mesh = next((x.mesh for x in params.values()), self.inner)

        def absent() -> dict[str, Tensor]:
            specs = {n: spec_of(x) for n, x in self.whole.items()}
            return {n: s.value(s.nan(mesh), mesh) for n, s in specs.items()}

        # what is kept holds the mesh, so no other has its number
        return {**self.memo("absent", id(mesh), absent), **params}

    def step(
        self, f: Callable[..., Any], params: Any, batch: MicroBatches, sums: GradientSums
    ) -> Tensor:
        """Run forward and backward of every micro-batch; gradients are added to ``sums``."""
        leaves = optree.tree_leaves(params)
        trains = any(x.requires_grad for x in self.whole.values())
        held = any(x.requires_grad for x in leaves) or all(frozen(leaves))
        if spans_processes(self.mesh) and trains and not held:
            # after the module was cut
            why = "all parameters of this rank's stages are frozen, and others are trained"
            fix = "module.get_submodule(name).requires_grad_(False)  # before sl.parallelize"
            raise Unsupported(why, op="value_and_grad", mesh=self.mesh, fix=fix)
        cuts = self.cuts_for(f, batch)
        make = lambda: Traffic(cuts, self._table(batch.count), self.inner, self.here)  # noqa: E731
        # of the last steps, since branches on values may combine in many ways
        traffic = self.memo("traffic", cuts, make, 16)
        return PipelineStep(self, f, traffic, batch, sums).run()

    def explained(
        self, f: Callable[..., Any], batch: MicroBatches, cluster: Cluster,
        tx: Transform | None, params: Any,
    ) -> PipelineExplanation:  # fmt: skip
        """Explain a step, see ``StepPrices``."""
        prices = StepPrices(self, f, batch, cluster, tx, params)
        return prices.explained(self._table(batch.count), self.cuts_for(f, batch))

    def forward(self, params: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run forward alone; return its result on every rank.

        Raises: Unsupported where a gradient could be asked for.
        """
        if torch.is_grad_enabled() and any(x.requires_grad for x in optree.tree_leaves(params)):
            why = "gradients of a module in stages are those of a step"
            fix = "with torch.no_grad(): out = apply(params, x)  # or sl.value_and_grad(loss)"
            raise Unsupported(why, op="apply", mesh=self.mesh, fix=fix)
        batch = MicroBatches(args, kwargs, 1, stage=self.inner)
        cuts = self.cuts_for(self.apply, batch)
        rows: list[list[Action]] = [[] for _ in {*self.ranks}]
        for s, rank in enumerate(self.ranks):
            rows[rank].append(Action("F", s, 0))
        table = PipelineSchedule("forward", 1, tuple(self.ranks), tuple(map(tuple, rows)))
        traffic, sums = Traffic(cuts, table, self.inner, self.here), GradientSums(params, ())
        with within(), within(mesh=self.inner):
            return PipelineStep(self, self.apply, traffic, batch, sums).run()


@case_of("pipeline")
def _schedules(
    loss: Callable[..., Any], params: Any, inputs: Inputs = (), microbatches: int = 1,
    cluster: str | Cluster = "h100", tx: Transform | None = None,
) -> Why:  # fmt: skip
    """List the cost of a step of a module in stages under every schedule, for ``sl.why``."""
    pipeline, batch = call_of_stages(loss, params, inputs, microbatches, "why")
    prices = StepPrices(pipeline, loss, batch, cluster_of(cluster), tx, params)
    memory = prices.cluster.memory
    own, count = pipeline.stages, len(pipeline.ranks)
    size = pipeline.mesh.axes[own.axis]
    begins: dict[int, Sequence[UnitCall]] = {count: pipeline.first.begins}
    # what is written after sl.Stages -> the step
    found: dict[str, PipelineExplanation] = {}
    verdicts: list[tuple[str, str]] = []
    for name, v in offered(own.per_rank):
        text = f"per_rank={v}, schedule={name!r}"
        try:
            table = schedule(name, size, batch.count, v)
            cut, said = prices.cut_at(table, begins.get(table.stages, table.stages))
        except ShardError as e:
            verdicts.append((name, e.message.splitlines()[0]))
            continue
        begins[table.stages], found[text] = cut.begins, said
        verdicts.append((name, said.summary(memory)))
        if said.peak <= memory:
            continue
        if at := fitting(cut.chain, table.ranks, partial(prices.peaks, table))(memory)[0]:
            names = [str(c) for c in at]
            found[f"cut={names}, {text}"] = said = prices.cut_at(table, at)[1]
            verdicts.append((f"{name} cut at {', '.join(names)}", said.summary(memory)))
    notes = [f"{n} stages begin at {', '.join(map(str, c))}" for n, c in begins.items()]
    fits = [text for text, x in found.items() if x.peak <= memory]
    best = min(fits, key=lambda text: found[text].seconds, default=None)
    if best not in (None, f"per_rank={count // size}, schedule={own.schedule!r}"):
        notes.append(f"the fastest: sl.Stages({own.axis!r}, {best})")
    given = {"stages": str(pipeline), "microbatches": f"{batch.count} micro-batches"}
    return Why("pipeline", given, own.schedule, tuple(verdicts), tuple(notes))


def _refuse_in_training(module: nn.Module, only_calls: bool = False) -> None:
    """Refuse statistics of a batch, which would be those of each micro-batch, and LayerDrop."""
    for m in (m for m in module.modules() if m.training):
        drops = getattr(m, "layerdrop", getattr(getattr(m, "config", None), "layerdrop", 0))
        if isinstance(drops, float) and drops > 0:
            why = f"{type(m).__name__} in training skips blocks at random (layerdrop={drops})"
            fix = "module.eval()  # or module.layerdrop = 0.0"
            raise Unsupported(why, op="parallelize", fix=fix)
        norms = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
        if isinstance(m, norms) and not only_calls:
            why = f"{type(m).__name__} in training takes the statistics of each micro-batch alone"
            fix = "module.eval()  # or a norm over features, as nn.GroupNorm(8, channels)"
            raise Unsupported(why, op="value_and_grad", fix=fix)


def _of_its_rank(x: Tensor, layout: Layout | None) -> Tensor:
    more = 0 if layout is None or layout.ellipsis is not None else x.ndim - len(layout.dims)
    return x.flatten(0, more) if more > 0 else x
