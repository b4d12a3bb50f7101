"""Which mesh, and will it fit: the ways to split a model over so many ranks, priced on shapes alone.

Every recipe on every mesh of so many ranks is first estimated from the model's products.  The best
of them then run on paper, forward and backward, with each distinct layer once and once more
(outline.py), so that products, attention, embedding and loss are what a step's own calls say, and a
model of 80 layers takes as long as one of two.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardlib.errors import BadArgument, ShardError
from shardlib.mesh import Link, record
from shardlib.modules import parallelize, recipes
from shardlib.modules.dimensions import Dimensions, trace_dimensions
from shardlib.placing import shard
from shardlib.planning.explain import explain
from shardlib.planning.grids import step_cost
from shardlib.planning.outline import Outline, outline
from shardlib.planning.products import Layer, Sums, all_products

__all__ = ["CLUSTERS", "Cluster", "Plan", "Way", "Weighed", "loss_of", "plan"]


@dataclass(frozen=True)
class Cluster:
    """What a rank has, and how ranks are joined.

    ``memory``   bytes of one rank.     ``flops``    operations per second that its products reach.
    ``node``     ranks that are joined by links ``inside``; others are by links ``between``.

    >>> Cluster(memory=80e9, flops=4e14).node
    8
    """

    memory: float
    flops: float
    node: int = 8
    inside: Link = field(default=Link(5e-6, 1 / 200e9))
    between: Link = field(default=Link(1e-5, 1 / 40e9))

    def links(self, mesh: Mapping[str, int]) -> dict[str, Link]:
        """The link of each axis, the last axis' ranks side by side."""
        out, reach = {}, 1
        for axis, n in reversed(list(mesh.items())):
            reach *= n
            out[axis] = self.inside if reach <= self.node else self.between
        return out


CLUSTERS = {  # data sheets' memory; half of the data sheets' operations and links
    "a100": Cluster(80e9, 156e12, 8, Link(5e-6, 1 / 150e9), Link(1e-5, 1 / 12.5e9)),
    "h100": Cluster(80e9, 495e12, 8, Link(5e-6, 1 / 225e9), Link(1e-5, 1 / 25e9)),
    "h200": Cluster(141e9, 495e12, 8, Link(5e-6, 1 / 225e9), Link(1e-5, 1 / 25e9)),
    "b200": Cluster(180e9, 1125e12, 8, Link(5e-6, 1 / 450e9), Link(1e-5, 1 / 25e9)),
}


BUCKET = 25 * 2**20  # bytes of gradients that travel together, as zero's bucket_mb


@dataclass(frozen=True)
class Way:
    """A recipe on a mesh, with ZeRO's stage and what modules keep for backward."""

    recipe: str
    mesh: Mapping[str, int]
    stage: int = 0
    remat: str = ""

    @property
    def copies(self) -> tuple[str, ...]:
        """The axes over which parameters are copied."""
        names = ("data", "s") if self.recipe == "ring" else ("data",)
        return tuple(a for a in names if self.mesh.get(a, 1) > 1)

    def __str__(self) -> str:
        text = f"{self.recipe:<10} {' '.join(f'{a}={n}' for a, n in self.mesh.items())}"
        text += f", zero {self.stage}" if self.stage else ""
        return text + (f", remat {self.remat}" if self.remat else "")


@dataclass(frozen=True)
class Weighed:
    """What a step moves, takes and holds on one rank.

    ``along``      axis -> (bytes, messages).     ``seconds``  of transfers and of products, one after the other.
    ``parameters``, ``gradients``, ``state``, ``saved``, ``temporary``  bytes.
    ``layers``   the stacks of layers that ``remat`` is of.
    """

    way: Way
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
    def bytes(self) -> float:
        """Received in a step."""
        return sum(b for b, _ in self.along.values())

    @property
    def messages(self) -> float:
        """Received in a step."""
        return sum(m for _, m in self.along.values())

    @property
    def peak(self) -> float:
        """Held at the most: what is saved goes as gradients come."""
        return self.parameters + self.state + max(self.gradients, self.saved) + self.temporary


