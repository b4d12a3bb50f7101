"""Explain a function of sharded tensors: each operation's layouts, algorithm, bytes and memory.

Nothing runs: blocks are on the meta device and the mesh is only a mapping of names to sizes, so
a plan for 512 ranks takes as long as one for two.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from shardlib.collectives import Event, Trace, trace
from shardlib.cost import lower_bound
from shardlib.errors import ShardError, Unsupported, user_line
from shardlib.grad import (
    GradientSums,
    accumulate,
    check_parts,
    deferring,
    pipeline_of,
    staged_mesh,
    with_sums,
)
from shardlib.mesh import Mesh, MeshLike, axis_sizes, record, within
from shardlib.microbatches import MicroBatches
from shardlib.modules.dim_trace import called_with
from shardlib.modules.paths import Paths
from shardlib.ops.matmul.prefetch import planned
from shardlib.ops.registry import Match
from shardlib.opspec import Args, Func, Kwargs
from shardlib.optim.buckets import Buckets, Index
from shardlib.optim.index import IndexCache
from shardlib.optim.sink import Sink
from shardlib.optim.stage3 import Parts
from shardlib.optim.tiered import TieredParts
from shardlib.optim.transform import Step, Transform, run_in_place
from shardlib.placing import padded_size, shard
from shardlib.planning.cluster import Cluster, cluster_of
from shardlib.planning.constant_folding import Known
from shardlib.planning.explanation import Explanation, Row
from shardlib.planning.tier_use import Note, PaperParts, TierReplay
from shardlib.planning.work import Meter, StepWork
from shardlib.tensor import ShardedTensor, Together, raw_of, settle, typeof

T = TypeVar("T")
Inputs = Tensor | Sequence[object] | Mapping[str, object]
LaterBuckets = tuple[IndexCache, Index]


def explain(
    apply: Callable[..., object],
    params: object,
    inputs: Inputs = (),
    *,
    mesh: MeshLike | Mapping[str, int] | None = None,
    backward: bool = True,
    tx: Transform | None = None,
    microbatches: int | None = None,
    cluster: str | Cluster = "h100",
) -> Explanation:
    """Run ``apply(params, *inputs)`` on the meta device and list every operation with its cost.

    ``inputs``    a tensor, a tuple of arguments or a dict of keyword arguments; only shapes are
                  read.
    ``mesh``      sizes to plan for, as ``{"x": 16, "y": 32}``; the parameters' own mesh if None.
    ``backward``  also the gradients of ``params``.
    ``tx``        an optimizer's transform, whose state is then part of the peak.  With ``zero``,
                  gradients go into its buckets, as in ``value_and_grad(..., into=tx)``, and the peak
                  is that of a step behind the first and its update, whose buckets are reused; of
                  the first if it needs more because gradients come in another order; at
                  stage 3 pass it with ``tx.shard(params)``.  The update's own transfers are not
                  counted.

    ``microbatches``  of a step, in which ``inputs`` are cut, as ``value_and_grad`` does; ``apply`` is
                  then a loss.  Of a module in stages the result, a ``PipelineExplanation``, has
                  each stage's cost and the timeline of the schedule.
    ``cluster``   the speed and the links by which the seconds of stages and of memory tiers are
                  priced, as ``sl.planning.plan`` takes it; links that ``sl.probe`` measured go before its own.
    Raises: the errors of ``apply``, for example UnevenSplit at another size; Unsupported, with the
    submodule, where a module's own code raises on the meta device.

    >>> import torch, shardlib as sl; from torch import nn
    >>> with sl.simulate(x=2, y=2):
    ...     rules = [("weight", "y x"), ("bias", "y")]
    ...     apply, params = sl.parallelize(nn.Linear(64, 64), rules, inputs={"input": "x y"})
    >>> plan = sl.explain(apply, params, torch.empty(128, 64), mesh={"x": 4, "y": 8})
    >>> print(plan.rows[0].op, plan.rows[0].algorithm, plan.forward.bytes)
    linear summa 8704
    """
    leaves = _of(ShardedTensor, params)
    if not leaves:
        fix = "sl.explain(apply, sl.shard(params, '...'), inputs)"
        raise ShardError("no parameter is sharded", op="explain", fix=fix)
    own = leaves[0].mesh
    check_parts(microbatches)
    if staged_mesh(params) is not None:
        pipeline, batch = call_of_stages(apply, params, inputs, microbatches or 1)
        return pipeline.explained(apply, batch, cluster_of(cluster), tx, params)
    if mesh is None:
        mesh = own
    sizes = dict(axis_sizes(mesh))
    make = partial(record, device=getattr(mesh, "device_type", own.device_type), **sizes)
    call = _Call(apply, params, called_with(inputs), make, [], [], [])
    with Paths() as paths:
        try:
            how = tx, paths, backward, microbatches
            found = planned(partial(call.rehearse, microbatches), lambda: call.explain(*how))
            if isinstance(params, TieredParts):
                return _in_tiers(found, params, call, cluster_of(cluster), microbatches)
            return found
        except ShardError:
            raise
        except Exception as e:
            # raised by the code of a foreign module
            raise _refused(e, paths, inputs, sizes) from e


def call_of_stages(
    f: Callable[..., Any], params: object, inputs: Inputs, count: int, op: str = "explain"
) -> tuple[Any, MicroBatches]:
    """Return the module in stages that a loss calls, and the micro-batches of a step.

    Raises: ShardError for another module.
    """
    stage = staged_mesh(params)
    if stage is None:
        why = "the parameters are not those of a module in stages, which has micro-batches"
        fix = 'apply, params = sl.parallelize(model, rules, stages=sl.Stages("pipe"))'
        raise ShardError(why, op=op, fix=fix)
    batch = MicroBatches(*called_with(inputs), count, stage=stage)
    return pipeline_of(f, params, batch), batch


def _refused(
    error: Exception, paths: Paths, inputs: object, sizes: Mapping[str, int]
) -> ShardError:
    """Build the error for a forward that does not run on the meta device: where, why, and a fix."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    where = f"module {paths.where(error)!r}" if paths.where(error) else "what was given"
    given = _of(Tensor, inputs)
    stars = {dict: "**inputs", tuple: "*inputs", list: "*inputs"}.get(type(inputs), "inputs")
    runs = f"with sl.trace() as t: apply(params, {stars})"
    if any(word in str(error) for word in ("meta", "item()", "data-dependent", "_local_scalar")):
        why = f"asks for values, and on paper there are none: {text}"
    else:
        why = f"raised {type(error).__name__}: {text}"
    return Unsupported(
        f"forward does not run on shapes alone: {where} {why}",
        op="explain",
        operands={"inputs": ", ".join(typeof(x) for x in given)} if given else {},
        mesh=sizes,
        fix=f"{runs}  # counts the same of a run, or raises the same where the module itself does",
    )


