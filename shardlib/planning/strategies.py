"""Cost of a call of a step under given layouts, found by running it on shapes.

There is no second set of rules.  A strategy of a call is found by calling its function, forward and
backward, on blocks on the meta device whose values lie as is asked: what implements the call in a
step answers with the layouts of its results, what it moves, computes, saves and needs meanwhile.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardlib.collectives import Event, trace
from shardlib.cost import Cost
from shardlib.errors import NoImplementation, ShardError
from shardlib.mesh import Axes, Mesh, bind, within
from shardlib.ops.registry import Match
from shardlib.opspec import Args, Func, Kwargs
from shardlib.planning.calls import Call, StepCalls, writes
from shardlib.planning.work import Meter, StepWork
from shardlib.tensor import Place, ShardedTensor

_REFUSED = ShardError, RuntimeError, TypeError, ValueError, IndexError
"""Errors of calls of operands that they do not take."""


@dataclass(frozen=True)
class Operand:
    """Where a value lies, and how its block is stored; ``trained``: whether it has a gradient.

    ``nbytes``  bytes of the block's memory.
    """

    place: Place
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    trained: bool
    nbytes: int = field(init=False, compare=False)
    # a key of many tables
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        reach = [(n - 1) * step for n, step in zip(self.size, self.stride, strict=True)]
        nbytes = (1 + sum(reach)) * self.dtype.itemsize * (0 not in self.size)
        object.__setattr__(self, "nbytes", nbytes)
        fields = self.place, self.dtype, self.size, self.stride, self.trained
        object.__setattr__(self, "_hash", hash(fields))

    def __hash__(self) -> int:
        return self._hash

    def made(self) -> ShardedTensor:
        """Return such a value on the meta device."""
        raw = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        return ShardedTensor(raw.requires_grad_(self.trained), self.place)


def operand_of(x: ShardedTensor) -> Operand:
    """Return where a value lies."""
    raw = x.raw
    return Operand(x.place, raw.dtype, tuple(raw.shape), raw.stride(), raw.requires_grad)


class GradientSum(NamedTuple):
    """The sum over mesh axes of a parameter's gradient, which others share: bytes of the block."""

    operand: int
    axes: Axes
    nbytes: int


@dataclass(frozen=True, eq=False)
class CallStrategy:
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
    forward: StepWork
    backward: StepWork
    saved: frozenset[int]
    beside: int
    shares: tuple[int, ...]
    most: int
    most_back: int
    sums: tuple[GradientSum, ...]


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

    def __init__(self, step: StepCalls, mesh: Mesh) -> None:
        self.step, self.mesh = step, mesh
        self.known: dict[tuple[Hashable, tuple[Operand, ...]], CallStrategy | str] = {}
        # of the ways of a search: what does not depend on ZeRO
        self.offers: dict[Any, list[Any]] = {}
        self.transitions: dict[Any, dict[Any, Any]] = {}

    def ask(self, call: Call, operands: Sequence[Operand]) -> CallStrategy | str:
        """Return the strategy of a call of such operands, or why there is none."""
        key = call.key, tuple(operands)
        if key not in self.known:
            self.known[key] = self._run(call, operands)
        return self.known[key]

    def unsplit(self, call: Call) -> str:
        """Return why a call takes no operand that is split over an axis; "" if it takes one."""
        found = [
            x for (key, operands), x in self.known.items()
            if key == call.key and any(o.place.layout.axes for o in operands)
        ]  # fmt: skip
        refused = [x for x in found if isinstance(x, str)]
        if not refused or len(refused) < len(found):
            return ""
        return refused[0]

    def moves(self, call: Call, operands: Sequence[Operand]) -> Cost | None:
        """Return what forward of a product moves at the least, which its algorithm says before it runs.

        None where it does not say.  Raises: NoImplementation where no algorithm takes the operands.
        """
        with bind(self.mesh), within(promoting=True, watcher=_Ask()):
            try:
                call.run([o.made() for o in operands])
            except _Chosen as e:
                return e.match.forward
            except NoImplementation:
                raise
            except _REFUSED:
                return None
        return None

    def _run(self, call: Call, operands: Sequence[Operand]) -> CallStrategy | str:
        with bind(self.mesh), trace() as t:
            given = [o.made() for o in operands]
            sums = _SumSizes({
                i: given[i] for i, r in enumerate(call.reads) if r in self.step.parameters
            })  # fmt: skip
            try:
                on_shapes = _CallOnShapes(call, given, sums, t.events)
                with within(promoting=True, repeats=on_shapes):
                    return on_shapes.strategy()
            except ShardError as e:
                return e.message
            except _REFUSED as e:
                return f"{type(e).__name__}: {e}"


class _Chosen(Exception):
    """Raised when a product has chosen its algorithm: ends its call before it runs."""

    def __init__(self, match: Match) -> None:
        self.match = match


class _Ask:
    """A watcher that ends a call when its first product has chosen an algorithm."""

    def __call__(
        self, implementation: Callable[..., Any], func: Func, args: Args, kwargs: Kwargs
    ) -> Any:
        return implementation(func, args, kwargs)

    verb = __call__

    def chose(self, match: Match, **_: object) -> None:
        """Raise _Chosen."""
        raise _Chosen(match)


class _SumSizes:
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


class _CallOnShapes:
    """A call on shapes: forward, what it saved, and backward."""

    def __init__(
        self, call: Call, given: Sequence[ShardedTensor], sums: _SumSizes, events: list[Event]
    ) -> None:
        self.call, self.given, self.sums, self.events = call, given, sums, events
        self.work = StepWork()

    def strategy(self) -> CallStrategy:
        """Run both passes."""
        leaves, operands = [x.raw for x in self.given], [*self.given]
        if writes(self.call.func) and leaves[0].requires_grad:
            # a leaf that has a gradient cannot be written to
            operands[0] = ShardedTensor(leaves[0].clone(), operands[0].place)
        raws = [x.raw for x in operands]
        packed: list[Tensor] = []
        forward, backward = self.work, StepWork()
        with Meter(forward, raws) as meter, saved_tensors_hooks(_keeping(packed), lambda x: x):
            results = self.call.run(operands)
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
        most_back = self._back(backward, leaves, [x.raw for x in results])
        return CallStrategy(
            outs, forward, backward, saved, sum(beside.values()), shares, most, most_back,
            tuple(self.sums.found),
        )  # fmt: skip

    def times(self, more: int) -> Callable[[], None]:
        """Begin a step of a loop; the function that ends it counts as many more equal ones."""
        now, begun = self.work, len(self.events)
        before = replace(now, along={}, kernels=dict(now.kernels))

        def end() -> None:
            self.events += self.events[begun:] * more
            step = replace(now, along={}, kernels=dict(now.kernels))
            step.join(before, -1)
            now.join(step, more)

        return end

    def _back(self, work: StepWork, raws: Sequence[Tensor], results: Sequence[Tensor]) -> int:
        """Run backward; return the most bytes that it needs."""
        ends = [x for x in results if x.requires_grad]
        starts = [x for x in raws if x.requires_grad]
        if not (ends and starts):
            return 0
        gradients = [torch.empty_like(x) for x in ends]
        before, self.work = len(self.events), work
        with Meter(work, [*raws, *ends, *gradients]) as meter:
            torch.autograd.grad(ends, starts, gradients, allow_unused=True)
        work.add(self.events[before:])
        return meter.peak


def _keeping(packed: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x

    return pack


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata
