"""Muon: momentum whose matrices are made orthogonal, wherever they lie.

What makes it hard to split is that a matrix's update hangs on all of it.  Four ways to compute it
give the same values; which is cheapest is a matter of price:

local     every rank has whole matrices (experts, heads, or all of them): nothing moves;
gathered  each matrix on every rank: all compute the same;
owners    each matrix on one rank, which sends the result back: the work is shared out;
blocks    Newton and Schulz's products on the blocks themselves, by the matmul family: more bytes,
          but no rank ever holds the matrix.

``sl.why("muon", params)`` prints the prices, ``sl.algorithm(muon="gathered")`` pins one.

Source: Jordan et al., Muon (2024), kellerjordan.github.io/posts/muon; torch.optim.Muon.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor

from shardlib.collectives import blocks
from shardlib.collectives.count import Trace
from shardlib.cost import Cost, moving
from shardlib.errors import ShardError, Unsupported
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Link, Mesh, bind, coordinates, record, within
from shardlib.modules.patterns import Pattern, matches
from shardlib.ops.registry import Match, algorithm, case_of, decide, known
from shardlib.optim.buckets import Buckets
from shardlib.optim.groups import by_mask
from shardlib.optim.newton_schulz import COEFFICIENTS, Coefficients, flops, on_blocks, orthogonal
from shardlib.optim.owners import Laid, Spread, apart, deal, laid, through_owners
from shardlib.optim.schedules import Schedule, at_step
from shardlib.optim.select import Mask, named, one_each
from shardlib.optim.sums import scaled
from shardlib.optim.transform import Transform, ranged
from shardlib.optim.trees import each, moments, need, ready, wide
from shardlib.placing import reshard
from shardlib.tensor import Place, ShardedTensor, typeof

__all__ = ["muon"]

Adjust = Literal["original", "match_rms_adamw"]


class MuonState(NamedTuple):
    """Steps taken, and the momentum."""

    count: int
    trace: Any


@ranged
def muon(
    lr: float | Schedule,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    *,
    rest: Transform | None = None,
    matrices: Mask = None,
    side: Sequence[tuple[Pattern[Any], int | tuple[int, int]]] = (),
    adjust: Adjust = "original",
    coefficients: Coefficients = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    most_mb: float = math.inf,
) -> Transform:
    """Orthogonal momentum for matrices, as torch.optim.Muon, on any layout.

    ``rest``      what updates everything that ``matrices`` does not mean.
    ``matrices``  globs of paths, a tree of bools, or a function of the tree; see
                  ``recipes.matrices(model)``.  Leaves of three dimensions are stacks of matrices.
    ``side``      (pattern, n): n matrices lie side by side in the rows of these (a fused qkv: 3,
                  heads: their number), each made orthogonal on its own; (rows, columns) where they
                  lie in columns too.
    ``adjust``    the rate per matrix, as torch's ``adjust_lr_fn``.
    ``dtype``     in which matrices travel and are computed; torch's is bfloat16, which is fast on
                  GPUs and rounds by 1 %.  None: fp32, or fp64 for fp64.
    ``most_mb``   the most MiB of a matrix that a rank may hold whole.
    Raises: Unsupported for a leaf that is no matrix.

    >>> import shardlib as sl
    >>> tx = muon(0.1, weight_decay=0.0, rest=sl.optim.adamw(0.1), matrices="*.weight")
    >>> params = {"a.weight": torch.eye(2), "a.bias": torch.ones(2)}
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> updates["a.weight"].diagonal().round(decimals=3), round(updates["a.bias"][0].item(), 3)
    (tensor([-0.1110, -0.1110]), -0.101)
    """
    how = _How(coefficients, steps, eps, dtype, most_mb * 2**20, tuple(side))

    def init(params: Any) -> MuonState:
        _check(params)
        return MuonState(0, moments(params))

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        ready(grads, "muon", state.trace)
        if weight_decay:
            need(params, "muon")
        rate = at_step(lr, state.count)
        trace = each(lambda m, g: m.lerp(g.to(m.dtype), 1 - momentum), state.trace, grads)
        way = trace
        if nesterov:
            way = each(lambda m, g: g.to(m.dtype).lerp(m, momentum), trace, grads)
        way = _orthogonal(way, how)
        sizes = [x if x is None else x * -rate for x in _adjusted(way, adjust, how)]
        updates = scaled(way, sizes)
        if weight_decay:
            updates = each(lambda u, p: u.add_(p, alpha=-rate * weight_decay), updates, params)
        return updates, MuonState(state.count + 1, trace)

    core = Transform(init, update, "matrix")
    if rest is None and matrices is None:
        return core
    if rest is None or matrices is None:
        raise ShardError(
            "matrices= says which parameters are Muon's, and rest= what updates the others",
            op="muon",
            fix='sl.optim.muon(0.02, rest=sl.optim.adamw(3e-4), matrices="*.weight")',
        )

    return by_mask(matrices, core, rest, "muon")


class _How(NamedTuple):
    """Of the iteration, and of where it may run."""

    coefficients: Coefficients
    steps: int
    eps: float
    dtype: torch.dtype | None
    most: float
    side: tuple[Any, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return orthogonal(x, self.coefficients, self.steps, self.eps)

    def sides(self, path: str, x: Tensor) -> tuple[int, int]:
        """How many matrices lie side by side."""
        n = next((n for p, n in self.side if matches(p, path, x)), 1)
        rows, cols = (n, 1) if isinstance(n, int) else n
        if x.shape[-2] % rows or x.shape[-1] % cols:
            raise ShardError(
                f"{path} of {list(x.shape)} is not {rows} x {cols} matrices side by side",
                op="muon",
                fix=f"side = [({path!r}, 1)]",
            )
        return rows, cols


def _check(params: Any) -> None:
    """Refuse what is no matrix."""
    for path, x in named(params).items():
        if isinstance(x, Tensor) and x.ndim < 2:
            raise Unsupported(
                f"{path or 'the parameter'} of {x.ndim} dimensions is no matrix",
                op="muon",
                operands={"parameter": typeof(x)},
                fix="tx = sl.optim.muon(0.02, rest=sl.optim.adamw(3e-4), "
                "matrices=lambda tree: optree.tree_map(lambda p: p.ndim > 1, tree))",
            )


def _adjusted(tree: Any, adjust: Adjust, how: _How) -> list[Tensor | None]:
    """The factor of each matrix's rate."""
    out: list[Tensor | None] = []
    for path, x in one_each(tree):
        if not isinstance(x, Tensor):
            out.append(None)
            continue
        rows, cols = how.sides(path, x)
        m, n = x.shape[-2] // rows, x.shape[-1] // cols
        ratio = math.sqrt(max(1, m / n)) if adjust == "original" else 0.2 * math.sqrt(max(m, n))
        out.append(torch.tensor(ratio, dtype=torch.float64))
    return out