@dataclass(frozen=True)
class Plan:
    """The best way, and the others.

    ``table``  best first; those that fit before those that do not.   ``best``  None where none fits.
    ``rejected``  (way, why) of those that cannot be.    ``looked``  how many were estimated.

    >>> from torch import nn
    >>> words = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
    >>> found = plan(words, 2, batch=8, sequence=16, memory=1000)
    >>> found.best, found.table[0].fits
    (None, False)
    """

    table: tuple[Weighed, ...]
    memory: float
    looked: int
    rejected: tuple[tuple[Way, str], ...] = ()

    @property
    def best(self) -> Weighed | None:
        return self.table[0] if self.table and self.table[0].fits else None

    def __str__(self) -> str:
        lines = []
        best = self.best
        if best is not None:
            lines.append(
                f"{best.way}: {_gib(best.peak)} of {_gib(self.memory)} GiB, {best.seconds:.3g} s a step"
            )
        elif self.table:
            least = min(self.table, key=lambda w: w.peak)
            lines.append(
                f"nothing fits into {_gib(self.memory)} GiB; the least is {_gib(least.peak)} GiB: {least.way}"
            )
        lines.append(
            "GiB per rank: peak  params   grads   state   saved    temp   MiB moved  messages   seconds"
        )
        for w in self.table:
            parts = (w.peak, w.parameters, w.gradients, w.state, w.saved, w.temporary)
            figures = " ".join(f"{_gib(p):>7}" for p in parts)
            tail = f"{w.bytes / 2**20:>11.1f} {w.messages:>9.0f} {w.seconds:>9.3g}"
            lines.append(
                f"        {figures} {tail}  {w.way}" + ("" if w.fits else "  (does not fit)")
            )
        lines.append(f"{self.looked} ways were estimated, {len(self.table)} ran on paper")
        return "\n".join(lines)

    __repr__ = __str__


def _gib(n: float) -> str:
    return f"{n / 2**30:.2f}"


def plan(
    model: nn.Module,
    ranks: int,
    *,
    batch: int,
    sequence: int,
    cluster: str | Cluster = "h100",
    memory: float | None = None,
    state: float = 8.0,
    recipe: str | Sequence[str] = ("ddp", "megatron1d", "fsdp", "optimus2d", "cube3d", "ring"),
    loss: Callable[..., Tensor] | None = None,
    most: int = 4,
) -> Plan:
    """Find how to train a language model on so many ranks: mesh, recipe, ZeRO's stage, remat.

    ``model``     best on the meta device; its dtype counts.
    ``batch``     rows of a global batch, of ``sequence`` tokens each.
    ``cluster``   what ranks have and how they are joined: "a100", "h100", "h200", "b200", or yours.
    ``memory``    bytes of one rank, else the cluster's.
    ``state``     bytes that the optimizer keeps per parameter: AdamW 8, with an fp32 master 12.
    ``recipe``    those to look at.     ``most``  how many run on paper.
    ``loss``      of (apply, params, ids, labels); by default cross entropy of the logits.
    ZeRO is used over the axes that copy parameters, at the lowest stage from 1 on that fits, and
    ``remat`` of whole layers where nothing else does.  Transfers are not thought to be hidden.
    Raises: BadArgument where there is nothing to plan.

    >>> from torch import nn
    >>> class Tiny(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.wte, self.up, self.down = nn.Embedding(64, 32), nn.Linear(32, 128), nn.Linear(128, 32)
    ...         self.head = nn.Linear(32, 64, bias=False)
    ...     def forward(self, ids):
    ...         return self.head(self.down(self.up(self.wte(ids)).relu()))
    >>> found = plan(Tiny(), 4, batch=8, sequence=16, recipe=["ddp", "megatron1d"])
    >>> found.best.way.recipe, dict(found.best.way.mesh), found.best.way.stage
    ('ddp', {'data': 4}, 1)
    """
    if ranks < 1 or batch < 1 or sequence < 1:
        raise BadArgument(
            f"ranks={ranks}, batch={batch}, sequence={sequence}: each is 1 at least",
            op="plan",
            fix="sl.planning.plan(model, 8, batch=64, sequence=1024)",
        )
    names = [recipe] if isinstance(recipe, str) else list(recipe)
    where = _cluster(cluster)
    room = where.memory if memory is None else memory
    study = _Study(model, where, batch, sequence, state, loss or _loss, room)
    ways = list(study.ways(ranks, names))
    ranked = sorted((study.estimate(w), i, w) for i, w in enumerate(ways))
    table: list[Weighed] = []
    rejected: list[tuple[Way, str]] = []
    for way in _some([(seconds, w) for seconds, _, w in ranked], most):
        try:
            table.append(study.weigh(way))
        except ShardError as e:
            rejected.append((way, e.message.splitlines()[0]))
    table.sort(key=lambda w: (not w.fits, w.seconds if w.fits else w.peak, w.peak))
    return Plan(tuple(table), room, len(ways), tuple(rejected))


