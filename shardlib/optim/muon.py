"""Muon: momentum with orthogonalised matrices, on any layout.

It is hard to split because a matrix's update depends on all of its elements.  Four algorithms give
the same values at different costs:

local     every rank has whole matrices (experts, heads, or all of them): nothing moves;
gathered  each matrix on every rank: all compute the same;
owners    each matrix on one rank, which sends the result back: the work is divided;
blocks    Newton-Schulz's products on the blocks themselves, by the matmul family: more bytes,
          but no rank ever holds the matrix.

``sl.why("muon", params)`` prints the prices, ``sl.algorithm(muon="gathered")`` pins one.

Newton-Schulz iteration approaches the nearest orthogonal matrix by matrix products alone:
X <- a X + (b A + c A A) X with A = X X^T, five times from X = G / |G|: singular values approach 1,
singular vectors do not change.

Source: Jordan et al., Muon (2024), kellerjordan.github.io/posts/muon; the coefficients are those of
torch.optim.Muon.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shardlib.collectives import blocks, played, storage
from shardlib.collectives.count import Trace
from shardlib.cost import Cost, moving
from shardlib.dtypes import wider
from shardlib.errors import BadArgument, ShardError, Unsupported
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Link, Mesh, axes_of, bind, coordinates, record, scope, within
from shardlib.modules.rules import Pattern, matches
from shardlib.ops.registry import Match, algorithm, case_of, decide
from shardlib.optim.buckets import AxisSizes
from shardlib.optim.groups import Mask, of_matrices
from shardlib.optim.matrix_owners import (
    Laid,
    Patterns,
    Spread,
    apart,
    deal,
    flops,
    in_batches,
    join,
    laid,
    listed,
    only_matrices,
    through_owners,
)
from shardlib.optim.norms import totals
from shardlib.optim.transform import COUNT, Schedule, Transform, by_directions, ranged
from shardlib.optim.trees import Tree, bucketed_in, moments, pieces, spans
from shardlib.optional import optional_text
from shardlib.placing import reshard
from shardlib.tensor import ShardedTensor

Coefficients = tuple[float, float, float]

# steepest at 0, so that small singular values grow fast; they end near 1, not at 1
COEFFICIENTS: Coefficients = (3.4445, -4.7750, 2.0315)

Adjust = Literal["original", "match_rms_adamw"]


class MuonState(NamedTuple):
    """Steps taken, and the momentum."""

    count: int
    trace: Tree


@ranged(steps=COUNT)
def muon(
    lr: float | Schedule,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    *,
    rest: Transform | None = None,
    matrices: Mask = None,
    side: Sequence[tuple[Pattern[Any], int | tuple[int, int]]] = (),
    kernels: Patterns | None = None,
    adjust: Adjust = "original",
    coefficients: Coefficients = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    most_mb: float = math.inf,
) -> Transform:
    """Update matrices by their orthogonalised momentum, as torch.optim.Muon, on any layout.

    ``rest``      the transform of all parameters that ``matrices`` does not select.
    ``matrices``  globs of paths, a tree of bools, or a function of the tree; see
                  ``recipes.matrices(model)``.  Leaves of three dimensions are stacks of matrices.
    ``side``      (pattern, n): the rows of these leaves consist of n matrices (a fused qkv: 3,
                  heads: their number), each orthogonalised on its own; (rows, columns) for a grid
                  of matrices.
    ``kernels``   patterns of leaves [out, in, *window], such as a convolution's: each is one matrix
                  [out, in x window].  Others of more than three dimensions are stacks too, and
                  refused without ``kernels``.
    ``adjust``    the rate per matrix, as torch's ``adjust_lr_fn``.
    ``dtype``     in which matrices are sent and computed; torch's is bfloat16, which is fast on
                  GPUs and rounds by 1 %.  None: fp32, or fp64 for fp64.
    ``most_mb``   the most MiB of a matrix that a rank may hold whole.
    Raises: Unsupported for a leaf that is not a matrix.

    >>> import shardlib as sl
    >>> tx = muon(0.1, weight_decay=0.0, rest=sl.optim.adamw(0.1), matrices="*.weight")
    >>> params = {"a.weight": torch.eye(2), "a.bias": torch.ones(2)}
    >>> updates, state = tx.update(params, tx.init(params), params)
    >>> updates["a.weight"].diagonal().round(decimals=3), round(updates["a.bias"][0].item(), 3)
    (tensor([-0.1110, -0.1110]), -0.101)
    """
    if adjust not in get_args(Adjust) or len(coefficients) != 3:
        raise BadArgument(
            f"adjust={adjust!r} of {len(coefficients)} coefficients: one of "
            f"{', '.join(map(repr, get_args(Adjust)))}, and three",
            op="muon",
            fix="sl.optim.muon(0.02, adjust='match_rms_adamw')",
        )
    how = Iteration(coefficients, steps, eps, dtype, most_mb * 2**20, tuple(side), listed(kernels))

    def init(params: Tree) -> MuonState:
        only_matrices(params, "muon", kernels)
        return MuonState(0, **moments(params, "trace"))

    def direct(
        grads: Tree, state: MuonState, params: Tree, way: Tree, rate: float
    ) -> tuple[MuonState, float]:
        for g, m, w in spans(*pieces(grads, state.trace, way)):
            m.lerp_(g.to(m.dtype), 1 - momentum)
            w.copy_(g.to(m.dtype).lerp(m, momentum) if nesterov else m)
        for one in _orthogonal(way, how):
            for run in one.runs:
                run.mul_(-rate * _adjusted(*one.spread.one, adjust))
        return state._replace(count=state.count + 1), -rate * weight_decay

    weights = bool(weight_decay)
    core = by_directions("muon", "matrix", init, lr, direct, moment="trace", weights=weights)
    return of_matrices(core, rest, matrices, "muon", 0.02)


class Iteration(NamedTuple):
    """Settings of Newton-Schulz, as ``muon`` takes them; ``most`` bytes of a matrix on a rank."""

    coefficients: Coefficients = COEFFICIENTS
    steps: int = 5
    eps: float = 1e-7
    dtype: torch.dtype | None = None
    most: float = math.inf
    side: tuple[Any, ...] = ()
    kernels: tuple[Pattern[Any], ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        return orthogonal(x, self)

    def sides(self, path: str, x: Tensor) -> tuple[int, int]:
        """Return the numbers of matrices in a leaf's rows and columns."""
        n = next((n for p, n in self.side if matches(p, path, x)), 1)
        rows, cols = (n, 1) if isinstance(n, int) else n
        if x.shape[-2] % rows or x.shape[-1] % cols:
            raise ShardError(
                f"{path} of {list(x.shape)} is not {rows} x {cols} matrices side by side",
                op="muon",
                fix=f"side = [({path!r}, 1)]",
            )
        return rows, cols


