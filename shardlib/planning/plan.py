"""The choice of a mesh by memory and time: recipes on every mesh, priced on the meta device.

Every recipe on every mesh of the given number of ranks is first estimated from the model's
products.  The best then run on the meta device, forward and backward, with each distinct layer once
and then once more (layer_dedup.py).  Products, attention, embedding and loss are therefore counted
from the step's own calls, and a model of 80 layers takes as long as one of two.
"""

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardlib.cost import slowest
from shardlib.dtypes import wide
from shardlib.errors import BadArgument, ShardError, mesh_text, similar
from shardlib.mesh import Link, record
from shardlib.modules import parallelize, recipes
from shardlib.modules.dim_trace import Dimensions, trace_dimensions
from shardlib.placing import shard
from shardlib.planning.cluster import Cluster, cluster_of
from shardlib.planning.explain import explain
from shardlib.planning.explanation import size
from shardlib.planning.grids import Grid3, factorizations, grids_text, in_stages, step_cost
from shardlib.planning.layer_dedup import Layer, Outline, all_products, elements, outline, width

RECIPES = ("ddp", "megatron1d", "fsdp", "optimus2d", "cube3d", "ring")

# gradients per collective, as zero's bucket_mb
BUCKET = 25 * 2**20
# bytes saved without remat / with it: a guess where one of them was measured
_KEPT = 8.0


@dataclass(frozen=True)
class Strategy:
    """A way to train: a recipe on a mesh, ZeRO's stage, remat and micro-batches.

    ``mesh``        its axis "pipe", if any, is that of stages; the recipe uses the others.
    ``accumulate``  micro-batches of a step: forward and backward run once for each.
    ``mlp``         roles of the axes in MLPs, as ``recipes.cube3d`` takes them.
    """

    recipe: str
    mesh: Mapping[str, int]
    stage: int = 0
    remat: str = ""
    accumulate: int = 1
    mlp: str = field(default="mnk", repr=False)

    @property
    def pipe(self) -> int:
        """The number of stages of a pipeline."""
        return self.mesh.get("pipe", 1)

    @property
    def inner(self) -> dict[str, int]:
        """The axes of each stage."""
        return {a: n for a, n in self.mesh.items() if a != "pipe"}

    @property
    def copies(self) -> tuple[str, ...]:
        """The axes over which parameters are copied."""
        names = ("data", "s") if self.recipe == "ring" else ("data",)
        return tuple(a for a in names if self.mesh.get(a, 1) > 1)

    @property
    def rows(self) -> int:
        """The number that must divide a batch's rows: their parts on this mesh."""
        x, y, z = (self.mesh.get(a, 1) for a in "xyz")
        parts = {"fsdp": x, "optimus2d": x, "cube3d": math.lcm(x * y, x * z)}
        return self.mesh.get("data", 1) * parts.get(self.recipe, 1)

    def __str__(self) -> str:
        text = f"{self.recipe:<10} {mesh_text(self.mesh)}"
        text += f", zero {self.stage}" if self.stage else ""
        text += f", remat {self.remat}" if self.remat else ""
        return text + (f", {self.accumulate} micro-batches" if self.accumulate > 1 else "")


@dataclass(frozen=True)
class Weighed:
    """A way to train with its cost: bytes, messages, seconds and memory of a step on one rank.

    ``along``    axis -> (bytes, messages).
    ``seconds``  of transfers and of products, added.
    ``layers``   the stacks of layers that ``remat`` applies to.

    ``parameters``, ``gradients``, ``state``, ``saved`` and ``temporary`` are bytes, the last two of
    one micro-batch.
    """

    way: Strategy
    along: Mapping[str, tuple[float, float]]
    parameters: float
    gradients: float
    state: float
    saved: float
    temporary: float
    seconds: float
    fits: bool = True
    layers: tuple[str, ...] = ()

    @property
    def mesh(self) -> Mapping[str, int]:
        """Axis sizes."""
        return self.way.mesh

    @property
    def bytes(self) -> float:
        """Bytes received in a step."""
        return sum(b for b, _ in self.along.values())

    @property
    def messages(self) -> float:
        """Messages received in a step."""
        return sum(m for _, m in self.along.values())

    @property
    def peak(self) -> float:
        """The most bytes held at once.

        Saved tensors are freed as gradients are made, so the larger of the two counts; the sum of
        the gradients of earlier micro-batches is held in addition.
        """
        held = self.gradients if self.way.accumulate > 1 else 0
        own = max(self.gradients, self.saved) + self.temporary
        return self.parameters + self.state + held + own