class _Call(NamedTuple):
    """The call to explain; ``make`` opens the mesh that it is planned for.

    ``notes``   what happens to parameters in memory tiers; ``rounds`` the same of each micro-batch.
    ``later``   the buckets of steps behind the first, where they are others.
    """

    apply: Callable[..., Any]
    params: object
    inputs: tuple[Args, Kwargs]
    make: Callable[[], Mesh]
    notes: list[Note]
    rounds: list[list[Note]]
    later: list[LaterBuckets]

    @contextmanager
    def opened(self) -> Iterator[tuple[Mesh, object, tuple[Args, Kwargs]]]:
        """Open the mesh; yield it, and the parameters and the inputs on it."""
        self.notes.clear()
        with self.make() as paper, Known():
            yield paper, *papers((self.params, self.inputs), paper, self.notes)

    def rehearse(self, count: int | None) -> None:
        """Run forward alone first: products learn which of their operands are read again.

        Of micro-batches one runs: with other rows a product may have another layout.
        """
        with self.opened() as (_, params, (args, kwargs)), torch.no_grad():
            if count is not None:
                args, kwargs = MicroBatches(args, kwargs, count)[0]
            self.apply(params, *args, **kwargs)

    def explain(
        self, tx: Transform | None, paths: Paths, backward: bool, count: int | None
    ) -> Explanation:
        """Explain a step behind the first, from which on buckets are in the order of gradients.

        If they were in another, the most bytes may be the first step's.
        """
        found = self.once(tx, paths, backward, count)
        if not self.later:
            return found
        self.rounds.clear()
        with using(self.later):
            later = self.once(tx, paths, backward, count)
        return replace(later, transient=max(found.transient, later.transient))

    def once(
        self, tx: Transform | None, paths: Paths, backward: bool, count: int | None
    ) -> Explanation:
        """Explain a step in the buckets that there are."""
        if count is not None:
            return self.accumulated(count, tx, paths)
        with self.opened() as (paper, params, (args, kwargs)), trace() as t:
            watch = CallRecorder(t, paper.size, backward, paths)
            trained = [x for x in _of(ShardedTensor, params) if x.raw.requires_grad]
            raws = [x.raw for x in trained]
            state, sink = state_of(tx, params), None
            if backward and trained:
                sink = sink_of(tx, params)
            if sink is not None:
                # as value_and_grad(into=) does
                for i, x in enumerate(trained):
                    x.place = deferring(x, sink.over)
                    x.raw.register_hook(partial(watch.counted, sink.take, i))
            together = _Together(raws if sink is None else [], watch)
            work = StepWork()
            with new_pool(sink), together, Meter(work) as live:
                watch.live = live
                with within(watcher=watch):
                    out = self.apply(params, *args, **kwargs)
                saved = live.now
                grads: Any = None
                if backward:
                    grads = watch.back(out, raws, together, sink)
                    del out
                work.add(t.events)
                self.later.extend(later := later_buckets([sink]))
                most = _steady(live, tx, params, grads, state, not later)
        self.rounds.append(self.notes)
        return Explanation(
            watch.rows, dict(paper.axes), bytes_of(params), most, bytes_of(state), saved, work=work
        )

    def accumulated(self, count: int, tx: Transform | None, paths: Paths) -> Explanation:
        """Explain a step of so many micro-batches: the first, one for all between, and the last."""
        with self.opened() as (paper, params, (args, kwargs)), trace() as t:
            watch = CallRecorder(t, paper.size, True, paths)
            state, sink = state_of(tx, params), sink_of(tx, params)
            sums = _CountedSums(params, sink, watch)
            work, saved = StepWork(), []

            def loss(*given: Any, **how: Any) -> Any:
                with within(watcher=watch):
                    out = self.apply(*given, **how)
                saved.append(live.now)
                watch.turn(watch.rows[-1] if watch.rows else None)
                return out

            with new_pool(sink), Meter(work) as live:
                watch.live = live
                batch = MicroBatches(args, kwargs, count)
                for k in sorted({0, min(1, count - 1), count - 1}):
                    live.work, events, rows = StepWork(), len(t.events), len(watch.rows)
                    begun = len(self.notes)
                    accumulate(loss, batch, k, sums)
                    if k == count - 1:
                        grads = watch.counted(sums.finish)
                    watch.turn(None)
                    live.work.add(t.events[events:])
                    times = count - 2 if 0 < k < count - 1 else 1
                    work.join(live.work, times)
                    watch.rows += watch.rows[rows:] * (times - 1)
                    self.rounds.extend([self.notes[begun:]] * times)
                watch.close()
                del sums
                self.later.extend(later := later_buckets([sink]))
                most = _steady(live, tx, params, grads, state, not later)
        return Explanation(
            watch.rows, dict(paper.axes), bytes_of(params), most, bytes_of(state), saved[0],
            work=work,
        )  # fmt: skip