TORCHS = Iteration()
"""The settings of torch.optim.Muon, but for its dtype."""


def _adjusted(m: int, n: int, adjust: Adjust) -> float:
    """Compute the factor of a matrix's rate, as torch.optim.Muon's adjust_lr_fn."""
    if adjust == "original":
        return math.sqrt(max(1, m / max(n, 1)))
    # to match the RMS of AdamW's updates
    return 0.2 * math.sqrt(max(m, n))


# ---------------------------------------------------------------- Newton-Schulz iteration


def orthogonal(x: Tensor, how: Iteration = TORCHS) -> Tensor:
    """Orthogonalise unsharded matrices, each of a batch on its own.

    Shapes: x [..., m, n] -> [..., m, n].

    >>> orthogonal(torch.diag(torch.tensor([3.0, 2.0]))).diagonal().round(decimals=2)
    tensor([1.1200, 0.6800])
    """
    if not x.numel():
        return x
    a, b, c = how.coefficients
    # X X^T is smaller with the short side first
    if x.shape[-2] > x.shape[-1]:
        return orthogonal(x.mT, how).mT
    y = x.reshape(-1, *x.shape[-2:])
    y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=how.eps)
    for _ in range(how.steps):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.reshape(x.shape)


def on_blocks(x: ShardedTensor, how: Iteration = TORCHS) -> ShardedTensor:
    """Orthogonalise a matrix in its layout, with sharded products: no rank holds it whole.

    Shapes: x [m, n], in any layout -> the same.
    """
    a, b, c = how.coefficients
    place = x.place
    tall = x.shape[0] > x.shape[1]
    (found,) = totals([x])
    assert found[0] is not None, "a matrix has a norm"
    y = x.with_padding
    y = y.becomes(y.raw / found[0].sqrt().clamp(min=how.eps).to(y.raw.device, y.raw.dtype))
    if tall:
        y = y.mT
    for _ in range(how.steps):
        gram = _summed(y @ y.mT)
        mixed = gram * b + _as(_summed(gram @ gram), gram) * c
        y = y * a + _as(_summed(mixed @ y), y)
    y = y.mT if tall else y
    return ShardedTensor(reshard(y, place.layout).raw.contiguous(), place)


