"""Redistribution from one layout to another: the cheapest sequence of steps, found by search.

Steps act on local blocks and change one thing each (block shapes in brackets):

    slice(axis, dim)             keep this rank's part [n] -> [n/p]; nothing moves
    all_gather(axis, dim)        undo the innermost split [n] -> [n p]; (p-1) n received
    all_to_all(axis, dim, to)    move the innermost split of dim to dim ``to``; (p-1)/p n
    psum(axis)                   finish a pending sum; 2 (p-1)/p n
    psum_scatter(axis, dim)      finish it and split dim; (p-1)/p n
    mask(axis)                   keep the value on coordinate 0, zeros elsewhere: a pending sum
    ppermute(axes, pairs)        whole blocks change places; n times the moving fraction
    order_slice(axes, dim)       reorder an unsplit dimension by ``table``, then slice: (3 y), zigzag,
                                 striped
    gather_order(axes, dim)      all_gather, then reorder by ``table``: the way back
    exchange(axes)               every rank receives exactly what it lacks

The plan is a shortest path over these steps and the axes that the two layouts name; of equal words
it prefers the collectives to an exchange.  Between layouts without pending sums an exchange is
the least that any plan moves, so a direct plan never costs more than a detour: cost(A >> C) <=
cost(A >> B) + cost(B >> C).  Where sums are pending this holds if B is pending over the same axes.

Exchange: two layouts cut a tensor into boxes.  The elements that a rank lacks of its new box are in
other ranks' old boxes, and each overlap is sent once.  No plan can send fewer words, since a rank
has to receive every element that it does not hold.  Overlaps of one shape between ranks equally far
apart share one ppermute, so a box of any shape can go to any rank.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from shardlib.layouts.dims import WHOLE, Dim, positions, radix_of
from shardlib.mesh import Axes, MeshKey, Sizes, axis_sizes, coordinates

# a Layout; layout.py imports this file
_Layout = Any

_OF_BLOCKS = ("psum", "mask", "ppermute", "exchange")
"""Kinds of steps that are of no one dimension."""


@dataclass(frozen=True)
class ReshardStep:
    """One move; ``words`` received per rank on average, ``elements`` of the block afterwards."""

    kind: str
    axes: Axes = ()
    dim: int = 0
    to: int = 0
    table: tuple[Any, ...] = ()
    words: Fraction = Fraction(0)
    messages: int = 0
    elements: int = 0

    def __str__(self) -> str:
        detail = {"all_to_all": f", {self.dim} -> {self.to}"} | dict.fromkeys(_OF_BLOCKS, "")
        return f"{self.kind}({' '.join(self.axes)}{detail.get(self.kind, f', dim {self.dim}')})"


@dataclass(frozen=True)
class ReshardPlan:
    """Plan for ``source >> target``; its steps depend on a shape and a mesh.

    >>> from shardlib import Layout
    >>> plan = Layout.parse("x .") >> Layout.parse(". x")
    >>> [str(s) for s in plan.steps((8, 8), {"x": 2})], plan.bytes((8, 8), {"x": 2}, 4)
    (['all_to_all(x, 0 -> 1)'], 64)
    """

    source: _Layout
    target: _Layout

    def steps(self, shape: Sequence[int], mesh: object) -> tuple[ReshardStep, ...]:
        """Return the moves in order.  Raises what ``Layout.check`` raises."""
        return _search(self.source, self.target, tuple(shape), tuple(axis_sizes(mesh).items()))

    def bytes(self, shape: Sequence[int], mesh: object, itemsize: int = 4) -> int | Fraction:
        """Count the bytes received per rank, on average over the ranks."""
        total = sum((s.words for s in self.steps(shape, mesh)), Fraction(0)) * itemsize
        return int(total) if total.denominator == 1 else total

    def messages(self, shape: Sequence[int], mesh: object) -> int:
        """Count the messages per rank."""
        return sum(s.messages for s in self.steps(shape, mesh))

    def peak(self, shape: Sequence[int], mesh: object, itemsize: int = 4) -> int:
        """Count the bytes of the largest block and its successor held at once."""
        sizes = [math.prod(self.source.local_shape(shape, mesh))]
        sizes += [s.elements for s in self.steps(shape, mesh)]
        return max(a + b for a, b in itertools.pairwise([*sizes, 0])) * itemsize

    def __str__(self) -> str:
        return f"{self.source} >> {self.target}"


_Moves = Iterator[tuple[ReshardStep, _Layout]]
# positions per dimension: of a rank in the tensor, or of a block
Box = tuple[Sequence[int], ...]


@lru_cache(maxsize=4096)
def _search(
    source: _Layout, target: _Layout, shape: tuple[int, ...], mesh: MeshKey
) -> tuple[ReshardStep, ...]:
    sizes = dict(mesh)
    first, last = (layout.resolve(len(shape)) for layout in (source, target))
    first.check(shape, sizes, op="reshard")
    last.check(shape, sizes, op="reshard")
    # Dijkstra's algorithm; of equal words, fewer exchanges and then fewer messages win
    # heapq compares the counter before the states, which have no order
    tie = itertools.count()
    queue: list[tuple[Fraction, int, int, int, _Layout, tuple[ReshardStep, ...]]] = [
        (Fraction(0), 0, 0, next(tie), first, ())
    ]
    done: set[_Layout] = set()
    while queue:
        words, exchanges, messages, _, state, path = heapq.heappop(queue)
        if state == last:
            return _settled(path, last, shape, mesh)
        if state in done:
            continue
        done.add(state)
        for step, after in _moves(state, last, shape, sizes):
            if after not in done:
                again = exchanges + (step.kind == "exchange")
                entry = (
                    words + step.words,
                    again,
                    messages + step.messages,
                    next(tie),
                    after,
                    (*path, step),
                )
                heapq.heappush(queue, entry)
    raise AssertionError(
        f"no path from {source} to {target}: every layout reaches the replicated one"
    )


class _SearchNode(NamedTuple):
    """State of the search, where it leads, and the sizes on which the words of a move depend.

    A state is the layout that the blocks have there.

    ``block``  elements of a rank's block.
    """

    state: _Layout
    last: _Layout
    shape: tuple[int, ...]
    sizes: Sizes
    block: int

    def local(self, d: int) -> int:
        """Count a block's elements along dimension ``d``."""
        return self.shape[d] // self.ranks(self.state.dims[d].axes)

    def ranks(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[a] for a in axes)

    def held(self, to: _Layout, axes: Axes) -> tuple[tuple[Box, ...], tuple[Box, ...], int]:
        """Return what every rank along ``axes`` holds in this state and in another one.

        Positions count runs of elements that neither state parts; also the elements of a run.
        """
        pairs = zip(self.state.dims, to.dims, self.shape, strict=True)
        runs = [math.gcd(*(_run_of(d, n, self.sizes) for d in (a, b))) or 1 for a, b, n in pairs]
        shape = tuple(n // run for n, run in zip(self.shape, runs, strict=True))
        of = shape, tuple(self.sizes.items()), axes
        return _held(self.state, *of), _held(to, *of), math.prod(runs)

    def splits(self, axis: str) -> list[int]:
        """List the dimensions that can be split over one more axis."""
        dims, p = self.state.dims, self.sizes[axis]
        return [d for d, dim in enumerate(dims) if dim.is_plain and self.local(d) % p == 0]

    def changed(self, changes: Mapping[int, Dim], finished: str = "") -> _Layout:
        """Return the state with other tokens of some dimensions, and without one pending sum."""
        dims = tuple(changes.get(d, dim) for d, dim in enumerate(self.state.dims))
        sums = tuple(x for x in self.state.partial if x != finished)
        return replace(self.state, dims=dims, partial=sums)


def _moves(state: _Layout, last: _Layout, shape: tuple[int, ...], sizes: Sizes) -> _Moves:
    # of equal words the first plan found wins, so the order of the moves is part of the result
    block = math.prod(
        n // math.prod(sizes[a] for a in d.axes) for d, n in zip(state.dims, shape, strict=True)
    )
    at = _SearchNode(state, last, shape, sizes, block)
    yield from _permutations(at)
    yield from _exchanges(at)
    yield from _sums(at)
    if state.skew:
        return
    for d, dim in enumerate(state.dims):
        if dim.is_split and dim.is_plain:
            yield from _gathers(at, d)
        elif dim.is_split:
            yield _gather_order(at, d)
    yield from _slices(at)
    yield from _scatters(at)
    yield from _order_slices(at)


def _sums(at: _SearchNode) -> _Moves:
    """Yield the start of the target's pending sums by masks, and the end of those pending."""
    partial, here = at.state.partial, at.block
    for axis in sorted(set(at.last.partial).difference(at.state.named)):
        step = ReshardStep("mask", (axis,), elements=here)
        yield step, replace(at.state, partial=(*partial, axis))
    for axis in partial:
        p = at.sizes[axis]
        words = Fraction(2 * (p - 1) * here, p)
        step = ReshardStep("psum", (axis,), words=words, messages=2 * (p - 1), elements=here)
        yield step, at.changed({}, axis)


def _gathers(at: _SearchNode, d: int) -> _Moves:
    """Yield moves of the innermost split of a dimension: undone, or moved to another one."""
    dims, here = at.state.dims, at.block
    axis = dims[d].parts[-1]
    assert isinstance(axis, str)
    p = at.sizes[axis]
    inner = Dim(dims[d].parts[:-1])
    words = Fraction((p - 1) * here)
    step = ReshardStep("all_gather", (axis,), d, 0, (), words, p - 1, here * p)
    yield step, at.changed({d: inner})
    for to in at.splits(axis):
        if to != d:
            step = ReshardStep("all_to_all", (axis,), d, to, (), words / p, p - 1, here)
            yield step, at.changed({d: inner, to: Dim((*dims[to].parts, axis))})


def _gather_order(at: _SearchNode, d: int) -> tuple[ReshardStep, _Layout]:
    """Return the gather of a dimension with factors or another order."""
    dim, n = at.state.dims[d], at.shape[d]
    p, here = at.ranks(dim.axes), at.block
    back = _table(dim, n, at.sizes)
    table = tuple(sorted(range(n), key=back.__getitem__))
    words = Fraction((p - 1) * here)
    step = ReshardStep("gather_order", dim.axes, d, 0, table, words, p - 1, here * p)
    return step, at.changed({d: WHOLE})


def _slices(at: _SearchNode) -> _Moves:
    """Yield slices over the axes of the target that nothing uses yet."""
    used, goal = at.state.named, at.last.named
    for axis, p in at.sizes.items():
        # in mesh order, so that every rank finds the same plan
        if axis in used or axis not in goal:
            continue
        for d in at.splits(axis):
            step = ReshardStep("slice", (axis,), d, elements=at.block // p)
            yield step, at.changed({d: Dim((*at.state.dims[d].parts, axis))})


def _scatters(at: _SearchNode) -> _Moves:
    """Yield ends of pending sums that split a dimension at once."""
    for axis in at.state.partial:
        p, here = at.sizes[axis], at.block
        words = Fraction((p - 1) * here, p)
        for d in at.splits(axis):
            step = ReshardStep("psum_scatter", (axis,), d, 0, (), words, p - 1, here // p)
            yield step, at.changed({d: Dim((*at.state.dims[d].parts, axis))}, axis)


def _order_slices(at: _SearchNode) -> _Moves:
    """Yield moves to tokens with factors or another order: reorder an unsplit dimension, slice."""
    used = set(at.state.named)
    for d, want in enumerate(at.last.dims):
        now = at.state.dims[d]
        inner = Dim(want.parts[len(now.parts) :], want.order)
        begun = (
            now.is_plain and want.parts[: len(now.parts)] == now.parts and inner.ring == want.ring
        )
        if not begun or want.is_plain or want.by or used.intersection(inner.axes):
            continue
        table = tuple(_table(inner, at.local(d), at.sizes))
        elements = at.block // at.ranks(inner.axes)
        step = ReshardStep("order_slice", inner.axes, d, table=table, elements=elements)
        yield step, at.changed({d: want})


def _table(dim: Dim, n: int, sizes: Sizes) -> list[int]:
    """List the global positions, rank after rank along the token's axes."""
    ranks = coordinates({a: sizes[a] for a in dim.axes})
    return [i for coord in ranks for i in positions(dim, n, sizes, coord)]


def _permutations(at: _SearchNode) -> _Moves:
    """Yield moves of whole blocks to the ranks that need them, where blocks are equal."""
    now, last = at.state, at.last
    same = set(now.axes) == set(last.axes)
    if now.skew and not (last.skew and same):
        # a skew fits one pair of axes only, so it is undone before the axes change
        yield from _permute_to(at, now.aligned)
    elif same and now.partial == last.partial:
        yield from _permute_to(at, last)
    elif last.skew and now.dims == last.aligned.dims:
        yield from _permute_to(at, now.onto(last.dims))


_WORLD = 64
"""Ranks up to which an exchange is considered: its table has a row for every pair."""


def _exchanges(at: _SearchNode) -> _Moves:
    """Yield an exchange to the target if the same sums are pending; ``_settled`` plans it later."""
    state, last = at.state, at.last
    axes = _between(state, last, at.sizes)
    if state.partial == last.partial and axes and at.ranks(axes) <= _WORLD:
        old, new, run = at.held(last, axes)
        # also where no rank lacks anything: (3 b) >> (c b) is no slice that a step could name
        words = Fraction(run * sum(map(_lacking, old, new)), len(new))
        block = run * math.prod(map(len, new[0]))
        yield ReshardStep("exchange", axes, table=(state,), words=words, elements=block), last


def _between(a: _Layout, b: _Layout, sizes: Sizes) -> Axes:
    return tuple(n for n in sizes if n in a.axes + b.axes)


def _settled(
    path: tuple[ReshardStep, ...],
    last: _Layout,
    shape: tuple[int, ...],
    mesh: MeshKey,
) -> tuple[ReshardStep, ...]:
    """Return the path; an exchange at its end gets its rounds."""
    if not path or path[-1].kind != "exchange":
        return path
    step = path[-1]
    table = exchange(*(_held(x, shape, mesh, step.axes) for x in (step.table[0], last)))
    return (*path[:-1], replace(step, table=(table,), messages=len(table.rounds)))


def _permute_to(at: _SearchNode, b: _Layout) -> _Moves:
    axes = _between(at.state, b, at.sizes)
    old, new, _ = at.held(b, axes)
    if at.block:
        holders = {held: rank for rank, held in enumerate(old)}
        pairs = tuple((holders.get(held, -1), rank) for rank, held in enumerate(new))
        fits = len(holders) == len(old) and all(source >= 0 for source, _ in pairs)
    else:
        # empty blocks: a block is in the right place if it has the right shape
        pairs = tuple((rank, rank) for rank in range(len(old)))
        fits = [*map(len, old[0])] == [*map(len, new[0])]
    if fits:
        moved = sum(source != rank for source, rank in pairs)
        words = Fraction(moved * at.block, len(pairs))
        step = ReshardStep("ppermute", axes, 0, 0, pairs, words, int(moved > 0), at.block)
        yield step, b


# ---------------------------------------------------------------- exchange


@dataclass(frozen=True)
class Round:
    """One ppermute: ``takes[s]`` of the sender's old block becomes ``puts[d]`` of the new one."""

    pairs: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    takes: Mapping[int, Box]
    puts: Mapping[int, Box]


@dataclass(frozen=True)
class Exchange:
    """Plan from old blocks to new ones: the elements each rank keeps, and rounds of ppermute.

    ``kept``   rank -> its kept elements, in the old block and in the new one.
    ``shape``  of the new blocks.
    """

    shape: tuple[int, ...]
    kept: Mapping[int, tuple[Box, Box]]
    rounds: tuple[Round, ...]


def exchange(old: Sequence[Box], new: Sequence[Box]) -> Exchange:
    """Plan the sends from the positions that ranks hold to those that they shall hold.

    Of several ranks that hold the same box the least busy one sends.
    """
    p, holders = len(old), {}
    for rank, held in enumerate(old):
        holders.setdefault(held, []).append(rank)
    busy, kept = [0] * p, {}
    rounds: dict[tuple[int, tuple[int, ...]], list[tuple[int, int, Box, Box]]] = {}
    for target, wanted in enumerate(new):
        for held, ranks in holders.items():
            places = [_places(h, w) for h, w in zip(held, wanted, strict=True)]
            if not all(places):
                continue
            take, put = (tuple(side) for side in zip(*places, strict=True)) if places else ((), ())
            if target in ranks:
                kept[target] = (take, put)
                continue
            source = min(ranks, key=lambda r, t=target: (busy[r], (t - r) % p))
            size = tuple(map(len, put))
            busy[source] += math.prod(size)
            # of one distance and size: each rank sends and receives once, so one ppermute does
            rounds.setdefault(((target - source) % p, size), []).append((source, target, take, put))
    return Exchange(
        tuple(map(len, new[0])),
        kept,
        tuple(
            Round(
                tuple((s, d) for s, d, *_ in moved),
                size,
                {s: take for s, _, take, _ in moved},
                {d: put for _, d, _, put in moved},
            )
            for (_, size), moved in sorted(rounds.items(), key=lambda item: item[0])
        ),
    )


@lru_cache(maxsize=256)
def _held(
    state: _Layout,
    shape: tuple[int, ...],
    mesh: MeshKey,
    axes: Axes,
) -> tuple[Box, ...]:
    """Return the positions that every rank along ``axes`` holds, in rank order."""
    sizes = dict(mesh)
    return tuple(
        tuple(map(_run, state.indices(shape, sizes, dict.fromkeys(sizes, 0) | c)))
        for c in coordinates({a: sizes[a] for a in axes})
    )


def _run_of(dim: Dim, n: int, sizes: Sizes) -> int:
    """Return the length of the runs in which a token of a dimension of size n deals elements."""
    parts = math.prod(radix_of(p, sizes) for p in dim.parts)
    if dim.order != "contiguous" or n % parts:
        return 1
    return n // parts


def _lacking(old: Box, new: Box) -> int:
    """Count the elements of a box that are not in another one."""
    return math.prod(map(len, new)) - math.prod(map(_common, old, new))


@lru_cache(maxsize=8192)
def _common(old: Sequence[int], new: Sequence[int]) -> int:
    """Count the positions that are in both."""
    if isinstance(old, range) and isinstance(new, range):
        return max(0, min(old.stop, new.stop) - max(old.start, new.start))
    return len({*old} & {*new})


@lru_cache(maxsize=8192)
def _places(old: Sequence[int], new: Sequence[int]) -> Box:
    """Return where shared positions are in each, in ``new``'s order; () if there are none."""
    if isinstance(old, range) and isinstance(new, range):
        shared = range(max(old.start, new.start), min(old.stop, new.stop))
        moved = [range(shared.start - x.start, shared.stop - x.start) for x in (old, new)]
        return tuple(moved) if shared else ()
    at = {position: i for i, position in enumerate(old)}
    both = [(at[position], i) for i, position in enumerate(new) if position in at]
    return tuple(map(_run, zip(*both, strict=True)))


def _run(places: Sequence[int]) -> Sequence[int]:
    """Write positions as a range if they are consecutive."""
    if isinstance(places, range):
        return places
    follow = places and all(b == a + 1 for a, b in itertools.pairwise(places))
    return range(places[0], places[-1] + 1) if follow else tuple(places)