def new_pool(sink: Sink | None) -> AbstractContextManager[object]:
    """Return a context in which buckets are made as in a first step."""
    if sink is None:
        return nullcontext()
    return sink.memory.anew()


def _steady(
    live: Meter, tx: Transform | None, params: Any, grads: Any, state: Any, stay: bool
) -> int:
    """Return the most bytes of a step behind the first: ZeRO's buckets are there when it begins.

    ``stay``   whether the first step keeps its buckets; of others it is that step's.
    ``grads``  as the step gives them, or a list for parts of buckets.
    """
    if isinstance(params, Parts) and isinstance(grads, list):
        tree: Any = params
        left = iter(grads)

        def gradient(x: ShardedTensor) -> ShardedTensor | None:
            if not x.requires_grad:
                return None
            g = next(left)
            return x.becomes(torch.zeros_like(x.raw) if g is None else g)

        grads = optree.tree_map(gradient, tree)
    if updated(live, tx, params, grads, state) and stay:
        return live.steady()
    return live.peak


def updated(live: Meter, tx: Transform | None, params: Any, grads: Any, state: Any) -> bool:
    """Update parameters on paper; return whether buckets of gradients stay from step to step.

    The update makes further buckets.  In memory tiers it runs on the host.
    """
    if isinstance(params, PaperParts):
        return True
    if tx is None or not isinstance(grads, Buckets):
        return False
    live.work = StepWork()
    # an update that asks for values cannot run; the gradients' buckets are there
    with suppress(RuntimeError):
        run_in_place(tx, grads, state, params, Step())
    return True


