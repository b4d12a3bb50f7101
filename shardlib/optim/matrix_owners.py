"""Deals of whole matrices to ranks, with one packed exchange there and one back.

A matrix is stored in blocks, some of them copied, some (under ``zero``) cut into runs.  Each is
assigned to one rank, its owner, so that all ranks have about the same work.  Its parts are sent to
the owner, which computes, and the result's parts are sent back to all holders.  The exchange is a
pure value that every rank computes, so no size is sent.

State of a matrix as a whole, such as statistics of its rows, need not be sent: it stays on its
owner, see ``Owned``.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import product
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from shardlib.capacity import refuse_beyond
from shardlib.collectives import blocks, played, ragged_all_to_all, storage, unwrap, wrap
from shardlib.collectives.posted import Counts
from shardlib.errors import Unsupported
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh, bind, coordinates, rank_along, uploaded
from shardlib.modules.rules import Pattern, matches
from shardlib.optim.buckets import AxisSizes, Buckets, finer, vector
from shardlib.optim.norms import over_ranks
from shardlib.optim.trees import TensorView, Tree, by_tensor, named, of_others, pytree_node
from shardlib.placing import reshard, whole_of
from shardlib.tensor import Place, ShardedTensor, typeof


def flops(m: int, n: int, steps: int = 5) -> int:
    """Count the flops of Newton-Schulz's iteration for one matrix.

    >>> flops(2, 3)
    320
    """
    m, n = min(m, n), max(m, n)
    # per step: two products of 2 m m n flops, one of 2 m^3
    return steps * (4 * m * m * n + 2 * m**3)


def ranks_of(mesh: Mesh | None) -> list[int]:
    """List the ranks in this process, by their numbers; without a mesh there is one."""
    if mesh is None:
        return [0]
    return [rank_along(mesh.names, c, mesh.axes) for c in played(mesh)]


@dataclass(frozen=True)
class Spread:
    """The distribution of one parameter's matrices over ranks.

    ``layout``, ``tiled``  of the whole parameter, as of a Place, and ``shape``; of more dimensions
                           than two, the leading ones number matrices.
    ``side``   (rows, columns) of matrices in one leaf, such as a fused weight's.
    ``cut``    the axes along which blocks are cut into runs, major first.
    ``runs``   per rank along ``cut``, the elements (start, stop) of its block that it holds.
    """

    layout: Layout
    tiled: tuple[int, ...]
    shape: tuple[int, ...]
    side: tuple[int, int] = (1, 1)
    cut: tuple[str, ...] = ()
    runs: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> int:
        """The number of matrices that are dealt; those in one leaf's grid stay together."""
        return math.prod(self.shape[:-2])

    @property
    def flops(self) -> int:
        """The flops for one dealt matrix."""
        rows, cols = self.side
        return rows * cols * flops(*self.one)

    @property
    def one(self) -> tuple[int, int]:
        """The shape of one of the matrices in a leaf's grid."""
        rows, cols = self.side
        return self.shape[-2] // rows, self.shape[-1] // cols

    def block_shape(self, mesh: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of a rank's block."""
        return self.layout.local_shape(self.tiled, mesh)

    def run(self, coord: Mapping[str, int], mesh: Mapping[str, int]) -> slice:
        """Return the elements of its block that a rank holds."""
        return slice(*self.runs[rank_along(self.cut, coord, mesh)]) if self.cut else slice(None)

    def block(
        self, coord: Mapping[str, int], mesh: Mapping[str, int]
    ) -> tuple[list[int], Sequence[int], Sequence[int]]:
        """Return the numbers of the matrices in a rank's block, a stack, and its rows and columns."""
        *lead, rows, cols = self.layout.indices(self.tiled, mesh, coord)
        return list(map(self._number, product(*lead))), rows, cols

    def _number(self, at: Sequence[int]) -> int:
        """Return the number of the matrix at a position of the leading dimensions.

        At a position in the padding it is ``count``.
        """
        found = 0
        for i, n in zip(at, self.shape, strict=False):
            if i >= n:
                return self.count
            found = found * n + i
        return found

    def folded(self) -> "Spread":
        """Return the same as one matrix: the first dimension times all others.

        Raises: Unsupported if dimensions after the second are split, or the second has a ring
        order.
        """
        first, second, *window = self.layout.dims
        if any(d.axes for d in window) or second.order != "contiguous":
            raise Unsupported(
                f"a kernel of {list(self.shape)} in {self.layout} is no matrix split in blocks",
                op="muon",
                fix="w = sl.reshard(w, 'x ...')",
            )

        def flat(sizes: tuple[int, ...]) -> tuple[int, ...]:
            return sizes[0], math.prod(sizes[1:])

        layout = Layout((first, second))
        return replace(self, layout=layout, tiled=flat(self.tiled), shape=flat(self.shape))

    def place(self, mesh: Mesh) -> Place:
        """Return the place of the whole parameter."""
        return Place(self.layout, torch.Size(self.shape), mesh, torch.Size(self.tiled))


class Laid(NamedTuple):
    """A parameter's matrices in a tree: the run of each rank in this process.

    The runs are views: writing to them writes to the tree.
    """

    path: str
    spread: Spread
    mesh: Mesh | None
    runs: list[Tensor]


Patterns = Pattern[Any] | Sequence[Pattern[Any]]
Side = Callable[[str, Tensor], tuple[int, int]]


def laid(tree: Tree, side: Side | None = None, kernels: Sequence[Pattern[Any]] = ()) -> list[Laid]:
    """List the leaves of two dimensions and more, without empty ones.

    ``side``     returns the grid of matrices in a leaf.
    ``kernels``  patterns of leaves [out, in, *window] that are one matrix [out, in x window].
    """
    out = []
    for path, view in zip(named(tree, once=True), by_tensor(tree), strict=True):
        if view is not None and len(view.shape) > 1 and math.prod(view.shape):
            spread = _spread(path, view, side, kernels)
            runs = [view.like.new_empty(0) if x is None else x.reshape(-1) for x in view.parts]
            out.append(Laid(path, spread, view.mesh, runs))
    return out


def _spread(
    path: str, view: TensorView, side: Side | None, kernels: Sequence[Pattern[Any]]
) -> Spread:
    layout = view.layout.bare.resolve(len(view.shape))
    spread = Spread(layout, view.tiled, view.shape, cut=view.cut, runs=view.runs)
    if kernels and len(spread.shape) > 2:
        like = torch.empty(spread.shape, device="meta")
        if any(matches(k, path, like) for k in kernels):
            spread = spread.folded()
    if side is not None:
        spread = replace(spread, side=side(path, torch.empty(spread.shape, device="meta")))
    return spread


def listed(patterns: Patterns | None) -> tuple[Pattern[Any], ...]:
    """Return one pattern, several or none as a tuple."""
    if isinstance(patterns, Sequence) and not isinstance(patterns, str):
        return tuple(patterns)
    return () if patterns is None else (patterns,)


def only_matrices(params: Tree, op: str, kernels: Patterns | None) -> None:
    """Refuse leaves that are no matrices, and more than three dimensions without ``kernels``."""
    for path, x in named(params).items():
        if not isinstance(x, Tensor) or 1 < x.ndim < 4 or (x.ndim > 3 and kernels is not None):
            continue
        why = f"{path or 'the parameter'} of {x.ndim} dimensions"
        fix = f"tx = sl.optim.{op}(0.02, kernels=[{path!r}])"
        if x.ndim > 3:
            why += (
                ": kernels= names those that are one matrix [out, in x window], as a "
                "convolution's; others are stacks of matrices"
            )
        else:
            why += " is no matrix"
            fix = (
                f"tx = sl.optim.{op}(0.02, rest=sl.optim.adamw(3e-4), "
                "matrices=lambda tree: optree.tree_map(lambda p: p.ndim > 1, tree))"
            )
        raise Unsupported(why, op=op, operands={"parameter": typeof(x)}, fix=fix)


class MatrixRun(NamedTuple):
    """A run of elements of one matrix that a rank holds.

    Elements ``lo`` to ``hi`` of its run of parameter ``param`` are those from ``at`` on in the
    block of matrix ``unit`` at rows and columns ``box``.
    """

    param: int
    unit: int
    lo: int
    hi: int
    at: int
    box: int

    @property
    def elements(self) -> tuple[int, int, int, int]:
        """Its elements of the matrix; equal for copies."""
        return self.unit, self.box, self.at, self.hi - self.lo


@dataclass(frozen=True)
class Deal:
    """An assignment of matrices to owners, with the runs that each rank sends.

    ``units``  (parameter, number of the matrix in it).
    ``owner``  of each unit.
    ``holds``  per rank its runs, in the order of owners.
    ``sends``  the same without copies that another rank sends.
    ``boxes``  (rows, columns) of the blocks, by number.
    """

    spreads: tuple[Spread, ...]
    units: tuple[tuple[int, int], ...]
    owner: tuple[int, ...]
    holds: tuple[tuple[MatrixRun, ...], ...]
    sends: tuple[tuple[MatrixRun, ...], ...]
    boxes: tuple["Box", ...]

    def _counts(self, parts: Sequence[Sequence[MatrixRun]]) -> Counts:
        table = [[0] * len(parts) for _ in parts]
        for rank, mine in enumerate(parts):
            for h in mine:
                # row: the sender, column: the owner
                table[rank][self.owner[h.unit]] += h.hi - h.lo
        return tuple(map(tuple, table))

    @cached_property
    def there(self) -> Counts:
        """Elements sent from each rank to each."""
        return self._counts(self.sends)

    @cached_property
    def back(self) -> Counts:
        """Elements of results sent from each rank to each."""
        return tuple(zip(*self._counts(self.holds), strict=True))

    @cached_property
    def moved(self) -> int:
        """Elements sent between different ranks, over all ranks, both ways."""
        tables = (self.there, self.back)
        return sum(
            n for t in tables for i, row in enumerate(t) for j, n in enumerate(row) if i != j
        )

    @cached_property
    def load(self) -> tuple[int, ...]:
        """The flops of each rank."""
        out = [0] * len(self.holds)
        for (param, _), owner in zip(self.units, self.owner, strict=True):
            out[owner] += self.spreads[param].flops
        return tuple(out)


@lru_cache(maxsize=64)
def deal(
    spreads: tuple[Spread, ...],
    sizes: AxisSizes,
    work: Callable[[Spread], int] = attrgetter("flops"),
) -> Deal:
    """Deal matrices to ranks, those with most work first, each to the rank with least.

    A rank that holds more of a matrix is preferred if no rank's work then exceeds the busiest
    rank's by more than 2 %.

    ``work``  of one of a parameter's matrices, in any unit.

    >>> s = Spread(Layout.parse("x ."), (8, 8), (8, 8))
    >>> d = deal((s, s), (("x", 2),))
    >>> d.owner, d.there, d.load
    ((0, 1), ((32, 32), (32, 32)), (15360, 15360))
    """
    mesh = dict(sizes)
    ranks = coordinates(mesh)
    units = tuple((p, k) for p, s in enumerate(spreads) for k in range(s.count))
    number = {u: i for i, u in enumerate(units)}
    boxes: dict[Any, int] = {}
    holds: list[list[MatrixRun]] = [[] for _ in ranks]
    copies: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    for (p, spread), (rank, coord) in product(enumerate(spreads), enumerate(ranks)):
        matrices, rows, cols = spread.block(coord, mesh)
        size = len(rows) * len(cols)
        box = boxes.setdefault((tuple(rows), tuple(cols)), len(boxes))
        # a block is a stack of matrices' parts, one after the other
        first, last, _ = spread.run(coord, mesh).indices(len(matrices) * size)
        for k, matrix in enumerate(matrices):
            lo, hi = max(first, k * size), min(last, (k + 1) * size)
            if lo < hi and (p, matrix) in number:  # else it is padding
                h = MatrixRun(p, number[p, matrix], lo - first, hi - first, lo - k * size, box)
                holds[rank].append(h)
                copies[h.elements].append(rank)
    owner = _dealt([work(spreads[p]) for p, _ in units], holds)

    def sends_it(rank: int, h: MatrixRun) -> bool:
        # of several copies the owner's own is taken, which moves nothing; else a hash spreads senders
        who, own = copies[h.elements], owner[h.unit]
        return rank == (own if own in who else who[sum(h.elements) % len(who)])

    ordered = [tuple(sorted(mine, key=lambda h: (owner[h.unit], h))) for mine in holds]
    sends = [filter(partial(sends_it, rank), mine) for rank, mine in enumerate(ordered)]
    return Deal(
        spreads, units, tuple(owner), tuple(ordered), tuple(map(tuple, sends)), tuple(boxes)
    )


def _dealt(work: Sequence[int], holds: Sequence[Sequence[MatrixRun]]) -> list[int]:
    """Choose the owner of each unit."""
    ranks = range(len(holds))
    amount: list[dict[int, int]] = [defaultdict(int) for _ in work]
    for rank, mine in enumerate(holds):
        for h in mine:
            amount[h.unit][rank] += h.hi - h.lo
    order = sorted(range(len(work)), key=lambda i: (-work[i], i))

    def within(most: float) -> tuple[list[int], int]:
        load, owner = [0] * len(holds), [0] * len(work)
        for i in order:
            fits = [r for r in ranks if load[r] + work[i] <= most]
            if fits:
                owner[i] = min(fits, key=lambda r: (-amount[i][r], load[r], r))
            else:
                owner[i] = min(ranks, key=lambda r: (load[r], -amount[i][r], r))
            load[owner[i]] += work[i]
        return owner, max(load)

    # balance the work alone; then prefer holders, within 2 % of that balance
    even, most = within(0)
    near, highest = within(1.02 * most)
    return near if highest <= 1.02 * most else even


Compute = Callable[[int, Sequence[int], Tensor, tuple[int, int]], None]
"""An owner's computation, in place: (number of the rank in this process, units, their matrices
[k, m, n], the grid of matrices in each)."""


def in_batches(f: Callable[[Tensor], Tensor]) -> Compute:
    """Apply a function of a batch [k, m, n] to matrices, and to each matrix of a grid."""

    def run(rank: int, units: Sequence[int], batch: Tensor, side: tuple[int, int]) -> None:
        most = max(BATCH // max(math.prod(batch.shape[1:]), 1), 1)
        for some in batch.split(most):
            some.copy_(apart(f, some, side))

    return run


def through_owners(items: Sequence[Laid], plan: Deal, f: Compute, dtype: torch.dtype) -> None:
    """Send matrices to their owners, compute there, and write the results over the matrices.

    ``dtype`` in which matrices are sent and computed.
    Moves: ``plan.moved / ranks`` elements per rank in two exchanges.
    """
    mesh, runs = items[0].mesh, [x.runs for x in items]
    ranks = ranks_of(mesh)

    def sent(i: int, rank: int) -> list[Tensor]:
        return [runs[h.param][i][h.lo : h.hi].to(dtype) for h in plan.sends[rank]]

    like = runs[0][0].new_empty(0, dtype=dtype)
    arrived = exchange([sent(i, r) for i, r in enumerate(ranks)], plan.there, mesh, like)
    results = [_owned(arrived.pop(0), plan, rank, i, f) for i, rank in enumerate(ranks)]
    returned = exchange(results, plan.back, mesh, like)
    for i, rank in enumerate(ranks):
        at = 0
        for h in plan.holds[rank]:
            n = h.hi - h.lo
            runs[h.param][i][h.lo : h.hi] = returned[i][at : at + n]
            at += n


def join(items: Sequence[Laid], mesh: Mesh, dtype: torch.dtype) -> list[list[Tensor]]:
    """Join whole blocks, cut along the same axes, from their runs, as vectors.

    Moves: (N-1)/N of the blocks, for N ranks along those axes, in one exchange.
    """
    cut = items[0].spread.cut
    like = items[0].runs[0].new_empty(0, dtype=dtype)
    # by rank along the axes
    runs = list(zip(*(x.spread.runs for x in items), strict=True))
    own = [[x.runs[i].to(dtype) for x in items] for i in range(len(items[0].runs))]
    sent = [row * (len(runs) - 1) for row in own]
    arrived = exchange(sent, _counts(runs), mesh, like, cut)
    out = [[like.new_empty(math.prod(x.spread.block_shape(mesh.axes))) for _ in own] for x in items]
    for i, coord in enumerate(played(mesh)):
        parts = _by_rank(runs, rank_along(cut, coord, mesh.axes), own[i], arrived[i])
        for into, (start, stop), part in parts:
            out[into][i][start:stop] = part
    return out


_RunsOfRank = Sequence[tuple[int, int]]
"""Start and stop of a rank's run of each matrix."""


def _counts(runs: Sequence[_RunsOfRank]) -> tuple[tuple[int, ...], ...]:
    """Return how many numbers rank i sends to rank j: all of its runs, to every other one."""
    lengths = [sum(stop - start for start, stop in row) for row in runs]
    return tuple(tuple(n if i != j else 0 for j in range(len(runs))) for i, n in enumerate(lengths))


def _by_rank(
    runs: Sequence[_RunsOfRank], mine: int, own: Sequence[Tensor], arrived: Tensor
) -> Iterator[tuple[int, tuple[int, int], Tensor]]:
    """Yield (matrix, its run, the numbers) of every rank: others' arrive one after the other."""
    for rank, row in enumerate(runs):
        for matrix, (start, stop) in enumerate(row):
            if rank == mine:
                yield matrix, (start, stop), own[matrix]
            else:
                yield matrix, (start, stop), arrived[: stop - start]
                arrived = arrived[stop - start :]


def exchange(
    parts: Sequence[Sequence[Tensor]],
    counts: Counts,
    mesh: Mesh | None,
    like: Tensor,
    axes: tuple[str, ...] = (),
) -> list[Tensor]:
    """Exchange vectors between ranks, along some axes or all; return those received by each."""
    most = max(map(sum, counts))
    rows = []
    for mine in parts:
        row, n = like.new_empty(most), sum(map(len, mine))
        if n:
            torch.cat(list(mine), out=row[:n])
        rows.append(row)
    if mesh is None:
        return rows
    with bind(mesh):
        sent = wrap(storage(rows, mesh), mesh)
        came = unwrap(ragged_all_to_all(sent, axes or mesh.names, counts))
    return blocks(came, mesh)


BATCH = 1 << 22
"""Elements of matrices that are computed at a time."""


def _owned(vector: Tensor, plan: Deal, rank: int, number: int, f: Compute) -> list[Tensor]:
    """Do an owner's work: join matrices, compute them by shape, and cut them again."""
    alike: dict[Any, list[int]] = defaultdict(list)
    for unit, owner in enumerate(plan.owner):
        if owner == rank:
            spread = plan.spreads[plan.units[unit][0]]
            alike[spread.shape[-2:], spread.tiled[-2:], spread.side].append(unit)
    whole: dict[int, Tensor] = {}
    batches = []
    for (shape, tiled, side), units in alike.items():
        # of the sizes that blocks tile, so that boxes index it; the kernel gets the true part
        batch = vector.new_zeros(len(units), *tiled)
        batches.append((units, batch[:, : shape[0], : shape[1]], side))
        whole.update(zip(units, batch.unbind(), strict=True))
    _assemble(vector, plan, rank, whole)
    for units, true, side in batches:
        f(number, units, true, side)
    cut: dict[tuple[int, int], Tensor] = {}
    out = []
    for mine in plan.holds:
        for h in mine:
            if plan.owner[h.unit] == rank:
                if (h.unit, h.box) not in cut:
                    cut[h.unit, h.box] = whole[h.unit][
                        _at(plan.boxes[h.box], whole[h.unit])
                    ].reshape(-1)
                out.append(cut[h.unit, h.box][h.at : h.at + h.hi - h.lo])
    return out


def _assemble(vector: Tensor, plan: Deal, rank: int, whole: dict[int, Tensor]) -> None:
    """Copy received runs into the matrices; a block that came in several runs is joined first."""
    partly: dict[tuple[int, int], Tensor] = {}
    at = 0
    for mine in plan.sends:
        for h in mine:
            if plan.owner[h.unit] != rank:
                continue
            n, shape = h.hi - h.lo, [len(p) for p in plan.boxes[h.box]]
            part, size = vector[at : at + n], shape[0] * shape[1]
            at += n
            matrix, box = whole[h.unit], plan.boxes[h.box]
            if n == size:
                matrix[_at(box, matrix)] = part.view(shape)
            # the block is the whole matrix in order: copy the run into it directly
            elif size == matrix.numel() and None not in map(_span, box):
                matrix.view(-1)[h.at : h.at + n] = part
            else:
                if (h.unit, h.box) not in partly:
                    partly[h.unit, h.box] = vector.new_zeros(size)
                partly[h.unit, h.box][h.at : h.at + n] = part
    for (unit, box), block in partly.items():
        place = plan.boxes[box]
        whole[unit][_at(place, whole[unit])] = block.view(*map(len, place))


Box = tuple[tuple[int, ...], tuple[int, ...]]


def _at(box: Box, whole: Tensor) -> Any:
    """Return the index of a box in a matrix: slices, or positions where they are no neighbours."""
    spans = [_span(places) for places in box]
    if None not in spans:
        return tuple(spans)
    rows, cols = (uploaded(places, whole.device) for places in box)
    return rows[:, None], cols


def apart(f: Callable[[Tensor], Tensor], x: Tensor, side: tuple[int, int]) -> Tensor:
    """Apply ``f`` to each matrix of the grids in a batch [k, m, n]."""
    rows, cols = side
    if side == (1, 1):
        return f(x)
    k, m, n = x.shape
    parts = x.reshape(k, rows, m // rows, cols, n // cols).transpose(2, 3)
    done = f(parts.reshape(k * rows * cols, m // rows, n // cols))
    return done.reshape(parts.shape).transpose(2, 3).reshape(x.shape)


@lru_cache(maxsize=4096)
def _span(places: tuple[int, ...]) -> slice | None:
    """Return neighbouring positions as a slice."""
    first = places[0] if places else 0
    end = first + len(places)
    return slice(first, end) if places == tuple(range(first, end)) else None


# ---------------------------------------------------------------- state on owners


Kind = Literal["mn", "mm", "nn"]
"""Numbers kept of a matrix [m, n]: one per element, per pair of rows, or per pair of columns."""


@dataclass(frozen=True)
class OwnedNumbers:
    """A list of the numbers kept per matrix, with their owners.

    ``paths``   of the parameters, in the order of ``plan.spreads``.
    ``shapes``  of the numbers per matrix, for each parameter.
    """

    paths: tuple[str, ...]
    plan: Deal
    shapes: tuple[tuple[int, int], ...]

    @cached_property
    def places(self) -> list[list[tuple[int, int, int]]]:
        """Per rank, (unit, start, stop) of its numbers in the rank's vector."""
        out: list[list[tuple[int, int, int]]] = [[] for _ in self.plan.holds]
        rows = zip(self.plan.units, self.plan.owner, strict=True)
        for unit, ((param, _), owner) in enumerate(rows):
            at = out[owner][-1][2] if out[owner] else 0
            out[owner].append((unit, at, at + math.prod(self.shapes[param])))
        return out

    @cached_property
    def length(self) -> int:
        """The length of the longest rank's vector."""
        return max((mine[-1][2] for mine in self.places if mine), default=0)


@pytree_node
class Owned:
    """Numbers of matrices on their owners; a pytree node with one vector in it.

    A rank's numbers are stored one after the other in a vector; all ranks' vectors form one
    ShardedTensor split over the whole mesh.  So every rank holds about its share of the state, for
    any layout of the parameters.

    ``vector``  a ShardedTensor split over the whole mesh, or a plain tensor without a mesh.
    """

    def __init__(self, vector: Any, held: OwnedNumbers, mesh: Mesh | None) -> None:
        self.vector = vector
        self.held = held
        self.mesh = mesh

    def tree_flatten(self) -> tuple[list[Any], Any, list[str]]:
        """Return the vector, and what it is of."""
        return [self.vector], (self.held, self.mesh), ["vector"]

    @staticmethod
    def tree_unflatten(where: tuple[OwnedNumbers, Mesh | None], children: Iterable[Any]) -> "Owned":
        """Build the same of another vector."""
        return Owned(next(iter(children)), *where)

    @staticmethod
    def zeros(
        items: Sequence[Laid], plan: Deal, kind: Kind, dtype: torch.dtype, most: float
    ) -> "Owned":
        """Make zeros for the numbers of these matrices, on the owners of ``plan``.

        ``most``  sides with more rows, or columns, keep no pairs.
        """
        mesh = items[0].mesh
        shapes = []
        for spread in plan.spreads:
            m, n = spread.shape[-2:]
            shape = {"mn": (m, n), "mm": (m, m), "nn": (n, n)}[kind]
            shapes.append(shape if kind == "mn" or shape[0] <= most else (0, 0))
        held = OwnedNumbers(tuple(x.path for x in items), plan, tuple(shapes))
        like, ranks = items[0].runs[0], ranks_of(mesh)
        nbytes = held.length * dtype.itemsize * len(ranks)
        refuse_beyond(nbytes, like.device, "init", mesh)
        rows = [like.new_zeros(held.length, dtype=dtype) for _ in ranks]
        if mesh is None:
            return Owned(rows[0], held, mesh)
        place = vector(held.length, mesh.names, mesh)
        return Owned(ShardedTensor(storage(rows, mesh), place), held, mesh)

    @property
    def vectors(self) -> list[Tensor]:
        """The vector of each rank in this process."""
        return [self.vector] if self.mesh is None else [*blocks(self.vector.raw, self.mesh)]

    def views(self, i: int) -> dict[int, Tensor]:
        """Map units to views of their numbers, for the units of the i-th rank in this process."""
        rank, vector = ranks_of(self.mesh)[i], self.vectors[i]
        units, shapes = self.held.plan.units, self.held.shapes
        return {
            unit: vector[start:stop].view(shapes[units[unit][0]])
            for unit, start, stop in self.held.places[rank]
        }

    def _of(self, path: str) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (number of the rank in this process, of the matrix, view) of a parameter."""
        param = self.held.paths.index(path)
        for i in range(len(self.vectors)):
            for unit, view in self.views(i).items():
                p, k = self.held.plan.units[unit]
                if p == param:
                    yield i, k, view

    def kinds(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Map the path of each parameter with numbers to their shape as one tensor, and dtype."""
        rows = zip(self.held.paths, self.held.plan.spreads, self.held.shapes, strict=True)
        kept = ((path, (*s.shape[:-2], *shape)) for path, s, shape in rows if shape != (0, 0))
        return {path: (shape, self.vector.dtype) for path, shape in kept}

    def by_parameter(self) -> list[tuple[str, Tensor]]:
        """List (path, its numbers as one tensor), split over the mesh if a dimension divides.

        Moves: one psum of each.
        """
        return [(path, self._parameter(path, *kind)) for path, kind in self.kinds().items()]

    def _parameter(self, path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        rows = [vector.new_zeros(shape) for vector in self.vectors]
        for i, k, view in self._of(path):
            rows[i].view(-1, *view.shape)[k] = view
        whole = over_ranks(rows, self.mesh)
        if self.mesh is None:
            return whole
        place = Place(Layout((Dim(),) * len(shape)), torch.Size(shape), self.mesh)
        value = ShardedTensor(storage([whole] * len(rows), self.mesh), place)
        return reshard(value, finer(place, tuple(self.mesh.names)).layout)

    def with_values(self, values: Mapping[str, Tensor]) -> "Owned":
        """Return a copy with the numbers of each path replaced."""
        out = Owned(self.vector.clone(), self.held, self.mesh)
        for path, value in values.items():
            whole = whole_of(value)
            for _, k, view in out._of(path):
                view.copy_(whole.reshape(-1, *view.shape)[k])
        return out

    def check(self, items: Sequence[Laid], op: str) -> None:
        """Refuse matrices other than those of this state."""
        paths, spreads = tuple(x.path for x in items), tuple(x.spread for x in items)
        held = self.held
        if paths == held.paths and spreads == held.plan.spreads:
            return
        gone = sorted(set(held.paths) ^ set(paths))
        moved = not gone
        if moved:
            rows = zip(paths, spreads, held.plan.spreads, strict=True)
            gone = [path for path, a, b in rows if a != b]
        raise of_others(f"they differ at {', '.join(gone[:4])}", None, op, self.mesh, moved)


ByParameter = Buckets | Owned
"""A leaf of a state with numbers of several parameters, which are saved and loaded by their paths:
``kinds``, ``by_parameter`` and ``with_values``."""
