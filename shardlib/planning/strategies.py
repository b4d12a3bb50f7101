"""Cost of a call of a step under given layouts, found by running it on shapes.

There is no second set of rules.  A strategy of a call is found by calling its function, forward and
backward, on blocks on the meta device whose values lie as is asked: what implements the call in a
step answers with the layouts of its results, what it moves, computes, saves and needs meanwhile.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardlib.collectives import Event, trace
from shardlib.cost import Cost
from shardlib.dtypes import is_half
from shardlib.errors import NoImplementation, ShardError
from shardlib.mesh import Axes, Mesh, bind, within
from shardlib.modules.remat import SMALL
from shardlib.ops.registry import Match
from shardlib.opspec import Args, Func, Kwargs
from shardlib.planning.calls import Call, StepCalls, writes
from shardlib.planning.work import Meter, StepWork
from shardlib.recompute import Kept
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
    """The sum over mesh axes of a parameter's gradient: bytes of the block.

    ``own``  bytes and messages of the sum within the call, of half precision before it is rounded;
             with ZeRO or micro-batches it is not done there.  None: it is summed with others.
    """

    operand: int
    axes: Axes
    nbytes: int
    own: tuple[float, float] | None = None


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
    ``again``   what forward does where it is computed again, before backward.
    ``held``    numbers of results that are held until then, and ``held_beside`` further bytes.
    ``away``    bytes of saved tensors that remat "host" sends to host memory, each as often as it is
                saved; ``near`` those of the small ones, which stay.
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
    again: StepWork
    held: frozenset[int] = frozenset()
    held_beside: int = 0
    away: int = 0
    near: int = 0


class Table:
    """Strategies of the calls of a step on a mesh, each found once.

    ``without``  the table of the same step and mesh of which this one differs: here results of
                 products and attention are held, and not computed again before backward.
                 All else is as there.

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

    def __init__(self, step: StepCalls, mesh: Mesh, without: "Table | None" = None) -> None:
        self.step, self.mesh, self.without = step, mesh, without
        self.known: dict[tuple[Hashable, tuple[Operand, ...]], CallStrategy | str] = {}
        # of the ways of a search: what does not depend on ZeRO
        self.offers: dict[Any, list[Any]] = {}
        self.transitions: dict[Any, dict[Any, Any]] = {}
        # keys of calls that have no such results
        self.alike: set[Hashable] = set()

    @cached_property
    def holding(self) -> "Table":
        """The table in which results of products and attention are held."""
        return Table(self.step, self.mesh, self)

    def ask(self, call: Call, operands: Sequence[Operand]) -> CallStrategy | str:
        """Return the strategy of a call of such operands, or why there is none."""
        if self.without is not None and call.key in self.alike:
            return self.without.ask(call, operands)
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
        known: CallStrategy | str | None = None
        if self.without is not None:
            known = self.without.ask(call, operands)
        if isinstance(known, str):
            return known
        with bind(self.mesh), trace() as t:
            given = [o.made() for o in operands]
            sums = _SumSizes({
                i: given[i] for i, r in enumerate(call.reads) if r in self.step.parameters
            })  # fmt: skip
            try:
                on_shapes = _CallOnShapes(call, given, sums, t.events)
                with within(promoting=True, repeats=on_shapes):
                    if known is None:
                        return on_shapes.strategy()
                    found = on_shapes.holding(known)
                    if found is known:
                        self.alike.add(call.key)
                    return found
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
        self.parameters = parameters
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

    def of_products(self, events: Sequence[Event]) -> list[Event]:
        """Take the sums that a product did of gradients in half precision; return the other events.

        They are over axes that split none of the call's parameters, over which nothing else is summed.
        """
        taken = {s.operand for s in self.found}
        half = {
            i: x.raw.nbytes for i, x in self.parameters.items()
            if i not in taken and x.raw.requires_grad and is_half(x.raw)
        }  # fmt: skip
        split = {a for x in self.parameters.values() for a in x.sharding.axes}
        theirs = [e.kind == "psum" and not split & {*e.axis.split()} for e in events]
        sums = [e for e, own in zip(events, theirs, strict=True) if own]
        if not (half and sums):
            return [*events]
        axes, total = tuple(sums[0].axis.split()), sum(half.values())
        nbytes, messages = sum(float(e.bytes) for e in sums), sum(e.messages for e in sums)
        for i, own in half.items():
            moved = own / total * nbytes, own / total * messages
            self.found.append(GradientSum(i, axes, own, moved))
        return [e for e, own in zip(events, theirs, strict=True) if not own]