W = TypeVar("W", Weighed, Grid3)


@dataclass(frozen=True)
class Plan(Generic[W]):
    """The ways to train a model, the best first: of ``plan``, or the grids of ``choose``.

    ``table``     best first; those that fit before those that do not.
    ``best``      None where none fits.
    ``mesh``      axis sizes of the best, for ``make_mesh(**found.mesh)``.
    ``recipe``    the best's function of ``shardlib.modules.recipes``.
    ``save``      operands that a grid keeps gathered; if any, train within ``sl.saving()``.
    ``rejected``  (way, reason) of those that are impossible.
    ``looked``    number of ways that were estimated.
    ``batch``     rows of a step.
    ``cluster``   the memory, operations and links that were assumed.

    >>> from torch import nn
    >>> words = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
    >>> found = plan(words, 2, batch=8, sequence=16, memory=1000)
    >>> found.best, found.table[0].fits
    (None, False)
    """

    table: tuple[W, ...]
    memory: float | None
    looked: int
    rejected: tuple[tuple[Strategy, str], ...] = ()
    batch: int = 0
    cluster: Cluster | None = None

    @property
    def best(self) -> W | None:
        """The best way, or None where none fits."""
        return next((w for w in self.table if w.fits), None)

    @property
    def mesh(self) -> dict[str, int]:
        """The axis sizes of the best way.  Raises: ShardError if nothing fits."""
        return dict(self._chosen().mesh)

    @property
    def recipe(self) -> Callable[..., recipes.Recipe]:
        """The recipe that lays a model out as the best way does.  Raises: ShardError."""
        best = self._chosen()
        if isinstance(best, Weighed):
            return getattr(recipes, best.way.recipe)
        return recipes.cube3d if best.mlp == "mnk" else partial(recipes.cube3d, mlp=best.mlp)

    @property
    def save(self) -> str:
        """The operands that the best way keeps gathered.  Raises: ShardError if nothing fits."""
        best = self._chosen()
        return "" if isinstance(best, Weighed) else best.save

    def _chosen(self) -> W:
        if self.best is None:
            raise ShardError("no way to train fits", op="plan", fix="print(found)")
        return self.best

    def __str__(self) -> str:
        grids = [g for g in self.table if isinstance(g, Grid3)]
        if grids:
            return grids_text(grids, len(self.rejected))
        return _ways_text(cast("Plan[Weighed]", self))

    __repr__ = __str__


def _ways_text(plan: Plan[Weighed]) -> str:
    """Write what ``plan`` found: the best way, a table of figures, and what is impossible."""
    lines = _outcome(plan)
    large = max((w.peak for w in plan.table), default=0.0) >= 2**30
    unit, scale = ("GiB", 2**30) if large else ("MiB", 2**20)
    if plan.table:
        lines.append(
            f"{unit} per rank: peak  params   grads   state   saved    temp"
            "   MiB moved  messages   seconds"
        )
    for w in plan.table:
        parts = (w.peak, w.parameters, w.gradients, w.state, w.saved, w.temporary)
        figures = " ".join(f"{p / scale:>7.2f}" for p in parts)
        lines += [
            str(w.way) + ("" if w.fits else "  (does not fit)"),
            f"        {figures} {w.bytes / 2**20:>11.1f} {w.messages:>9.0f} {w.seconds:>9.3g}",
        ]
    lines += [f"cannot be: {way}: {why}" for way, why in plan.rejected]
    lines.append(f"{plan.looked} ways were estimated, {len(plan.table)} ran on paper")
    if plan.cluster is not None:
        lines.append(plan.cluster.told())
    return "\n".join(lines)


def _outcome(plan: Plan[Weighed]) -> list[str]:
    """Write the best way, or the one that needs least memory where none fits."""
    best, room = plan.best, size(plan.memory or 0)
    if best is not None:
        n = best.way.accumulate
        lines = [f"{best.way}: {size(best.peak)} of {room}, {best.seconds:.3g} s a step"]
        if n > 1:
            lines.append(f"fits with {n} micro-batches of {plan.batch // n} rows each")
        return lines
    if plan.table:
        least = min(plan.table, key=lambda w: w.peak)
        return [f"nothing fits into {room}; the least is {size(least.peak)}: {least.way}"]
    if plan.rejected:
        return []
    return [f"no recipe splits {plan.batch} rows, and the heads, over so many ranks"]


def search(
    ways: Iterable[Strategy],
    weigh: Callable[[Strategy], Sequence[Any]],
    order: Callable[[Any], tuple[Any, ...]],
) -> tuple[tuple[Any, ...], tuple[tuple[Strategy, str], ...]]:
    """Return the forms of these ways to train, the best first, and the ways that are impossible.

    ``weigh``  finds the cost of each form of a way, or raises ShardError where it is impossible.
    ``order``  the key that sorts these forms.
    """
    table: list[Any] = []
    rejected: list[tuple[Strategy, str]] = []
    for way in ways:
        try:
            table += weigh(way)
        except ShardError as e:
            rejected.append((way, e.message.splitlines()[0]))
    return tuple(sorted(table, key=order)), tuple(rejected)


def plan(
    model: nn.Module,
    ranks: int,
    *,
    batch: int,
    sequence: int,
    cluster: str | Cluster = "h100",
    memory: float | None = None,
    state: float = 8.0,
    recipe: str | Sequence[str] = RECIPES,
    loss: Callable[..., Tensor] | None = None,
    most: int = 4,
    accumulate: int = 1,
    pipe: int | None = None,
) -> Plan[Weighed]:
    """Find how to train a language model on ``ranks`` ranks: mesh, recipe, ZeRO, micro-batches.

    ``model``       best on the meta device; its dtype counts.
    ``batch``       rows of a step, over all ranks and micro-batches.
    ``sequence``    tokens of a row.
    ``cluster``     memory, speed and links: "a100", "h100", "h200", "b200", your own ``Cluster``,
                    or what ``sl.planning.measured`` found on the ranks that run.
    ``memory``      bytes of one rank, else the cluster's.
    ``state``       bytes that the optimizer keeps per parameter: AdamW 8, with an fp32 master 12.
    ``recipe``      the recipes to consider.
    ``most``        how many ways run on the meta device.
    ``loss``        called with (apply, params, ids, labels); by default cross entropy of the
                    logits.
    ``accumulate``  micro-batches of a step at the least; there are more where a whole batch does
                    not fit.
    ``pipe``        stages of a pipeline over an axis of this name, in the order of 1F1B; by default
                    every number that divides the ranks is considered, up to 16
                    and to the repeated layers.
    ZeRO is used over the axes that copy parameters.  Among its stages from 1 on, numbers of
    micro-batches and ``remat`` of whole layers, the fastest that fits is taken: each micro-batch
    adds messages, stages 2 and 3 reduce gradients once per micro-batch, stage 3 also gathers
    parameters for each, and ``remat`` computes a third more.  No transfer is assumed to overlap
    with computation.
    Raises: BadArgument where there is nothing to plan.

    >>> from torch import nn
    >>> class Tiny(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.wte = nn.Embedding(64, 32)
    ...         self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
    ...         self.head = nn.Linear(32, 64, bias=False)
    ...     def forward(self, ids):
    ...         return self.head(self.down(self.up(self.wte(ids)).relu()))
    >>> found = plan(Tiny(), 4, batch=8, sequence=16, recipe=["ddp", "megatron1d"])
    >>> found.best.way.recipe, dict(found.best.way.mesh), found.best.way.stage
    ('ddp', {'data': 4}, 1)
    """
    names = [recipe] if isinstance(recipe, str) else list(recipe)
    counts = {"batch": batch, "sequence": sequence, "accumulate": accumulate, "most": most}
    counts["pipe"] = 1 if pipe is None else pipe
    _check(ranks, counts, state, memory, names)
    where = cluster_of(cluster)
    if memory is None:
        memory = where.memory
    study = _Study(model, where, batch, sequence, state, loss or _loss, memory, accumulate)
    ways = study.ways(ranks, names, pipe)
    table, rejected = search(study.tried(ways, most), study.weigh, _order)
    return Plan(table, memory, len(ways), rejected, batch, where)