def _summed(x: Tensor) -> ShardedTensor:
    """Return the product with its pending sum completed, in its own layout."""
    assert isinstance(x, ShardedTensor), "a product of sharded matrices is one"
    return reshard(x, x.sharding.bare)


def _as(x: ShardedTensor, other: Tensor) -> ShardedTensor:
    assert isinstance(other, ShardedTensor), "a product of sharded matrices is one"
    return reshard(x, other.sharding)


# ---------------------------------------------------------------- choice of the algorithm


RATES = {"cpu": 8.5e10, "accelerator": 5e13}
"""Assumed flops per second of one rank."""

HOST = {"cpu": 5e-4, "accelerator": 1e-4}
"""Assumed seconds of a rank's host per operation on a sharded value, added to its arithmetic and
transfers: three operations for a distributed product, four for a gathered matrix and one to begin,
one for a dealt matrix and three for the exchange of all of these."""

TOGETHER = 1.1
"""Slowdown of a product that all ranks compute at once, since they share memory bandwidth."""


@dataclass(frozen=True)
class MuonCase:
    """Matrices to orthogonalise together: their layouts, and the speed of ranks and links.

    ``share``  the busiest owner's part of the work of all owners; None: computed from these
               matrices alone.
    ``paths``  of the parameters, for reports.
    """

    differentiable: ClassVar[bool] = False

    spreads: tuple[Spread, ...]
    sizes: AxisSizes
    dtype: torch.dtype
    device: str
    most: float
    share: float | None = None
    links: tuple[tuple[str, Link], ...] = ()
    steps: int = 5
    paths: tuple[str, ...] = ()

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the mesh's axes."""
        return dict(self.sizes)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.mesh.values())

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the mesh's axes."""
        return tuple(self.mesh)

    def operands(self) -> dict[str, str]:
        """Describe the matrices: equal ones in one line, at most eight lines."""
        alike = Counter(f"{list(s.shape)} in {s.layout}" for s in self.spreads)
        rows = [f"{n} x {row}".removeprefix("1 x ") for row, n in alike.items()]
        more = [f"and {len(rows) - 8} kinds more"] if len(rows) > 8 else []
        return {str(i): row for i, row in enumerate(rows[:8] + more)}

    def notes(self) -> list[str]:
        """Describe a step that uses several algorithms, and the fix that pins another one."""
        if "muon" in dict(scope().policy.pins):
            return []
        out, ways = [], _ways(replace(self, paths=()))
        named: dict[str, list[str]] = {}
        for path, way in zip(self.paths, ways, strict=True):
            named.setdefault(way, []).append(path)
        if len(named) > 1:
            parts = [f"{len(some)} by {way} ({_some(some)})" for way, some in named.items()]
            took = 1e3 * _together(self, ways)
            out.append(f"a step computes {', '.join(parts)}: {took:.3g} ms")
        fits = [n for n, price in _PRICES.items() if not isinstance(price(self), str)]
        other = next((n for n in reversed(fits) if n not in ways), None)
        return [*out, f'another: with sl.algorithm(muon="{other}"): ...'] if other else out

    def fix(self) -> tuple[str, type[ShardError]]:
        """Return an error's fix, and its class."""
        return "sl.optim.muon(0.02, most_mb=float('inf'))", Unsupported

    def match(self, name: str, work: float, cost: Cost, asked: float = 0) -> Match:
        """Price an algorithm for these matrices.

        ``work``   flops of the busiest rank.
        ``asked``  operations of its host.
        """
        work = work * self.steps / 5
        kind = "cpu" if self.device in ("cpu", "meta") else "accelerator"
        seconds = work / RATES[kind] + asked * HOST[kind]
        whole = Cost(cost.bytes, cost.messages, cost.memory, cost.along, seconds)
        took = 1e3 * whole.seconds(dict(self.links))
        note = f"{work / 1e9:.3g} GF on the busiest rank, {took:.3g} ms"
        return Match(self.spreads[0].layout, name, whole, note=note)

    def too_large(self) -> str | None:
        """Return why no rank may hold one of them, or None."""
        size = max(math.prod(s.tiled[-2:]) for s in self.spreads) * self.dtype.itemsize
        if size <= self.most:
            return None
        return f"a matrix has {size} bytes, and a rank may hold {self.most:.0f}"


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + optional_text(" and {} more", len(paths[3:]))


@algorithm("muon", "local", order=0)
def _local(case: MuonCase) -> Match | str:
    if any(_gathered_layout(s, case.sizes) != s.layout for s in case.spreads):
        return "a matrix is split"
    if any(s.cut for s in case.spreads) and (why := case.too_large()) is not None:
        return why
    work = sum(_count(s, s.layout, case.mesh) * flops(*s.one) for s in case.spreads)
    return case.match("local", work, _joining(case))


@algorithm("muon", "gathered", order=1)
def _gathered(case: MuonCase) -> Match | str:
    if (why := case.too_large()) is not None:
        return why
    work, cost = 0, _joining(case)
    for s in case.spreads:
        target = _gathered_layout(s, case.sizes)
        plan = s.layout >> target
        cost += moving(
            case.axes,
            plan.bytes(s.tiled, case.mesh, case.dtype.itemsize),
            plan.messages(s.tiled, case.mesh),
            plan.peak(s.tiled, case.mesh, case.dtype.itemsize),
        )
        work += _count(s, target, case.mesh) * flops(*s.one)
    asked = 4 * len(case.spreads) + (case.share is None)
    return case.match("gathered", work * TOGETHER, cost, asked)


@algorithm("muon", "owners", order=2)
def _owners(case: MuonCase) -> Match | str:
    if (why := case.too_large()) is not None:
        return why
    plan = deal(case.spreads, case.sizes)
    nbytes = Fraction(plan.moved * case.dtype.itemsize, case.ranks)
    work = float(max(plan.load))
    messages = 2 * (case.ranks - 1)
    asked = 3.0
    share = max(plan.load) / max(sum(plan.load), 1)
    if case.share is not None:
        # one of many matrices: its part of their exchange and work
        work = sum(plan.load) * case.share
        messages = 1
        asked = 0.0
        share = case.share
    asked += sum(s.count for s in case.spreads) * share
    return case.match("owners", work, moving(case.axes, nbytes, messages), asked)


@algorithm("muon", "blocks", order=3)
def _blocks(case: MuonCase) -> Match | str:
    if not any(s.layout.axes for s in case.spreads):
        return "nothing is split"
    cost, work = _joining(case), 0
    for s in case.spreads:
        one = _beside(s)
        if isinstance(one, str):
            return one
        found = _on_paper(one, case.sizes, case.dtype, case.links, case.steps)
        if isinstance(found, str):
            return found
        for _ in range(s.side[0] * s.side[1]):
            cost += found[0]
            work += found[1]
    products = 3 * case.steps * sum(s.side[0] * s.side[1] for s in case.spreads)
    return case.match("blocks", work * 5 / case.steps, cost, 3 * products)


