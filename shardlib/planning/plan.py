"""Plans of a training step: the choice of mesh, layouts, remat, ZeRO, micro-batches and stages.

One batch at once is planned first (joint.py).  Where memory is what costs time, more and more
micro-batches are, each time as a whole; and stages of a pipeline where their idle time leaves room
for a faster step.  ``choose`` restricts the search to the layouts of recipes.
"""

import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from shardlib import toml_text
from shardlib._compat import tree_flatten
from shardlib.capacity import bytes_in
from shardlib.dtypes import wide
from shardlib.errors import BadArgument, NoPlanFits, ShardError, mesh_text, similar
from shardlib.layouts import Layout
from shardlib.optim.adaptive import adamw
from shardlib.optim.transform import Transform
from shardlib.placing import reshard
from shardlib.planning.candidates import PIPE, RECIPES, divisors, hiding, stage_counts
from shardlib.planning.cluster import Cluster, cluster_of
from shardlib.planning.explanation import size
from shardlib.planning.joint import NEAR, SURE, Proposal, Study, placed
from shardlib.planning.question import Question, Strategy
from shardlib.tensor import ShardedTensor, heard

FIX = "sl.plan(model, (ids,), ranks=8)"


@dataclass(frozen=True)
class Plan(Strategy):
    """Way to train a module: what ``parallelize`` and ``zero`` take, with the cost of a step.

    ``mesh``     axis sizes, for ``make_mesh``; an axis "pipe" is that of stages.
    ``rules``    layouts of parameters, as ``parallelize`` takes them.
    ``inputs``   layouts of the inputs of the module's forward, in their order.
    ``remat``    policies, as ``parallelize`` takes them.
    ``zero``     keyword arguments of ``sl.optim.zero``; none: no ZeRO.
    ``tiers``    keyword arguments of ``sl.optim.Tiers``, of ``zero``; none: all is on the device.
    ``microbatches``  as ``value_and_grad`` takes them; 1: the batch is not cut.
    ``peak``     the most bytes of one rank, and ``seconds`` of forward and backward: as ``sl.explain``
                 finds them; ``seconds`` have the optimizer's update in them too.
    ``along``    axes -> bytes and messages that a rank receives in a step, the update among it.
    ``explained``  the explanation of forward and backward.
    ``recipe``     the name of the one of ``sl.recipes`` whose rules these are; "" for none.
    ``largest``  (name, bytes) of the tensors of one rank, the largest first: parameters, and results
                 of calls by function and module; the numbers of equal layers are stars.
    ``whole``    calls that take no split value, as of an operator without a declaration, with the
                 reason: what they read is whole on every rank.

    >>> import torch, shardlib as sl
    >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    >>> found = sl.plan(mlp, torch.empty(32, 64), ranks=2)
    >>> with sl.simulate(**found.mesh):
    ...     apply, params, tx = found.apply(mlp)
    >>> sl.layout_of(params["0.weight"]), found.rules
    (Layout('. .'), (('0.weight', '. .'), ('2.weight', '. .'), ('*', '...')))
    """

    asked: Question = field(repr=False, kw_only=True)

    def apply(self, module: nn.Module) -> tuple[Any, dict[str, Any], Transform]:
        """Return ``(apply, params, tx)`` on the ambient mesh: ``parallelize`` and ``zero`` as planned.

        In memory tiers the parameters are rows in host memory, as ``tx.shard`` returns them.
        """
        apply, params = placed(module, self.pipe, self.rules, self.remat)
        tx = self.asked.transform(self.zero, self.tiers)
        return apply, tx.shard(params) if self.tiers else params, tx

    def without(self, what: str) -> "Plan":
        """Return the plan that has no ``what``, and would be taken if it could not be had.

        ``what``  "remat", "zero", "microbatches", "pipe", "tiers"; or the name or pattern of parameters, which
                  then lie otherwise than in this plan, on the same mesh, in all equal layers.
        Raises: NoPlanFits where no other does.

        >>> import torch, shardlib as sl
        >>> mlp = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
        >>> found = sl.plan(mlp, torch.empty(65536, 512, device="meta"), ranks=2)
        >>> found.zero, found.without("zero").zero, found.seconds < found.without("zero").seconds
        ({'axis': ('a',), 'stage': 2}, {}, True)
        """
        asked = self.asked
        if what in _WITHOUT:
            return _answer(replace(asked, **_WITHOUT[what]))
        names = self._named(what, "without")
        return _answer(self._here({n: frozenset({self._layout(n)}) for n in names}))

    def why(self, parameter: str) -> str:
        """Say what a step would take if parameters of this name or pattern lay otherwise.

        Those of equal layers lie otherwise together.

        >>> import torch, shardlib as sl
        >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        >>> print(sl.plan(mlp, torch.empty(32, 64), ranks=2).why("0.weight"))
        0.weight on a=2
          . .: 9.96e-07 s, 549.01 KiB  as planned
          a .: 1.06e-05 s, 275.01 KiB
          . a: 1.1e-05 s, 456.01 KiB
        """
        names = self._named(parameter, "why")
        texts = Study(self._here({}), self.microbatches).layouts(names[0])
        lines = [f"{parameter} on {mesh_text(self.mesh)}"]
        for text in texts:
            others = frozenset(texts) - {text}
            try:
                found = _answer(self._here(dict.fromkeys(names, others)))
            except ShardError as e:
                lines.append(f"  {text}: {e.message}")
                continue
            chosen = "  as planned" if text == self._layout(names[0]) else ""
            lines.append(f"  {text}: {found.seconds:.3g} s, {size(found.peak)}{chosen}")
        return "\n".join(lines)

    def _named(self, text: str, method: str) -> list[str]:
        """Return the matrices of a name or pattern.  Raises: BadArgument where there is none."""
        named = dict(self.asked.module.named_parameters())
        found = [n for n in named if fnmatch.fnmatchcase(n, text) and named[n].ndim > 1]
        if not found:
            known = [n for n in named if named[n].ndim > 1]
            why = f"{text!r} is no matrix of the module"
            if method == "without":
                known += _WITHOUT
                why += f", and none of {', '.join(_WITHOUT)}"
            near = similar(text, known, 1) or known
            raise BadArgument(why, op="plan", fix=f"found.{method}({near[0]!r})")
        return found

    def _layout(self, name: str) -> str:
        """Return the layout of a parameter."""
        return next(rule[1] for rule in self.rules if fnmatch.fnmatchcase(name, rule[0]))

    def _here(self, refused: Mapping[str, frozenset[str]]) -> Question:
        """Return the question of a plan on this mesh, with other layouts."""
        how = {"axes": self.mesh, "pipe": self.pipe, "micros": self.microbatches}
        return replace(self.asked, refused=refused, **how)

    def toml(self) -> str:
        """Write the tables of a file that ``shardlib train`` reads, beside its model and optimizer.

        >>> import torch, shardlib as sl
        >>> mlp = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
        >>> print(sl.plan(mlp, torch.empty(65536, 512, device="meta"), ranks=2).toml())
        [mesh]
        a = 2
        <BLANKLINE>
        [data]
        layout = "a ..."
        batch = 65536
        <BLANKLINE>
        [layout]
        pad = true
        rules = [
            ["0.weight", ". ."],
            ["2.weight", ". ."],
            ["*", "..."],
        ]
        <BLANKLINE>
        [optimizer.zero]
        axis = ["a"]
        stage = 2
        """
        dims = Layout.parse(self.inputs[0]).dims
        lies = " ".join([*map(str, dims[: 1 + any(d.is_split for d in dims[1:])]), "..."])
        data: dict[str, Any] = {"layout": lies, "batch": self.asked.rows}
        layout: dict[str, Any] = {"pad": True, "rules": self.rules}
        if self.recipe:
            # it says how tokens and labels lie, too
            del data["layout"]
            layout = {"recipe": self.recipe, "pad": True}
        texts = [lies, *(text for _, *said in self.rules for text in said)]
        texts += self.zero.get("axis", ())
        used = set(re.findall(r"\w+", " ".join(texts + [*self.inputs] * bool(self.recipe))))
        if equal := {a: a for a, n in self.mesh.items() if n > 1 and a not in {*used, PIPE}}:
            # without a name in the file, an axis over which nothing is split is refused
            layout["axes"] = equal
        tables = {
            "mesh": dict(self.mesh),
            "data": data,
            "layout": layout,
            "stages": {"axis": PIPE} if self.pipe > 1 else {},
            "optimizer.zero": dict(self.zero),
            "tiers": dict(self.tiers),
            "remat": dict(self.remat),
        }
        texts = [_table(name, keys) for name, keys in tables.items() if keys]
        if self.microbatches > 1:
            texts.insert(0, f"microbatches = {self.microbatches}")
        return "\n\n".join(texts)

    def json(self) -> dict[str, Any]:
        """Return the plan and its figures as plain values."""
        names = (
            "mesh", "rules", "inputs", "remat", "zero", "tiers", "microbatches", "seconds", "peak",
        )  # fmt: skip
        held = {n: getattr(self.explained, n) for n in ("parameters", "state", "transient")}
        along = {axes: {"bytes": b, "messages": m} for axes, (b, m) in self.along.items()}
        return {n: getattr(self, n) for n in names} | held | {"along": along}

    def summary(self) -> str:
        """Format the figures of a step, without the layouts."""
        e, room = self.explained, size(round(self.asked.room))
        lines = [
            f"{mesh_text(self.mesh)}: {size(self.peak)} of {room}, {self.seconds:.3g} s a step"
            + f", laid out by recipes.{self.recipe}" * bool(self.recipe),
            f"parameters {size(e.parameters)}, state {size(e.state)}, {size(e.transient)} at the most "
            "beside them",
            "inputs " + ", ".join(map(repr, dict.fromkeys(self.inputs))),
        ]
        if self.microbatches > 1:
            each = self.asked.rows // self.microbatches
            lines.append(f"{self.microbatches} micro-batches of {each} rows each")
        if self.zero:
            lines.append("zero " + ", ".join(f"{k}={v!r}" for k, v in self.zero.items()))
        lines += [f"whole on every rank: {said}" for said in self.whole]
        if e.tiers is not None:
            lines += str(e.tiers).splitlines()
        for axes, (nbytes, messages) in self.along.items():
            lines.append(f"over {axes}: {size(round(nbytes))} in {math.ceil(messages)} messages")
        return "\n".join(lines)

    def __str__(self) -> str:
        rules = [f"  {rule}" for rule in self.rules]
        return "\n".join([self.summary(), *rules, *(f"  remat {rule}" for rule in self.remat)])


_WITHOUT: dict[str, dict[str, Any]] = {
    "remat": {"remat": False}, "zero": {"zero": False}, "microbatches": {"micros": 1}, "pipe": {"pipe": 1},
    "tiers": {"host": None},
}  # fmt: skip


def _table(name: str, keys: Mapping[str, Any]) -> str:
    """Write a table of a TOML file, with a line for each rule."""
    lines = [f"[{name}]"]
    for k, x in keys.items():
        text = toml_text.value(x)
        if k == "rules":
            text = "\n".join(["[", *(f"    {toml_text.value(rule)}," for rule in x), "]"])
        lines.append(f"{toml_text.key(k)} = {text}")
    return "\n".join(lines)


def plan(
    module: nn.Module,
    inputs: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
    *,
    ranks: int | None = None,
    mesh: Mapping[str, int] | None = None,
    memory: float | str | None = None,
    optimizer: Transform | None = None,
    cluster: str | Cluster = "h100",
    loss: Callable[..., Any] | None = None,
    microbatches: int | None = None,
    pipe: int | None = None,
    recipes: Sequence[str] | None = None,
    host: float | str | None = None,
) -> Plan:
    """Find the way to train a module that takes least time a step, within ``memory`` on a rank.

    ``inputs``   the inputs of forward, of global sizes, rows first, of a whole step: a tuple, or a
                 dict of keyword arguments; only shapes are read.
    ``ranks``    every mesh of so many ranks with one or two axes is considered; ``mesh``: one of
                 these axis sizes.  An axis "pipe" is that of stages, beside them.
    ``memory``   bytes of one rank, or a text such as "80GB"; else the cluster's.
    ``optimizer``  its state is counted; AdamW's by default.
    ``cluster``  memory, speed and links: "a100", "h100", "h200", "b200", your own ``Cluster``, or
                 what ``sl.planning.measured`` found on the ranks that run.
    ``loss``     called with (apply, params, *inputs), or (apply, params, **inputs) of a dict; by
                 default the output's loss, else cross entropy of its logits where the last input
                 may be their labels, else a mean.
    ``microbatches``  of a step; by default as many as the memory asks for.
    ``pipe``     stages of a pipeline in the order of 1F1B; by default every number up to 16 and to the
                 repeated layers.
    ``recipes``  names of ``sl.recipes``: only their layouts are weighed, on every mesh that they
                 take; by default all layouts on one or two axes are, with sequences split where
                 there are fewer rows than ranks, and ``cube3d`` on three.
    ``host``     bytes of host memory of one rank, or a text: parameters and state may be there, in
                 memory tiers, and what layers save, where the device's memory is what costs time.

    Each call of the step runs on shapes under every layout of what it reads; the best ways through
    equal layers are found by dynamic programming, and how many layers run in which way by an
    integer program (scipy's).  The figures of the plan are those of ``sl.explain``; stages are
    weighed as equal parts, and explained as they are cut.  Transfers are not assumed to overlap
    with computation, but for those between stages.
    Raises: NoPlanFits, with the least that does and its largest tensors; BadArgument; ShardError
    without scipy.

    >>> import torch
    >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    >>> found = plan(mlp, torch.empty(32, 64), ranks=2, memory="1MB")
    >>> found.mesh, found.zero, found.peak < 1e6
    ({'a': 2}, {}, True)
    """
    given, call = _inputs(inputs, loss)
    if (ranks is None) == (mesh is None) or not given:
        raise BadArgument("either ranks or a mesh, and inputs, are needed", op="plan", fix=FIX)
    _check(module, recipes)
    where = cluster_of(cluster)
    counts = {"microbatches": microbatches, "pipe": pipe, "ranks": ranks, **(mesh or {})}
    for name, n in counts.items():
        if n is not None and not 1 <= n <= 2**20:
            raise BadArgument(f"{name}={n}: a whole number, 1 at least", op="plan", fix=FIX)
    if mesh is not None:
        ranks, pipe = math.prod(mesh.values()), mesh.get(PIPE, 1)
    assert ranks is not None
    rows = given[0].shape[0]
    if microbatches is not None and rows % microbatches:
        why = f"{rows} rows make no {microbatches} micro-batches"
        raise BadArgument(why, op="plan", fix=f"microbatches={hiding(rows, microbatches)}")
    if pipe is not None and ranks % pipe:
        why = f"{ranks} ranks make no {pipe} stages"
        raise BadArgument(why, op="plan", fix=f"pipe={math.gcd(ranks, pipe)}")
    room = bytes_in(where.memory if memory is None else memory, "plan", FIX)
    asked = Question(
        module, given, call, optimizer or adamw(1e-3), where, room, ranks, mesh, microbatches, pipe,
        recipes=None if recipes is None else tuple(recipes),
        host=None if host is None else bytes_in(host, "plan", FIX),
    )  # fmt: skip
    return _answer(asked)


def choose(
    module: nn.Module,
    inputs: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
    *,
    ranks: int,
    memory: float | str | None = None,
    optimizer: Transform | None = None,
    cluster: str | Cluster = "h100",
    loss: Callable[..., Any] | None = None,
) -> Plan:
    """Find the recipe and its mesh of ``ranks`` by which a step takes least time, as ``plan`` does.

    Arguments as ``plan`` has them.  ZeRO, remat and micro-batches are found too; the layouts are the
    recipe's, and ``found.recipe`` is its name.
    Raises: as ``plan``.

    >>> import torch
    >>> mlp = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    >>> found = choose(mlp, torch.empty(32, 64), ranks=4)
    >>> found.recipe, found.mesh
    ('megatron1d', {'x': 4})
    """
    return plan(
        module, inputs, ranks=ranks, memory=memory, optimizer=optimizer, cluster=cluster, loss=loss,
        recipes=tuple(RECIPES),
    )  # fmt: skip


def _check(module: nn.Module, recipes: Sequence[str] | None) -> None:
    """Refuse a module without parameters, and recipes that are none."""
    if next(module.parameters(), None) is None:
        why = f"{type(module).__name__} has no parameters to lay out"
        line = "sl.plan(torch.nn.Linear(64, 64), torch.empty(8, 64), ranks=8)"
        raise BadArgument(why, op="plan", fix=line)
    wrong = [name for name in recipes or () if name not in RECIPES]
    if wrong or (recipes is not None and not recipes):
        near = similar(str(wrong[0]), RECIPES, 1) if wrong else []
        why = f"recipes: {wrong or recipes!r}, of {', '.join(RECIPES)}"
        raise BadArgument(why, op="plan", fix=f"recipes={near or ['cube3d']}")