def _check(
    ranks: int,
    counts: Mapping[str, int],
    state: float,
    memory: float | None,
    names: Sequence[str],
) -> None:
    """Refuse counts, bytes and recipes that cannot be planned with."""
    line = "sl.planning.plan(model, 8, batch=64, sequence=1024"
    for name, n in {"ranks": ranks, **counts}.items():
        top = _RANKS if name == "ranks" else _ROWS
        if not 1 <= n <= top:
            raise _bad(f"{name}={n}: 1 at least and {top:,} at most", f"{line})")
    for name, amount in {"state": state, "memory": memory}.items():
        if amount is not None and not (0 < amount < math.inf or (name, amount) == ("state", 0)):
            raise _bad(f"{name}={amount}: a number of bytes", f"{line}, state=8.0, memory=80e9)")
    if wrong := [name for name in names if name not in RECIPES]:
        near = similar(wrong[0], RECIPES, 1, 0.5) or RECIPES[:1]
        raise _bad(
            f"no recipe {wrong[0]!r} to plan with; there are {', '.join(RECIPES)}",
            f"sl.planning.plan(model, {ranks}, batch={counts['batch']}, "
            f"sequence={counts['sequence']}, recipe={near[0]!r})",
        )


def _bad(why: str, fix: str) -> BadArgument:
    return BadArgument(why, op="plan", fix=fix)


_RANKS, _ROWS, _STAGES = 2**20, 2**40, 16
"""Upper limits: ranks (their divisors are counted one by one), rows and tokens per row, stages."""


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
    if isinstance(labels, Tensor) and out.ndim == labels.ndim + 1:
        return F.cross_entropy(out.view(-1, out.shape[-1]), labels.view(-1))
    return None


def _loss(apply: Any, params: Any, ids: Tensor, labels: Tensor) -> Tensor:
    known = dict(apply.arguments)
    fixed = {"use_cache": False} if "use_cache" in known else {}
    out = apply(params, ids, **fixed)
    found = loss_of(out, labels)
    if found is None:
        raise _bad(
            f"forward gives {type(out).__name__}, no logits and no loss",
            "sl.planning.plan(model, 8, batch=8, sequence=64, "
            "loss=lambda f, p, ids, _: f(p, ids).mean())",
        )
    return found


# ---------------------------------------------------------------- the estimates and runs


_Measured = dict[tuple[int, str], dict[str, float]]
"""(micro-batches, remat) -> the cost of a micro-batch, of what has run."""


