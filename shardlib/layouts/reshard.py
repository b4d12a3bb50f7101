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
    exchange(axes)               every rank receives exactly what it lacks (exchange.py)

The plan is a shortest path over these steps and the axes that the two layouts name; of equal words
it prefers the collectives to an exchange.  Between layouts without pending sums an exchange is
the least that any plan moves, so a direct plan never costs more than a detour: cost(A >> C) <=
cost(A >> B) + cost(B >> C).  Where sums are pending this holds if B is pending over the same axes.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from shardlib.layouts.dims import WHOLE, Dim, axis_sizes, indices, positions
from shardlib.layouts.exchange import exchange, lacking
from shardlib.mesh import coordinates

__all__ = ["ReshardPlan", "ReshardStep"]


@dataclass(frozen=True)
class ReshardStep:
    """One move; ``words`` received per rank on average, ``elements`` of the block afterwards."""

    kind: str
    axes: tuple[str, ...] = ()
    dim: int = 0
    to: int = 0
    table: tuple[Any, ...] = ()
    words: Fraction = Fraction(0)
    messages: int = 0
    elements: int = 0

    def __str__(self) -> str:
        where = " ".join(self.axes)
        detail = {
            "all_to_all": f"{where}, {self.dim} -> {self.to}",
            "psum": where,
            "mask": where,
            "ppermute": where,
            "exchange": where,
        }.get(self.kind, f"{where}, dim {self.dim}")
        return f"{self.kind}({detail})"


@dataclass(frozen=True)
class ReshardPlan:
    """Plan for ``source >> target``; its steps depend on a shape and a mesh.

    >>> from shardlib import Layout
    >>> plan = Layout.parse("x .") >> Layout.parse(". x")
    >>> [str(s) for s in plan.steps((8, 8), {"x": 2})], plan.bytes((8, 8), {"x": 2}, 4)
    (['all_to_all(x, 0 -> 1)'], 64)
    """

    source: Any  # Layouts; typed Any because layout.py imports this file
    target: Any

    def steps(self, shape: Sequence[int], mesh: Any) -> tuple[ReshardStep, ...]:
        """Return the moves in order.  Raises what ``Layout.check`` raises."""
        return _search(self.source, self.target, tuple(shape), tuple(axis_sizes(mesh).items()))

    def bytes(self, shape: Sequence[int], mesh: Any, itemsize: int = 4) -> int | Fraction:
        """Count the bytes received per rank, on average over the ranks."""
        total = sum((s.words for s in self.steps(shape, mesh)), Fraction(0)) * itemsize
        return int(total) if total.denominator == 1 else total

    def messages(self, shape: Sequence[int], mesh: Any) -> int:
        """Count the messages per rank."""
        return sum(s.messages for s in self.steps(shape, mesh))

    def peak(self, shape: Sequence[int], mesh: Any, itemsize: int = 4) -> int:
        """Count the bytes of the largest block and its successor held at once."""
        sizes = [math.prod(self.source.local_shape(shape, mesh))]
        sizes += [s.elements for s in self.steps(shape, mesh)]
        return max(a + b for a, b in itertools.pairwise([*sizes, 0])) * itemsize

    def __str__(self) -> str:
        return f"{self.source} >> {self.target}"


_State = tuple[tuple[Dim, ...], tuple[str, ...], str]


@lru_cache(maxsize=4096)
def _search(
    source: Any, target: Any, shape: tuple[int, ...], mesh: tuple[tuple[str, int], ...]
) -> tuple[ReshardStep, ...]:
    sizes = dict(mesh)
    a, b = (layout.resolve(len(shape)) for layout in (source, target))
    a.check(shape, sizes, op="reshard")
    b.check(shape, sizes, op="reshard")
    first, last = _state(a), _state(b)
    # Dijkstra's algorithm; of equal words, fewer exchanges and then fewer messages win
    # heapq compares the counter before the states, which have no order
    tie = itertools.count()
    queue: list[tuple[Fraction, int, int, int, _State, tuple[ReshardStep, ...]]] = [
        (Fraction(0), 0, 0, next(tie), first, ())
    ]
    done: set[_State] = set()
    while queue:
        words, exchanges, messages, _, state, path = heapq.heappop(queue)
        if state == last:
            return _settled(path, last, shape, sizes)
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


def _state(layout: Any) -> _State:
    return layout.dims, layout.partial, layout.skew


def _plain(d: Dim) -> bool:
    return d.order == "contiguous" and len(d.axes) == len(d.parts)


def _moves(
    state: _State, last: _State, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> Iterator[tuple[ReshardStep, _State]]:
    dims, partial, skew = state
    goal = {*_axes(last), *last[1]}
    here = math.prod(
        n // math.prod(sizes[a] for a in d.axes) for d, n in zip(dims, shape, strict=True)
    )
    used = {a for d in dims for a in d.axes} | set(partial)

    def at(d: int, dim: Dim) -> tuple[Dim, ...]:
        return (*dims[:d], dim, *dims[d + 1 :])

    def ways(d: int) -> int:
        return shape[d] // math.prod(sizes[a] for a in dims[d].axes)

    yield from _permutations(state, last, shape, sizes, here)
    yield from _exchanges(state, last, shape, sizes)
    for axis in sorted(set(last[1]) - used):
        yield (
            ReshardStep("mask", (axis,), elements=here),
            (dims, tuple(sorted((*partial, axis))), skew),
        )
    for axis in partial:
        p = sizes[axis]
        step = ReshardStep(
            "psum",
            (axis,),
            words=Fraction(2 * (p - 1) * here, p),
            messages=2 * (p - 1),
            elements=here,
        )
        yield step, (dims, tuple(x for x in partial if x != axis), skew)
    if skew:
        return
    for d, dim in enumerate(dims):
        if not dim.is_split:
            continue
        p = math.prod(sizes[a] for a in dim.axes)
        if not _plain(dim):
            back = _table(dim, shape[d], sizes)
            table = tuple(sorted(range(shape[d]), key=back.__getitem__))
            words = Fraction((p - 1) * here)
            yield (
                ReshardStep("gather_order", dim.axes, d, 0, table, words, p - 1, here * p),
                (at(d, WHOLE), partial, skew),
            )
            continue
        axis = dim.parts[-1]
        assert isinstance(axis, str)
        p = sizes[axis]
        inner = Dim(dim.parts[:-1])
        step = ReshardStep(
            "all_gather",
            (axis,),
            d,
            words=Fraction((p - 1) * here),
            messages=p - 1,
            elements=here * p,
        )
        yield step, (at(d, inner), partial, skew)
        for to, other in enumerate(dims):
            if to != d and _plain(other) and ways(to) % p == 0:
                step = ReshardStep(
                    "all_to_all",
                    (axis,),
                    d,
                    to,
                    words=Fraction((p - 1) * here, p),
                    messages=p - 1,
                    elements=here,
                )
                moved = list(at(d, inner))
                moved[to] = Dim((*other.parts, axis))
                yield step, (tuple(moved), partial, skew)
    for axis, p in sizes.items():  # in mesh order, so that every rank finds the same plan
        if axis in used or axis not in goal:
            continue
        for d, dim in enumerate(dims):
            if _plain(dim) and ways(d) % p == 0:
                yield (
                    ReshardStep("slice", (axis,), d, elements=here // p),
                    (at(d, Dim((*dim.parts, axis))), partial, skew),
                )
    for axis in partial:
        p = sizes[axis]
        rest = tuple(x for x in partial if x != axis)
        for d, dim in enumerate(dims):
            if _plain(dim) and ways(d) % p == 0:
                step = ReshardStep(
                    "psum_scatter",
                    (axis,),
                    d,
                    words=Fraction((p - 1) * here, p),
                    messages=p - 1,
                    elements=here // p,
                )
                yield step, (at(d, Dim((*dim.parts, axis))), rest, skew)
    yield from _special(state, last, shape, sizes, here, used)


def _axes(state: _State) -> set[str]:
    """Return the axes that split a dimension of a state."""
    return {a for d in state[0] for a in d.axes}


def _special(
    state: _State,
    last: _State,
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    here: int,
    used: set[str],
) -> Iterator[tuple[ReshardStep, _State]]:
    """Yield moves to tokens with factors or another order: reorder an unsplit dimension, slice."""
    dims, partial, skew = state
    for d, want in enumerate(last[0]):
        now = dims[d]
        inner = Dim(want.parts[len(now.parts) :], want.order)
        begun = (
            _plain(now) and want.parts[: len(now.parts)] == now.parts and inner.ring == want.ring
        )
        if not begun or _plain(want) or set(inner.axes) & used:
            continue
        p = math.prod(sizes[a] for a in inner.axes)
        table = tuple(_table(inner, shape[d] // math.prod(sizes[a] for a in now.axes), sizes))
        step = ReshardStep("order_slice", inner.axes, d, table=table, elements=here // p)
        yield step, ((*dims[:d], want, *dims[d + 1 :]), partial, skew)


def _table(dim: Dim, n: int, sizes: Mapping[str, int]) -> list[int]:
    """List the global positions, rank after rank along the token's axes."""
    out: list[int] = []
    for digits in itertools.product(*(range(sizes[a]) for a in dim.axes)):
        out += positions(dim, n, sizes, dict(zip(dim.axes, digits, strict=True)))
    return out


def _permutations(
    state: _State, last: _State, shape: tuple[int, ...], sizes: Mapping[str, int], here: int
) -> Iterator[tuple[ReshardStep, _State]]:
    """Yield moves of whole blocks to the ranks that need them, where blocks are equal."""
    dims, partial, skew = state
    axes = _axes(state)
    if skew and not (last[2] and axes == _axes(last)):
        # a skew fits one pair of axes only, so it is undone before the axes change
        yield from _permute_to(state, (dims, partial, ""), shape, sizes, here)
    elif partial == last[1] and axes == _axes(last):
        yield from _permute_to(state, (last[0], partial, last[2]), shape, sizes, here)
    elif last[2] and dims == last[0]:
        yield from _permute_to(state, (dims, partial, last[2]), shape, sizes, here)


_WORLD = 64
"""Ranks up to which an exchange is considered: its table has a row for every pair."""


def _exchanges(
    state: _State, last: _State, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> Iterator[tuple[ReshardStep, _State]]:
    """Yield an exchange to the target if the same sums are pending; ``_settled`` plans it later."""
    axes = _between(state, last, sizes)
    if state[1] == last[1] and axes and math.prod(sizes[a] for a in axes) <= _WORLD:
        words = lacking((state[0], state[2]), (last[0], last[2]), shape, sizes, axes)
        if words or last[2]:  # without words to receive, every rank can slice its own block
            block = math.prod(
                map(len, indices(last[0], last[2], shape, sizes, dict.fromkeys(sizes, 0)))
            )
            yield ReshardStep("exchange", axes, table=(state,), words=words, elements=block), last


def _between(a: _State, b: _State, sizes: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(n for n in sizes if n in _axes(a) | _axes(b))


def _settled(
    path: tuple[ReshardStep, ...], last: _State, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> tuple[ReshardStep, ...]:
    """Return the path; an exchange at its end gets its rounds."""
    if not path or path[-1].kind != "exchange":
        return path
    dims, _, skew = path[-1].table[0]
    table = exchange((dims, skew), (last[0], last[2]), shape, sizes, path[-1].axes)
    return (*path[:-1], replace(path[-1], table=(table,), messages=len(table.rounds)))


def _permute_to(
    a: _State, b: _State, shape: tuple[int, ...], sizes: Mapping[str, int], here: int
) -> Iterator[tuple[ReshardStep, _State]]:
    axes = tuple(n for n in sizes if n in _axes(a) | _axes(b))
    full = dict.fromkeys(sizes, 0)
    coords = coordinates({n: sizes[n] for n in axes})

    def held(state: _State, coord: dict[str, int]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(i) for i in indices(state[0], state[2], shape, sizes, full | coord))

    if not here:  # empty blocks: a block is in the right place if it has the right shape
        if [*map(len, held(a, full))] == [*map(len, held(b, full))]:
            yield ReshardStep("ppermute", axes, table=tuple((i, i) for i in range(len(coords)))), b
        return
    holders = {held(a, c): i for i, c in enumerate(coords)}
    if len(holders) < len(coords):
        return
    pairs = []
    for target, c in enumerate(coords):
        source = holders.get(held(b, c))
        if source is None:
            return
        pairs.append((source, target))
    moving = Fraction(sum(s != t for s, t in pairs), len(pairs))
    step = ReshardStep(
        "ppermute",
        axes,
        table=tuple(pairs),
        words=moving * here,
        messages=int(moving > 0),
        elements=here,
    )
    yield step, b
