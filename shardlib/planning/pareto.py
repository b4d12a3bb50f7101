"""The ways to run a part of a step that no other beats in both seconds and bytes, found exactly.

The calls of a part run in their order.  All that later calls depend on is where the values lie that
they read, and which of these are saved already: the state.  Of two ways with the same state, the
one that takes more seconds and more bytes can be no part of a best plan and is dropped (Bellman).
Results' layouts depend on the operands' layouts alone (decision 0003), so a state is finite.

Where links are so fast that most ways take about as long, there are very many.  Of more than STATES
states those of least seconds and of least bytes are followed, and of more than MANY ways of a state
those are left out that differ from another by a share GRAIN of the memory.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from shardlib.cost import Cost
from shardlib.dtypes import wider
from shardlib.errors import NoImplementation
from shardlib.layouts import Dim
from shardlib.mesh import Axes
from shardlib.optim.buckets import Memory
from shardlib.optim.index import MOST
from shardlib.optim.sink import FLYING
from shardlib.planning.calls import Call, StepCalls
from shardlib.planning.candidates import PRODUCTS, Candidates, Choice, Leaf, columns_of
from shardlib.planning.strategies import CallStrategy, GradientSum, Operand, Table
from shardlib.planning.work import Rates, StepWork, update_work

T = TypeVar("T")

MANY, GRAIN = 16, 1e-3
"""Ways of a state, from which on this share of the memory is no difference between two of them."""

STATES = 256
"""States behind a call of which all are followed; of more, those of least seconds and least bytes."""


class Alive(NamedTuple):
    """A value that later calls read; ``root``: the value whose memory it shares, of ``nbytes``."""

    number: int
    operand: Operand
    root: int
    nbytes: int

    @property
    def counts(self) -> bool:
        """Whether backward may need it: tables of integers are made once, and count nothing."""
        return self.operand.dtype.is_floating_point or self.operand.dtype.is_complex


@dataclass(frozen=True)
class State:
    """State behind some calls: the values alive, and the roots among them saved for backward.

    ``near``  bytes that the last call saved to host memory, and that are still on the device.
    """

    alive: tuple[Alive, ...] = ()
    saved: frozenset[int] = frozenset()
    near: int = 0
    # a key of many tables
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.alive, self.saved, self.near)))

    def __hash__(self) -> int:
        return self._hash


class WayStep(NamedTuple):
    """A call with its strategy, and the layouts of the parameters that it is the first to read."""

    call: Call
    strategy: CallStrategy
    choice: Choice

    @property
    def held(self) -> list[int]:
        """The results that are held where the rest is computed again."""
        return [self.call.gives[-1 - k] for k in self.strategy.held]


@dataclass(eq=False)
class Offer:
    """The ways to run a call with one choice of the matrices that it reads first.

    ``given``  the operands that lie somewhere before; ``whole`` vectors that it reads first.
    ``moves``  what forward of a product moves at the least; None where it does not say.
    ``steps``  found once one of them may be of use.
    """

    given: Mapping[int, Operand]
    matrices: Choice
    whole: Choice
    moves: Cost | None
    steps: list[WayStep] | None = None


class Transition(NamedTuple):
    """A step from a state to the one behind its call, which is the same under every stage of ZeRO.

    ``given``  the operands of the call that were there before, by number.
    ``saved``  bytes that it saves in addition, on the device; ``meanwhile`` the most that either
               pass holds there beside all that is saved until then.
    ``held``   bytes that it holds where the rest is computed again.
    """

    step: WayStep
    given: Mapping[int, Alive]
    after: State
    saved: float
    meanwhile: float
    held: float


class Price(NamedTuple):
    """Cost that a step adds to a way: seconds of passes, and bytes as ``Way`` has them.

    ``moving``  seconds of what it saves to host memory and back, where that is done.
    """

    forward: float
    back: float
    again: float
    kept: float
    gradients: float
    moving: float


class Way:
    """A way to run the calls so far: seconds of both passes, and bytes.

    ``again``  seconds of forward where it is computed again, 0 where it is not.
    ``kept``   bytes of parameters and optimizer state, ``gradients`` those of the gradients.
    ``saved``  bytes that backward reads; ``most`` the most that either pass holds of them and of
               values and gradients of values at once.
    ``held``   bytes that are held from forward to where it is computed again.
    """

    __slots__ = (
        "again", "back", "before", "forward", "gradients", "held", "kept", "most", "saved", "step",
    )  # fmt: skip

    def __init__(
        self, forward: float = 0, back: float = 0, kept: float = 0, gradients: float = 0,
        saved: float = 0, most: float = 0, step: WayStep | None = None, before: "Way | None" = None,
        again: float = 0, held: float = 0,
    ) -> None:  # fmt: skip
        self.forward, self.back, self.kept, self.gradients = forward, back, kept, gradients
        self.saved, self.most, self.step, self.before = saved, most, step, before
        self.again, self.held = again, held

    @property
    def seconds(self) -> float:
        """The seconds of all passes."""
        return self.forward + self.again + self.back

    def costs(self, remat: bool) -> tuple[float, ...]:
        """Return what a program adds up, or takes the most of: less of all is never worse."""
        kept = self.kept
        end, saved, most = kept + self.gradients, kept + self.saved, kept + self.most
        # what is computed again is not saved, but the calls to come hold it beside theirs
        return self.seconds, end, saved, most, remat * (kept + self.held)

    def steps(self) -> list[WayStep]:
        """List the steps, the first first."""
        found: list[WayStep] = []
        at: Way | None = self
        while at is not None:
            if at.step is not None:
                found.append(at.step)
            at = at.before
        return found[::-1]

    def choices(self) -> Choice:
        """Return the layouts of all parameters read."""
        return {i: leaf for step in self.steps() for i, leaf in step.choice.items()}


@dataclass(frozen=True)
class Holding:
    """Bytes that a parameter takes, with its gradient and state, under a stage of ZeRO.

    ``axes``   those of ZeRO; each parameter is split over those of them that its layout leaves whole.
    ``state``  bytes of the optimizer's state per byte of a parameter.
    ``micros`` micro-batches of a step: of more than one, gradients are added up and summed once.
    ``pipe``   stages of a pipeline, each with as much of every layer's bytes.
    ``total``  bytes of all gradients of the module.
    """

    sizes: Mapping[str, int]
    axes: tuple[str, ...] = ()
    stage: int = 0
    state: float = 2.0
    micros: int = 1
    pipe: int = 1
    total: float = math.inf

    @property
    def host(self) -> bool:
        """Whether parameters, gradients and state are in host memory, which is stage 3 here."""
        return self.stage == 3

    @property
    def bucket(self) -> bool:
        """Whether one bucket takes all gradients, so that it is held with them."""
        return self.total <= MOST

    def buckets(self, nbytes: float) -> float:
        """Return the share of transfers of whole buckets that a gradient of so many bytes causes."""
        return min(nbytes / min(MOST, self.total), 1.0)

    @property
    def passes(self) -> float:
        """Seconds of a step over those of a micro-batch, with the idle time of stages."""
        return (self.micros + self.pipe - 1) / self.pipe

    @property
    def share(self) -> float:
        """The least seconds of a step over those of a micro-batch on one rank."""
        return self.passes / math.prod(self.sizes.values())

    @property
    def flying(self) -> float:
        """Bytes saved of all micro-batches in flight over those of one."""
        return min(self.micros, self.pipe) / self.pipe

    def over(self, operand: Operand) -> Axes:
        """Return the axes over which ZeRO splits a parameter: those that its layout leaves whole."""
        return tuple(a for a in self.axes if a not in operand.place.layout.axes)

    def ways(self, axes: Iterable[str]) -> int:
        """Return the number of ranks along axes."""
        return math.prod(self.sizes[a] for a in axes)

    def parts(self, leaf: Leaf) -> int:
        """Return the number of ranks among which a parameter's state is split."""
        return self.ways(self.over(leaf.operand))

    def gradients(self, leaf: Leaf) -> float:
        """Return the bytes of a parameter's gradient at the end of backward."""
        if self.micros > 1 or self.stage:
            # the sum of all micro-batches is kept meanwhile, and ZeRO's parts from step to step
            return 0.0
        return leaf.operand.nbytes

    def kept(self, leaf: Leaf) -> float:
        """Return the bytes of a parameter, and of its optimizer's state."""
        if self.host:
            return 0.0
        own = leaf.operand.nbytes * (1 + self.state / self.parts(leaf))
        if self.micros > 1:
            own += self.added(leaf)
        if self.axes:
            # the sums' parts, and a single bucket with what is received for it, are there from step
            # to step; of more buckets there are some, whatever the parameters
            ways = self.parts(leaf)
            own += self.added(leaf) / ways + self.bucket * (1 + (ways > 2)) * leaf.operand.nbytes
        return own / self.pipe

    def pool(self, leaves: Sequence[Leaf]) -> float:
        """Return the bytes of ZeRO's buckets that stay from step to step, where they are several.

        While one is filled others are in transit, each with what is received for it, in memory that
        is taken and given back as in a step.
        ``leaves``  parameters in the order of forward.
        """
        if not self.axes or self.bucket:
            return 0.0
        # bytes of each bucket, and whether there is memory beside it for what is received
        buckets: list[tuple[int, bool]] = []
        for leaf in reversed(leaves):
            nbytes, ways = leaf.operand.nbytes, self.parts(leaf)
            if ways == 1:
                continue
            if not buckets or buckets[-1][0] + nbytes > MOST:
                buckets.append((0, False))
            buckets[-1] = buckets[-1][0] + nbytes, ways > 2
        memory = Memory()
        take = partial(memory.take, dtype=torch.uint8, device=torch.device("meta"))
        flying: list[list[Tensor]] = []
        for nbytes, received in buckets:
            taken = [take((nbytes,))]
            if len(flying) == FLYING:
                memory.give(*flying.pop(0))
            flying.append([*taken, *(take((nbytes,)) for _ in range(received))])
        memory.give(*itertools.chain(*flying))
        return sum(x.nbytes for some in memory.free.values() for x in some) / self.pipe

    def block(self, leaves: Iterable[Leaf]) -> float:
        """Return the bytes that memory tiers need on the device for a block of these parameters.

        Its parts; where they are gathered, it and the next one, and three gradients of which two are
        in transit, else two.
        """
        found = 0.0
        for leaf in leaves:
            ways = self.parts(leaf)
            found += leaf.operand.nbytes * (1 / ways + (5 if ways > 1 else 2))
        return found

    def gathering(self, sums: Iterable[GradientSum]) -> float:
        """Return the bytes of a bucket and of its sum, of gradients that are summed without ZeRO."""
        if not self.bucket or self.axes or self.host:
            return 0.0
        return 2 * sum(s.nbytes for s in sums if s.axes and not self.in_call(s)) / self.pipe

    def added(self, leaf: Leaf) -> int:
        """Return the bytes of the sum of micro-batches' gradients, of half precision in fp32."""
        dtype = leaf.operand.dtype
        return leaf.operand.nbytes // dtype.itemsize * wider(dtype).itemsize

    def once(self, number: int, leaf: Leaf) -> GradientSum:
        """Return the sum over all axes that a layout leaves whole, behind the last micro-batch."""
        over = leaf.operand.place.layout.axes
        axes = tuple(a for a, n in self.sizes.items() if n > 1 and a not in over)
        return GradientSum(number, axes, leaf.operand.nbytes)

    def in_call(self, s: GradientSum) -> bool:
        """Return whether the call itself sums a gradient."""
        return s.own is not None and not self.axes and self.micros == 1

    def summed(self, s: GradientSum, over: Axes = ()) -> StepWork:
        """Return the work of a gradient's sum, of its parts where ZeRO sums it over some axes.

        The factors are those that ``sl.explain`` counted in steps of GPT-2 on a mesh of 4 x 2.
        """
        work, axes = StepWork(), tuple(a for a in s.axes if a not in over)
        if s.own and self.in_call(s):
            work.receive(axes, *s.own)
        elif axes:
            p, nbytes = self.ways(axes), s.nbytes / self.ways(over)
            work.receive(axes, 2 * (p - 1) / p * nbytes, 2 * (p - 1) * self.buckets(nbytes))
            # into a bucket and out of it; a large one is sent as it is
            work.touched += 4 * nbytes * (nbytes < MOST)
        return work

    def reduced(self, leaf: Leaf) -> StepWork:
        """Return the work of a parameter's update, and of ZeRO's sum and gather of its parts.

        It is gathered after the update; at stage 3 for either pass, and updated on the host.
        """
        work, axes, nbytes = StepWork(), self.over(leaf.operand), leaf.operand.nbytes
        if not self.host:
            own = nbytes / self.parts(leaf)
            work = update_work(own, self.state * own, self.state)
        if self.axes:
            # into a bucket, but for a large one that is sent, and from there
            work.touched += (1 + 2 * (nbytes < MOST or not axes)) * nbytes
        if axes:
            p, passes = self.ways(axes), 2 + self.host
            messages = passes * (p - 1) * self.buckets(nbytes)
            work.receive(axes, passes * (p - 1) / p * nbytes, messages)
            # it is sent in parts; a part is added to those before, and to the state's
            work.touched += 5 / p * nbytes
        return work

    def loaded(self, choice: Choice) -> float:
        """Return the bytes of a rank's parts of parameters."""
        return sum(leaf.operand.nbytes / self.parts(leaf) for leaf in choice.values())