def _inputs(
    inputs: Tensor | Sequence[Tensor] | Mapping[str, Tensor], loss: Callable[..., Any] | None
) -> tuple[tuple[Tensor, ...], Callable[..., Any]]:
    """Return the inputs in their order, and the loss as a function of them."""
    call = loss or _loss
    if isinstance(inputs, Mapping):
        names = tuple(inputs)

        def named(apply: Any, params: Any, *given: Tensor) -> Any:
            return call(apply, params, **dict(zip(names, given, strict=True)))

        return tuple(inputs.values()), named
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    return tuple(inputs), call


def _loss(apply: Any, params: Any, *inputs: Tensor, **named: Tensor) -> Tensor:
    fixed: dict[str, Any] = {"use_cache": False} if "use_cache" in dict(apply.arguments) else {}
    out = apply(params, *inputs, **named, **fixed)
    # words are their own labels: of others the mean costs as much as a loss does
    found = loss_of(out, [*inputs, *named.values()][-1])
    if found is not None:
        return found
    first: Any = next(x for x in tree_flatten(out)[0] if isinstance(x, Tensor))
    return first.mean()


def loss_of(out: object, labels: object) -> Tensor | None:
    """Return the loss of forward's output: a scalar, its ``loss``, or its logits against labels.

    For outputs in half precision the loss is computed in fp32.
    """
    found = getattr(out, "loss", None)
    out = found if isinstance(found, Tensor) else getattr(out, "logits", out)
    if not isinstance(out, Tensor):
        return None
    out = wide(out)
    if out.numel() == 1:
        return out
    if isinstance(labels, Tensor) and _may_be_labels(labels, out):
        if isinstance(out, ShardedTensor) and isinstance(labels, ShardedTensor):
            labels = lay_labels(labels, out)
        return F.cross_entropy(out.view(-1, out.shape[-1]), labels.view(-1))
    return None


