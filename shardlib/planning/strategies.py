"""What a call of a step costs under given layouts: found by running it on shapes.

There is no second set of rules.  A strategy of a call is found by calling its function, forward and
backward, on blocks on the meta device whose values lie as is asked: what implements the call in a
step answers with the layouts of its results, what it moves, computes, saves and needs meanwhile.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry

from shardlib._compat import DispatchMode, tree_flatten
from shardlib.collectives import Event, trace
from shardlib.cost import slowest
from shardlib.errors import ShardError
from shardlib.memory_tracker import Live, tensors_in
from shardlib.mesh import Axes, Link, Mesh, bind, within
from shardlib.opspec import Args, Func, Kwargs
from shardlib.planning.calls import Call, Calls
from shardlib.planning.constant_folding import on_shapes
from shardlib.tensor import Place, ShardedTensor


class Operand(NamedTuple):
    """Where a value lies, and how its block is stored; ``trained``: whether it has a gradient."""

    place: Place
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    trained: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the block's memory."""
        reach = [(n - 1) * step for n, step in zip(self.size, self.stride, strict=True)]
        return (1 + sum(reach)) * self.dtype.itemsize * (0 not in self.size)

    def made(self) -> ShardedTensor:
        """Return such a value on the meta device."""
        raw = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        return ShardedTensor(raw.requires_grad_(self.trained), self.place)


def operand_of(x: ShardedTensor) -> Operand:
    """Return where a value lies."""
    raw = x.raw
    return Operand(x.place, raw.dtype, tuple(raw.shape), raw.stride(), raw.requires_grad)


@dataclass
class Work:
    """What a pass of a call takes of one rank.

    ``along``    axes -> (bytes, messages) that it receives.
    ``flops``    operations of products and attention; ``touched`` bytes that operators read and
                 write; ``calls`` how many operators run.
    """

    along: dict[str, tuple[float, float]] = field(default_factory=dict)
    flops: float = 0.0
    touched: float = 0.0
    calls: int = 0

    def add(self, events: Sequence[Event]) -> None:
        """Add transfers."""
        for e in events:
            self.receive(e.axis.split(), float(e.bytes), e.messages)

    def receive(self, axes: Sequence[str], nbytes: float, messages: float) -> None:
        """Add a transfer over axes."""
        at = " ".join(axes)
        had = self.along.get(at, (0.0, 0.0))
        self.along[at] = had[0] + nbytes, had[1] + messages


class GradientSum(NamedTuple):
    """The sum over mesh axes of a parameter's gradient, which others share: bytes of the block."""

    operand: int
    axes: Axes
    nbytes: int


@dataclass(frozen=True, eq=False)
class Strategy:
    """A call under the layouts of what it reads.

    ``outs``    where its results lie.
    ``saved``   numbers of operands (from 0) and of results (from -1 downwards) that it saves for
                backward; ``beside`` bytes that it saves in addition.
    ``shares``  result -> the operand whose memory it shares, -1 for none.
    ``most``    bytes that forward needs meanwhile beside results and saved ones; ``most_back`` those
                of backward, with the gradients that it makes.
    ``sums``    sums of gradients of parameters, which ``backward`` does not contain.
    """

    outs: tuple[Operand, ...]
    forward: Work
    backward: Work
    saved: frozenset[int]
    beside: int
    shares: tuple[int, ...]
    most: int
    most_back: int
    sums: tuple[GradientSum, ...]


@dataclass(frozen=True)
class Rates:
    """Seconds of work: a link per axis, operations and bytes per second, seconds per operator."""

    links: Mapping[str, Link]
    flops: float
    bandwidth: float = math.inf
    call: float = 0.0

    def seconds(self, work: Work) -> float:
        """Add the seconds of computing and of transfers; none overlap."""
        computing = work.flops / self.flops + work.touched / self.bandwidth + work.calls * self.call
        return computing + self.moving(work.along)

    def moving(self, along: Mapping[str, tuple[float, float]]) -> float:
        """Add the seconds of transfers."""
        return sum(slowest(axes.split(), self.links).seconds(*m) for axes, m in along.items())


class Table:
    """Strategies of the calls of a step on a mesh, each found once.

    >>> import shardlib as sl
    >>> from shardlib.planning.calls import calls_of
    >>> linear = torch.nn.Linear(4, 8, bias=False)
    >>> step = calls_of(linear, (torch.empty(6, 4),), lambda apply, params, x: apply(params, x).sum())
    >>> with sl.record(x=2) as mesh:
    ...     x, w = (sl.shard(torch.empty(s, device="meta"), "x .") for s in [(6, 4), (8, 4)])
    >>> found = Table(step, mesh).ask(step.calls[0], [operand_of(x), operand_of(w)])
    >>> str(found.outs[0].place.layout), found.forward.along
    ('. x', {'x': (48.0, 1.0)})
    """

    def __init__(self, step: Calls, mesh: Mesh) -> None:
        self.step, self.mesh = step, mesh
        self.known: dict[Hashable, Strategy | str] = {}

    def ask(self, call: Call, operands: Sequence[Operand]) -> Strategy | str:
        """Return the strategy of a call of such operands, or why there is none."""
        key = call.key, tuple(operands)
        if key not in self.known:
            self.known[key] = self._run(call, operands)
        return self.known[key]

    def _run(self, call: Call, operands: Sequence[Operand]) -> Strategy | str:
        with bind(self.mesh), within(promoting=True), trace() as t:
            given = [o.made() for o in operands]
            sums = _Sums({
                i: given[i] for i, r in enumerate(call.reads) if r in self.step.parameters
            })  # fmt: skip
            try:
                return _Run(call, given, sums, t.events).strategy()
            except ShardError as e:
                return e.message
            except (RuntimeError, TypeError, ValueError, IndexError) as e:
                return f"{type(e).__name__}: {e}"


