"""Explanations: the operations of a function with their bytes and memory, as a table of text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from shardlib.collectives import Event, Trace
from shardlib.errors import BadArgument, mesh_text
from shardlib.modules.rules import stars
from shardlib.pipeline.schedules import PipelineSchedule, PipelineTimeline
from shardlib.planning.work import StepWork


@dataclass
class Row:
    """One operation: bytes and messages are per rank, ``memory`` is temporaries at the peak.

    ``module``  the submodule whose forward calls it, as ``named_modules`` names it.
    """

    op: str
    at: str
    operands: tuple[str, ...]
    out: str
    algorithm: str = ""
    note: str = ""
    forward: list[Event] = field(default_factory=list)
    backward: list[Event] = field(default_factory=list)
    memory: int = 0
    bound: float = 0.0
    product: bool = False
    module: str = ""

    @property
    def bytes(self) -> int | Fraction:
        """Bytes received in both passes."""
        return Trace(self.forward).bytes + Trace(self.backward).bytes

    @property
    def pattern(self) -> str:
        """The operation's module with a ``*`` for every number: the same in every layer."""
        return stars(self.module)

    @property
    def same(self) -> tuple[Any, ...]:
        """A key that is the same for this operation in every layer."""
        call = self.op, self.at, self.pattern, self.operands, self.out, self.algorithm
        return *call, *self.forward, "backward", *self.backward


@dataclass(frozen=True)
class TierUse:
    """Bytes that memory tiers hold and move in a step that repeats, per rank.

    ``device``  bytes that parameters take there, beside ``transient``; ``host`` kind -> bytes.
    ``blocks``  the blocks of the module; ``loads`` how often one is loaded in a step.
    ``loaded``, ``sent``  bytes to the device and from it.
    ``computing``, ``moving``  seconds of all products and transfers between ranks, and of the
                busier of the two links; ``seconds`` those of a step, both beside one another.
    ``largest`` parameters of the largest model of such blocks that the tiers hold; None: any.
    ``disk``    bytes there; ``read``, ``written``  from it and to it in a step.
    """

    device: int
    host: Mapping[str, int]
    blocks: int
    loads: int
    loaded: int
    sent: int
    computing: float = 0.0
    moving: float = 0.0
    seconds: float = 0.0
    largest: int | None = None
    disk: int = 0
    read: int = 0
    written: int = 0

    def __str__(self) -> str:
        held = ", ".join(f"{kind} {size(n)}" for kind, n in self.host.items() if n)
        lines = [
            f"host        {size(sum(self.host.values()))}: {held}",
            f"loads       {self.loads} of {self.blocks} blocks: {size(self.loaded)} to the device, "
            f"{size(self.sent)} from it",
            f"time        {self.seconds:.3g} s: {self.computing:.3g} s of computing, "
            f"{self.moving:.3g} s of the busier link",
        ]
        if self.disk:
            moved = f"{size(self.read)} read, {size(self.written)} written"
            lines.insert(0, f"disk        {size(self.disk)}: {moved}")
        if self.largest is not None:
            lines.append(f"largest     {self.largest:,} parameters in such blocks")
        return "\n".join(lines)