_PRICES = {"local": _local, "gathered": _gathered, "owners": _owners, "blocks": _blocks}


def _joining(case: MuonCase) -> Cost:
    """Price joining blocks that are cut into runs."""
    cost = Cost()
    for cut in dict.fromkeys(s.cut for s in case.spreads):
        ways = math.prod(case.mesh[a] for a in cut)
        blocks = (s.block_shape(case.mesh) for s in case.spreads if s.cut == cut)
        if ways > 1:
            nbytes = Fraction(sum(map(math.prod, blocks)) * case.dtype.itemsize * (ways - 1), ways)
            cost += moving(cut, nbytes, 1 if case.share is not None else ways - 1)
    return cost


def _beside(s: Spread) -> Spread | str:
    """Return one of a leaf's matrices if each is split over the same ranks; else the reason."""
    if len(s.shape) != 2:
        return "stacks of matrices have no product on blocks"
    dims = []
    for dim, n in zip(s.layout.dims, s.side, strict=True):
        if n == 1:
            dims.append(dim)
        elif dim.parts[:1] == (n,) or not dim.parts:
            dims.append(Dim(dim.parts[1:], dim.order))
        else:
            return (
                f"{n} matrices side by side are not each split over the ranks: "
                f"their layout says ({n} ...)"
            )
    if s.side == (1, 1):
        return replace(s, cut=(), runs=())
    if s.tiled != s.shape:
        return "matrices side by side that are padded have no product on blocks"
    return Spread(Layout(tuple(dims)), s.one, s.one)


@lru_cache(maxsize=256)
def _on_paper(
    s: Spread,
    sizes: AxisSizes,
    dtype: torch.dtype,
    links: tuple[tuple[str, Link], ...],
    steps: int,
) -> tuple[Cost, int] | str:
    """Count bytes and flops of the products on blocks, by running them on the meta device.

    A product that ranks cannot divide, such as one whose summed result all of them need, counts
    whole.
    """
    axes: Any = dict(sizes)
    mesh = record(**axes)
    mesh.links.update(links)
    local = torch.empty(s.block_shape(mesh), dtype=dtype, device="meta")
    counted, work = Trace(), FlopCounterMode(display=False, custom_mapping=_IN_PLACE)
    try:
        with within(traces=(counted,), pins=(), budget=None), bind(mesh), work:
            on_blocks(ShardedTensor(local, s.place(mesh)), Iteration(steps=steps))
    except ShardError as e:
        return e.message.partition("\n")[0]
    along = tuple((axes_of(e.axis), e.bytes, e.messages) for e in counted.events)
    return Cost(counted.bytes, counted.messages, 0, along), work.get_total_flops()


def _added(into: Sequence[int], a: Sequence[int], b: Sequence[int], **_: Any) -> int:
    """Count the flops of a product that is added in place."""
    return 2 * math.prod(a) * b[-1]


_IN_PLACE = {torch.ops.aten.addmm_: _added, torch.ops.aten.baddbmm_: _added}
"""Operators that torch's flop counter lacks."""


@lru_cache(maxsize=1024)
def _gathered_layout(s: Spread, sizes: AxisSizes) -> Layout:
    """Return the layout with whole matrices that gathers least."""
    found = list(s.layout.dims)
    for d in (-2, -1):
        if s.tiled != s.shape or not _in_matrices(s, d, sizes):
            found[d] = Dim()
    return Layout(tuple(found))


