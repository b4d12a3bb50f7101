"""Columns of the integer program: the best ways through each part of a step, between two states."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from shardlib.planning.calls import Call
from shardlib.planning.pareto import Search, State, Way, narrowed
from shardlib.planning.parts import Part
from shardlib.planning.program import Column

AGAIN = 1.5
"""Most seconds of a layer that is computed again over those of the same layer in two passes."""


def columns_of(
    parts: Sequence[Part], search: Search, begin: State, alone: Mapping[Call, tuple[float, float]],
    policies: Callable[[Part], tuple[str, ...]], limit: float = math.inf, least: bool = False,
) -> list[Column]:  # fmt: skip
    """Return the best ways through each part, from every state that it may begin in.

    ``begin``     where the inputs lie.
    ``alone``     seconds of both passes of each call on one rank.
    ``policies``  part -> its policies of remat.
    ``limit``     seconds of the whole step, beyond which no way is of use.
    ``least``     the ways of least bytes alone, whatever their seconds.
    """
    share = search.holding.share
    ideal = {call: (share * f, share * b) for call, (f, b) in alone.items()}
    rest = sum(part.seconds(ideal) for part in parts)
    # states that the next part may begin in, with the least seconds until then
    reached = {begin: 0.0}
    found: list[Column] = []
    key = cache(_key)
    for number, part in enumerate(parts):
        ends: dict[State, tuple[float, float]] = {}
        layers = len(part.layers)
        rest -= part.seconds(ideal)
        for (begin, spent), remat in itertools.product(reached.items(), policies(part)):
            own = (limit - spent - rest) / layers
            if remat and layers > 1:
                # of layers that together are in time, a few may be computed again
                own *= AGAIN
            ways = search.under(remat).once(part.calls, begin, own, ideal, least)
            for end, kept, some in _ends(part, begin, ways, remat):
                if layers > 1 and not _repeats(begin, end):
                    continue
                states = key(begin), key(end)
                made = [_column(number, states, way, remat, kept, search) for way in some]
                found += undominated(made, least)
                first = spent + layers * min(c.seconds for c in made)
                held = min(c.kept + c.saved for c in made)
                before = ends.get(end, (math.inf, math.inf))
                ends[end] = min(first, before[0]), min(held, before[1])
        reached = {end: costs[0] for end, costs in narrowed(ends, lambda costs: costs).items()}
    return found


def _ends(
    part: Part, begin: State, ways: Mapping[State, Sequence[Way]], remat: str
) -> Iterator[tuple[State, int | None, Sequence[Way]]]:
    """Yield the states behind a part with the ways to it; where it is run again, what it keeps.

    What is computed again is saved by none, but what is held, and what a single layer reads.
    """
    if remat in ("", "host"):
        yield from ((replace(end, near=0), None, some) for end, some in ways.items())
        return
    read = begin.saved | (_roots(part.calls, begin) if len(part.layers) == 1 else set())
    for after, several in ways.items():
        alive, held = {x.root for x in after.alive}, defaultdict(list)
        for way in several:
            held[frozenset(n for step in way.steps() for n in step.held if n in alive)].append(way)
        for roots, some in held.items():
            end = replace(after, saved=frozenset(read & alive) | roots)
            yield end, _borders(begin, end), some


def _column(
    part: int, states: tuple[Any, Any], way: Way, remat: str, kept: int | None, search: Search
) -> Column:
    """Return the column of a way; ``kept`` is what it saves of what it reads where it is run again."""
    saved, away, flying = way.saved, 0.0, search.holding.flying
    if kept is not None:
        saved = kept + way.held
    if remat == "host":
        away = flying * sum(step.strategy.away for step in way.steps()) / search.host
    held = flying * saved
    # while it runs it holds as much beside what it saved as it would in a pipeline of one stage
    most = way.most - saved + held
    costs = way.seconds, way.kept, way.gradients, held, most, away
    return Column(part, *states, *costs, way=(way, remat))


def _borders(begin: State, end: State) -> int:
    """Return the bytes of what a layer that is run again keeps: what it reads, until its end."""
    left = {x.root for x in end.alive} - end.saved
    kept = {x.root: x.nbytes for x in begin.alive if x.counts and x.root not in left}
    return sum(n for root, n in kept.items() if root not in begin.saved)


def _roots(calls: Sequence[Call], begin: State) -> set[int]:
    """Return the values of a state that calls read and that count."""
    read = {n for c in calls for n in c.reads}
    return {x.root for x in begin.alive if x.number in read and x.counts}


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
    return frozenset(_places(state).items()), frozenset(saved.items())


def undominated(columns: Sequence[Column], least: bool = False) -> list[Column]:
    """Return the columns that no other beats in seconds and every kind of bytes.

    ``least``  in every kind of bytes, whatever the seconds.
    """
    found: list[Column] = []
    cost = lambda c: (c.seconds * (not least), c.kept + c.saved + c.most, c.seconds)  # noqa: E731
    for c in sorted(columns, key=cost):
        if not any(
            d.kept <= c.kept and d.saved <= c.saved and d.most <= c.most
            and d.gradients <= c.gradients and d.away <= c.away for d in found
        ):  # fmt: skip
            found.append(c)
    return found