class Search:
    """The best ways through a step's calls on a mesh.

    ``room``   bytes of a rank, see ``undominated``; ``host`` those of host memory for what is saved.
    ``remat``  "" to save what backward reads, "full" to save nothing: the part is run again;
               "products" to hold the results of products and attention, and compute the rest again;
               "host" to save in host memory.  ``under`` gives the search of another policy.
    """

    def __init__(
        self, step: StepCalls, table: Table, candidates: Candidates, rates: Rates, holding: Holding,
        inputs: Mapping[int, Operand], room: float = 0.0, host: float = 0.0,
    ) -> None:  # fmt: skip
        self.step, self.table, self.candidates = step, table, candidates
        self.rates, self.holding, self.inputs = rates, holding, inputs
        self.room, self.host, self.remat = room, host, ""
        # values whose gradient a call adds to that of a call before it
        self.later = {call: set[int]() for call in step.calls}
        read = set[int]()
        for call in step.calls:
            if not step.floating.isdisjoint(call.gives):
                self.later[call] = read & {*call.reads}
                read |= {*call.reads}
        self.at = {id(c): i for i, c in enumerate(step.calls)}
        self.priced: dict[int, Price] = {}
        # seconds that an offer's transfers take at the least
        self.moving: dict[int, float] = {}
        self.known: dict[Any, dict[State, list[Way]]] = {}
        self.policies: dict[str, Search] = {"": self}
        self.constants = candidates.constants()

    def under(self, remat: str) -> "Search":
        """Return the search under a policy of remat, which shares what is known of steps."""
        if remat not in self.policies:
            found = self.policies[remat] = copy(self)
            found.remat = remat
            if remat == "products":
                found.table = self.table.holding
        return self.policies[remat]

    @property
    def repeats(self) -> bool:
        """Whether forward is computed again before backward."""
        return self.remat in ("products", "full")

    def once(
        self, calls: Sequence[Call], begin: State, limit: float,
        ideal: Mapping[Call, tuple[float, float]], least: bool,
    ) -> dict[State, list[Way]]:  # fmt: skip
        """Return what ``run`` does, found once until ``known`` is cleared."""
        key = id(calls), self.remat, begin, limit, least
        if key not in self.known:
            self.known[key] = self.run(calls, begin, limit, ideal, least)
        return self.known[key]

    def run(
        self, calls: Sequence[Call], begin: State, limit: float = math.inf,
        ideal: Mapping[Call, tuple[float, float]] | None = None, least: bool = False,
    ) -> dict[State, list[Way]]:  # fmt: skip
        """Return the best ways through these calls from a state, by the state they end in.

        ``limit``  seconds of the ways that are of use; ``ideal`` the least seconds of both passes
                   of each call, with which a way that cannot end within the limit is left early.
        ``least``  of least bytes alone, whatever their seconds.
        Nothing is returned where a call runs under no layouts, or none within the limit.
        """
        now = {begin: [Way()]}
        # how often forward's transfers run
        passes = 1 + (self.remat == "full")
        outer = frozenset(x.root for x in begin.alive)
        pairs = {c: (ideal or {}).get(c, (0.0, 0.0)) for c in calls}
        alone = {c: passes * forward + back for c, (forward, back) in pairs.items()}
        rest = sum(alone.values())
        for call in calls:
            found: dict[State, list[Way]] = defaultdict(list)
            rest -= alone[call]
            for state, ways in now.items():
                room = (limit - rest - alone[call] - ways[0].seconds) / passes
                for taken in self._transitions(call, state, outer, room):
                    longer = self._longer(ways, taken, limit - rest)
                    if longer:
                        found[taken.after] += longer
            how = self.repeats, self.room, least
            best = {s: undominated(ways, *how) for s, ways in found.items()}
            now = narrowed(best, _least_of)
        return now

    def _longer(self, ways: Sequence[Way], taken: Transition, limit: float) -> list[Way]:
        """Return the ways with a transition behind them that take at most so many seconds."""
        price, step = self._price(taken), taken.step
        again, back = self.repeats * price.again, price.back
        if self.remat == "host":
            back += price.moving
        own = price.forward + again + back
        found = []
        for w in ways:
            if w.seconds + own > limit:
                # the fastest are first
                break
            saved = w.saved + taken.saved
            found.append(Way(
                w.forward + price.forward, w.back + back, w.kept + price.kept,
                w.gradients + price.gradients, saved, max(w.most, saved + taken.meanwhile), step, w,
                w.again + again, w.held + taken.held,
            ))  # fmt: skip
        return found

    def _transitions(
        self, call: Call, state: State, outer: frozenset[int], room: float
    ) -> Iterator[Transition]:
        """Yield the steps that a state allows, each found once on a mesh.

        ``outer``  roots whose memory these calls do not count.
        ``room``   seconds that forward's transfers may take.
        """
        key = call, outer, self.remat == "host"
        known = self.table.transitions.setdefault(key, {})
        if state not in known:
            have = {x.number: x for x in state.alive}
            given = {r: have[r] for r in call.reads if r in have}
            offers = self._offers(call, {r: x.operand for r, x in given.items()})
            known[state] = have, given, dict.fromkeys(offers)
        have, given, found = known[state]
        for offer, taken in found.items():
            if offer.moves and self._least_moving(offer) > room:
                continue
            if taken is None:
                taken = found[offer] = [
                    Transition(step, given, *self._after(state, have, step, outer))
                    for step in self._steps(call, offer)
                ]
            yield from taken

    def _least_moving(self, offer: Offer) -> float:
        """Return the seconds that the transfers of an offer take at the least, found once."""
        key = id(offer)
        if key not in self.moving:
            assert offer.moves is not None
            self.moving[key] = self.holding.passes * self.rates.least(offer.moves)
        return self.moving[key]

    def _price(self, taken: Transition) -> Price:
        """Return what a step costs, found once."""
        given, key = taken.given, id(taken.step)
        if key not in self.priced:
            call, strategy, choice = taken.step
            gradients = sum(map(self.holding.gradients, choice.values()))
            gradients += self.holding.gathering(self._sums(call, strategy, choice))
            kept = sum(map(self.holding.kept, choice.values()))
            forward, back = self._seconds(taken.step, given)
            again = forward
            if strategy.again is not strategy.forward:
                again = self.holding.passes * self.rates.seconds(strategy.again)
            moving = self.holding.passes * self.rates.seconds(StepWork(away=strategy.away))
            self.priced[key] = Price(forward, back, again, kept, gradients, moving)
        return self.priced[key]

    def _seconds(self, step: WayStep, given: Mapping[int, Alive]) -> tuple[float, float]:
        call, strategy, choice = step
        forward, back = map(self.rates.seconds, (strategy.forward, strategy.backward))
        work, holding = StepWork(), self.holding
        sums = self._sums(call, strategy, choice)
        if holding.micros > 1:
            added = sum(map(holding.added, choice.values()))
            work.touched += 3 * (holding.micros - 1) * added
        for s in sums:
            r = call.reads[s.operand]
            operand = choice[r].operand if r in choice else given[r].operand
            work.join(holding.summed(s, holding.over(operand)))
        for leaf in choice.values():
            work.join(holding.reduced(leaf))
        for r in self.later[call]:
            # the gradients of several calls are added
            if given[r].operand.trained:
                work.touched += 3 * holding.micros * given[r].operand.nbytes
        late = self.rates.seconds(work) / holding.pipe
        if holding.host:
            # each micro-batch gathers, and sends its gradients to the host
            late *= holding.micros
        return holding.passes * forward, holding.passes * back + late

    def _sums(self, call: Call, strategy: CallStrategy, choice: Choice) -> tuple[GradientSum, ...]:
        """Return the sums of gradients that belong to a call: of micro-batches with its parameters."""
        if self.holding.micros == 1:
            return strategy.sums
        return tuple(self.holding.once(call.reads.index(i), leaf) for i, leaf in choice.items())

    def _after(
        self, state: State, have: Mapping[int, Alive], step: WayStep, outer: Collection[int]
    ) -> tuple[State, float, float, float]:
        """Return the state behind a call, and the bytes that ``Transition`` has."""
        call, strategy, choice = step
        alive = dict(have)
        for r in call.reads:
            if r not in alive:
                alive[r] = self._leaf(r, choice)
        saved, more = set(state.saved), float(strategy.beside)
        alive |= {x.number: x for x in _results(call, strategy, alive)}
        # beside what is saved on the device: in forward, and in backward
        there = back = near = 0
        if self.remat == "host":
            # what the call before it saved leaves late, and is fetched early
            more, near = float(strategy.near), strategy.away
            there, back = strategy.beside + state.near, near + state.near
        else:
            for x in _saved(call, strategy, alive):
                if x.counts and x.root not in saved and x.root not in self.step.parameters:
                    saved.add(x.root)
                    more += x.nbytes
        outside = {*outer, *saved, *self.step.parameters, *self.constants}
        values = {x.root: x.nbytes for x in alive.values() if x.root not in outside}
        at = self.at[id(call)]
        left = [x for n, x in alive.items() if self.step.ends.get(n, -1) > at]
        left.sort(key=lambda x: x.number)
        forward = strategy.most + there + sum(values.values())
        most = max(forward, strategy.most_back + back + self._gradients(left))
        held = strategy.held_beside + sum(alive[n].nbytes for n in step.held)
        after = State(tuple(left), frozenset(saved & {x.root for x in left}), near)
        return after, more, most, held

    def _gradients(self, alive: Sequence[Alive]) -> int:
        """Return the bytes of the gradients that backward brings to these values."""
        values = [x for x in alive if x.number not in self.step.parameters]
        return sum(x.operand.nbytes for x in values if x.operand.trained and x.counts)

    def _leaf(self, number: int, choice: Choice) -> Alive:
        leaf = choice.get(number)
        operand = (leaf and leaf.operand) or self.inputs.get(number) or self.constants[number]
        return Alive(number, operand, number, operand.nbytes)

    def _offers(self, call: Call, have: Mapping[int, Operand]) -> list[Offer]:
        """List the choices of a call's matrices with such operands, found once on a mesh."""
        key = call, tuple(have.items())
        if key not in self.table.offers:
            given = dict(have)
            for r in call.reads:
                if r not in given and r not in self.step.parameters:
                    given[r] = self._leaf(r, {}).operand
            fresh = [r for r in call.reads if r not in given]
            names = {r: self.step.parameters[r] for r in fresh if len(self.step.shapes[r]) < 2}
            leaves = {r: self.candidates.leaf(name, "...") for r, name in names.items()}
            whole = {r: leaf for r, leaf in leaves.items() if leaf}
            found = self.table.offers[key] = []
            for matrices in self.candidates.of_call(call, fresh, given):
                # which a product does not take are none, whatever is added to it
                with suppress(NoImplementation):
                    moves = self._moves(call, given, {**matrices, **whole})
                    found.append(Offer(given, matrices, whole, moves))
        return self.table.offers[key]

    def _moves(self, call: Call, given: Mapping[int, Operand], choice: Choice) -> Cost | None:
        """Return what forward moves at the least, of a call that multiplies by a matrix read first.

        Raises: NoImplementation where no algorithm takes the operands.
        """
        if call.name not in PRODUCTS or not any(len(self.step.shapes[r]) > 1 for r in choice):
            return None
        return self.table.moves(call, self._placed(call, given, choice))

    def _steps(self, call: Call, offer: Offer) -> list[WayStep]:
        """List the strategies of a choice of matrices, with the layouts of vectors."""
        if offer.steps is None:
            found = self._with_vectors(call, offer.given, offer.matrices, offer.whole)
            offer.steps = [WayStep(call, strategy, choice) for choice, strategy in found]
        return offer.steps

    def _with_vectors(
        self, call: Call, given: Mapping[int, Operand], matrices: Choice, whole: Choice
    ) -> Iterator[tuple[Choice, CallStrategy]]:
        """Yield the strategies with these matrices: vectors lie as the columns do, or ``whole``.

        The columns are those of the product, or of an operand where there is none.
        """
        turned = bool(matrices) and call.name == "linear"
        around = [leaf.operand for leaf in matrices.values()] or list(given.values())
        columns = [columns_of(x, turned) for x in around if x.place.dims]
        offer = self._offer(call, given, matrices, whole, columns)
        if offer:
            yield offer
            if matrices:
                return
        first = self._ask(call, given, {**matrices, **whole})
        if first is None:
            return
        found = None
        if whole and not offer:
            # its results tell which columns are split where the weight does not, or was read before
            columns = [columns_of(x) for x in first.outs if x.place.dims]
            found = self._offer(call, given, matrices, whole, columns)
        yield found or ({**matrices, **whole}, first)

    def _offer(
        self, call: Call, given: Mapping[int, Operand], matrices: Choice, whole: Choice,
        columns: Sequence[tuple[int, Dim]],
    ) -> tuple[Choice, CallStrategy] | None:  # fmt: skip
        """Return the strategy in which vectors of these columns' size lie as they do, if any is split."""
        split = self.candidates.beside([*whole], columns)
        if not split:
            return None
        choice = {**matrices, **whole, **split}
        found = self._ask(call, given, choice)
        return found and (choice, found)

    def _ask(self, call: Call, given: Mapping[int, Operand], choice: Choice) -> CallStrategy | None:
        found = self.table.ask(call, self._placed(call, given, choice))
        if isinstance(found, str):
            return None
        return found

    def _placed(self, call: Call, given: Mapping[int, Operand], choice: Choice) -> list[Operand]:
        """Return all operands of a call in their order."""
        places = {**given, **{r: leaf.operand for r, leaf in choice.items()}}
        return [places[r] for r in call.reads]


