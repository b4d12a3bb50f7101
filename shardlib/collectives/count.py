"""Counting what moves: bytes received and messages, per axis and kind.

The count is the average over the ranks of an axis, so it is the same number on every rank and
on every back end, and equals the formulas in the collectives' docstrings exactly.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction

__all__ = ["OPEN", "Event", "Trace", "note", "trace"]


@dataclass(frozen=True)
class Event:
    """One collective: ``bytes`` received per rank, on average over the axis."""

    kind: str
    axis: str
    bytes: Fraction
    messages: int


@dataclass
class Trace:
    """What was communicated while it was open.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=4), sl.trace() as t:
    ...     _ = sl.all_gather(torch.ones(8), "x")
    >>> t.bytes, t.messages, t.by_kind()
    (96, 3, {'all_gather': 96})
    """

    events: list[Event] = field(default_factory=list)

    @property
    def bytes(self) -> int | Fraction:
        return _whole(sum((e.bytes for e in self.events), Fraction(0)))

    @property
    def messages(self) -> int:
        return sum(e.messages for e in self.events)

    def by_kind(self) -> dict[str, int | Fraction]:
        """Bytes per kind of collective."""
        return self._by(lambda e: e.kind)

    def by_axis(self) -> dict[str, int | Fraction]:
        """Bytes per mesh axis."""
        return self._by(lambda e: e.axis)

    def _by(self, key: Callable[[Event], str]) -> dict[str, int | Fraction]:
        out: dict[str, Fraction] = defaultdict(Fraction)
        for e in self.events:
            out[key(e)] += e.bytes
        return {k: _whole(v) for k, v in out.items()}


def _whole(x: Fraction) -> int | Fraction:
    return int(x) if x.denominator == 1 else x


OPEN: list[Trace] = []  # autograd may call backward on another thread, so traces are global


@contextmanager
def trace() -> Iterator[Trace]:
    """Record every collective while open, those of backward passes included."""
    t = Trace()
    OPEN.append(t)
    try:
        yield t
    finally:
        OPEN.remove(t)


def note(kind: str, axis: str | tuple[str, ...], numerator: int, denominator: int, messages: int) -> None:
    """Count one collective in every open trace."""
    name = axis if isinstance(axis, str) else " ".join(axis)
    event = Event(kind, name, Fraction(numerator, denominator), messages)
    for t in OPEN:
        t.events.append(event)