def _in_tiers(
    found: Explanation, params: TieredParts, call: _Call, cluster: Cluster, count: int | None
) -> Explanation:
    """Return the explanation of a step whose parameters and state are in host memory.

    ``count``  of micro-batches, each of which reads all blocks, and sends gradients that are added up.
    """
    cache, computing = params.cache, cluster.rates(found.mesh).seconds(found.work)
    replay = TierReplay(cache, count is not None)
    for notes in call.rounds:
        replay.run(notes, computing / len(call.rounds))
    use = replay.use(params.index, found.state, cluster)
    return replace(found, parameters=use.device, state=0, tiers=use)


def papers(tree: Any, paper: Mesh, notes: list[Note]) -> Any:
    """Return a tree with its tensors on the meta device, placed on another mesh.

    ``notes``  to which is added what happens to parameters in tiers.
    """

    def one(x: object) -> object:
        if not isinstance(x, Buckets):
            return on_paper(x, paper)
        if dict(x.mesh.axes) != dict(paper.axes):
            why = "parts of buckets are cut for one mesh"
            fix = "sl.explain(apply, params, inputs, tx=tx)"
            raise Unsupported(why, op="explain", mesh=x.mesh, fix=fix)
        # an index of its own has no memory yet, as that of a first step
        index, values = replace(x.index), {n: on_paper(v, paper) for n, v in x.items()}
        if isinstance(x, TieredParts):
            return PaperParts.of(values, index, paper, x.cache, notes)
        return type(x)(values, index, paper)

    buckets = lambda x: isinstance(x, Buckets)  # noqa: E731
    return optree.tree_map(one, tree, is_leaf=buckets, none_is_leaf=True)


def _of(kind: type[T], tree: Any) -> list[T]:
    """List the leaves of a tree that are of a kind."""
    return [x for x in optree.tree_leaves(tree) if isinstance(x, kind)]


def bytes_of(tree: object) -> int:
    """Count the bytes of the tensors in a tree, on one rank."""
    return sum(raw_of(x).nbytes for x in _of(Tensor, tree))