def _results(call: Call, strategy: CallStrategy, have: Mapping[int, Alive]) -> list[Alive]:
    """Return the results of a call; one that shares an operand's memory has its root."""
    found = []
    for number, operand, shared in zip(call.gives, strategy.outs, strategy.shares, strict=True):
        x = Alive(number, operand, number, operand.nbytes)
        if shared >= 0:
            source = have[call.reads[shared]]
            x = x._replace(root=source.root, nbytes=source.nbytes)
        found.append(x)
    return found


def _saved(call: Call, strategy: CallStrategy, have: Mapping[int, Alive]) -> list[Alive]:
    """Return the operands and the results that a call saves."""
    numbers = dict(enumerate(call.reads)) | {-1 - j: n for j, n in enumerate(call.gives)}
    return [have[numbers[k]] for k in strategy.saved]


def undominated(
    ways: Sequence[Way], remat: bool = False, room: float = 0.0, least: bool = False
) -> list[Way]:
    """Return the ways that no other beats in seconds and in each of their bytes, the fastest first.

    ``room``   bytes of a rank: of more than MANY ways those are left out that another beats but for
               a share GRAIN of it.
    ``least``  no other beats in their bytes, whatever the seconds.

    >>> ways = [Way(1, 1, saved=9), Way(2, 1, saved=9), Way(2, 2, saved=4)]
    >>> [w.saved for w in undominated(ways)]
    [9, 4]
    """
    if len(ways) == 1:
        return [*ways]
    costs = [w.costs(remat) for w in ways]
    if least:
        # of as many bytes the fastest is the first
        costs = [(0.0, *c[1:], c[0]) for c in costs]
    order = sorted(range(len(ways)), key=costs.__getitem__)
    found = _least(order, costs, 0.0)
    if len(found) > MANY:
        found = _least(found, costs, GRAIN * room)
    return [ways[at] for at in found]