def _may_be_labels(x: Tensor, out: Tensor) -> bool:
    """Return whether these are numbers of classes, one for each row of logits."""
    return not x.is_floating_point() and x.shape == out.shape[:-1]


def lay_labels(labels: ShardedTensor, out: ShardedTensor) -> ShardedTensor:
    """Lay labels as the rows of logits, which may be elsewhere than those of the tokens.

    It is recorded as a call, so that a search follows it to wherever the logits lie.
    """

    def moved(labels: ShardedTensor, out: ShardedTensor) -> ShardedTensor:
        found = reshard(labels, Layout(out.place.dims[:-1]))
        if found is labels:
            # a call is recorded only if it gives a new value
            return labels.becomes(labels.raw)
        return found

    found: ShardedTensor = heard(moved, lay_labels, labels, out)
    return found


# ---------------------------------------------------------------- the search


def _answer(asked: Question) -> Plan:
    """Return the best plan.  Raises: NoPlanFits."""
    best = Planning(asked).found()
    if best is None:
        why = "a call of the step runs under no layouts"
        if asked.recipes is not None and not [*asked.laid(asked.pipe or 1)]:
            why = f"no mesh of {asked.ranks} ranks for {' or '.join(asked.recipes)}"
        raise ShardError(why, op="plan", fix=FIX)
    if best.peak > asked.room:
        largest = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in best.largest[:3])
        why = f"nothing fits into {size(asked.room)}; the least is {size(best.peak)}"
        why += f"; its largest tensors: {largest}"
        raise NoPlanFits(why, best.peak, op="plan", fix=f"memory={best.peak}")
    return Plan(**vars(best), asked=asked)


