"""Whole matrices dealt to ranks, in one packed exchange there and one back.

A matrix lies in blocks, some of them copied, some (under ``zero``) cut into runs.  Each is given to
one rank, its owner, so that all ranks have about the same work.  Its parts travel to the owner,
which computes, and the result's parts travel back to all who hold them.  Who sends what to whom is
a pure value that all ranks know, so no size is sent.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlib.collectives import blocks, played, storage, unwrap, wrap
from shardlib.collectives.api import ragged_all_to_all
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh, bind, coordinates, rank_along
from shardlib.optim.buckets import Buckets, parts
from shardlib.optim.newton_schulz import flops
from shardlib.optim.select import named
from shardlib.tensor import ShardedTensor

__all__ = ["Deal", "Laid", "Spread", "apart", "deal", "laid", "through_owners"]


@dataclass(frozen=True)
class Spread:
    """How one parameter's matrices lie.

    ``layout``, ``padded``  of the whole parameter, ``shape`` its true sizes; of more dimensions
                            than two, the leading ones number matrices.
    ``runs``   per rank, which elements (start, stop) of its block it holds; None: all.
    ``side``   (rows, columns) of matrices that lie side by side in one, as a fused weight's.
    """

    layout: Layout
    padded: tuple[int, ...]
    shape: tuple[int, ...]
    runs: tuple[tuple[int, int], ...] | None = None
    side: tuple[int, int] = (1, 1)

    @property
    def count(self) -> int:
        """Matrices that are dealt: those side by side stay together."""
        return math.prod(self.shape[:-2])

    @property
    def flops(self) -> int:
        """Of one of them."""
        rows, cols = self.side
        return rows * cols * flops(self.shape[-2] // rows, self.shape[-1] // cols)


class Laid(NamedTuple):
    """A parameter's matrices as they lie in a tree: of each rank that is played here its run.

    What is written to the runs is written to the tree.
    """

    path: str
    spread: Spread
    mesh: Mesh | None
    runs: list[Tensor]


def laid(tree: Any, side: Callable[[str, Tensor], tuple[int, int]] | None = None) -> list[Laid]:
    """The leaves of two dimensions and more; ``side`` says what lies side by side in them."""
    if isinstance(tree, Buckets):
        return _in_buckets(tree, side)
    out = []
    for path, x in named(tree).items():
        if not isinstance(x, Tensor) or x.ndim < 2:
            continue
        beside = (1, 1) if side is None else side(path, x)
        if isinstance(x, ShardedTensor):
            layout = x.sharding.bare.resolve(x.ndim)
            spread = Spread(layout, tuple(x.padded_shape), tuple(x.shape), None, beside)
            out.append(Laid(path, spread, x.mesh, [b.reshape(-1) for b in blocks(x.raw, x.mesh)]))
        else:
            spread = Spread(Layout((Dim(),) * x.ndim), tuple(x.shape), tuple(x.shape), None, beside)
            out.append(Laid(path, spread, None, [x.reshape(-1)]))
    return out


def _in_buckets(tree: Buckets, side: Callable[[str, Tensor], tuple[int, int]] | None) -> list[Laid]:
    mesh, index = tree.mesh, tree.index
    where = [rank_along(index.axes, c, mesh.axes) for c in coordinates(mesh.axes)]
    mine = {
        (b.name, p.slot.offset, i): piece
        for (b, i, p), piece in zip(tree.held, tree.pieces, strict=True)
    }
    out = []
    for bucket in index.buckets:
        of = [{p.slot.offset: p for p in parts(bucket, r, index.ways)} for r in where]
        empty = tree[bucket.name].raw.new_empty(0)
        for slot in bucket.slots:
            item = index.items[slot.leaves[0]]
            if len(item.whole) < 2:
                continue
            found = [o.get(slot.offset) for o in of]
            runs = tuple((0, 0) if p is None else (p.at, p.at + p.length) for p in found)
            like = torch.empty(item.whole, device="meta")
            beside = (1, 1) if side is None else side(item.path, like)
            spread = Spread(item.layout, item.tiled, item.whole, runs, beside)
            keys = [(bucket.name, slot.offset, i) for i in range(len(played(mesh)))]
            given = [mine[key] if key in mine else empty for key in keys]  # noqa: SIM401
            out.append(Laid(item.path, spread, mesh, given))
    return out


class Held(NamedTuple):
    """Elements ``lo`` to ``hi`` of a rank's run of parameter ``param``, ``at`` on in the block of
    matrix ``unit`` that lies at rows and columns ``box``.
    """

    param: int
    unit: int
    lo: int
    hi: int
    at: int
    box: int


@dataclass(frozen=True)
class Deal:
    """Who owns which matrix, and what each rank sends.

    ``units``   (parameter, number of the matrix in it).     ``owner``  of each.
    ``holds``   per rank what it holds, in the order of owners.
    ``sends``   the same without what another rank sends that holds a copy.
    ``boxes``   (rows, columns) of the blocks, by number.
    """

    spreads: tuple[Spread, ...]
    units: tuple[tuple[int, int], ...]
    owner: tuple[int, ...]
    holds: tuple[tuple[Held, ...], ...]
    sends: tuple[tuple[Held, ...], ...]
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def _counts(self, parts: Sequence[Sequence[Held]]) -> tuple[tuple[int, ...], ...]:
        table = [[0] * len(parts) for _ in parts]
        for rank, mine in enumerate(parts):
            for h in mine:
                table[rank][self.owner[h.unit]] += h.hi - h.lo
        return tuple(map(tuple, table))

    @cached_property
    def there(self) -> tuple[tuple[int, ...], ...]:
        """Elements from each rank to each."""
        return self._counts(self.sends)

    @cached_property
    def back(self) -> tuple[tuple[int, ...], ...]:
        """The same for results."""
        return tuple(zip(*self._counts(self.holds), strict=True))

    @cached_property
    def moved(self) -> int:
        """Elements that change their rank, of all ranks, both ways."""
        tables = (self.there, self.back)
        return sum(
            n for t in tables for i, row in enumerate(t) for j, n in enumerate(row) if i != j
        )

    @cached_property
    def load(self) -> tuple[int, ...]:
        """Flops of each rank."""
        out = [0] * len(self.holds)
        for (param, _), owner in zip(self.units, self.owner, strict=True):
            out[owner] += self.spreads[param].flops
        return tuple(out)


@lru_cache(maxsize=64)
def deal(spreads: tuple[Spread, ...], sizes: tuple[tuple[str, int], ...]) -> Deal:
    """Deal matrices, the one with most work first, to the rank with least.

    >>> s = Spread(Layout.parse("x ."), (8, 8), (8, 8))
    >>> d = deal((s, s), (("x", 2),))
    >>> d.owner, d.there, d.load
    ((0, 1), ((32, 32), (32, 32)), (15360, 15360))
    """
    mesh = dict(sizes)
    ranks = coordinates(mesh)
    units = tuple((p, k) for p, s in enumerate(spreads) for k in range(s.count))
    number = {u: i for i, u in enumerate(units)}
    load, owner = [0] * len(ranks), [0] * len(units)
    for i in sorted(range(len(units)), key=lambda i: (-spreads[units[i][0]].flops, i)):
        owner[i] = min(range(len(ranks)), key=lambda r: (load[r], r))
        load[owner[i]] += spreads[units[i][0]].flops
    boxes: dict[Any, int] = {}
    holds: list[list[Held]] = [[] for _ in ranks]
    copies: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    for p, spread in enumerate(spreads):
        for rank, coord in enumerate(ranks):
            for h in _held(p, spread, coord, mesh, rank, number, boxes):
                holds[rank].append(h)
                copies[h.unit, h.box, h.at, h.hi - h.lo].append(rank)
    source = {
        key: owner[key[0]] if owner[key[0]] in who else who[sum(key) % len(who)]
        for key, who in copies.items()
    }
    ordered = [tuple(sorted(mine, key=lambda h: (owner[h.unit], h))) for mine in holds]
    sends = [
        tuple(h for h in mine if source[h.unit, h.box, h.at, h.hi - h.lo] == rank)
        for rank, mine in enumerate(ordered)
    ]
    return Deal(spreads, units, tuple(owner), tuple(ordered), tuple(sends), tuple(boxes))


def _held(
    p: int,
    spread: Spread,
    coord: dict[str, int],
    mesh: dict[str, int],
    rank: int,
    number: dict[tuple[int, int], int],
    boxes: dict[Any, int],
) -> list[Held]:
    *lead, rows, cols = spread.layout.indices(spread.padded, mesh, coord)
    size = len(rows) * len(cols)
    box = boxes.setdefault((tuple(rows), tuple(cols)), len(boxes))
    whole = len(list(product(*lead))) * size
    first, last = (0, whole) if spread.runs is None else spread.runs[rank]
    out = []
    for k, at in enumerate(product(*lead)):
        lo, hi = max(first, k * size), min(last, (k + 1) * size)
        if lo < hi and all(i < n for i, n in zip(at, spread.shape, strict=False)):
            matrix = 0
            for i, n in zip(at, spread.shape, strict=False):
                matrix = matrix * n + i
            unit = number[p, matrix]
            out.append(Held(p, unit, lo - first, hi - first, lo - k * size, box))
    return out


def through_owners(
    runs: Sequence[Sequence[Tensor]],
    spreads: Sequence[Spread],
    mesh: Mesh,
    f: Callable[[Tensor], Tensor],
) -> list[list[Tensor]]:
    """Apply ``f`` to whole matrices by their owners.

    ``runs``  per parameter, of each rank that is played here the elements that it holds, a vector.
    ``f``     a batch of matrices [k, m, n] -> the same shape.
    Returns the results as the runs lie.
    Moves: ``deal(...).moved / ranks`` elements per rank in two exchanges.
    """
    plan = deal(tuple(spreads), tuple(mesh.axes.items()))
    ranks = [rank_along(mesh.names, c, mesh.axes) for c in played(mesh)]
    flat = [[r.reshape(-1) for r in row] for row in runs]

    def packed(i: int, rank: int) -> list[Tensor]:
        return [flat[h.param][i][h.lo : h.hi] for h in plan.sends[rank]]

    like = flat[0][0]
    arrived = _exchange([packed(i, r) for i, r in enumerate(ranks)], plan.there, mesh, like)
    results = [_owned(vector, plan, rank, f) for vector, rank in zip(arrived, ranks, strict=True)]
    returned = _exchange(results, plan.back, mesh, like)
    out = [[torch.empty_like(r) for r in row] for row in flat]
    for i, rank in enumerate(ranks):
        at = 0
        for h in plan.holds[rank]:
            n = h.hi - h.lo
            out[h.param][i][h.lo : h.hi] = returned[i][at : at + n]
            at += n
    return [
        [o.view(r.shape) for o, r in zip(a, b, strict=True)] for a, b in zip(out, runs, strict=True)
    ]


def _exchange(
    parts: Sequence[Sequence[Tensor]], counts: tuple[tuple[int, ...], ...], mesh: Mesh, like: Tensor
) -> list[Tensor]:
    """What each rank played here receives, from rank 0, 1, ... on."""
    most = max(map(sum, counts))
    rows = []
    for mine in parts:
        row = torch.cat([*mine, like.new_empty(0)])
        rows.append(torch.nn.functional.pad(row, (0, most - len(row))))
    with bind(mesh):
        came = unwrap(ragged_all_to_all(wrap(storage(rows, mesh), mesh), mesh.names, counts))
    return list(came) if len(rows) > 1 or came.ndim > 1 else [came]


def _owned(vector: Tensor, plan: Deal, rank: int, f: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """An owner's work: matrices put together, computed in batches of a shape, and cut again."""
    blocks: dict[tuple[int, int], Tensor] = {}
    at = 0
    for mine in plan.sends:
        for h in mine:
            if plan.owner[h.unit] == rank:
                n = h.hi - h.lo
                block = blocks.get((h.unit, h.box))
                if block is None:
                    rows, cols = plan.boxes[h.box]
                    block = blocks[h.unit, h.box] = vector.new_zeros(len(rows) * len(cols))
                block[h.at : h.at + n] = vector[at : at + n]
                at += n
    whole: dict[int, Tensor] = {}
    for (unit, box), block in blocks.items():
        spread = plan.spreads[plan.units[unit][0]]
        if unit not in whole:
            whole[unit] = vector.new_zeros(spread.padded[-2:])
        rows, cols = (_span(p) for p in plan.boxes[box])
        part = block.view(*map(len, plan.boxes[box]))
        if isinstance(rows, slice) and isinstance(cols, slice):
            whole[unit][rows, cols] = part
        else:
            whole[unit].index_put_((_index(rows, 1, vector), _index(cols, 0, vector)), part)
    alike: dict[Any, list[int]] = defaultdict(list)
    for unit in whole:
        spread = plan.spreads[plan.units[unit][0]]
        alike[spread.shape[-2:], spread.side].append(unit)
    for (shape, side), units in alike.items():
        true = torch.stack([whole[u][: shape[0], : shape[1]] for u in units])
        for u, done in zip(units, apart(f, true, side), strict=True):
            whole[u][: shape[0], : shape[1]] = done
    cut: dict[tuple[int, int], Tensor] = {}
    for unit, box in blocks:
        rows, cols = (_span(p) for p in plan.boxes[box])
        if isinstance(rows, slice) and isinstance(cols, slice):
            part = whole[unit][rows, cols]
        else:
            part = whole[unit][_index(rows, 1, vector), _index(cols, 0, vector)]
        cut[unit, box] = part.reshape(-1)
    return [
        cut[h.unit, h.box][h.at : h.at + h.hi - h.lo]
        for mine in plan.holds
        for h in mine
        if plan.owner[h.unit] == rank
    ]


def apart(f: Callable[[Tensor], Tensor], x: Tensor, side: tuple[int, int]) -> Tensor:
    """``f`` of each of the matrices that lie side by side in those of a batch [k, m, n]."""
    rows, cols = side
    if side == (1, 1):
        return f(x)
    k, m, n = x.shape
    parts = x.reshape(k, rows, m // rows, cols, n // cols).transpose(2, 3)
    done = f(parts.reshape(k * rows * cols, m // rows, n // cols))
    return done.reshape(parts.shape).transpose(2, 3).reshape(x.shape)


@lru_cache(maxsize=4096)
def _span(places: tuple[int, ...]) -> slice | tuple[int, ...]:
    """Neighbouring places as a slice."""
    if places == tuple(range(places[0], places[0] + len(places))) if places else True:
        return slice(places[0], places[0] + len(places)) if places else slice(0, 0)
    return places


def _index(places: slice | tuple[int, ...], dims: int, like: Tensor) -> Tensor:
    given = range(places.start, places.stop) if isinstance(places, slice) else places
    return torch.tensor(list(given), device=like.device).reshape(-1, *[1] * dims)