def narrowed(found: dict[State, T], costs: Callable[[T], tuple[float, float]]) -> dict[State, T]:
    """Return the states in their order; of more than STATES, half by either cost, the least first."""
    if len(found) <= STATES:
        return found
    priced = {state: costs(x) for state, x in found.items()}
    order = (sorted(found, key=lambda state, i=i: priced[state][i]) for i in (0, 1))
    kept = {state for some in order for state in some[: STATES // 2]}
    return {state: x for state, x in found.items() if state in kept}


def _least_of(ways: Sequence[Way]) -> tuple[float, float]:
    """Return the least seconds of ways, and the least bytes that one holds between the passes."""
    return ways[0].seconds, min(w.kept + w.saved for w in ways)


def _least(order: Sequence[int], costs: Sequence[tuple[float, ...]], more: float) -> list[int]:
    """Return those that none before them beats in bytes, but for ``more``."""
    found: list[int] = []
    best: list[tuple[float, ...]] = []
    for at in order:
        _, end, held, most, kept, *_ = costs[at]
        # a loop takes half of the time of any()
        for c in best:
            if c[1] <= end and c[2] <= held and c[3] <= most and c[4] <= kept:
                break
        else:
            # moved once, not in each comparison
            best.append(tuple(c - more for c in costs[at]))
            found.append(at)
    return found