@dataclass
class _Study:
    """A study of one model on one cluster; its traced dimensions and counts serve every way.

    ``least``  the micro-batches that a step has at least.
    """

    model: InitVar[nn.Module]
    cluster: Cluster
    batch: int
    sequence: int
    state: float
    loss: Callable[..., Tensor]
    room: float
    least: int = 1

    def __post_init__(self, model: nn.Module) -> None:
        # rows of a micro-batch and remat of the fastest way so far, where the next search starts
        self.begin: tuple[int, str] | None = None
        self.fastest = math.inf
        self.outline: Outline = outline(model)
        self.models = self.outline.models
        self.dims: list[Dimensions] = [trace_dimensions(m) for m in self.models]
        self.layers: list[Layer] = all_products(self.outline, self.dims)
        self.item = max(p.element_size() for p in model.parameters())
        # backward has two products for each of forward's
        forward = self.outline.total([{"": _flops(m, self.sequence)} for m in self.models])
        self.flops = 3 * self.batch * forward[""]
        self.heads, self.keys = _heads(model), _keys(model)

    def ways(self, ranks: int, names: Sequence[str], pipe: int | None = None) -> list[Strategy]:
        """List every recipe on every mesh that divides the sizes, with and without a pipeline."""
        ways = [
            replace(way, mesh={"pipe": n, **way.mesh} if n > 1 else way.mesh)
            for n in stage_counts(ranks, self.outline.depth, pipe)
            for data in divisors(ranks // n)
            for way in _strategies(data, ranks // n // data)
        ]
        return [way for way in ways if way.recipe in names and self._divides(way)]

    def tried(self, ways: Sequence[Strategy], most: int) -> list[Strategy]:
        """Return the best, and each recipe's best if its estimate is at most twice the best one."""
        estimates = [self.estimate(w) for w in ways]
        ranked = sorted(zip(estimates, ways, strict=True), key=operator.itemgetter(0))
        near = [w for t, w in ranked if t <= 2 * ranked[0][0]]
        firsts = list({w.recipe: w for w in reversed(near)}.values())
        rest = max(most - len(firsts), 1)
        return [w for i, w in enumerate(near) if i < rest or w in firsts][:most]

    def _divides(self, way: Strategy) -> bool:
        """Check that rows, heads and a ring's sequence divide over the mesh."""
        heads = way.mesh.get("x" if way.recipe == "megatron1d" else "y", 1)
        turns = 2 * way.mesh["s"] if way.recipe == "ring" else 1
        even = self.batch % way.rows == 0 and self.sequence % turns == 0
        return even and (self.heads or heads) % heads == 0

    def estimate(self, way: Strategy) -> float:
        """Estimate a step's seconds from its products; 1e9 more where its state cannot fit."""
        mesh, links = way.inner, self.cluster.links(way.mesh)
        if way.recipe == "megatron1d":
            # the axis n of the grid, which is y there
            mesh["y"], links["y"] = mesh.pop("x"), links.pop("x")
        data = mesh.get("data", 1) * mesh.get("s", 1)
        m, k, n = mesh.get("x", 1), mesh.get("z", 1), mesh.get("y", 1)
        tokens = self.batch * self.sequence // data
        cost = step_cost(self.layers, m, k, n, "", tokens, self.item, 0)
        ranks = math.prod(way.mesh.values())
        # of a stage
        weights = elements(self.layers) / way.pipe
        held = weights * (self.item + (self.item + self.state) / data) / (m * k * n)
        seconds = cost.seconds(links) / way.pipe
        if way.recipe == "ring":
            # keys and values go round, with their gradients on the way back
            p, own = mesh["s"], self.batch // mesh.get("data", 1) * self.sequence
            turns = 3 * (p - 1) / p * own * self.keys * self.item * links["s"].beta
            seconds += turns / way.pipe
        seconds += self.flops / ranks / self.cluster.flops
        if way.pipe > 1:
            # messages take their turns with stages
            count = hiding(self.batch // way.rows, way.pipe)
            hop = links["pipe"].seconds(self._crossing(way) / count)
            seconds = in_stages(seconds / count, way.pipe, count, hop)
        if data > 1:
            link = links.get("data", links.get("s", self.cluster.between))
            # a ring all-reduce of gradients in buckets: (data - 1) / data of them, twice
            part = weights * self.item / (m * k * n)
            seconds += (
                2 * (data - 1) * (part / data * link.beta + math.ceil(part / BUCKET) * link.alpha)
            )
        if (held / data if way.recipe in ("ddp", "ring") else held) > self.room:
            seconds += 1e9
        return seconds

    def weigh(self, way: Strategy) -> list[Weighed]:
        """Find the micro-batches, remat and stage that fit and take least time, with their cost.

        One number of micro-batches runs on the meta device, with or without remat; the others are
        estimated from it, and the best estimate runs next, until the best is one that has run.
        Raises: BadArgument if the batch cannot be split into ``accumulate`` micro-batches.
        """
        counts = [n for n in divisors(self.batch // way.rows) if n >= self.least]
        if not counts:
            raise _bad(
                f"{self.batch} rows over {way.rows} parts make no {self.least} micro-batches",
                f"sl.planning.plan(model, ranks, batch={way.rows * self.least}, "
                f"sequence={self.sequence})",
            )
        # without repeated layers there is nothing that remat could be applied to
        remats = [""]
        if self.outline.stacks:
            remats.append("full")
        rows, remat = self.begin or (self.batch // counts[0], "")
        # the number whose micro-batches are nearest to those of the fastest way
        count = min(counts, key=lambda n: abs(math.log(self.batch / way.rows / n / rows)))
        every = list(itertools.product(counts, remats))
        found: _Measured = {}
        for _ in range(4):
            found[count, remat] = self._measured(replace(way, accumulate=count), remat)
            known, best = (self._best(way, found, keys) for keys in (list(found), every))
            if known.fits and best.seconds > 0.95 * known.seconds:
                # no estimate is more than 5 % better
                break
            count, remat = best.way.accumulate, best.way.remat
            if (count, remat) in found:
                break
        known = self._best(way, found, list(found))
        if known.fits and known.seconds < self.fastest:
            self.fastest = known.seconds
            self.begin = self.batch // way.rows // known.way.accumulate, known.way.remat
        return [known]

    def _best(
        self,
        way: Strategy,
        found: _Measured,
        keys: Sequence[tuple[int, str]],
    ) -> Weighed:
        """Return the fastest that fits, else the smallest, with these micro-batches and remats."""
        stages = range(1, 4) if way.copies else range(1)
        tried = [
            self._staged(replace(way, stage=s, remat=r, accumulate=n), self._thought(found, n, r))
            for n, r in keys
            for s in stages
        ]
        fitting = [t for t in tried if t.fits]
        if fitting:
            return min(fitting, key=lambda t: (t.seconds, t.way.accumulate, t.way.stage))
        return min(tried, key=lambda t: t.peak)

    def _thought(self, found: _Measured, count: int, remat: str) -> Mapping[str, float]:
        """Return the cost of a micro-batch: measured, or scaled from the nearest one that was."""
        if (count, remat) in found:
            return found[count, remat]
        near = min(found, key=lambda key: (key[1] != remat, abs(math.log(key[0] / count))))
        by, known = near[0] / count, found[near]
        out = dict(known)
        # of a way with the other remat: without it a step keeps more, with it less
        kept = {("full", ""): _KEPT, ("", "full"): 1 / _KEPT}.get((near[1], remat), 1.0)
        out["saved"] = by * kept * known["saved"]
        if kept < 1:
            out["temporary"] += known["kept"]
        out["temporary"] *= by
        return out | {k: by * n for k, n in known.items() if k.startswith("own bytes ")}

    def _measured(self, way: Strategy, remat: str) -> dict[str, float]:
        """Measure the cost of a micro-batch on the meta device."""
        policies = [(f"{path}.*", remat) for path, _ in self.outline.stacks] if remat else []
        found = [
            self._run(way, m, d, policies) for m, d in zip(self.models, self.dims, strict=True)
        ]
        whole = self.outline.total(found)
        last, first = found[-1], found[0]
        # temporaries do not grow with the number of layers: take those of the largest small model
        held = max(last["saved"], last["parameters"])
        whole["temporary"] = max(last["transient"] - held, 0)
        for of, name in (("parameters", "layer"), ("saved", "kept")):
            # of one layer
            whole[name] = max((f[of] - first[of] for f in found[1:]), default=0)
        return whole

    def _run(
        self, way: Strategy, model: nn.Module, dims: Dimensions, remat: Any
    ) -> dict[str, float]:
        """Run one of the smaller models on the meta device."""
        with record(**way.inner) as mesh:
            make = getattr(recipes, way.recipe)
            if way.recipe not in ("ddp", "ring"):
                # these take the whole of each parameter
                make = partial(make, inputs=dims)
            rules = make(model, mesh)
            apply, params = parallelize(model, rules, mesh=mesh, pad=True, remat=remat)
            rows = self.batch // way.accumulate
            ids = torch.empty(rows, self.sequence, dtype=torch.int64, device="meta")
            given = shard(ids, rules.tokens, mesh), shard(ids, rules.labels, mesh)
            found = explain(lambda p, i, t: self.loss(apply, p, i, t), params, given)
        out: dict[str, float] = defaultdict(float)
        for late, t in enumerate((found.forward, found.backward)):
            for e in t.events:
                summed = e.kind == "psum" and set(e.axis.split()) <= set(way.copies)
                # of gradients, or all others
                of = "reduced" if late and summed else "own"
                out[f"{of} bytes {e.axis}"] += float(e.bytes)
                out[f"{of} messages {e.axis}"] += e.messages
        out |= {"parameters": found.parameters, "saved": found.saved, "transient": found.transient}
        return dict(out)

    def _staged(self, way: Strategy, found: Mapping[str, float]) -> Weighed:
        """Compute a step's cost from that of a micro-batch, under a stage of ZeRO."""
        ways = math.prod(way.mesh[a] for a in way.copies)
        if way.pipe > 1:
            found = self._of_stage(way, found)
        params = gradients = float(found["parameters"])
        state = params / self.item * self.state
        temporary = float(found["temporary"])
        along = self._along(way, found)
        if way.stage >= 1:
            state /= ways
        if way.stage >= 2 and way.pipe == 1:
            gradients, temporary = gradients / ways, temporary + found["layer"]
        if way.stage >= 3:
            params, temporary = params / ways, temporary + 2 * found["layer"]
        seconds = self._seconds(way, along, found)
        weighed = Weighed(way, along, params, gradients, state, found["saved"], temporary, seconds)
        stacks = tuple(path for path, _ in self.outline.stacks) if way.remat else ()
        return replace(weighed, fits=weighed.peak <= self.room, layers=stacks)

    def _of_stage(self, way: Strategy, found: Mapping[str, float]) -> dict[str, float]:
        """Return the cost of a micro-batch in one stage: of a mean one, but memory of the first."""
        out = {
            k: v / way.pipe if k.startswith(("own ", "reduced ")) else v for k, v in found.items()
        }
        # what is outside the layers, as an embedding and a head, may be on one stage
        depth = self.outline.depth
        fewer = depth - math.ceil(depth / way.pipe)
        out["parameters"] -= fewer * found["layer"]
        out["saved"] *= min(way.accumulate, way.pipe) / way.pipe
        return out

    def _along(self, way: Strategy, found: Mapping[str, float]) -> dict[str, tuple[float, float]]:
        """Count the bytes and messages of a step over each axis."""
        params, count = float(found["parameters"]), way.accumulate
        # half of a reduction scatters gradients, the other half gathers parameters
        times = {2: (count + 1) / 2, 3: count}.get(way.stage, 1) if way.pipe == 1 else 1
        along: dict[str, tuple[float, float]] = {}
        for axis in dict.fromkeys(k.split(" ", 2)[2] for k in found if " " in k):
            own, reduced = (
                [found.get(f"{of} {what} {axis}", 0.0) for what in ("bytes", "messages")]
                for of in ("own", "reduced")
            )
            if way.stage:
                p = math.prod(way.mesh[a] for a in axis.split())
                reduced[1] = min(2 * (p - 1) * math.ceil(params / BUCKET), reduced[1])
            along[axis] = count * own[0] + times * reduced[0], count * own[1] + times * reduced[1]
        if way.stage >= 3:
            ways, over = math.prod(way.mesh[a] for a in way.copies), " ".join(way.copies)
            had = along.get(over, (0.0, 0.0))
            gathered = params * (ways - 1) / ways
            along[over] = had[0] + count * gathered, had[1] + count * (ways - 1)
        if way.pipe > 1:
            each_way = 2 * (way.pipe - 1) / way.pipe
            along["pipe"] = each_way * self._crossing(way), each_way * count
        return along

    def _crossing(self, way: Strategy) -> float:
        """Count the bytes that pass between two layers in a step, on one rank."""
        copies = way.mesh["x"] if way.recipe == "megatron1d" else 1
        elements = self.batch * self.sequence * width(self.layers)
        return elements * self.item * copies / math.prod(way.inner.values())

    def _seconds(
        self,
        way: Strategy,
        along: Mapping[str, tuple[float, float]],
        found: Mapping[str, float],
    ) -> float:
        """Add the seconds of a step's products and transfers."""
        links = self.cluster.links(way.mesh)
        # remat runs forward twice: 4 products instead of 3
        products = 4 / 3 if way.remat else 1
        seconds = self.flops * products / math.prod(way.mesh.values()) / self.cluster.flops
        seconds += _moving({a: moved for a, moved in along.items() if a != "pipe"}, links)
        if way.pipe == 1:
            return seconds
        # gradients are reduced once all micro-batches are through
        once = {k: v for k, v in found.items() if k.startswith("reduced ")}
        late = self._along(replace(way, accumulate=0), once | {"parameters": found["parameters"]})
        late.pop("pipe")
        after, count = _moving(late, links), way.accumulate
        hop = links["pipe"].seconds(self._crossing(way) / count)
        return after + in_stages((seconds - after) / count, way.pipe, count, hop)


def _moving(along: Mapping[str, tuple[float, float]], links: Mapping[str, Link]) -> float:
    """Add the seconds of the bytes and messages over each axis, or several."""
    return sum(slowest(axes.split(), links).seconds(*moved) for axes, moved in along.items())


def _strategies(data: int, rest: int) -> list[Strategy]:
    """List the ways with ``data`` copies of the parameters, each over ``rest`` ranks."""
    ways = [("megatron1d", {"x": rest}), ("fsdp", {"x": rest}), ("ring", {"s": rest})]
    if rest == 1:
        ways = [("ddp", {"data": data})]
    for x, z, y in factorizations(rest):
        if z == 1 and min(x, y) > 1:
            ways.append(("optimus2d", {"x": x, "y": y}))
        elif min(x, y, z) > 1:
            ways.append(("cube3d", {"x": x, "y": y, "z": z}))
    copies = {"data": data} if data > 1 else {}
    return [Strategy(recipe, {**copies, **mesh}) for recipe, mesh in ways]


def _order(found: Weighed) -> tuple[bool, float, float]:
    """Sort those that fit by seconds, then the others by bytes."""
    return not found.fits, found.seconds if found.fits else found.peak, found.peak


def stage_counts(ranks: int, depth: int, pipe: int | None = None) -> list[int]:
    """List the numbers of stages to consider for a model of so many equal layers, or ``pipe``."""
    most = min(depth, _STAGES)
    return [n for n in divisors(ranks) if n <= most and pipe in (None, n)]


def hiding(rows: int, pipe: int) -> int:
    """Return the number of equal micro-batches that hides the bubble of so many stages."""
    return max(n for n in divisors(rows) if n <= 4 * pipe)


def divisors(n: int) -> list[int]:
    """List the divisors of a number."""
    return [d for d in range(1, n + 1) if n % d == 0]


def _said(config: object, names: Sequence[str]) -> int | None:
    """Return the first of these fields that a configuration has as an integer."""
    found = (getattr(config, n, None) for n in names)
    return next((n for n in found if isinstance(n, int)), None)


def _heads(model: nn.Module) -> int | None:
    """Return the number of attention heads in a model's configuration, or None."""
    return _said(getattr(model, "config", None), ("num_attention_heads", "n_head", "heads"))


def _keys(model: nn.Module) -> float:
    """Count elements of keys and values per token, in all layers, from the configuration."""
    config, heads = getattr(model, "config", None), _heads(model) or 1
    hidden = _said(config, ("hidden_size", "n_embd", "embed")) or 0
    layers = _said(config, ("num_hidden_layers", "n_layer", "layers")) or 1
    return 2.0 * hidden * layers * (_said(config, ("num_key_value_heads",)) or heads) / heads


def _flops(model: nn.Module, sequence: int) -> float:
    """Count the operations of forward for one row, on the meta device."""
    from torch.utils.flop_counter import FlopCounterMode

    state = {n: x.detach().to("meta") for n, x in model.state_dict(keep_vars=True).items()}
    ids = torch.empty(1, sequence, dtype=torch.int64, device="meta")
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as count:
        torch.func.functional_call(model, state, (ids,), tie_weights=False)
    return float(count.get_total_flops())