def on_paper(x: object, mesh: Mesh) -> Any:
    """Return the value as a tensor on the meta device, placed on another mesh."""
    if isinstance(x, ShardedTensor):
        place = x.place._replace(mesh=mesh, deferred=frozenset())
        if x.is_padded:
            # the padding depends on the mesh
            size = padded_size(x.sharding, torch.empty(x.shape, device="meta"), mesh)
            place = place._replace(tiled=size)
        block = torch.empty(
            x.sharding.local_shape(tuple(place.tiled), mesh), dtype=x.raw.dtype, device="meta"
        )
        return ShardedTensor(block.requires_grad_(x.requires_grad), place)
    return x.detach().to("meta") if isinstance(x, Tensor) else x


@dataclass(eq=False)
class CallRecorder:
    """A watcher that adds a row per function called on sharded tensors.

    Calls inside such a function belong to its row.

    ``marks``  whether rows get the events of their gradients, up to ``seen``.
    ``apart``  events of gradients that are summed together.
    ``nodes``  of the graph, kept alive so that no id is reused.
    ``live``   the meter of the work.
    """

    t: Trace
    ranks: int
    marks: bool
    paths: Paths
    rows: list[Row] = field(default_factory=list)
    inside: bool = False
    match: Match | None = None
    product: bool = False
    seen: int = 0
    row: Row | None = None
    apart: list[Event] = field(default_factory=list)
    nodes: set[Any] = field(default_factory=set)
    live: Meter | None = None

    def away(self, nbytes: int) -> None:
        """Count the bytes of a saved tensor that goes to host memory."""
        if self.live is not None:
            self.live.work.away += nbytes

    def chose(self, match: Match, product: bool = False) -> None:
        self.match, self.product = match, product

    def __call__(
        self, implementation: Callable[..., Any], func: Func, args: Args, kwargs: Kwargs
    ) -> Any:
        if self.inside:
            return implementation(func, args, kwargs)
        self.inside, self.match, before = True, None, len(self.t.events)
        try:
            out = implementation(func, args, kwargs)
        finally:
            self.inside = False
        found = _of(Tensor, out)
        first = next((x for x in found if isinstance(x, ShardedTensor)), None)
        if first is not None or (found and len(self.t.events) > before):
            operands = _of(ShardedTensor, (args, kwargs))
            self._write(func, operands, found[0] if first is None else first, before)
        return out

    verb = __call__

    def _write(self, func: object, operands: list[ShardedTensor], out: Tensor, before: int) -> None:
        types = tuple(map(typeof, operands))
        row = Row(function_name(func), user_line(), types, typeof(out), module=self.paths.now())
        row.forward = self.t.events[before:]
        if self.match is not None:
            row.algorithm, row.note = self.match.algorithm, self.match.note
            row.memory = int(self.match.forward.memory)
            row.product = self.product
            if row.product and isinstance(out, ShardedTensor):
                *rows, n = out.padded_shape
                words = lower_bound(math.prod(rows), operands[0].padded_shape[-1], n, self.ranks)
                row.bound = words * out.raw.element_size()
        self.rows.append(row)
        node = raw_of(out).grad_fn
        if self.marks and node is not None and node not in self.nodes:
            self.nodes.add(node)
            # events between two of these hooks belong to the gradient of the first
            node.register_prehook(lambda *_: self.turn(row))

    def turn(self, row: Row | None) -> None:
        """Assign the events since the last call to the row whose gradient was computed."""
        if self.row is not None:
            known = set(map(id, self.apart))
            self.row.backward += [e for e in self.t.events[self.seen :] if id(e) not in known]
        self.row, self.seen = row, len(self.t.events)

    def counted(self, f: Callable[..., object], *given: object) -> object:
        """Call what sums several gradients together; its events are apart from the rows'."""
        before, known = len(self.t.events), len(self.apart)
        out = f(*given)
        # what is called within has added some of them
        self.apart[known:] = self.t.events[before:]
        return out

    def back(self, out: object, starts: list[Tensor], together: Together, sink: Sink | None) -> Any:
        """Run backward, and return the gradients: a list, or what the sink makes of them.

        Gradients that are summed together get a row of their own, the last.
        """
        found = [settle(x).raw for x in _of(ShardedTensor, out)]
        ends = [raw for raw in found if raw.requires_grad]
        self.turn(self.rows[-1] if self.rows else None)
        together.open = True
        # blocks have no values: any cotangent of the right shape does
        grads: Any = [None] * len(starts)
        if ends and starts:
            cotangents = [torch.empty_like(x) for x in ends]
            grads = list(torch.autograd.grad(ends, starts, cotangents, allow_unused=True))
        grads = with_sums(grads, together.finish())
        if sink is not None:
            grads = self.counted(sink.finish)
        self.turn(None)
        self.close()
        return grads

    def close(self) -> None:
        """Add a row of the gradients that are summed together, and let go of the graph."""
        self.nodes.clear()
        if self.apart:
            at = "gradients of several parameters"
            self.rows.append(Row(self.apart[0].kind, at, (), "", backward=self.apart))