class _Sums:
    """Takes sums of gradients of parameters, as ``tensor.Together`` does, and keeps their sizes."""

    def __init__(self, parameters: Mapping[int, ShardedTensor]) -> None:
        self.found: list[GradientSum] = []
        for i, x in parameters.items():
            x.raw.together = self, i

    def takes(self, i: int) -> bool:
        """Take every sum."""
        return True

    def take(self, i: int, g: Tensor, mesh: Mesh, axes: Axes, *_: torch.dtype | None) -> None:
        """Keep the axes and the bytes of a sum."""
        self.found.append(GradientSum(i, axes, g.nbytes))

    def owe(self, i: int, wait: Callable[[], Tensor]) -> None:
        """End a sum that was begun elsewhere: its transfer counts to the call."""
        wait()


class _Run:
    """A call on shapes: forward, what it saved, and backward."""

    def __init__(
        self, call: Call, given: Sequence[ShardedTensor], sums: _Sums, events: list[Event]
    ) -> None:
        self.call, self.given, self.sums, self.events = call, given, sums, events

    def strategy(self) -> Strategy:
        """Run both passes."""
        raws = [x.raw for x in self.given]
        packed: list[Tensor] = []
        forward, backward = Work(), Work()
        with _Meter(forward, raws) as meter, saved_tensors_hooks(_keeping(packed), lambda x: x):
            results = self.call.run(self.given)
        forward.add(self.events)
        owners = {_memory(x.raw): -1 - j for j, x in reversed(list(enumerate(results)))}
        owners |= {_memory(raw): i for i, raw in enumerate(raws)}
        shares = tuple(max(owners[_memory(x.raw)], -1) for x in results)
        beside = {_memory(x): x.untyped_storage().nbytes() for x in packed}
        saved = frozenset(owners[m] for m in beside if m in owners)
        beside = {m: n for m, n in beside.items() if m not in owners}
        own = {
            _memory(x.raw): x.raw.untyped_storage().nbytes()
            for x, operand in zip(results, shares, strict=True)
            if operand < 0
        }
        most = max(meter.peak - sum(own.values()) - sum(beside.values()), 0)
        packed.clear()
        outs = tuple(map(operand_of, results))
        most_back = self._back(backward, raws, [x.raw for x in results])
        return Strategy(
            outs, forward, backward, saved, sum(beside.values()), shares, most, most_back,
            tuple(self.sums.found),
        )  # fmt: skip

    def _back(self, work: Work, raws: Sequence[Tensor], results: Sequence[Tensor]) -> int:
        """Run backward; return the most bytes that it needs."""
        ends = [x for x in results if x.requires_grad]
        starts = [x for x in raws if x.requires_grad]
        if not (ends and starts):
            return 0
        gradients = [torch.empty_like(x) for x in ends]
        before = len(self.events)
        with _Meter(work, [*raws, *ends, *gradients]) as meter:
            torch.autograd.grad(ends, starts, gradients, allow_unused=True)
        work.add(self.events[before:])
        return meter.peak


class _Meter(Live):
    """Bytes alive, and the work of the operators that run; memory of ``known`` tensors is no news."""

    def __init__(self, work: Work, known: Sequence[Tensor]) -> None:
        super().__init__(paper=True)
        self.work = work
        for x in known:
            self._note(x, new=False)

    def __torch_dispatch__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = tensors_in((args, kwargs))
        for x in operands:
            self._note(x, new=False)
        out = on_shapes(func, args, kwargs)
        for x in tensors_in(out):
            self._note(x, new=True)
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.work.flops += count(*args, **kwargs, out_val=out)
            self.work.calls += 1
        elif nbytes := _touched(func, operands, out):
            self.work.touched += nbytes
            self.work.calls += 1
        return out


def metered(work: Work) -> DispatchMode:
    """Return a mode that adds the operations of what runs within it, and the bytes it touches."""
    return _Meter(work, ())


def _touched(func: Func, operands: Sequence[Tensor], out: object) -> int:
    """Count the bytes that an operator reads and writes: none for a view, or for empty memory."""
    aliases = [r.alias_info for r in func._schema.returns]
    if any(a is not None and not a.is_write for a in aliases) or "empty" in func.__name__:
        return 0
    made = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
    return sum(x.nbytes for x in [*operands, *made])


def _keeping(packed: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x

    return pack


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata
