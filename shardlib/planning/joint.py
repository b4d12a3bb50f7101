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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardlib.errors import BadArgument, ShardError, mesh_text
from shardlib.mesh import record
from shardlib.modules import parallelize
from shardlib.optim.adaptive import adamw
from shardlib.optim.transform import Transform
from shardlib.optim.zero import zero
from shardlib.placing import shard
from shardlib.planning.calls import Call, Calls, calls_of
from shardlib.planning.candidates import Candidates, side_by_side
from shardlib.planning.cluster import Cluster, cluster_of
from shardlib.planning.explain import bytes_of, explain
from shardlib.planning.explanation import Explanation, size
from shardlib.planning.layer_dedup import Outline, outline
from shardlib.planning.pareto import Holding, Search, State, Way
from shardlib.planning.program import Column, Solution, solve
from shardlib.planning.strategies import Table
from shardlib.planning.work import Rates

NEAR = 1.1
"""Share of the best plan's seconds to which a program may think that a plan takes."""

ROUNDS = 3
"""How often a plan that needs more than was thought is taken back and the program solved again."""


@dataclass(frozen=True)
class Part:
    """Calls that follow one another: one layer of a stack of equal ones, or what is between stacks.

    ``path``     of the layer; ``layers`` paths of all layers like it.
    """

    calls: tuple[Call, ...]
    path: str = ""
    layers: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class JointPlan:
    """How to train a module: what ``parallelize`` and ``zero`` take, with the cost of a step.

    ``mesh``     axis sizes, for ``make_mesh``.
    ``rules``    layouts of parameters, as ``parallelize`` takes them.
    ``inputs``   layouts of the inputs of the module's forward, in their order.
    ``remat``    policies, as ``parallelize`` takes them.
    ``zero``     keyword arguments of ``sl.optim.zero``; none: no ZeRO.
    ``peak``     the most bytes of one rank, ``seconds`` of a step: as ``sl.explain`` finds them.
    ``explained``  the explanation of the step.
    """

    mesh: Mapping[str, int]
    rules: tuple[tuple[str, ...], ...]
    inputs: tuple[str, ...]
    remat: tuple[tuple[str, str], ...]
    zero: Mapping[str, Any]
    seconds: float
    peak: int
    explained: Explanation = field(repr=False)
    memory: float = math.inf
    optimizer: Transform | None = field(default=None, repr=False)

    @property
    def bytes(self) -> dict[str, tuple[float, int]]:
        """Axes -> bytes and messages that a rank receives in a step."""
        along = self.explained.work.along
        return {axes: (nbytes, int(n)) for axes, (nbytes, n) in along.items()}

    def apply(self, module: nn.Module) -> tuple[Any, dict[str, Any], Transform]:
        """Return ``(apply, params, tx)`` on the ambient mesh: ``parallelize`` and ``zero`` as planned."""
        apply, params = parallelize(module, self.rules, pad=True, remat=self.remat)
        tx = self.optimizer or adamw(1e-3)
        return apply, params, zero(tx, **self.zero) if self.zero else tx

    def __str__(self) -> str:
        lines = [f"{mesh_text(self.mesh)}: {size(self.peak)} of {size(self.memory)}, "
                 f"{self.seconds:.3g} s a step"]  # fmt: skip
        lines.append("inputs " + ", ".join(map(repr, self.inputs)))
        if self.zero:
            lines.append("zero " + ", ".join(f"{k}={v!r}" for k, v in self.zero.items()))
        lines += [f"  {rule}" for rule in self.rules]
        lines += [f"  remat {rule}" for rule in self.remat]
        for axes, (nbytes, messages) in self.bytes.items():
            lines.append(f"  {axes}: {nbytes / 2**20:.1f} MiB in {messages} messages")
        return "\n".join(lines)


def plan_jointly(
    module: nn.Module,
    inputs: Sequence[Tensor],
    *,
    ranks: int | None = None,
    mesh: Mapping[str, int] | None = None,
    memory: float | None = None,
    optimizer: Transform | None = None,
    cluster: str | Cluster = "h100",
    loss: Callable[..., Any],
) -> JointPlan:
    """Find the fastest way to train a module within ``memory`` bytes on each rank.

    ``inputs``   what ``loss(apply, params, *inputs)`` is called with, of global sizes; only shapes
                 are read.
    ``ranks``    every mesh of so many ranks with at most two axes is considered; or ``mesh``, axis
                 sizes.
    ``memory``   bytes of one rank, else the cluster's.
    ``optimizer``  its state is counted; AdamW by default.
    Raises: ShardError where nothing fits, with the least that works.
    """
    where = cluster_of(cluster)
    room = where.memory if memory is None else memory
    meshes = [dict(mesh)] if mesh is not None else meshes_of(ranks or 1)
    study = Study(module, inputs, loss, optimizer or adamw(1e-3), where)
    best: JointPlan | None = None
    least: JointPlan | None = None
    for axes in meshes:
        for setting in study.settings(axes):
            bound = math.inf if best is None else best.seconds
            found = study.planned(setting, room, bound)
            if found is None:
                continue
            if found.peak <= room and (best is None or found.seconds < best.seconds):
                best = found
            if least is None or found.peak < least.peak:
                least = found
    if best is not None:
        return best
    if least is None:
        raise ShardError("no layouts fit", op="plan", fix="sl.planning.plan(model, 8, batch=8)")
    raise BadArgument(
        f"nothing fits into {size(room)}; the least is {size(least.peak)}",
        op="plan",
        fix=f"memory={least.peak}",
    )