class Planning:
    """The search of one plan: a study of each number of micro-batches, and the best way so far.

    Programs weigh first: ways are explained, the fastest first, when no more are of use.
    """

    def __init__(self, asked: Question) -> None:
        self.asked = asked
        self.studies: dict[int, Study] = {}
        self.best: Strategy | None = None
        self.proposals: list[Proposal] = []

    def found(self) -> Strategy | None:
        """Return the fastest way that fits; where none does, the one of least bytes that was found."""
        asked = self.asked
        if asked.pipe in (None, 1):
            if asked.micros is None:
                self._in_parts()
            else:
                self._weigh(asked.micros)
            self._explain()
        for pipe in self._pipes():
            self._weigh(asked.micros or hiding(asked.rows, pipe), pipe)
            try:
                self._explain(pipe)
            except ShardError:
                if asked.pipe is not None or self.best is None:
                    raise
                # its stages are not known: forward does not run on the inputs that were guessed
                break
            if self.best is not None and self.seconds < math.inf and self.best.pipe != pipe:
                # more stages idle longer
                break
        if self.seconds == math.inf:
            least = self.studies[max(self.studies)].least(asked.pipe or 1)
            if least is not None and least.better(self.best, asked.room):
                return least
        return self.best

    @property
    def seconds(self) -> float:
        """The seconds of the best way so far that fits, infinite without one."""
        if self.best is None or self.best.peak > self.asked.room:
            return math.inf
        return self.best.seconds

    @property
    def bound(self) -> float:
        """The seconds that a program thinks of the best way so far, at the least."""
        return min([self.seconds / NEAR, *(p.seconds for p in self.proposals)])

    def _weigh(self, micros: int, pipe: int = 1) -> Study:
        """Let programs find the fastest way of each setting."""
        if micros not in self.studies:
            self.studies[micros] = Study(self.asked, micros)
        study, whole = self.studies[micros], self.studies.get(1)
        less = whole.least_seconds if whole is not None and pipe == 1 < micros else {}
        self.proposals += study.weighed(study.settings(pipe), self.bound, less)
        if self.asked.host is not None and not study.enough:
            # in host memory nothing is faster than what fits into any memory
            tiered = study.settings(pipe, host=True)
            self.proposals += study.weighed(tiered, self.bound, less)
        # prices take memory, and are found again for the few questions that come back
        study.tables.clear()
        return study

    def _explain(self, pipe: int = 1) -> None:
        """Explain the ways that programs found, the fastest first, while one may be the best."""
        proposals = sorted(self.proposals, key=lambda p: p.order)
        self.proposals = []
        self._first_of(proposals)
        # what a program thought to fit and be fast does not: slower ways were not looked at
        for study in dict.fromkeys(p.study for p in proposals):
            if study.misfits or self.best is None:
                more = study.weighed(study.every(pipe), self.bound, {}, bounded=False)
                self._first_of(sorted(more, key=lambda p: p.order))
                study.tables.clear()

    def _first_of(self, proposals: Sequence[Proposal]) -> None:
        """Explain these ways in their order, until the next one cannot be faster than the best."""
        for proposal in proposals:
            # a plan takes about the share of what a program thought that others took
            shares = [share for study in self.studies.values() for share in study.shares]
            least = 1 / NEAR
            if shares:
                least = min(1.0, *shares) - SURE
            if least * proposal.seconds >= self.seconds:
                break
            self.best = proposal.study.planned(proposal, self.best)

    def _in_parts(self) -> None:
        """Weigh more micro-batches while memory is what costs time."""
        asked = self.asked
        study, counts = self._weigh(1), divisors(asked.rows)[1:]
        if study.enough or not counts:
            return
        guess = min(counts, key=lambda n: abs(math.log(n / study.wanted)))
        study = self._weigh(guess)
        # fewer, of which some layers are computed again, or are saved in host memory
        fewer = [n for n in counts if guess / 4 <= n < guess][::-1]
        more = [n for n in counts if n > guess]
        counts = more
        if study.enough or asked.host is not None:
            counts = fewer + more * (not study.enough)
        while counts and study.faster(self.bound):
            study = self._weigh(counts[0])
            counts = [n for n in counts if max(n, study.micros) >= 2 * min(n, study.micros)]

    def _pipes(self) -> Iterator[int]:
        """Yield the numbers of stages of which computing alone takes less than the best way."""
        asked = self.asked
        if asked.pipe is not None:
            yield from [asked.pipe] * (asked.pipe > 1)
            return
        study = self.studies[max(self.studies)]
        for pipe in stage_counts(asked.ranks, study.outline.depth)[1:]:
            micros = asked.micros or hiding(asked.rows, pipe)
            idle = (micros + pipe - 1) / micros
            least = idle * study.micros * sum(study.ideal) / asked.ranks
            if least < self.seconds:
                yield pipe