# ---------------------------------------------------------------- where it is computed


RATES = {"cpu": 7e10, "cuda": 5e13}
"""Flops per second of one rank, where none are known."""


@dataclass(frozen=True)
class MuonCase:
    """Matrices to be made orthogonal together: how they lie, and what ranks and links can do.

    ``share``  of all the work that owners have, the part of the one who has most; None: of these
               matrices alone.
    """

    spreads: tuple[Spread, ...]
    sizes: tuple[tuple[str, int], ...]
    dtype: torch.dtype
    rate: float
    most: float
    share: float | None = None
    links: tuple[tuple[str, Link], ...] = ()

    @property
    def mesh(self) -> dict[str, int]:
        return dict(self.sizes)

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.mesh)

    def operands(self) -> dict[str, str]:
        rows = [f"{list(s.shape)} in {s.layout}" for s in self.spreads]
        return {str(i): row for i, row in enumerate(rows[:8])}

    def fix(self) -> tuple[str, type[ShardError]]:
        return "sl.optim.muon(0.02, most_mb=float('inf'))", Unsupported

    def match(self, name: str, work: float, cost: Cost) -> Match:
        """The price of a way: ``work`` is the flops of the rank that has most."""
        seconds = work / self.rate
        whole = Cost(cost.bytes, cost.messages, cost.memory, cost.along, seconds)
        note = f"{work / 1e9:.3g} GF on the rank with most, {1e3 * whole.seconds(dict(self.links)):.3g} ms"
        return Match(self.spreads[0].layout, name, whole, note=note)

    def too_large(self) -> str | None:
        """What says that no rank should hold one of them."""
        size = max(math.prod(s.padded[-2:]) for s in self.spreads) * self.dtype.itemsize
        if size <= self.most:
            return None
        return f"a matrix has {size} bytes, and a rank may hold {self.most:.0f}"