@dataclass
class Explanation:
    """The operations that communicate or multiply, and the totals.

    ``rows``                   in the order they run.
    ``bytes``                  received per rank, forward and backward; ``messages`` likewise.
    ``parameters``, ``state``  bytes of the parameters and of the optimizer's state, per rank.
    ``transient``              the most bytes alive on top of these: tensors saved for backward, as
                               ``remat`` sets them, temporaries, gradients.
    ``peak``                   all three together.
    ``tiers``                  what memory tiers hold and move; parameters are then those on the
                               device, and the state is in host memory.
    ``work``                   operations, bytes that operators touch and transfers of both passes.
    ``bound``                  the least bytes that any algorithm must receive for the forward
                               products, each alone (Al Daas et al., SPAA 2022); ``products`` has
                               the bytes received for them here.
    """

    rows: list[Row]
    mesh: Mapping[str, int]
    parameters: int
    transient: int
    state: int = 0
    saved: int = 0
    tiers: TierUse | None = None
    work: StepWork = field(default_factory=StepWork)

    @property
    def peak(self) -> int:
        """The most bytes that one rank holds: parameters, state and transient tensors."""
        return self.parameters + self.state + self.transient

    @property
    def forward(self) -> Trace:
        """The events of the forward pass."""
        return Trace([e for row in self.rows for e in row.forward])

    @property
    def backward(self) -> Trace:
        """The events of the backward pass."""
        return Trace([e for row in self.rows for e in row.backward])

    @property
    def bytes(self) -> int | Fraction:
        """Bytes that one rank receives in both passes."""
        return self.forward.bytes + self.backward.bytes

    @property
    def messages(self) -> int:
        """Messages that one rank receives in both passes."""
        return self.forward.messages + self.backward.messages

    @property
    def memory(self) -> int:
        """Bytes of temporaries of the operation that needs most."""
        return max((row.memory for row in self.rows), default=0)

    @property
    def products(self) -> int | Fraction:
        """Bytes received for the products of the forward pass."""
        return Trace([e for row in self.rows if row.product for e in row.forward]).bytes

    @property
    def bound(self) -> float:
        """The least bytes that any algorithms must receive for the products of the forward pass."""
        return sum(row.bound for row in self.rows)

    def kinds(self, by: str = "order") -> list[list[Row]]:
        """Group the operations that communicate or multiply: equal calls of all layers together.

        ``by``  "order", in which they run; or "bytes" or "memory", most first.
        Raises: BadArgument for another order.
        """
        if by not in ("order", "bytes", "memory"):
            raise BadArgument(f"no order {by!r}", op="explain", fix="plan.kinds('bytes')")
        found: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            if row.algorithm or row.forward or row.backward:
                found.setdefault(row.same, []).append(row)
        kinds = list(found.values())
        if by == "bytes":
            kinds.sort(key=lambda rows: -len(rows) * rows[0].bytes)
        elif by == "memory":
            kinds.sort(key=lambda rows: -rows[0].memory)
        return kinds

    def json(self) -> dict[str, Any]:
        """Return the totals and a row per kind of operation as plain values, bytes per rank.

        >>> import json, torch, shardlib as sl; from torch import nn
        >>> with sl.simulate(x=2):
        ...     apply, params = sl.parallelize(nn.Linear(4, 4, bias=False), [("weight", ". x")])
        >>> found = sl.explain(apply, params, torch.empty(2, 4)).json()
        >>> found["bytes"] == found["rows"][0]["bytes"], json.loads(json.dumps(found)) == found
        (True, True)
        """
        rows = [
            {
                "op": row.op, "module": row.pattern, "at": row.at, "count": len(rows),
                "operands": list(row.operands), "out": row.out, "algorithm": row.algorithm,
                "note": row.note, "forward_bytes": _plain(Trace(row.forward).bytes * len(rows)),
                "backward_bytes": _plain(Trace(row.backward).bytes * len(rows)),
                "bytes": _plain(row.bytes * len(rows)), "memory": row.memory,
            }
            for rows in self.kinds()
            for row in rows[:1]
        ]  # fmt: skip
        return {
            "mesh": dict(self.mesh), "bytes": _plain(self.bytes), "messages": self.messages,
            "forward_bytes": _plain(self.forward.bytes),
            "backward_bytes": _plain(self.backward.bytes),
            "parameters": self.parameters, "state": self.state, "transient": self.transient,
            "peak": self.peak, "bound": _plain(self.bound), "rows": rows,
        }  # fmt: skip

    def __str__(self) -> str:
        return self.text()

    def text(self, by: str = "order") -> str:
        """Format operands, result and traffic of each kind of operation, and the totals.

        ``by``  the order of the kinds, as ``kinds`` takes it.
        """
        lines = [f"on {mesh_text(self.mesh)}, per rank"]
        for rows in self.kinds(by):
            lines += self._of_kind(rows[0], len(rows))
        lines.append(f"parameters  {size(self.parameters)}")
        if self.state:
            lines.append(f"state       {size(self.state)} of the optimizer")
        lines.append(f"transient   {size(self.transient)} at the most, beside them")
        lines.append(f"peak        {size(self.peak)}")
        if self.tiers is not None:
            lines.append(str(self.tiers))
        if self.work.away:
            lines.append(f"host        {size(self.work.away)} saved there, and fetched in backward")
        for name, t in (("forward", self.forward), ("backward", self.backward)):
            lines.append(f"{name:<11} {size(t.bytes)} in {t.messages} messages")
        if self.bound:
            ratio = float(self.products) / self.bound
            lines.append(
                f"products    {size(self.products)} forward, {ratio:.2f} x the lower bound of "
                "each alone"
            )
        return "\n".join(lines)

    def _of_kind(self, row: Row, count: int) -> Iterator[str]:
        """Format one kind of operation, of which there are so many."""
        op = f"{count} x {row.op}" if count > 1 else row.op
        chosen = row.algorithm
        if chosen and row.note:
            chosen += f": {row.note}"
        yield "   ".join(filter(None, [op, row.pattern, row.at, chosen]))
        if row.out:
            yield f"    {', '.join(row.operands)} -> {row.out}"
        there, back = Trace(row.forward), Trace(row.backward)
        moved = f"    forward {size(there.bytes)}, backward {size(back.bytes)}"
        if row.bytes:
            moved += f" ({100 * float(row.bytes * count / self.bytes):.0f} % of all)"
        if row.memory:
            moved += f", temporaries {size(row.memory)}"
        yield moved

    __repr__ = __str__


