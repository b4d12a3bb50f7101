"""Traces: bytes received and messages, per axis and kind, and the host's waits for its device.

A count is the average over the ranks of an axis, so it is the same number on every rank and on
every back end, and equals the formulas in the collectives' docstrings exactly.

An operator whose result the host needs (a number, sizes that depend on values), and a copy
between host and device, are recorded as torch dispatches them, so this is the same on every kind of
device.  On the host itself nothing is uploaded, and the recorded operators would wait on a device.
Calls that torch does not dispatch (``torch.accelerator.synchronize()``, events) are not recorded.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import DispatchMode
from shardlib.errors import UnexpectedComm, package_line, user_line
from shardlib.mesh import Axes, Entered, enter, leave, scope
from shardlib.opspec import Args, Func, Kwargs, names_of

_WAITS = frozenset(names_of(waits=True))
_INDEXED = frozenset("index index_put index_put_ _unsafe_index _unsafe_index_put".split())
# (file, function or class): on an accelerator these read what is on the host already, or let the
# device check
_FREE = {
    ("optim/transform.py", "Posted"), ("optim/transform.py", "told"),
    ("ops/id_bounds.py", "in_range"), ("ops/random.py", "_probabilities"),
    ("ops/random.py", "uniform"),
}  # fmt: skip
_MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class Wait:
    """A wait for the device, or an upload to it.

    ``kind``     "wait" or "upload"; an upload that the host waits for is both, in this order.
    ``what``     torch's operator.
    ``line``     the user's line, "" where the engine of backward runs it on a thread of its own.
    ``library``  the line of shardlib that called it, "" where the user's own did.
    """

    kind: str
    what: str
    line: str
    library: str

    def __str__(self) -> str:
        places = [
            f"at {self.line or 'backward'}",
            *([f"by {self.library}"] if self.library else []),
        ]
        return f"{self.kind} for {self.what} {', '.join(places)}"


class Waiting(DispatchMode):  # type: ignore[misc, valid-type]
    """Record waits and uploads in ``found``, while open."""

    def __init__(self, found: list[Wait]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for kind in _asked(func._schema.name.partition("::")[2], args, kwargs or {}, out):
            frame = sys._getframe(1)
            by, function = package_line(frame)
            place = by.partition(":")[0], function.partition(".")[0]
            if not (place in _FREE and args[0].device.type == "cpu"):
                self.found.append(Wait(kind, str(func), user_line(frame), by))
        return out


def _asked(name: str, args: Args, kwargs: Kwargs, out: Any) -> list[str]:
    """List the effects of an operator: "wait", "upload", both or none."""
    first = next((x for x in args if isinstance(x, Tensor)), None)
    if first is None or first.is_meta:
        return []
    if name == "_to_copy":
        return _crossed(first, out, kwargs.get("non_blocking", False))
    if name == "copy_":
        return _crossed(args[1], first, args[2] if len(args) > 2 else False)
    if first.device.type == "cpu" and _elsewhere():
        return []
    if name in _WAITS:
        sized = name == "repeat_interleave" and kwargs.get("output_size") is not None
        return [] if sized else ["wait"]
    if name in _INDEXED:
        return _indexed(first, *args[1:3])
    if name == "lift_fresh" and first.device.type != "cpu" and first.numel():
        # torch.tensor(numbers, device=...)
        return ["upload", "wait"]
    return []


def _indexed(x: Tensor, places: Iterable[object], values: Tensor | None = None) -> list[str]:
    """List the effects of indexing: indices are uploaded, and a mask's number of places is read."""
    given = [i for i in places if isinstance(i, Tensor)]
    if any(i.device != x.device for i in given):
        return ["upload", "wait"]
    if values is not None and values.numel() == 1:
        # torch fills by the mask itself
        return []
    return ["wait"] if any(i.dtype in _MASKS for i in given) else []


def _elsewhere() -> bool:
    """Check whether the mesh in scope is on a device, so that reading the host's memory is free."""
    mesh = scope().mesh
    return mesh is not None and mesh.device.type not in ("cpu", "meta")


def _crossed(source: Tensor, to: Tensor, ahead: bool) -> list[str]:
    """List the effects of a copy, if it was between the host and a device."""
    host = [x for x in (source, to) if x.device.type == "cpu"]
    if len(host) != 1 or not to.numel() or to.is_meta:
        return []
    found = []
    if host[0] is source:
        found.append("upload")
    if not ahead or not host[0].is_pinned():
        found.append("wait")
    return found


def listed(found: Iterable[Wait]) -> str:
    """Format one line per different wait, with its count; "" where there is none."""
    return "\n".join(f"  {n:>5} times  {w}" for w, n in Counter(found).most_common())


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
        self, name: str, raw: Any, mesh: Any, axes: Axes, params: tuple
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
        found, wanted = Counter(e.kind for e in t.events), Counter(self.kinds)
        rows: list[tuple[str, Any, Any]] = [(k, found[k], wanted[k]) for k in {**wanted, **found}]
        rows += [("bytes", t.bytes, self.bytes), ("messages", t.messages, self.messages)]
        wrong = [f"{n} {what}, not {want}" for what, n, want in rows if want not in (None, n)]
        if wrong:
            ran = ", ".join(f"{k}={n}" for k, n in found.items())
            raise UnexpectedComm(
                "; ".join(wrong) + f"\n{t}", op="expect_comm", fix=f"sl.expect_comm({ran})"
            )


def note(
    traces: tuple[Trace, ...],
    kind: str,
    axes: Axes,
    numerator: int,
    denominator: int,
    messages: int,
) -> None:
    """Count one collective in these traces."""
    event = Event(kind, " ".join(axes), Fraction(numerator, denominator), messages)
    for t in traces:
        t.events.append(event)
