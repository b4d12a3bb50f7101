"""StepWork of a step on one rank: transfers, operations, bytes read and written; and its seconds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardlib._compat import tree_flatten
from shardlib.collectives import Event
from shardlib.cost import slowest
from shardlib.memory_tracker import Live, tensors_in
from shardlib.mesh import Link
from shardlib.opspec import Args, Func, Kwargs
from shardlib.planning.constant_folding import result_of

_MOVES_NOTHING = ("empty", "new_empty", "_unsafe_view")


@dataclass
class StepWork:
    """Work of a pass of a call, on one rank.

    ``along``    axes -> (bytes, messages) that it receives.
    ``flops``    operations of products and attention; ``touched`` bytes that operators read and
                 write; ``calls`` how many operators run.
    ``saved``    bytes that memory tiers copy to the host for backward; ``fetched`` those back.
    """

    along: dict[str, tuple[float, float]] = field(default_factory=dict)
    flops: float = 0.0
    touched: float = 0.0
    calls: float = 0
    saved: float = 0
    fetched: float = 0

    def add(self, events: Sequence[Event]) -> None:
        """Add transfers."""
        for e in events:
            self.receive(e.axis.split(), float(e.bytes), e.messages)

    def receive(self, axes: Sequence[str], nbytes: float, messages: float) -> None:
        """Add a transfer over axes."""
        at = " ".join(axes)
        had = self.along.get(at, (0.0, 0.0))
        self.along[at] = had[0] + nbytes, had[1] + messages

    def move(self, saved: float, fetched: float) -> None:
        """Add bytes that memory tiers save in host memory for backward, and fetch."""
        self.saved += saved
        self.fetched += fetched

    def join(self, other: "StepWork", times: float = 1) -> None:
        """Add the work of a part that runs so many times, or as a share of ranks."""
        for axes, (nbytes, messages) in other.along.items():
            self.receive(axes.split(), times * nbytes, times * messages)
        self.flops += times * other.flops
        self.touched += times * other.touched
        self.calls += times * other.calls
        self.saved += times * other.saved
        self.fetched += times * other.fetched


@dataclass(frozen=True)
class Rates:
    """Seconds of work: a link per axis, operations and bytes per second, seconds per operator."""

    links: Mapping[str, Link]
    flops: float
    bandwidth: float = math.inf
    call: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """Add the seconds of computing and of transfers; none overlap."""
        computing = work.flops / self.flops + work.touched / self.bandwidth + work.calls * self.call
        return computing + self.moving(work.along)

    def moving(self, along: Mapping[str, tuple[float, float]]) -> float:
        """Add the seconds of transfers."""
        return sum(slowest(axes.split(), self.links).seconds(*m) for axes, m in along.items())


class Meter(Live):
    """Bytes alive on paper, and the work of the operators that run.

    ``work``   what is added to.
    ``known``  tensors whose memory was there before.

    >>> import torch
    >>> x = torch.empty(4, 4, device="meta")
    >>> with Meter(StepWork(), [x]) as meter:
    ...     y = x @ x + 1
    >>> meter.work.flops, meter.work.touched, meter.now, meter.peak
    (128.0, 320.0, 64, 128)
    """

    def __init__(self, work: StepWork, known: Sequence[Tensor] = ()) -> None:
        super().__init__(paper=True)
        self.work = work
        for x in known:
            self._note(x, new=False)

    def __torch_dispatch__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_view(func):
            # of a tensor from elsewhere it is no new memory
            self._note(args[0], new=False)
            return func(*args, **kwargs)
        known = result_of(func, args, kwargs)
        if known is None:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            flops, nbytes = _cost(func, out, args, kwargs)
        else:
            out = known.of(args)
            if known.size is not None:
                self._note(out, new=True)
            if known.cost is None:
                known.cost = _cost(func, out, args, kwargs)
            flops, nbytes = known.cost
        self.work.flops += flops
        self.work.touched += nbytes
        self.work.calls += bool(flops or nbytes)
        return out


@cache
def _is_view(func: Func) -> bool:
    """Return whether an operator's results are views of its first operand."""
    aliases = [r.alias_info for r in func._schema.returns]
    return any(a is not None and not a.is_write for a in aliases)


def _cost(func: Func, out: object, args: Args, kwargs: Kwargs) -> tuple[float, int]:
    operands = tensors_in((args, kwargs))
    return operations(func, out, args, kwargs), touched(func, operands, out)


def touched(func: Func, operands: Iterable[Tensor], out: object) -> int:
    """Count the bytes that an operator reads and writes: none for a view, or for empty memory."""
    if _is_view(func) or func.__name__.startswith(_MOVES_NOTHING):
        return 0
    made = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
    return sum(x.nbytes for x in [*operands, *made])


def operations(func: Func, out: object, args: Args, kwargs: Kwargs) -> float:
    """Count the floating point operations of an operator: of products, convolutions, attention."""
    count = flop_registry.get(func.overloadpacket)
    return 0.0 if count is None else count(*args, **kwargs, out_val=out)
