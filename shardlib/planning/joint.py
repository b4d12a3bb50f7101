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
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardlib import toml_text
from shardlib._compat import tree_flatten
from shardlib.capacity import bytes_in
from shardlib.errors import BadArgument, ShardError, mesh_text
from shardlib.layouts import Layout
from shardlib.mesh import record
from shardlib.modules import parallelize
from shardlib.optim.adaptive import adamw
from shardlib.optim.transform import Transform
from shardlib.optim.zero import zero
from shardlib.placing import shard
from shardlib.planning.calls import Call, StepCalls, calls_of
from shardlib.planning.candidates import Candidates, side_by_side
from shardlib.planning.cluster import Cluster, cluster_of
from shardlib.planning.explain import bytes_of, explain
from shardlib.planning.explanation import Explanation, size
from shardlib.planning.layer_dedup import Outline, outline
from shardlib.planning.pareto import BUCKET, Alive, Holding, Search, State, Way
from shardlib.planning.plan import loss_of
from shardlib.planning.program import Column, Solution, solve
from shardlib.planning.strategies import Table
from shardlib.planning.work import Rates

NEAR = 1.05
"""Share of the best plan's seconds to which a program may think that a plan takes."""

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

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies of remat to weigh: layers may be computed again, what is around them not."""
        if len(self.layers) > 1:
            return "", "full"
        return ("",)


@dataclass(frozen=True)
class LayoutPlan:
    """Way to train a module: what ``parallelize`` and ``zero`` take, with the cost of a step.

    ``mesh``     axis sizes, for ``make_mesh``.
    ``rules``    layouts of parameters, as ``parallelize`` takes them.
    ``inputs``   layouts of the inputs of the module's forward, in their order.
    ``remat``    policies, as ``parallelize`` takes them.
    ``zero``     keyword arguments of ``sl.optim.zero``; none: no ZeRO.
    ``peak``     the most bytes of one rank, ``seconds`` of a step: as ``sl.explain`` finds them.
    ``along``    axes -> bytes and messages that a rank receives in a step, the update among it.
    ``explained``  the explanation of forward and backward.

    >>> import shardlib as sl
    >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    >>> found = plan_layouts(mlp, torch.empty(32, 64), ranks=2)
    >>> with sl.simulate(**found.mesh):
    ...     apply, params, tx = found.apply(mlp)
    >>> sorted(params) == sorted(name for name, *_ in found.rules)
    True
    """

    mesh: Mapping[str, int]
    rules: tuple[tuple[str, ...], ...]
    inputs: tuple[str, ...]
    remat: tuple[tuple[str, str], ...]
    zero: Mapping[str, Any]
    seconds: float
    peak: int
    along: Mapping[str, tuple[float, float]]
    explained: Explanation = field(repr=False)
    memory: float = math.inf
    optimizer: Transform | None = field(default=None, repr=False)

    def apply(self, module: nn.Module) -> tuple[Any, dict[str, Any], Transform]:
        """Return ``(apply, params, tx)`` on the ambient mesh: ``parallelize`` and ``zero`` as planned."""
        apply, params = parallelize(module, self.rules, pad=True, remat=self.remat)
        tx = self.optimizer or adamw(1e-3)
        return apply, params, _zeroed(tx, self.zero)

    def toml(self) -> str:
        """Write the tables of a file that ``shardlib train`` reads, beside its model and optimizer.

        >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        >>> print(plan_layouts(mlp, torch.empty(65536, 64), ranks=2).toml())
        [mesh]
        a = 2
        <BLANKLINE>
        [data]
        layout = "a ..."
        <BLANKLINE>
        [layout]
        pad = true
        rules = [
            ["0.weight", ". ."],
            ["0.bias", "..."],
            ["2.weight", ". ."],
            ["2.bias", "..."],
        ]
        <BLANKLINE>
        [optimizer.zero]
        axis = ["a"]
        stage = 2
        """
        rows = str(Layout.parse(self.inputs[0]).dims[0])
        tables = {
            "mesh": dict(self.mesh),
            "data": {"layout": f"{rows} ..."},
            "layout": {"pad": True, "rules": self.rules},
            "optimizer.zero": dict(self.zero),
            "remat": dict(self.remat),
        }
        return "\n\n".join(_table(name, keys) for name, keys in tables.items() if keys)

    def __str__(self) -> str:
        room = size(round(self.memory))
        lines = [
            f"{mesh_text(self.mesh)}: {size(self.peak)} of {room}, {self.seconds:.3g} s a step"
        ]
        lines.append("inputs " + ", ".join(map(repr, self.inputs)))
        if self.zero:
            lines.append("zero " + ", ".join(f"{k}={v!r}" for k, v in self.zero.items()))
        lines += [f"  {rule}" for rule in self.rules]
        lines += [f"  remat {rule}" for rule in self.remat]
        for axes, (nbytes, messages) in self.along.items():
            lines.append(f"over {axes}: {size(round(nbytes))} in {math.ceil(messages)} messages")
        return "\n".join(lines)


def _table(name: str, keys: Mapping[str, Any]) -> str:
    """Write a table of a TOML file, with a line for each rule."""
    lines = [f"[{name}]"]
    for k, x in keys.items():
        text = toml_text.value(x)
        if k == "rules":
            text = "\n".join(["[", *(f"    {toml_text.value(rule)}," for rule in x), "]"])
        lines.append(f"{toml_text.key(k)} = {text}")
    return "\n".join(lines)


def _zeroed(tx: Transform, how: Mapping[str, Any]) -> Transform:
    if not how:
        return tx
    return zero(tx, **how)


def plan_layouts(
    module: nn.Module,
    inputs: Tensor | Sequence[Tensor],
    *,
    ranks: int | None = None,
    mesh: Mapping[str, int] | None = None,
    memory: float | str | None = None,
    optimizer: Transform | None = None,
    cluster: str | Cluster = "h100",
    loss: Callable[..., Any] | None = None,
) -> LayoutPlan:
    """Find the layouts, remat and stage of ZeRO by which a step takes least time within ``memory``.

    ``inputs``   the inputs of forward, of global sizes, rows first; only shapes are read.
    ``ranks``    every mesh of so many ranks with one or two axes is considered; ``mesh``: one of
                 these axis sizes.
    ``memory``   bytes of one rank, or a text such as "80GB"; else the cluster's.
    ``optimizer``  its state is counted; AdamW's by default.
    ``cluster``  speeds and links, as ``sl.planning.plan`` takes it.
    ``loss``     called with (apply, params, *inputs); by default the output's loss, else cross
                 entropy of its logits where the last input may be their labels, else a mean.

    Each call of the step runs on shapes under every layout of what it reads; the best ways through
    equal layers are found by dynamic programming, and how many layers run in which way by an
    integer program (scipy's).  The figures of the plan are those of ``sl.explain``.  Splits of the
    sequence, micro-batches and pipelines are not considered.
    Raises: BadArgument where nothing fits, with the least that does; ShardError without scipy.

    >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    >>> found = plan_layouts(mlp, torch.empty(32, 64), ranks=2, memory="1MB")
    >>> found.mesh, found.zero, found.peak < 1e6
    ({'a': 2}, {}, True)
    """
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    fix = "sl.planning.plan_layouts(model, (ids,), ranks=8)"
    if (ranks is None) == (mesh is None) or not len(inputs):
        raise BadArgument("either ranks or a mesh, and inputs, are needed", op="plan", fix=fix)
    where = cluster_of(cluster)
    if memory is None:
        memory = where.memory
    room = bytes_in(memory, "plan", fix)
    study = Study(module, tuple(inputs), loss or _loss, optimizer or adamw(1e-3), where)
    meshes = [dict(mesh or {})]
    if ranks is not None:
        meshes = meshes_of(ranks, where)
    best = study.best(meshes, room)
    if best is None:
        raise ShardError("a call of the step runs under no layouts", op="plan", fix=fix)
    if best.peak > room:
        why = f"nothing fits into {size(room)}; the least is {size(best.peak)}"
        raise BadArgument(why, op="plan", fix=f"memory={best.peak}")
    return best


def _loss(apply: Any, params: Any, *inputs: Tensor) -> Tensor:
    out = apply(params, *inputs)
    # words are their own labels: of others the mean costs as much as a loss does
    found = loss_of(out, inputs[-1])
    if found is not None:
        return found
    first: Any = next(x for x in tree_flatten(out)[0] if isinstance(x, Tensor))
    return first.mean()


def meshes_of(ranks: int, cluster: Cluster) -> list[dict[str, int]]:
    """List the meshes of so many ranks with at most two axes, the larger named "a".

    The last axis joins ranks that are near; where both axes have the same links, their order is one.

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


@dataclass(eq=False)
class Setting:
    """A mesh, the split of the batch and ZeRO: what is fixed before the program is made."""

    search: Search
    batch: str
    columns: list[Column] = field(default_factory=list)

    @property
    def holding(self) -> Holding:
        """The bytes that parameters take."""
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
        stacks = stacks_of(self.outline)
        self.step = calls_of(self.small, inputs, loss, lambda module: _layer(module, stacks))
        self.parts = parts_of(stacks, self.step)
        self.parameters = dict(self.small.named_parameters())
        self.groups = side_by_side(self.small)
        self.state = _state(optimizer, next(iter(self.parameters.values())).dtype)
        self.counts = [len(p.layers) for p in self.parts]
        self.ideal = self._ideal()
        # sizes of axes -> what does not depend on their order
        self.tables: dict[Any, tuple[Table, Candidates]] = {}

    def settings(self, axes: Mapping[str, int]) -> Iterator[Setting]:
        """Yield the settings of a mesh."""
        key = frozenset(axes.items())
        if key not in self.tables:
            with record(**dict(sorted(axes.items()))) as mesh:
                candidates = Candidates(self.step, mesh, self.parameters, self.groups)
                self.tables[key] = Table(self.step, mesh), candidates
        table, candidates = self.tables[key]
        c = self.cluster
        rates = Rates(c.links(axes), c.flops, c.bandwidth)
        rows = self.inputs[0].shape[0]
        for batch in reversed(candidates.batches(rows)):
            inputs = candidates.inputs(batch, self.inputs)
            split = next(iter(inputs.values())).place.layout.axes
            for over in dict.fromkeys(((), split, tuple(a for a, n in axes.items() if n > 1))):
                holding = Holding(axes, over, 2 * bool(over), self.state)
                yield Setting(Search(self.step, table, candidates, rates, holding, inputs), batch)

    def best(self, meshes: Sequence[Mapping[str, int]], room: float) -> LayoutPlan | None:
        """Return the fastest plan that fits, explained; where none fits, the one of least bytes."""
        settings = [s for axes in meshes for s in self.settings(axes)]
        bound, found = math.inf, []
        for setting in settings:
            # a program thinks that a plan takes at most NEAR less than it does, or more
            setting.columns = self.columns(setting.search, NEAR * NEAR * bound)
            solution = solve(setting.columns, self.counts, room)
            if solution is not None:
                bound = min(bound, solution.seconds)
                found.append((solution.seconds, len(found), setting))
        best: LayoutPlan | None = None
        for seconds, _, setting in sorted(found):
            if best is not None and seconds >= NEAR * best.seconds:
                break
            best = _best(best, self.planned(setting, room), room)
        if best is not None and best.peak <= room:
            return best
        return self.least(settings, room, best)

    def least(
        self, settings: Sequence[Setting], room: float, best: LayoutPlan | None
    ) -> LayoutPlan | None:
        """Return the plan of least bytes, whatever its seconds, or the fastest if it fits then."""
        found = []
        for setting in settings:
            setting.columns = self.columns(setting.search)
            solution = solve(setting.columns, self.counts, room, least=True)
            if solution is not None:
                found.append((solution.peak, len(found), solution, setting))
        for _, _, solution, setting in sorted(found, key=lambda f: f[:2])[:ROUNDS]:
            best = _best(best, self.explained(solution, setting, room), room)
        return best

    def planned(self, setting: Setting, room: float) -> LayoutPlan | None:
        """Return the best plan of a setting that fits, explained; else one that nearly does."""
        off, best, tried = 0.0, None, set()
        for _ in range(1 + ROUNDS):
            found = solve(setting.columns, self.counts, room - off)
            if found is None:
                break
            made = self.explained(found, setting, room)
            best = _best(best, made, room)
            if made.peak <= room or made.rules in tried:
                break
            tried.add(made.rules)
            off = made.peak - found.peak
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
            for (begin, spent), remat in itertools.product(reached.items(), part.policies):
                own = (limit - spent - rest) / layers
                for after, ways in search.run(part.calls, begin, remat, own).items():
                    # what is computed again is saved by none
                    end = after
                    if remat:
                        end = after._replace(saved=after.saved & begin.saved)
                    if layers > 1 and not _repeats(begin, end):
                        continue
                    made = [_column(number, begin, end, way, remat) for way in ways]
                    found += undominated(made)
                    least = spent + layers * min(c.seconds for c in made)
                    ends[end] = min(least, ends.get(end, math.inf))
            reached = ends
        return found

    def _ideal(self) -> list[float]:
        """Return the seconds that each part takes at the least, on one rank and without transfers."""
        with record(one=1) as mesh:
            candidates = Candidates(self.step, mesh, self.parameters, self.groups)
        inputs = candidates.inputs(".", self.inputs)
        rates = Rates({}, self.cluster.flops, self.cluster.bandwidth)
        search = Search(
            self.step, Table(self.step, mesh), candidates, rates, Holding({"one": 1}), inputs
        )
        found, state = [], self._begin(search)
        for part in self.parts:
            ((state, ways),) = search.run(part.calls, state).items()
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

    def explained(self, found: Solution, setting: Setting, room: float) -> LayoutPlan:
        """Return a solution as a plan, with the cost of its whole step."""
        search, axes = setting.search, dict(setting.holding.sizes)
        rules, remat = self.written(found)
        texts = tuple(
            str(search.inputs[n].place.layout)
            for n in sorted(self.step.inputs, key=self.step.inputs.__getitem__)
        )
        over = setting.holding
        how: dict[str, Any] = {}
        if over.axes:
            how = {"axis": over.axes, "stage": over.stage}
        tx = _zeroed(self.optimizer, how)
        with record(**axes) as mesh:
            apply, params = parallelize(self.module, rules, mesh=mesh, pad=True, remat=remat)
            given = [
                shard(x.detach().to("meta"), text, mesh)
                for x, text in zip(self.inputs, texts, strict=True)
            ]
            whole = explain(lambda p, *x: self.loss(apply, p, *x), params, tuple(given), tx=tx)
        work = replace(whole.work, along=dict(whole.work.along))
        for x in params.values():
            over = [a for a in setting.holding.axes if a not in x.sharding.axes]
            parts = math.prod(axes[a] for a in over)
            if parts > 1:
                # the explanation ends with backward; the update's gather is half of a sum
                sent = (parts - 1) * x.raw.nbytes
                work.receive(over, sent / parts, sent / BUCKET)
        seconds = search.rates.seconds(work)
        return LayoutPlan(
            axes, rules, texts, remat, how, seconds, whole.peak, work.along, whole, room,
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
                    continue
                for layer in layers:
                    stack, dot, index = layer.rpartition(".")
                    pattern = f"{stack}{dot}{{}}{name.removeprefix(part.path)}"
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


def _column(part: int, begin: State, end: State, way: Way, remat: str) -> Column:
    seconds, saved = way.forward + way.back, way.saved
    if remat:
        seconds += way.forward
        after = {x.root for x in end.alive}
        borders = {x.root: x.nbytes for x in begin.alive if x.counts and x.root not in after}
        saved = sum(n for root, n in borders.items() if root not in begin.saved)
    states = _key(begin), _key(end)
    return Column(
        part, *states, seconds, way.kept, way.gradients, saved, way.most, way=(way, remat)
    )


def _best(one: LayoutPlan | None, other: LayoutPlan | None, room: float) -> LayoutPlan | None:
    """Return the better of two plans, of which there may be none."""
    if one is None or (other is not None and _better(other, one, room)):
        return other
    return one


def _better(one: LayoutPlan, other: LayoutPlan, room: float) -> bool:
    """Return whether a plan fits where another does not, or is faster, or the smaller of two."""
    fits = one.peak <= room, other.peak <= room
    if all(fits):
        return (one.seconds, one.peak) < (other.seconds, other.peak)
    return fits[0] or (not fits[1] and one.peak < other.peak)


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


def parts_of(stacks: Mapping[str, tuple[str, ...]], step: StepCalls) -> list[Part]:
    """Cut the calls of a step into layers of stacks, and what is before, between and behind them."""
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