class _Together(Together):
    """Gradients that one collective sums together, as in ``value_and_grad``, with their events."""

    def __init__(self, raws: list[Tensor], watch: CallRecorder, nbytes: int = 0) -> None:
        super().__init__(raws, nbytes)
        self.watch = watch

    def _post(self, key: Any) -> None:
        self.watch.counted(super()._post, key)


class _CountedSums(GradientSums):
    """Sums of the gradients of micro-batches, with the events of what is summed together."""

    def __init__(self, params: object, sink: Sink | None, watch: CallRecorder) -> None:
        super().__init__(params, (), sink)
        self.watch = watch
        self.together = _Together([], watch, self.nbytes)

    def _take(self, i: int, g: Tensor) -> None:
        self.watch.counted(super()._take, i, g)


def state_of(tx: Transform | None, params: object) -> Any:
    """Return the state in which an optimizer begins, for which ZeRO lays parameters in buckets."""
    if tx is None:
        return None
    return tx.init(params)


def sink_of(tx: Transform | None, params: object) -> Sink | None:
    """Return the buckets that take the gradients; None: they come as a tree."""
    if tx is None or tx.sink is None:
        return None
    try:
        return tx.sink(params)
    except Unsupported:  # each group has its own
        return None


def later_buckets(sinks: Sequence[Sink | None]) -> list[LaterBuckets]:
    """Return the buckets to which a first step's are made behind it, in the order of gradients."""
    found = [(k.heard.cache, k.heard.better(k.order)) for k in sinks if k and k.heard]
    return [(cache, index) for cache, index in found if index is not None]


@contextmanager
def using(later: Sequence[LaterBuckets]) -> Iterator[None]:
    """Use the buckets of later steps within the block."""
    with ExitStack() as block:
        for cache, index in later:
            block.enter_context(cache.using(index))
        yield


def gather_work(sink: Sink | None) -> StepWork:
    """Return what ZeRO gathers behind the update."""
    work = StepWork()
    for bucket in sink.index.buckets if sink is not None else ():
        if bucket.ways > 1:
            # half of a sum
            part = bucket.part_length * bucket.dtype.itemsize
            work.receive(bucket.over, (bucket.ways - 1) * part, bucket.ways - 1)
    return work


def state_ratio(optimizer: Transform, dtype: torch.dtype) -> float:
    """Return the bytes of an optimizer's state per byte of a parameter, of a square matrix."""
    with record(one=1) as mesh:
        w = shard(torch.empty(64, 64, dtype=dtype, device="meta"), "...", mesh)
        w.requires_grad_()
        return bytes_of(optimizer.init({"w": w})) / bytes_of({"w": w})


def function_name(func: object) -> str:
    """Return torch's name of a function, or the name of a property.

    >>> function_name(Tensor.add_), function_name(Tensor.T.__get__)
    ('add', 'T')
    """
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name.strip("_")
