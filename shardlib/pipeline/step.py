"""One step of a pipeline: forwards and backwards of all micro-batches, in the order of a schedule.

Each rank performs the actions of its row of the table.  A forward keeps what its backward needs;
blocks are sent straight to the ranks whose stages need them.  Where one process runs all ranks, it
performs the actions of all rows in the order of the table's timeline.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib._compat import tree_flatten, tree_unflatten
from shardlib.collectives import checking, pbroadcast, spans_processes, unwrap, wrap
from shardlib.collectives.count import note
from shardlib.collectives.point_to_point import Message, Messages
from shardlib.errors import RankFailed, ShardError, StageFailed
from shardlib.grad import GradientSums, loss_block, with_block
from shardlib.mesh import Mesh, bind, current_job, scope, within
from shardlib.microbatches import MicroBatches
from shardlib.pipeline.cut import Cut
from shardlib.pipeline.forward import (
    RESULT,
    AllSent,
    Output,
    OutputSpec,
    StageForward,
    block_of_output,
    block_that_crosses,
    spec_of,
)
from shardlib.pipeline.schedules import Action, PipelineSchedule, timeline
from shardlib.random import Draws
from shardlib.tensor.gradients import mapped
from shardlib.tensor.weight_gradients import WeightGradients


class Crossing(NamedTuple):
    """Message between two stages: "F" or "B", the output, its micro-batch, the stage that uses it."""

    direction: str
    output: Output
    micro: int
    user: int

    def __str__(self) -> str:
        gradient = "the gradient of " if self.direction == "B" else ""
        return f"{gradient}{self.output.call} (stage {self.user}, micro-batch {self.micro})"


@dataclass
class Forwarded:
    """Tensors that a forward of a stage leaves for its backward.

    ``received``  blocks of outputs of earlier stages, leaves of autograd.
    ``made``      blocks of outputs that later stages need.
    ``leaves``    blocks of the parameters.
    """

    received: dict[Output, Tensor]
    made: dict[Output, Tensor]
    leaves: Sequence[Tensor]
    loss: Tensor | None = None
    later: WeightGradients | None = None


class Traffic:
    """Messages of a table, listed once for all steps whose micro-batches have these cuts.

    ``receives``  of an action: (label, the stage that sends it) of each message that it needs.
    ``sends``     of an action: (label, the stage that gets it) of each message that it sends.
    ``between``   (rank, rank) -> what the first sends to the second, in the order of its actions.
    ``actions``   of all ranks, in the order of a timeline; ``own`` those of the ranks ``here``.
    ``parted``    stages and micro-batches whose backward is an I and a W.
    ``ends``      of ``own``, see ``last_gradients``.
    """

    def __init__(
        self, cuts: Sequence[Cut], table: PipelineSchedule, inner: Mesh, here: Container[int]
    ) -> None:
        self.cuts, self.table = cuts, table
        self.actions = [*timeline(table).begins]
        self.kinds = {a.kind for a in self.actions}
        self.parted = {(a.stage, a.micro) for a in self.actions if a.kind == "I"}
        self.sends: dict[Action, list[tuple[Crossing, int]]] = defaultdict(list)
        self.receives: dict[Action, list[tuple[Crossing, int]]] = defaultdict(list)
        for micro, cut in enumerate(cuts):
            for output, user in ((k, user) for k, users in cut.users.items() for user in users):
                maker = cut.owner[output.call]
                ways = [("F", maker, user)] + [("BI", user, maker)] * cut.spec(output).grad
                for kinds, source, target in ways:
                    label = Crossing(kinds[0], output, micro, user)
                    for kind in kinds:
                        self.sends[Action(kind, source, micro)].append((label, target))
                        self.receives[Action(kind, target, micro)].append((label, source))
        self.between: dict[tuple[int, int], list[Message]] = defaultdict(list)
        # numbers of messages, and of the last that arrived: those before it arrived too
        numbers: dict[Crossing, int] = {}
        arrived: Counter[tuple[int, int]] = Counter()
        for a in self.actions:
            rank = table.ranks[a.stage]
            for label, stage in self.receives[a]:
                way = table.ranks[stage], rank
                arrived[way] = max(arrived[way], numbers[label])
            for label, stage in self.sends[a]:
                spec, to = cuts[a.micro].spec(label.output), table.ranks[stage]
                message = Message(label, spec.stored(inner), spec.dtype, arrived[to, rank])
                self.between[rank, to].append(message)
                numbers[label] = len(self.between[rank, to])
        self.own = [a for a in self.actions if table.ranks[a.stage] in here]
        self.ends = last_gradients(self.own, cuts)


def last_gradients(actions: Iterable[Action], cuts: Sequence[Cut]) -> dict[Action, list[str]]:
    """Return an action -> the parameters of which no later one makes gradients."""
    backward = [a for a in actions if a.kind in "BW"]
    last = {n: a for a in backward for n in cuts[a.micro].params[a.stage]}
    return {a: [n for n in last if last[n] == a] for a in last.values()}


class PipelineStep:
    """A step; ``run`` returns the loss, and adds gradients to ``sums``.

    ``cuts``    the cut of each micro-batch.
    ``firsts``  of each, the count of draws before its first.
    """

    def __init__(
        self, pipeline: Any, f: Callable[..., Any], traffic: Traffic,
        batch: MicroBatches, sums: GradientSums,
    ) -> None:  # fmt: skip
        # the pipeline, and what the call of the module knows as such
        self.pipeline = self.module = pipeline
        self.f, self.traffic = f, traffic
        self.cuts, self.table, self.train = traffic.cuts, traffic.table, traffic.kinds > {"F"}
        self.batch, self.sums = batch, sums
        self.mesh, self.inner, self.axis = pipeline.mesh, pipeline.inner, pipeline.stages.axis
        self.real = spans_processes(self.mesh)
        self.ranks = self.table.ranks
        self.firsts = [*accumulate((c.draws for c in self.cuts), initial=Draws.begun(self.inner))]
        self.draws = self.firsts[-1] > self.firsts[0]
        # runs the module on blocks alone
        self.blocks: Any = None
        self.kept: dict[tuple[int, int], Forwarded] = {}
        # the loss so far, of forwards alone the result
        self.result: Any = None
        self.ghosts: dict[Any, Tensor] = {}
        self.tied = pipeline.tied(sums.number) if self.train and pipeline.shared else {}
        # timelines that are open
        self.lines: list[Any] = [t for t in scope().listeners.traces if hasattr(t, "phase")]
        here = pipeline.here
        coming = {r: self._coming(r, min(here)) for r in {*self.ranks} - here}
        self.messages = Messages(self.mesh, self.axis, coming)

    def run(self) -> Any:
        """Perform all actions; return the loss, of forwards alone the result, on every rank."""
        do = self._recorded if self.lines else self._do
        with ExitStack() as stack:
            if self._alone():
                params = self.sums.leaves(again=True).arguments[0]
                self.blocks = stack.enter_context(self.pipeline.apply.on_blocks(params))
            for i, action in enumerate(self.traffic.own):
                # the next action's receives are posted before this one computes
                for coming in self.traffic.own[i : i + 2]:
                    for label, source in self.traffic.receives[coming]:
                        self.messages.expect(label, self.ranks[source])
                do(action)
        if self.train and self.real:
            self._add_ties()
        self.messages.finish()
        Draws.passed(self.inner, self.firsts[-1])
        self.count()
        leaves, tree = tree_flatten(self.cuts[0].result)
        here = [None] * len(leaves) if self.result is None else tree_flatten(self.result)[0]
        return tree_unflatten(list(map(self._everywhere, here, leaves)), tree)

    def _alone(self) -> bool:
        """Check whether a stage has one rank and does only what torch alone does.

        Draws, traces, checks and recomputation are those of sharded values.
        """
        watched = scope().listeners.traces or checking()
        again = self.draws or self.pipeline.apply.remat
        on_values = self.pipeline.on_values or hasattr(self.sums.params, "opened")
        return self.real and self.inner.size == 1 and not (watched or again or on_values)

    def _coming(self, rank: int, to: int) -> Iterator[Message]:
        """List the messages from a rank to another, in the order in which it sends them."""
        yield from self.traffic.between[rank, to]
        for name, ranks in self.tied.items():
            if rank in ranks and to in ranks:
                g = self.sums.of(name)
                yield Message(("tied", name, rank), tuple(g.shape), g.dtype)

    def _add_ties(self) -> None:
        """Add up the gradients of parameters that the stages of several ranks read."""
        (me,) = self.pipeline.here
        tied = {n: ranks for n, ranks in self.tied.items() if me in ranks}
        for name, ranks in tied.items():
            for rank in ranks:
                if rank != me:
                    self.messages.send(("tied", name, me), self.sums.of(name), rank)
                    self.messages.expect(("tied", name, rank), rank)
        self.sums.land()
        for name, ranks in tied.items():
            parts = [
                self.sums.of(name) if r == me else self.messages.take(("tied", name, r))
                for r in sorted(ranks)
            ]
            # in one order on all ranks, so that copies stay equal bit for bit
            self.sums.set(name, sum(parts[1:], parts[0]))

    def count(self) -> None:
        """Count the messages of all ranks in the traces, on every rank alike."""
        if not (traces := scope().listeners.traces):
            return
        for a in self.traffic.actions:
            for label, stage in self.traffic.sends[a]:
                if self.ranks[stage] != self.ranks[a.stage]:
                    n = self.cuts[a.micro].spec(label.output).nbytes
                    note(traces, "send", (self.axis,), n, self.table.size, 1)
        for name, ranks in self.tied.items():
            n, sends = self.pipeline.nbytes(name), len(ranks) * (len(ranks) - 1)
            note(traces, "send", (self.axis,), n * sends, self.table.size, sends)

    def _do(self, a: Action) -> None:
        doing = {"F": self._forward, "W": self._weights}.get(a.kind, self._backward)
        ended = self._ended(a)
        try:
            with self.sums.ending(ended) if ended else nullcontext():
                doing(a)
        except (RankFailed, StageFailed):
            raise
        except Exception as e:
            raise self._failed(a, e) from e

    def _ended(self, a: Action) -> list[int]:
        """List the leaves of which an action makes the last gradients, but those that ranks add up."""
        names = () if self.sums.parts else self.traffic.ends.get(a, ())
        done = (self.sums.number.get(n) for n in names if not (self.real and n in self.tied))
        return [i for i in done if i is not None]

    def _recorded(self, a: Action) -> None:
        """Do an action; in timelines it begins when its messages are there."""
        for label, _ in self.traffic.receives[a]:
            self.messages.here[label] = self.messages.take(label)
        about: Any = {
            "module": self.cuts[a.micro].named(a.stage), "type": self.table.name,
            "action": [self.ranks[a.stage], *a], "backward": a.kind != "F",
        }  # fmt: skip
        with ExitStack() as spans:
            for line in self.lines:
                spans.enter_context(line.phase(str(a), **about))
            self._do(a)

    def _failed(self, a: Action, e: Exception) -> StageFailed:
        part = {"F": "forward", "W": "gradients of weights"}.get(a.kind, "backward")
        text = (str(e) or type(e).__name__).splitlines()[0]
        where = f"stage {a.stage} ({self.cuts[a.micro].named(a.stage)})"
        why = f"{where}, {part} of micro-batch {a.micro}: {type(e).__name__}: {text}"
        fix = getattr(e, "fix", None) or "sl.value_and_grad(loss, microbatches=1)  # to look at one"
        failed = StageFailed(why, op="value_and_grad", mesh=self.mesh, fix=fix)
        if self.real and (job := current_job()) is not None:
            # the others wait for this rank, also if its caller catches the error
            job.raised(failed.with_traceback(e.__traceback__))
        return failed

    def _forward(self, a: Action) -> None:
        raws = {label.output: self.messages.take(label) for label, _ in self.traffic.receives[a]}
        versions = [x._version for x in raws.values()]
        try:
            kept = self._run_stage(a, raws)
        except ShardError:
            if self.blocks is None or versions != [x._version for x in raws.values()]:
                raise
            self.blocks = None
            kept = self._run_stage(a, raws)
            # the module calls functions of sharded values
            self.pipeline.on_values = True
        if self.train:
            self.kept[a.stage, a.micro] = kept
        for label, user in self.traffic.sends[a]:
            block, spec = kept.made[label.output].detach(), self.cuts[a.micro].spec(label.output)
            self._refuse_unlike(a, block, spec, f"stage {user} expects {label.output.call} as")
            self.messages.send(label, block, self.ranks[user])

    def _refuse_unlike(self, a: Action, x: Tensor, spec: OutputSpec, expects: str) -> None:
        """Refuse to send a block that is not as the cut says, for which its receivers wait."""
        shape = spec.stored(self.inner)
        if x.shape == shape and x.dtype == spec.dtype:
            return
        fix = "apply.stages.memo.clear()  # cuts the module as it is now"
        # other ranks are told this line alone
        why = f"{expects} {spec.dtype}{[*shape]}, and it is {x.dtype}{[*x.shape]}: {fix}"
        raise self._failed(a, ShardError(why, fix=fix))

    def _run_stage(self, a: Action, raws: dict[Output, Tensor]) -> Forwarded:
        """Run the function on one stage, with the blocks that it received."""
        cut = self.cuts[a.micro]
        received: dict[Output, Tensor] = {}
        given: dict[Output, Tensor] = {}
        for k, raw in raws.items():
            spec, raw = cut.spec(k), raw.detach()
            if spec.grad:
                received[k] = raw.requires_grad_()
                # in the same memory, and may be written in place, as a leaf may not
                raw = mapped(raw, lambda g: g, Tensor.detach)
            given[k] = raw if self.blocks else spec.value(raw, self.inner, spec.grad)
        draws = Draws(self.inner, self.firsts[a.micro]) if self.draws else None
        stage = StageForward(
            pipeline=self.module, blocks=self.blocks, mesh=self.inner, cut=cut, number=a.stage,
            wanted=frozenset(cut.makes[a.stage]), given=given, draws=draws, ghosts=self.ghosts,
        )  # fmt: skip
        leaves = self.sums.leaves(again=self.blocks is not None)
        parted = (a.stage, a.micro) in self.traffic.parted
        loss = None
        args, kwargs = self.batch[a.micro]
        inside = within(
            stage=stage, differentiated=self.train, split_backward=parted,
            **({"draws": draws.instead} if draws else {}),
        )  # fmt: skip
        with inside, torch.set_grad_enabled(self.train):
            try:
                out = self.f(leaves.arguments[0], *args, **kwargs)
                stage.next_call(RESULT.unit)
                if a.stage == self.table.stages - 1 and self.train:
                    loss = self._add_loss(out, a.micro)
                elif a.stage == self.table.stages - 1:
                    self.result = out
            except AllSent:
                pass
        made = {k: block_that_crosses(stage.found[k]) for k in cut.makes[a.stage]}
        return Forwarded(received, made, leaves.wanted, loss)

    def _add_loss(self, loss: Tensor, micro: int) -> Tensor:
        """Add a micro-batch's share to the loss of the step; return what backward starts from."""
        share = self.batch.part(loss_block(loss), micro)
        done = share.detach() if self.result is None else loss_block(self.result) + share.detach()
        self.result = with_block(loss.detach(), done)
        return share

    def _backward(self, a: Action) -> None:
        kept, split = self.kept.pop((a.stage, a.micro)), a.kind == "I"
        # an output that several stages use is there for each of them
        ends = [(kept.made[x.output], self.messages.take(x)) for x, _ in self.traffic.receives[a]]
        if kept.loss is not None:
            ends.append((kept.loss, torch.ones_like(kept.loss)))
        ends = [(x, g) for x, g in ends if x.requires_grad]
        later = WeightGradients(kept.leaves) if split else None
        if ends:
            roots, grads = zip(*ends, strict=True)
            with within(later=later) if later else nullcontext():
                self.sums.backward(kept.leaves, roots, grads, [*kept.received.values()], split)
        for label, source in self.traffic.sends[a]:
            x = kept.received[label.output]
            g = torch.zeros_like(x) if x.grad is None else x.grad
            self.messages.send(label, g, self.ranks[source])
        if split:
            # only what the gradients of weights need is kept
            self.kept[a.stage, a.micro] = Forwarded({}, {}, kept.leaves, later=later)

    def _weights(self, a: Action) -> None:
        kept = self.kept.pop((a.stage, a.micro))
        assert kept.later is not None, "a checked table has I before W"
        edges, grads = kept.later.run()
        if edges:
            self.sums.backward(kept.leaves, edges, grads)

    def _everywhere(self, x: Any, like: Any) -> Any:
        """Return a value of the last stage on every rank; ``like``: the value on shapes.

        It is on the mesh that the results of all models have.
        """
        if not self.real:
            return x
        if not isinstance(like, Tensor):
            return like
        spec = spec_of(like)
        raw = torch.zeros(spec.stored(self.inner), dtype=spec.dtype, device=self.inner.device)
        if x is not None:
            raw = block_of_output(x).detach()
            a = Action("F", self.table.stages - 1, 0)
            self._refuse_unlike(a, raw, spec, "every rank expects the result as")
        with bind(self.mesh):
            # a transfer has one dimension at least
            sent = wrap(raw[None], self.mesh)
            raw = unwrap(pbroadcast(sent, self.axis, self.ranks[-1]))[0]
        return spec.value(raw, self.mesh.without(self.axis))