def _cluster(given: str | Cluster) -> Cluster:
    if isinstance(given, Cluster):
        return given
    if given not in CLUSTERS:
        raise BadArgument(
            f"no cluster {given!r}; there are {', '.join(CLUSTERS)}",
            op="plan",
            fix="sl.planning.Cluster(memory=80e9, flops=4e14)",
        )
    return CLUSTERS[given]


def _some(ranked: Sequence[tuple[float, Way]], most: int) -> list[Way]:
    """The best, and of every recipe its best, unless that is thought to take more than twice as long."""
    if not ranked:
        return []
    bar = 2 * ranked[0][0]
    near = [(t, w) for t, w in ranked if t <= bar] or [ranked[0]]
    firsts = list({w.recipe: w for _, w in reversed(near)}.values())
    kept = [w for i, (_, w) in enumerate(near) if i < max(most - len(firsts), 1) or w in firsts]
    return kept[:most]


def loss_of(out: Any, labels: Any) -> Tensor | None:
    """The loss in what forward gave: a scalar, its ``loss``, or its logits against the labels."""
    found = getattr(out, "loss", None)
    out = found if isinstance(found, Tensor) else getattr(out, "logits", out)
    if isinstance(out, Tensor) and out.numel() == 1:
        return out
    if isinstance(out, Tensor) and isinstance(labels, Tensor) and out.ndim == labels.ndim + 1:
        return F.cross_entropy(out.view(-1, out.shape[-1]), labels.view(-1))
    return None


def _loss(apply: Any, params: Any, ids: Tensor, labels: Tensor) -> Tensor:
    known = dict(apply.arguments)
    fixed = {"use_cache": False} if "use_cache" in known else {}
    out = apply(params, ids, **fixed)
    found = loss_of(out, labels)
    if found is None:
        raise BadArgument(
            f"forward gives {type(out).__name__}, no logits and no loss",
            op="plan",
            fix="sl.planning.plan(model, 8, batch=8, sequence=64, loss=lambda f, p, ids, _: f(p, ids).mean())",
        )
    return found


# ---------------------------------------------------------------- what is looked at