@algorithm("muon", "local", order=0)
def _local(case: MuonCase) -> Match | str:
    if not all(_whole_blocks(s, case.sizes) for s in case.spreads):
        return "a matrix is split"
    work = sum(_local_count(s, s.layout, case.mesh) * flops(*_one(s)) for s in case.spreads)
    return case.match("local", work, Cost())


@algorithm("muon", "gathered", order=1)
def _gathered(case: MuonCase) -> Match | str:
    if (why := case.too_large()) is not None:
        return why
    work, cost = 0, Cost()
    for s in case.spreads:
        target = _rows_whole(s.layout)
        plan = s.layout >> target
        cost += moving(
            case.axes,
            plan.bytes(s.padded, case.mesh, case.dtype.itemsize),
            plan.messages(s.padded, case.mesh),
            plan.peak(s.padded, case.mesh, case.dtype.itemsize),
        )
        work += _local_count(s, target, case.mesh) * s.side[0] * s.side[1] * flops(*_one(s))
    return case.match("gathered", work, cost)


@algorithm("muon", "owners", order=2)
def _owners(case: MuonCase) -> Match | str:
    if case.ranks == 1:
        return "there is one rank"
    if (why := case.too_large()) is not None:
        return why
    plan = deal(case.spreads, case.sizes)
    nbytes = Fraction(plan.moved * case.dtype.itemsize, case.ranks)
    work, messages = max(plan.load), 2 * (case.ranks - 1)
    if case.share is not None:  # one of many matrices: of their exchange and work, its part
        work, messages = sum(plan.load) * case.share, 1
    return case.match("owners", work, moving(case.axes, nbytes, messages))


@algorithm("muon", "blocks", order=3)
def _blocks(case: MuonCase) -> Match | str:
    if any(len(s.shape) != 2 or s.side != (1, 1) for s in case.spreads):
        return "stacks of matrices and matrices side by side have no product on blocks"
    if not any(s.layout.axes for s in case.spreads):
        return "nothing is split"
    cost, work = Cost(), Fraction(0)
    for s in case.spreads:
        found = _on_paper(s, case.sizes, case.dtype, case.links)
        if isinstance(found, str):
            return found
        cost += found
        ways = math.prod(case.mesh[a] for a in s.layout.axes)
        work += Fraction(flops(*s.shape), ways)
    return case.match("blocks", float(work), cost)


@lru_cache(maxsize=256)
def _on_paper(
    s: Spread,
    sizes: tuple[tuple[str, int], ...],
    dtype: torch.dtype,
    links: tuple[tuple[str, Link], ...],
) -> Cost | str:
    """What the products on blocks move: they run on shapes alone, and are counted."""
    mesh = record(**dict(sizes))
    mesh.links.update(links)
    local = torch.empty(s.layout.local_shape(s.padded, mesh), dtype=dtype, device="meta")
    place = Place(s.layout, torch.Size(s.padded), mesh, _true(s))
    counted = Trace()
    try:
        with within(traces=(counted,), pins=(), budget=None), bind(mesh):
            on_blocks(ShardedTensor(local, place))
    except ShardError as e:
        return e.message.partition("\n")[0]
    along = tuple(
        ((e.axis,) if isinstance(e.axis, str) else tuple(e.axis), e.bytes, e.messages)
        for e in counted.events
    )
    return Cost(counted.bytes, counted.messages, 0, along)


def _true(s: Spread) -> torch.Size | None:
    return None if s.padded == s.shape else torch.Size(s.shape)


def _rows_whole(layout: Layout) -> Layout:
    return Layout((*layout.dims[:-2], Dim(), Dim()))