class _ForwardRun(NamedTuple):
    """A call's forward on shapes: its results, and what they hold.

    ``owners``  memory -> number of the operand or result, as ``CallStrategy.saved`` has them.
    ``shares``, ``saved``  as ``CallStrategy`` has them.
    ``beside``  bytes saved that are of no operand and no result; ``own`` those of the results.
    ``away``, ``near``  as ``CallStrategy`` has them.
    """

    results: list[ShardedTensor]
    owners: Mapping[int, int]
    shares: tuple[int, ...]
    saved: frozenset[int]
    beside: int
    own: int
    peak: int
    away: int
    near: int


class _CallOnShapes:
    """A call on shapes: forward, what it saved, and backward."""

    def __init__(
        self, call: Call, given: Sequence[ShardedTensor], sums: _SumSizes, events: list[Event]
    ) -> None:
        self.call, self.given, self.sums, self.events = call, given, sums, events
        self.work = StepWork()

    def strategy(self) -> CallStrategy:
        """Run both passes."""
        forward, backward = StepWork(), StepWork()
        run = self._forward(forward)
        most = max(run.peak - run.own - run.beside, 0)
        outs = tuple(map(operand_of, run.results))
        most_back = self._back(backward, [x.raw for x in self.given], [x.raw for x in run.results])
        return CallStrategy(
            outs, forward, backward, run.saved, run.beside, run.shares, most, most_back,
            tuple(self.sums.found), forward, away=run.away, near=run.near,
        )  # fmt: skip

    def holding(self, known: CallStrategy) -> CallStrategy:
        """Run forward twice, in a region that holds results; return what was known where none is."""
        region, again = Kept(), StepWork()
        with within(region=region):
            region.begin()
            self._forward(StepWork())
            kept = [x for results, _ in region.results for x in results if isinstance(x, Tensor)]
            if not kept:
                return known
            region.begin()
            run = self._forward(again)
        held = {_memory(x): x.untyped_storage().nbytes() for x in kept}
        return replace(
            known, saved=run.saved, beside=run.beside, shares=run.shares, again=again,
            held=frozenset(run.owners[m] for m in held if run.owners.get(m, 0) < 0),
            held_beside=sum(n for m, n in held.items() if m not in run.owners),
        )  # fmt: skip

    def _forward(self, work: StepWork) -> "_ForwardRun":
        """Run forward."""
        operands = [*self.given]
        if writes(self.call.func) and operands[0].raw.requires_grad:
            # a leaf that has a gradient cannot be written to
            operands[0] = ShardedTensor(operands[0].raw.clone(), operands[0].place)
        raws = [x.raw for x in operands]
        packed: list[Tensor] = []
        self.work, before = work, len(self.events)
        with Meter(work, raws) as meter, saved_tensors_hooks(_keeping(packed), lambda x: x):
            results = self.call.run(operands)
        work.add(self.events[before:])
        owners = {_memory(x.raw): -1 - j for j, x in reversed(list(enumerate(results)))}
        owners |= {_memory(raw): i for i, raw in enumerate(raws)}
        shares = tuple(max(owners[_memory(x.raw)], -1) for x in results)
        beside = {_memory(x): x.untyped_storage().nbytes() for x in packed}
        saved = frozenset(owners[m] for m in beside if m in owners)
        further = sum(n for m, n in beside.items() if m not in owners)
        own = {
            _memory(x.raw): x.raw.untyped_storage().nbytes()
            for x, operand in zip(results, shares, strict=True)
            if operand < 0
        }
        weights = {_memory(x.raw) for x in self.sums.parameters.values()}
        sizes = [x.nbytes for x in packed if _memory(x) not in weights]
        away = sum(n for n in sizes if n >= SMALL)
        return _ForwardRun(
            results, owners, shares, saved, further, sum(own.values()), meter.peak,
            away, sum(sizes) - away,
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
        work.add(self.sums.of_products(self.events[before:]))
        return meter.peak


def _keeping(packed: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x

    return pack


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata
