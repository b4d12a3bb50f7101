"""Communication counters: bytes received and messages, per axis and kind.

The count is the average over the ranks of an axis, so it is the same number on every rank and
on every back end, and equals the formulas in the collectives' docstrings exactly.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from shardlib.collectives.waits import Wait, Waiting, listed
from shardlib.errors import UnexpectedComm
from shardlib.mesh import Entered, enter, leave, scope

__all__ = ["Event", "Trace", "expect_comm", "note", "trace"]


@dataclass(frozen=True)
class Event:
    """Record of one collective: ``bytes`` received per rank, on average over the axis.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=4), sl.trace() as t:
    ...     _ = sl.psum_scatter(torch.ones(8), "x")
    >>> t.events  # 3/4 of 32 bytes
    [Event(kind='psum_scatter', axis='x', bytes=Fraction(24, 1), messages=3)]
    """

    kind: str
    axis: str
    bytes: Fraction
    messages: int


@dataclass
class Trace:
    """Record of the collectives that ran while it was open.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=4), sl.trace() as t:
    ...     _ = sl.all_gather(torch.ones(8), "x")
    >>> t.bytes, t.messages, t.by_kind()
    (96, 3, {'all_gather': 96})
    """

    events: list[Event] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)

    def before(
        self, name: str, raw: Any, mesh: Any, axes: tuple[str, ...], params: tuple
    ) -> Callable[[], None] | None:
        """Observe a transfer that is about to begin; a returned function is called at its end."""

    def ended(self) -> None:
        """Observe that the last mesh is left."""

    @property
    def bytes(self) -> int | Fraction:
        return _whole(sum((e.bytes for e in self.events), Fraction(0)))

    @property
    def messages(self) -> int:
        return sum(e.messages for e in self.events)

    def by_kind(self) -> dict[str, int | Fraction]:
        """Sum the bytes of each kind of collective."""
        return self._by(lambda e: e.kind)

    def by_axis(self) -> dict[str, int | Fraction]:
        """Sum the bytes along each mesh axis."""
        return self._by(lambda e: e.axis)

    def __str__(self) -> str:
        lines = [f"{float(self.bytes):,.0f} B in {self.messages} messages per rank"]
        for (kind, axis), n in sorted(
            self._by(lambda e: (e.kind, e.axis)).items(), key=lambda kv: -kv[1]
        ):
            calls = [e for e in self.events if (e.kind, e.axis) == (kind, axis)]
            lines.append(f"  {kind:<13} over {axis:<8} {len(calls):>4} times  {float(n):>14,.0f} B")
        return "\n".join([*lines, *([listed(self.waits)] if self.waits else [])])

    def _by(self, key: Callable[[Event], Any]) -> dict[Any, int | Fraction]:
        out: dict[Any, Fraction] = defaultdict(Fraction)
        for e in self.events:
            out[key(e)] += e.bytes
        return {k: _whole(v) for k, v in out.items()}


def _whole(x: Fraction) -> int | Fraction:
    return int(x) if x.denominator == 1 else x


class trace(Entered):
    """Record all collectives of this thread or task while open, backward passes included.

    ``waits``  list in ``t.waits`` the host's waits for its device and uploads to it too, each with
               the user's line and the library's.  Every operator is then checked, which takes
               some microseconds each.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2), sl.trace() as t:
    ...     _ = sl.psum(torch.ones(4), "x")
    >>> t.bytes
    16
    >>> with sl.trace(waits=True) as t:
    ...     _ = torch.ones(4).sum().item()
    >>> [(w.kind, w.what) for w in t.waits]
    [('wait', 'aten._local_scalar_dense.default')]
    """

    def __init__(self, *, waits: bool = False) -> None:
        self.waits = waits

    def __enter__(self) -> Trace:
        self.found = Trace()
        enter(self, traces=(*scope().listeners.traces, self.found))
        if self.waits:
            self.seen = Waiting(self.found.waits)
            self.seen.__enter__()
        return self.found

    def __exit__(self, *error: object) -> None:
        if self.waits:
            self.seen.__exit__(*error)
        leave(self)


class expect_comm(trace):
    """Assert, at the end of the block, how many collectives of each kind ran; 0 for others.

    ``bytes`` and ``messages`` are totals per rank, checked where given.
    Raises: UnexpectedComm listing what ran.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2):
    ...     a = sl.shard(torch.ones(4, 4), ". x")
    ...     with sl.expect_comm(psum=1, bytes=64):
    ...         _ = a @ sl.shard(torch.ones(4, 4), "x .")
    """

    def __init__(
        self, *, bytes: int | Fraction | None = None, messages: int | None = None, **kinds: int
    ) -> None:
        super().__init__()
        self.bytes, self.messages, self.kinds = bytes, messages, kinds

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if not any(error):
            self._compare(self.found)

    def _compare(self, t: Trace) -> None:
        found: dict[str, int] = defaultdict(int)
        for e in t.events:
            found[e.kind] += 1
        wanted = self.kinds
        wrong = [
            f"{found.get(k, 0)} {k}, not {wanted.get(k, 0)}"
            for k in {**wanted, **found}
            if found.get(k, 0) != wanted.get(k, 0)
        ]
        wrong += [f"{t.bytes} bytes, not {self.bytes}"] if self.bytes not in (None, t.bytes) else []
        wrong += (
            [f"{t.messages} messages, not {self.messages}"]
            if self.messages not in (None, t.messages)
            else []
        )
        if wrong:
            ran = ", ".join(f"{k}={n}" for k, n in found.items())
            raise UnexpectedComm(
                "; ".join(wrong) + f"\n{t}", op="expect_comm", fix=f"sl.expect_comm({ran})"
            )


def note(
    traces: tuple[Trace, ...],
    kind: str,
    axis: str | tuple[str, ...],
    numerator: int,
    denominator: int,
    messages: int,
) -> None:
    """Count one collective in these traces."""
    name = axis if isinstance(axis, str) else " ".join(axis)
    event = Event(kind, name, Fraction(numerator, denominator), messages)
    for t in traces:
        t.events.append(event)