def meshes_of(ranks: int) -> list[dict[str, int]]:
    """List the meshes of so many ranks with at most two axes.

    >>> meshes_of(4)
    [{'a': 4}, {'a': 2, 'b': 2}]
    """
    inner = [n for n in range(2, ranks // 2 + 1) if ranks % n == 0]
    return [{"a": ranks}, *({"a": ranks // n, "b": n} for n in reversed(inner))]


@dataclass(eq=False)
class Setting:
    """A mesh, the split of the batch and ZeRO: what is fixed before the program is made."""

    search: Search
    batch: str
    columns: list[Column] | None = None

    @property
    def holding(self) -> Holding:
        """What parameters hold in addition."""
        return self.search.holding


class Study:
    """The calls of one step, their strategies on each mesh, and the plans that these make."""

    def __init__(
        self, module: nn.Module, inputs: Sequence[Tensor], loss: Callable[..., Any],
        optimizer: Transform, cluster: Cluster,
    ) -> None:  # fmt: skip
        self.module, self.inputs, self.loss = module, inputs, loss
        self.optimizer, self.cluster = optimizer, cluster
        self.outline = outline(module)
        self.small = self.outline.model(0)
        self.step = calls_of(self.small, inputs, loss)
        self.parts = parts_of(self.outline, self.step)
        self.parameters = dict(self.small.named_parameters())
        self.groups = side_by_side(self.small)
        self.state = _state(optimizer, next(iter(self.parameters.values())).dtype)

    def settings(self, axes: Mapping[str, int]) -> Iterator[Setting]:
        """Yield the settings of a mesh."""
        with record(**axes) as mesh:
            table = Table(self.step, mesh)
            candidates = Candidates(self.step, mesh, self.parameters, self.groups)
        c = self.cluster
        rates = Rates(c.links(axes), c.flops, c.bandwidth)
        rows = self.inputs[0].shape[0]
        for batch in reversed(candidates.batches(rows)):
            inputs = candidates.inputs(batch, self.inputs)
            split = next(iter(inputs.values())).place.layout.axes
            for over in dict.fromkeys(((), split, tuple(a for a, n in axes.items() if n > 1))):
                holding = Holding(axes, over, 2 if over else 0, self.state)
                yield Setting(Search(self.step, table, candidates, rates, holding, inputs), batch)

    def planned(self, setting: Setting, room: float, bound: float) -> JointPlan | None:
        """Return the best plan of a setting, explained; or the one of least bytes if none fits."""
        if setting.columns is None:
            setting.columns = self.columns(setting.search, NEAR * bound)
        counts = [len(p.layers) for p in self.parts]
        off, best, tried = 0.0, None, set()
        for _ in range(1 + ROUNDS):
            found = solve(setting.columns, counts, room - off)
            if found is None or found.seconds >= bound:
                if found is None and best is None:
                    least = solve(setting.columns, counts, room, least=True)
                    best = least and self.explained(least, setting, room)
                break
            made = self.explained(found, setting, room)
            if DEBUG:
                print(
                    setting.batch,
                    over_text(setting),
                    f"thought {found.seconds:.4g} s {found.peak / 2**20:.2f}; explained {made.seconds:.4g} {made.peak / 2**20:.2f}",
                    flush=True,
                )
            key = made.rules, made.remat
            off = made.peak - found.peak
            if best is None or (made.peak <= room, -made.seconds) > (
                best.peak <= room,
                -best.seconds,
            ):
                best = made
            if made.peak <= room or key in tried:
                break
            tried.add(key)
        return best

    def columns(self, search: Search, limit: float = math.inf) -> list[Column]:
        """Return the best ways through each part, from every state that it may begin in.

        ``limit``  seconds of the whole step, beyond which no way is of use.
        """
        nothing = Way(0, 0, 0, 0)
        frontier = [State()]
        found: list[Column] = []
        for number, part in enumerate(self.parts):
            ends: dict[State, None] = {}
            for begin in frontier:
                for remat in ("", "full") if len(part.layers) > 1 else ("",):
                    own = limit / len(part.layers)
                    ends_of = search.run(part.calls, {begin: [nothing]}, remat, own)
                    for end, ways in ends_of.items():
                        if len(part.layers) > 1 and not _repeats(begin, end):
                            continue
                        ends[end] = None
                        made = [
                            self._column(search, number, begin, end, way, remat) for way in ways
                        ]
                        found += undominated(made)
            frontier = list(ends)
        return found

    def _column(
        self, search: Search, part: int, begin: State, end: State, way: Way, remat: str
    ) -> Column:
        leaves = list(way.choices().values())
        kept = sum(map(search.holding.kept, leaves))
        gradients = sum(map(search.holding.gradients, leaves))
        saved, most = search.peak(way, begin)
        seconds = way.forward + way.back
        if remat:
            held = {x.root: x.nbytes for x in begin.alive if x.counts}
            after = {x.root for x in end.alive}
            border = sum(n for root, n in held.items() if root not in after)
            return Column(
                part, _key(begin), _key(end), seconds + way.forward, kept, gradients, border, most,
                (way, remat),
            )  # fmt: skip
        return Column(
            part,
            _key(begin),
            _key(end),
            seconds,
            kept,
            gradients,
            saved,
            most - saved,
            (way, remat),
        )

    def explained(self, found: Solution, setting: Setting, room: float) -> JointPlan:
        """Return a solution as a plan, with the cost of its whole step."""
        search, axes = setting.search, dict(setting.holding.sizes)
        rules, remat = self.written(found)
        texts = tuple(
            str(search.inputs[n].place.layout)
            for n in sorted(self.step.inputs, key=self.step.inputs.__getitem__)
        )
        over = setting.holding
        how: dict[str, Any] = {"axis": over.axes, "stage": over.stage} if over.axes else {}
        tx = zero(self.optimizer, **how) if how else self.optimizer
        with record(**axes) as mesh:
            apply, params = parallelize(self.module, rules, mesh=mesh, pad=True, remat=remat)
            given = [
                shard(x.detach().to("meta"), text, mesh)
                for x, text in zip(self.inputs, texts, strict=True)
            ]
            whole = explain(lambda p, *x: self.loss(apply, p, *x), params, tuple(given), tx=tx)
        return JointPlan(
            axes, rules, texts, remat, how, search.rates.seconds(whole.work), whole.peak, whole, room,
            self.optimizer,
        )  # fmt: skip

    def written(
        self, found: Solution
    ) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, str], ...]]:
        """Write a solution's layouts and remat as rules; what most layers of a stack have, last."""
        said: dict[str, dict[int, tuple[str, ...]]] = defaultdict(dict)
        rules: list[tuple[str, ...]] = []
        remat: list[tuple[str, str]] = []
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
                for layer in layers if part.path else ():
                    stack, _, index = layer.rpartition(".")
                    pattern = f"{stack}.{{}}{name.removeprefix(part.path)}"
                    said[pattern][int(index)] = leaf.said
            remat += [(layer, policy) for layer in layers if policy]
        for pattern, of_layers in said.items():
            rules += _folded(pattern, of_layers)
        return tuple(rules), tuple(remat)


def _folded(pattern: str, said: Mapping[int, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return a rule for each layer that differs from most, then one for all others.

    >>> _folded("h.{}.w", {0: ("x .",), 1: (". x",), 2: (". x",)})
    [('h.0.w', 'x .'), ('h.*.w', '. x')]
    """
    ((usual, _),) = Counter(said.values()).most_common(1)
    others = [(pattern.format(i), *text) for i, text in said.items() if text != usual]
    return [*others, (pattern.format("*"), *usual)]


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
    return tuple(sorted(map(str, _places(state).items())))


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


def parts_of(outline: Outline, step: Calls) -> list[Part]:
    """Cut the calls of a step into layers of stacks, and what is before, between and behind them."""
    stacks: dict[str, tuple[str, ...]] = {}
    for path, alike in outline.stacks:
        for at, members in enumerate(alike):
            stacks[f"{path}.{at}"] = tuple(f"{path}.{i}" for i in members)
    found: list[Part] = []
    for path, calls in itertools.groupby(step.calls, lambda c: _layer(c.module, stacks)):
        found.append(Part(tuple(calls), path, stacks.get(path, ("",))))
    return found


def _layer(module: str, stacks: Mapping[str, object]) -> str:
    return next((s for s in stacks if module == s or module.startswith(s + ".")), "")


def _state(optimizer: Transform, dtype: torch.dtype) -> float:
    """Return the bytes of an optimizer's state per byte of a parameter, of a square matrix."""
    with record(one=1) as mesh:
        w = shard(torch.empty(64, 64, dtype=dtype, device="meta"), "...", mesh)
        w.requires_grad_()
        return bytes_of(optimizer.init({"w": w})) / bytes_of({"w": w})


DEBUG = False


def over_text(s):
    return s.holding.axes