def _one(s: Spread) -> tuple[int, int]:
    """The shape of one of the matrices side by side."""
    return s.shape[-2] // s.side[0], s.shape[-1] // s.side[1]


def _local_count(s: Spread, layout: Layout, mesh: Mapping[str, int]) -> int:
    """Matrices in a block of ``layout``, of those side by side each."""
    *lead, rows, cols = layout.local_shape(s.padded, mesh)
    if layout.dims[-2:] == (Dim(), Dim()) and s.side != (1, 1):
        return math.prod(lead)
    m, n = _one(s)
    return math.prod(lead) * max(rows // m, 1) * max(cols // n, 1)


@lru_cache(maxsize=1024)
def _whole_blocks(s: Spread, sizes: tuple[tuple[str, int], ...]) -> bool:
    """Whether every rank's block consists of whole matrices."""
    mesh = dict(sizes)
    if s.runs is not None or s.layout.skew:
        return False
    if s.layout.dims[-2:] == (Dim(), Dim()) and s.padded[-2:] == s.shape[-2:]:
        return True
    if s.padded != s.shape:
        return False
    return all(
        _in_pieces(places, n)
        for coord in coordinates(mesh)
        for places, n in zip(s.layout.indices(s.shape, mesh, coord)[-2:], _one(s), strict=True)
    )


def _in_pieces(places: Sequence[int], n: int) -> bool:
    """Whether places are runs of n neighbours, each from a multiple of n on."""
    firsts = places[::n]
    return len(places) % n == 0 and all(
        first % n == 0 and list(places[i * n : (i + 1) * n]) == list(range(first, first + n))
        for i, first in enumerate(firsts)
    )


@case_of("muon")
def _case(*operands: Any) -> MuonCase:
    """The case of parameters, or trees of them, that are updated together."""
    named_leaves = {f"{i}.{n}": x for i, t in enumerate(operands) for n, x in named(t).items()}
    leaves = {n: x for n, x in named_leaves.items() if isinstance(x, ShardedTensor) and x.ndim > 1}
    if not leaves:
        raise Unsupported(
            "there is no sharded matrix", op="why", fix='sl.why("muon", sl.shard(w, "..."))'
        )
    return _case_of(list(leaves.values()), [(1, 1)] * len(leaves), None, math.inf)


def _case_of(
    leaves: Sequence[ShardedTensor],
    sides: Sequence[tuple[int, int]],
    dtype: torch.dtype | None,
    most: float,
) -> MuonCase:
    mesh = leaves[0].mesh
    spreads = tuple(
        Spread(x.sharding.bare.resolve(x.ndim), tuple(x.padded_shape), tuple(x.shape), None, side)
        for x, side in zip(leaves, sides, strict=True)
    )
    return MuonCase(
        spreads,
        tuple(mesh.axes.items()),
        dtype or wide(leaves[0].dtype),
        RATES.get(leaves[0].raw.device.type, RATES["cpu"]),
        most,
        None,
        tuple(mesh.links.items()),
    )


def _orthogonal(tree: Any, how: _How) -> Any:
    """Every matrix of the tree made orthogonal."""
    with torch.no_grad():
        if isinstance(tree, Buckets):
            return _in_buckets(tree, how)
        leaves, shape = optree.tree_flatten(tree, none_is_leaf=True)
        out = list(leaves)
        together: dict[tuple[Mesh, torch.dtype], list[int]] = {}
        paths = list(named(tree))
        for i, x in enumerate(leaves):
            if isinstance(x, ShardedTensor):
                together.setdefault((x.mesh, x.dtype), []).append(i)
            elif isinstance(x, Tensor):
                out[i] = _plain(x, how.sides(paths[i], x), how)
        for (mesh, _), at in together.items():
            sides = [how.sides(paths[i], leaves[i]) for i in at]
            done = _placed(mesh, [leaves[i] for i in at], sides, how)
            for i, y in zip(at, done, strict=True):
                out[i] = y
        return optree.tree_unflatten(shape, out)


def _plain(x: Tensor, side: tuple[int, int], how: _How) -> Tensor:
    """A whole matrix, or a stack of them."""
    y = x.to(how.dtype or wide(x.dtype))
    flat = y.reshape(-1, *y.shape[-2:]) if y.numel() else y
    return (apart(how, flat, side) if y.numel() else y).reshape(x.shape).to(x.dtype)


def _placed(
    mesh: Mesh, leaves: list[ShardedTensor], sides: list[tuple[int, int]], how: _How
) -> list[ShardedTensor]:
    """Matrices of one mesh, each where it is cheapest."""
    case = _case_of(leaves, sides, how.dtype, how.most)
    ways = known(("muon", case), lambda: _ways(case), mesh.plans)
    out: list[Any] = [None] * len(leaves)
    for i, (x, way) in enumerate(zip(leaves, ways, strict=True)):
        if way == "local":
            out[i] = x.becomes(_each_local(x.raw, x, case.spreads[i], how))
        elif way == "gathered":
            out[i] = _by_gathering(x, case.spreads[i], how)
        elif way == "blocks":
            y = ShardedTensor(x.raw.to(case.dtype), x.place)
            done = on_blocks(y, how.coefficients, how.steps, how.eps)
            out[i] = x.becomes(done.raw.to(x.dtype))
    dealt = [i for i, way in enumerate(ways) if way == "owners"]
    if dealt:
        runs = [[b.reshape(-1).to(case.dtype) for b in blocks(leaves[i].raw, mesh)] for i in dealt]
        for i, rows in zip(
            dealt,
            through_owners(runs, [case.spreads[i] for i in dealt], mesh, how),
            strict=True,
        ):
            raw = torch.empty_like(leaves[i].raw, memory_format=torch.contiguous_format)
            for block, row in zip(blocks(raw, mesh), rows, strict=True):
                block.copy_(row.view(block.shape))
            out[i] = leaves[i].becomes(raw)
    return out


def _ways(case: MuonCase) -> tuple[str, ...]:
    """Where each matrix is computed, given that owners share the work of all."""
    share = None
    if case.ranks > 1:
        load = deal(case.spreads, case.sizes).load
        share = max(load) / max(sum(load), 1)
    out = []
    for s in case.spreads:
        one = MuonCase((s,), case.sizes, case.dtype, case.rate, case.most, share, case.links)
        out.append(decide("muon", one).run)
    return tuple(out)


def _each_local(raw: Tensor, x: ShardedTensor, s: Spread, how: _How) -> Tensor:
    """Blocks that consist of whole matrices."""
    m, n = _one(s)
    rows, cols = raw.shape[-2:]
    flat = raw.reshape(-1, rows, cols).to(how.dtype or wide(raw.dtype))
    return apart(how, flat, (rows // m, cols // n)).reshape(raw.shape).to(raw.dtype)


def _by_gathering(x: ShardedTensor, s: Spread, how: _How) -> ShardedTensor:
    """Each matrix on every rank."""
    dtype = how.dtype or wide(x.dtype)
    whole = reshard(x.with_padding.becomes(x.raw.to(dtype)), _rows_whole(s.layout))
    m, n = s.shape[-2:]
    true = whole.raw[..., :m, :n]
    out = torch.zeros_like(whole.raw)
    out[..., :m, :n] = apart(how, true.reshape(-1, m, n), s.side).reshape(true.shape)
    back = reshard(whole.becomes(out), s.layout)
    return x.becomes(back.raw.to(x.dtype))


def _in_buckets(tree: Buckets, how: _How) -> Any:
    """Matrices that ``zero`` has cut, by their owners."""
    result = tree.like({k: x.becomes(torch.zeros_like(x.raw)) for k, x in tree.items()})
    rows: dict[torch.dtype, list[tuple[Laid, Laid]]] = {}
    for given, made in zip(laid(tree, how.sides), laid(result, how.sides), strict=True):
        dtype = how.dtype or wide(given.runs[0].dtype)
        rows.setdefault(dtype, []).append((given, made))
    for dtype, group in rows.items():
        runs = [[t.to(dtype) for t in given.runs] for given, _ in group]
        done = through_owners(runs, [given.spread for given, _ in group], tree.mesh, how)
        for (_, made), found in zip(group, done, strict=True):
            for to, t in zip(made.runs, found, strict=True):
                to.copy_(t)
    return result