class _Study:
    """One model on one cluster: what is found once serves every way."""

    def __init__(
        self, model: nn.Module, cluster: Cluster, batch: int, sequence: int, state: float,
        loss: Callable[..., Tensor], room: float,
    ) -> None:  # fmt: skip
        self.cluster, self.batch, self.sequence = cluster, batch, sequence
        self.state, self.loss, self.room = state, loss, room
        self.ratio = 0.0  # of what is saved without remat and with it, once that is known
        self.outline: Outline = outline(model)
        self.models = [self.outline.model(i) for i in range(1 + len(self.outline.repeats))]
        self.dims: list[Dimensions] = [trace_dimensions(m) for m in self.models]
        self.layers: list[Layer] = all_products(self.outline, self.dims)
        self.item = max(p.element_size() for p in model.parameters())
        self.flops = 3 * batch * self.outline.total([_flops(m, sequence) for m in self.models])
        self.heads, self.keys = _heads(model), _keys(model)

    def ways(self, ranks: int, names: Sequence[str]) -> Iterator[Way]:
        """Every recipe on every mesh that the sizes let through."""
        for data in _divisors(ranks):
            rest = ranks // data
            axes = {"data": data} if data > 1 else {}
            if rest == 1:
                if "ddp" in names and self.batch % data == 0:
                    yield Way("ddp", {"data": data})
                continue
            if "megatron1d" in names and self._even(data, rest):
                yield Way("megatron1d", {**axes, "x": rest})
            if "fsdp" in names and self.batch % ranks == 0:
                yield Way("fsdp", {**axes, "x": rest})
            if "ring" in names and self.batch % data == 0 and self.sequence % (2 * rest) == 0:
                yield Way("ring", {**axes, "s": rest})
            for x in _divisors(rest):
                y = rest // x
                if "optimus2d" in names and 1 < x < rest and self._even(data * x, y):
                    yield Way("optimus2d", {**axes, "x": x, "y": y})
                for z in _divisors(y):
                    n = y // z
                    cube = "cube3d" in names and min(x, n, z) > 1
                    if cube and self._even(data * x * n, n) and self.batch % (data * x * z) == 0:
                        yield Way("cube3d", {**axes, "x": x, "y": n, "z": z})

    def _even(self, rows: int, heads: int) -> bool:
        return self.batch % rows == 0 and (self.heads is None or self.heads % heads == 0)

    def estimate(self, way: Way) -> float:
        """Seconds of a step by its products alone; infinite where its state cannot fit."""
        mesh = way.mesh
        data = mesh.get("data", 1)
        m, k, n = mesh.get("x", 1), mesh.get("z", 1), mesh.get("y", 1)
        if way.recipe == "megatron1d":
            m, n = 1, m
        if way.recipe == "ring":
            data, m = data * mesh["s"], 1
        tokens = self.batch * self.sequence // data
        cost = step_cost(self.layers, m, k, n, "", tokens, self.item, 0)
        ranks = math.prod(mesh.values())
        weights = sum(layer.inputs * layer.outputs * layer.count for layer in self.layers)
        held = weights * (self.item + (self.item + self.state) / data) / (m * k * n)
        links = self.cluster.links(mesh)
        roles = {"x": "x", "y": "y", "z": "z"}
        if way.recipe == "megatron1d":
            roles["y"] = "x"  # the axis n of the grid is called x there
        named = {a: links[roles[a]] for a in "xyz" if roles[a] in links}
        seconds = cost.seconds(named)
        if way.recipe == "ring":  # keys and values go round, with their gradients on the way back
            p, own = mesh["s"], self.batch // mesh.get("data", 1) * self.sequence
            seconds += 3 * (p - 1) / p * own * self.keys * self.item * links["s"].beta
        if data > 1:
            link = links.get("data", links.get("s", self.cluster.between))
            part = weights * self.item / (m * k * n)
            seconds += (
                2 * (data - 1) * (part / data * link.beta + math.ceil(part / BUCKET) * link.alpha)
            )
        over = held / data if way.recipe in ("ddp", "ring") else held
        return (
            seconds + self.flops / ranks / self.cluster.flops + (1e9 if over > self.room else 0.0)
        )

    def weigh(self, way: Way) -> Weighed:
        """What a step takes, at the lowest stage of ZeRO that fits, and with remat where it must.

        Once a way was measured both with remat and without, the next is measured without only where
        the same ratio of what is saved says that it may fit.
        """
        full = self._measured(way, "full") if self.ratio else None
        if full is not None and not self._may_fit(way, full):
            return self._first(way, full, "full")
        plain = self._measured(way, "")
        found = self._first(way, plain, "")
        if found.fits or not self.outline.stacks:
            return found
        full = full or self._measured(way, "full")
        self.ratio = plain["saved"] / max(full["saved"], 1)
        return self._first(way, full, "full")

    def _may_fit(self, way: Way, full: Mapping[str, float]) -> bool:
        """Whether a way may fit without remat, by what it saves with it."""
        without = {**full, "saved": full["saved"] * self.ratio}
        return self._first(way, without, "").peak <= 1.1 * self.room

    def _first(self, way: Way, found: Mapping[str, float], remat: str) -> Weighed:
        """At the lowest stage that fits, else at the highest."""
        stages = range(1, 4) if way.copies else range(1)
        tries = [self._staged(replace(way, stage=s, remat=remat), found) for s in stages]
        return next((t for t in tries if t.fits), tries[-1])

    def _measured(self, way: Way, remat: str) -> dict[str, float]:
        policies = [(f"{path}.*", remat) for path, _ in self.outline.stacks] if remat else []
        found = [
            self._run(way, m, d, policies) for m, d in zip(self.models, self.dims, strict=True)
        ]
        whole = self.outline.total(found).values
        last = found[-1].values
        # temporaries do not grow with the layers: what the largest of the smaller models had
        held = max(last["saved"], last["parameters"])
        whole["temporary"] = max(last["transient"] - held, 0)
        whole["layer"] = max(
            (f.values["parameters"] - found[0].values["parameters"] for f in found[1:]), default=0
        )
        return whole

    def _run(self, way: Way, model: nn.Module, dims: Dimensions, remat: Any) -> Sums:
        """One smaller model on paper."""
        with record(**way.mesh) as mesh:
            make = getattr(recipes, way.recipe)
            more = {} if way.recipe in ("ddp", "ring") else {"inputs": dims}
            rules = make(model, mesh, **more)
            apply, params = parallelize(model, rules, mesh=mesh, pad=True, remat=remat)
            ids = torch.empty(self.batch, self.sequence, dtype=torch.int64, device="meta")
            given = shard(ids, rules.tokens, mesh), shard(ids, rules.labels, mesh)
            found = explain(lambda p, i, t: self.loss(apply, p, i, t), params, given)
        out: dict[str, float] = defaultdict(float)
        for late, t in enumerate((found.forward, found.backward)):
            for e in t.events:
                out[f"bytes {e.axis}"] += float(e.bytes)
                out[f"messages {e.axis}"] += e.messages
                if late and not set(e.axis.split()).isdisjoint(way.copies):
                    out[f"gradients {e.axis}"] += e.messages
        out |= {"parameters": found.parameters, "saved": found.saved, "transient": found.transient}
        return Sums(dict(out))

    def _staged(self, way: Way, found: Mapping[str, float]) -> Weighed:
        ways = math.prod(way.mesh[a] for a in way.copies)
        params = float(found["parameters"])
        state = params / self.item * self.state
        along = {
            axis: (float(found[f"bytes {axis}"]), float(found[f"messages {axis}"]))
            for axis in [k.removeprefix("bytes ") for k in found if k.startswith("bytes ")]
        }
        temporary = float(found["temporary"])
        gradients = params
        if way.stage >= 1:
            state /= ways
            for axis, (nbytes, messages) in along.items():  # gradients travel in buckets
                p = math.prod(way.mesh[a] for a in axis.split())
                one_by_one = found.get(f"gradients {axis}", 0.0)
                in_buckets = 2 * (p - 1) * math.ceil(gradients / BUCKET)
                along[axis] = (nbytes, messages - max(one_by_one - in_buckets, 0))
        if way.stage >= 2:
            gradients, temporary = gradients / ways, temporary + found["layer"]
        if way.stage >= 3:
            over = " ".join(way.copies)
            gathered = params * (ways - 1) / ways
            had = along.get(over, (0.0, 0.0))
            along[over] = (had[0] + gathered, had[1] + ways - 1)
            params, temporary = params / ways, temporary + 2 * found["layer"]
        links = self.cluster.links(way.mesh)
        ranks = math.prod(way.mesh.values())
        seconds = self.flops * (4 / 3 if way.remat else 1) / ranks / self.cluster.flops
        for axis, (nbytes, messages) in along.items():
            met = [links[a] for a in axis.split()]
            seconds += max(m.alpha for m in met) * messages + max(m.beta for m in met) * nbytes
        weighed = Weighed(way, along, params, gradients, state, found["saved"], temporary, seconds)
        stacks = tuple(path for path, _ in self.outline.stacks) if way.remat else ()
        return replace(weighed, fits=weighed.peak <= self.room, layers=stacks)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _said(config: Any, names: Sequence[str]) -> int | None:
    """The first of these that a configuration says."""
    found = (getattr(config, n, None) for n in names)
    return next((n for n in found if isinstance(n, int)), None)


def _heads(model: nn.Module) -> int | None:
    """Attention heads, where a configuration says them."""
    return _said(getattr(model, "config", None), ("num_attention_heads", "n_head", "heads"))


def _keys(model: nn.Module) -> float:
    """Elements of keys and values per token, in all layers, where a configuration says them."""
    config, heads = getattr(model, "config", None), _heads(model) or 1
    hidden = _said(config, ("hidden_size", "n_embd", "embed")) or 0
    layers = _said(config, ("num_hidden_layers", "n_layer", "layers")) or 1
    return 2.0 * hidden * layers * (_said(config, ("num_key_value_heads",)) or heads) / heads


def _flops(model: nn.Module, sequence: int) -> float:
    """Operations of forward for one row, counted on shapes."""
    from torch.utils.flop_counter import FlopCounterMode

    state = {n: x.detach().to("meta") for n, x in model.state_dict(keep_vars=True).items()}
    ids = torch.empty(1, sequence, dtype=torch.int64, device="meta")
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as count:
        torch.func.functional_call(model, state, (ids,), tie_weights=False)
    return float(count.get_total_flops())