# ---------------------------------------------------------------- pipelines


@dataclass(frozen=True)
class StageCost:
    """A stage of a pipeline: figures of one micro-batch, on each rank of the stage.

    ``name``     its first and last unit.
    ``place``    its place on the axis.
    ``seconds``  kind of action, "F", "B" or "I" and "W" -> seconds.
    ``moved``    kind of action -> what is moved inside the stage.
    ``sends``    stage -> bytes sent there, outputs to a later one and gradients to an earlier one.
    ``kept``     bytes kept from a forward to its backward.
    """

    name: str
    place: int
    seconds: Mapping[str, float]
    moved: Mapping[str, Trace]
    sends: Mapping[int, int]
    kept: int


@dataclass(frozen=True)
class PlaceCost:
    """A place on the axis of a pipeline: bytes that each of its ranks holds, and moves at the end.

    ``gradients``  the sums of the micro-batches.
    ``transient``  the most on top of parameters, state and gradients, of all in flight.
    ``finish``     what is moved after the last micro-batch, and its ``seconds``.
    ``gather``     what ZeRO gathers behind the update, which is not in these.
    ``tiers``      what its memory tiers hold and move; ``parameters`` are then those on the device,
                   and gradients and state are in host memory.
    """

    parameters: int
    state: int
    gradients: int
    transient: int
    finish: Trace
    seconds: float
    tiers: TierUse | None = None
    gather: StepWork = field(default_factory=StepWork)

    @property
    def peak(self) -> int:
        """The most bytes that a rank of this place holds."""
        return self.parameters + self.state + self.gradients + self.transient