def _count(s: Spread, layout: Layout, mesh: Mapping[str, int]) -> int:
    """Count the matrices in a block of ``layout``, in which they are whole."""
    *lead, rows, cols = layout.local_shape(s.tiled, mesh)
    if s.tiled[-2:] != s.shape[-2:]:
        return math.prod(lead) * s.side[0] * s.side[1]
    m, n = s.one
    return math.prod(lead) * (rows // m if m else 0) * (cols // n if n else 0)


def _in_matrices(s: Spread, d: int, sizes: AxisSizes) -> bool:
    """Return whether every rank's positions in dimension ``d`` are whole matrices."""
    mesh = dict(sizes)
    return all(
        _in_pieces(s.layout.indices(s.shape, mesh, coord)[d], s.one[d])
        for coord in coordinates(mesh)
    )


def _in_pieces(places: Sequence[int], n: int) -> bool:
    """Return whether positions are runs of n neighbours, each starting at a multiple of n."""
    firsts = places[:: max(n, 1)]
    return not any(first % n for first in firsts) and list(places) == [
        first + i for first in firsts for i in range(n)
    ]


@case_of("muon")
def _case(*operands: Tree) -> MuonCase:
    """Build the case of parameters, of trees of them, or of state in ``zero``'s buckets."""
    found: list[Laid] = []
    for tree in operands:
        for x in bucketed_in(tree) or [tree]:
            # leaves of more than three dimensions are priced as kernels
            found += laid(x, None, [lambda path, x: x.ndim > 3])
    found = [x for x in found if x.mesh is not None]
    if not found:
        raise Unsupported(
            "there is no sharded matrix",
            op="why",
            fix='with sl.simulate(x=2, y=2): print(sl.why("muon", sl.shard(w, "...")))',
        )
    # the first of a parameter and its state
    once = {x.path: x for x in reversed(found)}
    paths = tuple(reversed(once))
    return replace(_case_of([once[p] for p in paths], TORCHS), paths=paths)


def _case_of(items: Sequence[Laid], how: Iteration) -> MuonCase:
    mesh, like = items[0].mesh, items[0].runs[0]
    assert mesh is not None, "where a whole matrix is computed is no choice"
    return MuonCase(
        tuple(x.spread for x in items),
        tuple(mesh.axes.items()),
        how.dtype or wider(like.dtype),
        mesh.device_type,
        how.most,
        links=tuple(mesh.links.items()),
        steps=how.steps,
    )


# ---------------------------------------------------------------- the four algorithms


def _orthogonal(tree: Tree, how: Iteration) -> list[Laid]:
    """Orthogonalise every matrix of the tree, of contiguous blocks, in place; list them."""
    every = laid(tree, how.sides if how.side else None, how.kernels)
    with torch.no_grad():
        together: dict[Any, list[Laid]] = {}
        for one in every:
            together.setdefault((one.mesh, one.runs[0].dtype), []).append(one)
        for (mesh, kind), items in together.items():
            if mesh is not None:
                _placed(mesh, items, how)
                continue
            for one in items:
                x = one.runs[0].to(how.dtype or wider(kind)).view(-1, *one.spread.shape[-2:])
                one.runs[0].copy_(apart(how, x, one.spread.side).reshape(-1))
    return every


def _placed(mesh: Mesh, items: Sequence[Laid], how: Iteration) -> None:
    """Orthogonalise matrices of one mesh, each by the algorithm that ``_ways`` chooses."""
    case = _case_of(items, how)
    ways = mesh.memo("muon", (case, scope().policy), lambda: _ways(case))
    dealt = [x for x, way in zip(items, ways, strict=True) if way == "owners"]
    if dealt:
        plan = deal(tuple(x.spread for x in dealt), case.sizes)
        through_owners(dealt, plan, in_batches(how), case.dtype)
    placed = [(x, _WAYS[w]) for x, w in zip(items, ways, strict=True) if w in _WAYS]
    for _, some in groupby(sorted(placed, key=_cut), key=_cut):
        _in_place(mesh, list(some), how, case.dtype)


def _cut(one: tuple[Laid, Any]) -> tuple[str, ...]:
    return one[0].spread.cut


def _in_place(
    mesh: Mesh, ways: Sequence[tuple[Laid, Any]], how: Iteration, dtype: torch.dtype
) -> None:
    """Orthogonalise matrices, cut along the same axes, on the ranks that hold them."""
    items = [x for x, _ in ways]
    whole: Iterable[Sequence[Tensor]] = ([run.to(dtype) for run in x.runs] for x in items)
    if items[0].spread.cut:
        whole = join(items, mesh, dtype)
    for (one, way), parts in zip(ways, whole, strict=True):
        s = one.spread
        shape = s.block_shape(mesh.axes)
        x = ShardedTensor(storage([b.view(shape) for b in parts], mesh), s.place(mesh))
        done = blocks(way(x, s, how), mesh)
        for to, block, coord in zip(one.runs, done, played(mesh), strict=True):
            to.copy_(block.reshape(-1)[s.run(coord, mesh.axes)])


def _ways(case: MuonCase) -> tuple[str, ...]:
    """Choose each matrix's algorithm, for the least cost of all together.

    Owners share the work of their matrices, so the price of one depends on the others.  Compared
    are: one algorithm for all matrices; each matrix's cheapest if owners have all of them; and the
    same with those that exceed a rank's part of the work priced alone.
    """
    ones = [replace(case, spreads=(s,), share=1.0) for s in case.spreads]
    if "muon" in dict(scope().policy.pins) or (len(ones) == 1 and case.spreads[0].count == 1):
        return tuple(decide("muon", replace(one, share=None)).run for one in ones)
    # a matrix that outweighs a rank's part cannot be balanced by dealing
    part = sum(s.count * s.flops for s in case.spreads) / case.ranks
    every, light = range(len(ones)), [i for i, s in enumerate(case.spreads) if s.flops <= part]
    found = [(way,) * len(ones) for way in _PRICES]
    # the share of the busiest owner, if owners have all matrices, or all but the heavy ones
    for shared in (every, light):
        load = deal(tuple(case.spreads[i] for i in shared), case.sizes).load
        share = max(load) / max(sum(load), 1)
        some = [replace(ones[i], share=share if i in shared else 1.0) for i in every]
        found.insert(0, tuple(decide("muon", one).run for one in some))
    return min(found, key=lambda ways: _together(case, ways))


def _together(case: MuonCase, ways: Sequence[str]) -> float:
    """Price matrices with their algorithms; infinite if one does not fit."""
    total, links = 0.0, dict(case.links)
    for way in dict.fromkeys(ways):
        mine = tuple(s for s, w in zip(case.spreads, ways, strict=True) if w == way)
        found = _PRICES[way](replace(case, spreads=mine))
        total += math.inf if isinstance(found, str) else found.cost.seconds(links)
    return total


def _by_gathering(x: ShardedTensor, s: Spread, how: Iteration) -> Tensor:
    """Orthogonalise each matrix on every rank that holds a part of it; nothing moves for whole ones."""
    whole = reshard(x.with_padding, _gathered_layout(s, tuple(x.mesh.axes.items())))
    (m, n), (rows, cols) = s.one, whole.raw.shape[-2:]
    side = rows // m, cols // n
    true = whole.raw
    if whole.sharding.dims[-2:] == (Dim(), Dim()):
        side = s.side
        true = true[..., : s.shape[-2], : s.shape[-1]]
    done = apart(how, true.reshape(-1, *true.shape[-2:]), side).reshape(true.shape)
    # zeros where the padding is
    done = F.pad(done, (0, cols - done.shape[-1], 0, rows - done.shape[-2]))
    return reshard(whole.becomes(done), s.layout).raw


def _by_blocks(x: ShardedTensor, s: Spread, how: Iteration) -> Tensor:
    """Orthogonalise matrices by products on blocks, each matrix of a leaf in turn."""
    one = _beside(s)
    assert isinstance(one, Spread), "the price was asked"
    if s.side == (1, 1):
        return on_blocks(x, how).raw
    rows, cols = s.side
    m, n = one.block_shape(x.mesh.axes)
    out = torch.empty_like(x.raw)
    for i in range(rows):
        for j in range(cols):
            at = (..., slice(i * m, (i + 1) * m), slice(j * n, (j + 1) * n))
            matrix = ShardedTensor(x.raw[at].contiguous(), one.place(x.mesh))
            out[at] = on_blocks(matrix, how).raw
    return out


_WAYS = {"local": _by_gathering, "gathered": _by_gathering, "blocks": _by_blocks}