@dataclass
class PipelineExplanation(Explanation):
    """The cost of a step of a module in stages: each stage's, and when each action runs.

    ``rows``      the operations of one micro-batch, of all stages.
    ``stages``    the cost of each stage; ``places`` that of each place on the axis.
    ``schedule``  the table of actions; ``line`` when each of them runs, in seconds.
    ``sent``      the messages between stages in a step, as ``sl.trace`` counts them.

    ``parameters``, ``state`` and ``transient`` are those of the place that holds most.  ``tiers`` are
    those of this process: of its place, or of all that are simulated in one budget.
    """

    stages: Sequence[StageCost] = ()
    places: Sequence[PlaceCost] = ()
    schedule: PipelineSchedule = field(kw_only=True)
    line: PipelineTimeline = field(kw_only=True)
    sent: Trace = field(kw_only=True)

    @property
    def seconds(self) -> float:
        """Seconds of a step, without the optimizer's."""
        return self.line.seconds + max(p.seconds for p in self.places)

    @property
    def bubble(self) -> float:
        """The idle part of the ranks' time, from 0 to 1."""
        return self.line.bubble

    @property
    def bytes(self) -> int | Fraction:
        """Bytes that one rank receives in a step, on average over the places."""
        rows, ends = self.schedule.tables, [p.finish.bytes for p in self.places]
        inside = [self.stages[a.stage].moved[a.kind].bytes for row in rows for a in row]
        return self.sent.bytes + Fraction(sum(inside) + sum(ends)) / len(rows)

    @property
    def along(self) -> Mapping[str, tuple[float, float]]:
        """Axes -> bytes and messages that one rank receives in a step, on average over the places."""
        work, rows = StepWork(), self.schedule.tables
        work.add(self.sent.events)
        for t in [
            *(self.stages[a.stage].moved[a.kind] for row in rows for a in row),
            *(p.finish for p in self.places),
        ]:
            inside = StepWork()
            inside.add(t.events)
            work.join(inside, 1 / len(rows))
        return work.along

    def summary(self, memory: float) -> str:
        """Format seconds, bubble, peaks and bytes of a step in one line."""
        peaks = ", ".join(size(p.peak) for p in self.places)
        text = (
            f"{self.seconds:.3g} s, {100 * self.bubble:.1f} % idle, {size(self.sent.bytes)} between "
            f"stages, peaks {peaks}"
        )
        return text + ("" if self.peak <= memory else f", more than {size(memory)}")

    def json(self) -> dict[str, Any]:
        """Return the figures of a step and of each stage as plain values."""
        stages = [
            vars(s)
            | {"sends": {str(to): n for to, n in s.sends.items()}}
            | {"moved": {kind: _plain(t.bytes) for kind, t in s.moved.items()}}
            for s in self.stages
        ]
        places = [
            vars(p)
            | {"finish": _plain(p.finish.bytes), "peak": p.peak, "in_flight": held}
            | {"gather": sum(nbytes for nbytes, _ in p.gather.along.values())}
            | {"tiers": p.tiers and {**vars(p.tiers), "host": dict(p.tiers.host)}}
            for p, held in zip(self.places, self.schedule.held, strict=True)
        ]
        return super().json() | {
            "schedule": self.schedule.name, "microbatches": self.schedule.micros,
            "seconds": self.seconds, "bubble": self.bubble, "stages": stages, "places": places,
            "sent_bytes": _plain(self.sent.bytes), "sent_messages": self.sent.messages,
        }  # fmt: skip

    def text(self, by: str = "order") -> str:
        """Format the stages, the places and the step, and the operations of a micro-batch.

        ``by``  the order of the operations, as ``kinds`` takes it.
        """
        s = self.schedule
        lines = [
            f"{s.stages} stages on {mesh_text(self.mesh)}, {s.name}, {s.micros} micro-batches: "
            f"{self.seconds:.3g} s a step, {100 * self.bubble:.1f} % idle"
        ]
        for i, stage in enumerate(self.stages):
            took = ", ".join(f"{kind} {t:.3g} s" for kind, t in stage.seconds.items())
            sends = ", ".join(f"{size(n)} to stage {to}" for to, n in stage.sends.items())
            moved = sum(t.bytes for t in stage.moved.values())
            inside = f", {size(moved)} moved inside" if moved else ""
            lines.append(
                f"stage {i}   {stage.name}, place {stage.place}: {took}; keeps {size(stage.kept)}"
                f"{', sends ' * bool(sends)}{sends}{inside}"
            )
        for i, (place, flying) in enumerate(zip(self.places, s.held, strict=True)):
            parts = ("parameters", "gradients", "state", "transient")
            held = ", ".join(f"{part} {size(getattr(place, part))}" for part in parts)
            lines.append(f"place {i}   {size(place.peak)} at the most: {held}; in flight {flying}")
            lines += [f"    {line}" for line in str(place.tiers or "").splitlines()]
        lines.append(f"sent      {size(self.sent.bytes)} in {self.sent.messages} messages a step")
        lines.append("a micro-batch, per rank")
        for rows in self.kinds(by):
            lines += self._of_kind(rows[0], len(rows))
        return "\n".join(lines)


def _plain(n: float | Fraction) -> int | float:
    """Return the number as int or float, which JSON can store."""
    return int(n) if n == int(n) else float(n)


def size(n: float | Fraction) -> str:
    """Format a number of bytes with its unit.

    >>> size(100), size(2048), size(3 * 2**20)
    ('100 B', '2.00 KiB', '3.00 MiB')
    """
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= scale:
            return f"{float(n) / scale:.2f} {unit}"
    return f"{float(n):.0f} B"
