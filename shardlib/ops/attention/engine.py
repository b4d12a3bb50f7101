"""Engine: the protocol of an attention algorithm over a split sequence, and its Plan and Job.

An *engine* runs one attention whose sequence is split: a frozen value with five methods and its
arguments as fields, in one file that ends with its registration.  ``plan`` turns a case (positions,
mask, sizes) into a *plan*, a value that states its price before anything runs; ``forward`` and
``backward`` run a plan as a *job*, on raw blocks.

A *chunk* is a range of rows of every rank's block that is sent round.  Its route lists the rank
that holds each owner's chunk at each step.  Sums (the gradients of keys) visit the same ranks one
step later and are then sent to their owner, so forward and backward take one hop per stop, and a
full ring 3 (p - 1) transfers in all.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from shardlib.cost import Cost, moving
from shardlib.errors import ShardError
from shardlib.layouts import Layout
from shardlib.memory_tracker import Live
from shardlib.mesh import Link, Mesh, rank_along, record
from shardlib.ops.attention.case import AttentionCase, Runs, Sizes, length
from shardlib.ops.attention.kernels import Kernel, pick, pieces
from shardlib.ops.attention.masks import At, Full, Mask
from shardlib.ops.registry import Match, choose, pinned
from shardlib.ops.registry import algorithm as enter

Pairs = tuple[tuple[int, int], ...]
"""(source, destination) of one transfer, as positions on the ring."""


@dataclass(frozen=True)
class RowChunk:
    """Rows lo:hi of each owner's block, and the ranks that they visit.

    ``at[t - 1][owner]``  the rank that holds them at step t >= 1, None after the last.
    ``since[t - 1]``      the step at which that rank's sender had them: t - 1, or
                          earlier where they are sent in two directions.
    """

    lo: int
    hi: int
    at: tuple[tuple[int | None, ...], ...]
    since: tuple[int, ...]

    def place(self, step: int, owner: int) -> int | None:
        """Return the rank that holds an owner's rows at a step."""
        if step == 0:
            return owner
        return self.at[step - 1][owner] if step <= len(self.at) else None

    def owner(self, step: int, rank: int) -> int | None:
        """Return the owner of the rows that a rank holds at a step."""
        places = self.at[step - 1] if step else range(len(self.at[0]))
        return next((j for j, r in enumerate(places) if r == rank), None)

    def hops(self, step: int) -> Pairs:
        """List the transfers by which rows arrive at ``step``."""
        return self._pairs(self.since[step - 1], step)

    def sum_hops(self, step: int) -> Pairs:
        """List the transfers by which sums are sent to the rank of ``step``."""
        return self._pairs(step - 1, step) if 1 < step <= len(self.at) else ()

    def home_hops(self, step: int) -> Pairs:
        """List the transfers that return sums to their owner at ``step``, after their last stop."""
        out = []
        for owner in range(len(self.at[0])) if self.at else ():
            source = self.place(step - 1, owner)
            if step > 1 and source is not None and self.place(step, owner) is None:
                out.append((source, owner))
        return tuple(out)

    def _pairs(self, before: int, step: int) -> Pairs:
        out = []
        for owner, target in enumerate(self.at[step - 1]):
            source = self.place(before, owner)
            if target is not None and source is not None:
                out.append((source, target))
        return tuple(out)


def once_round(p: int, rows: int, inner: int | None = None) -> tuple[RowChunk, ...]:
    """Return the route of whole blocks once round a ring of p ranks; () if nothing is sent.

    With ``inner``, round rings of ``inner`` ranks first, then on to the next of p / inner such
    rings: one hop in ``inner`` crosses between rings, and it is posted while the inner ring turns.

    >>> once_round(3, 8)[0].at
    ((1, 2, 0), (2, 0, 1))
    >>> [chunk.since for chunk in once_round(4, 8, inner=2)]
    [(0, 0, 2)]
    """
    inner = inner or p
    at, since = [], []
    for step in range(1, p):
        outer, turn = divmod(step, inner)
        rings = p // inner
        at.append(
            tuple(
                (j // inner + outer) % rings * inner + (j % inner + turn) % inner for j in range(p)
            )
        )
        since.append(step - 1 if turn else step - inner)
    return (RowChunk(0, rows, tuple(at), tuple(since)),) if at and rows else ()


Opt = Tensor | None
"""A term of the scores that need not be given: the bias [.., lq, t], the sink [1, h, 1]."""

Saved = tuple[Tensor, ...]
"""Tensors that forward saves; q, k and v come first where the engine ``saves_operands``."""

Outputs = tuple[Tensor, Tensor, Saved]
"""(out [.., h, lq, e], lse [.., h, lq], saved): out and lse in the dtype of sums."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""(dq, dk, dv, dbias) in the dtype of sums; dbias None where it is not needed."""

Given = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""(dout, dlse, out, lse) of a rank's rows; dlse None where lse has no gradient."""

Areas = tuple[tuple[int, ...], ...]
"""For each step and rank, the scores that are computed for each head."""


class AttentionMove(NamedTuple):
    """Transfer: bytes that a rank receives (the mean over the ring), and messages.

    >>> block, ranks = 4096, 4
    >>> AttentionMove(bytes=(ranks - 1) * block, messages=ranks - 1)  # an all-gather
    AttentionMove(bytes=12288, messages=3)
    """

    bytes: Fraction | int
    messages: int


class Moves(NamedTuple):
    """Transfers of both passes.

    >>> import torch, shardlib as sl
    >>> with sl.record(s=4):  # blocks of 16 keys and 16 values of 8 fp32, from 3 other ranks
    ...     q = sl.shard(torch.empty(1, 1, 64, 8, device="meta"), sl.Ring("s", 2))
    ...     plan = sl.planning.attention_plan(q, q, q, algorithm="allgather")
    >>> plan.engine.moves(plan).forward
    [AttentionMove(bytes=3072, messages=3)]
    """

    forward: list[AttentionMove]
    backward: list[AttentionMove]


class Engine(Protocol):
    """Algorithm of attention over a split sequence.

    ``name``            the name for ``sl.algorithm(attention=name)`` and ``sl.why``.
    ``saves_operands``  whether the saved tensors begin with q, k and v as given, which second
                        derivatives need; without them these are refused.
    An engine is hashable, and equal to engines that compute the same.  Storage is raw (``[ranks,
    *block]`` under simulate): ``local_queries`` lists the ranks that run in this process and a view
    of each one's block.  Rows without allowed keys have out 0 and lse -inf.
    ``sl.testing.check_engine`` tests an engine for all of this.  This one gathers all keys at once:

    >>> from dataclasses import dataclass
    >>> import torch, shardlib as sl
    >>> from shardlib.extend import *
    >>> @dataclass(frozen=True)
    ... class GatherAll(Engine):
    ...     name = "gather_all"
    ...
    ...     def plan(self, case):
    ...         return case.unsplit() or AttentionPlan(self, case)
    ...
    ...     def moves(self, plan):
    ...         z, n = plan.case.sizes, plan.p - 1  # keys, then values, from n ranks each
    ...         words = [n * z.b * z.g * z.lk * width for width in (z.d, z.e)]
    ...         gathers = [AttentionMove(w * z.itemsize, n) for w in words]
    ...         return Moves(gathers, gathers + [AttentionMove(w * z.acc_itemsize, n) for w in words])
    ...
    ...     def forward(self, job, q, k, v, bias, sink):
    ...         keys, values = (gathered(job, x, job.plan.k_runs) for x in (k, v))
    ...         every = (Run(0, 1, keys.shape[-2]),)  # the positions of all keys
    ...         out, lse = started(q, v.shape[-1])
    ...         for rank in local_queries(job, q, bias):
    ...             view, at = rank.view, positions(every, q.device)
    ...             held = view(keys), view(values), at, view(out), view(lse)
    ...             rank.attend(rank.calls(every), *held)
    ...         return out, add_sink(out, lse, sink), (q, k, v)
    ...
    ...     def backward(self, job, saved, bias, sink, given, wants_bias):
    ...         (q, k, v), runs = saved, job.plan.k_runs
    ...         keys, values = (gathered(job, x, runs) for x in (k, v))
    ...         every = (Run(0, 1, keys.shape[-2]),)
    ...         dq, dk, dv = (sums_like(x) for x in (q, keys, values))
    ...         dbias = sums_like(bias) if wants_bias else None
    ...         for rank in local_queries(job, q, bias):
    ...             view, at = rank.view, positions(every, q.device)
    ...             rank.attend_back(
    ...                 rank.calls(every), view(keys), view(values), at, viewed(given, view),
    ...                 view(dq), lambda: (view(dk), view(dv)), None if dbias is None else view(dbias))
    ...         rows = k.shape[-2]
    ...         return dq, scattered(job, dk, runs, rows), scattered(job, dv, runs, rows), dbias
    >>> sl.testing.check_engine(GatherAll())  # dense values and gradients, the stated bytes
    >>> _ = register_engine(GatherAll())
    >>> with sl.simulate(s=4):
    ...     q = sl.shard(torch.randn(1, 2, 8, 4), sl.Ring("s", dim=2))
    ...     out = sl.ring_attention(q, q, q, algorithm="gather_all")
    >>> remove("attention", "gather_all")
    """

    name: str
    saves_operands: bool = True

    @abstractmethod
    def plan(self, case: AttentionCase) -> "AttentionPlan | str":
        """Plan a case, or return why the engine does not fit it."""

    @abstractmethod
    def moves(self, plan: "AttentionPlan") -> Moves:
        """List the transfers; ``check_engine`` compares them with counted ones."""

    @abstractmethod
    def forward(
        self, job: "AttentionJob", q: Tensor, k: Tensor, v: Tensor, bias: Opt, sink: Opt
    ) -> Outputs:
        """Attend; a bias has this rank's rows and all keys, and a sink is [1, h, 1]."""

    @abstractmethod
    def backward(
        self,
        job: "AttentionJob",
        saved: Saved,
        bias: Opt,
        sink: Opt,
        given: Given,
        wants_bias: bool,
    ) -> Gradients:
        """Return the gradients; that of the sink is computed by the caller, from out and lse."""

    def areas(self, plan: "AttentionPlan") -> Areas:
        """Count the computed scores; unless overridden, one step computes those the mask needs."""
        case = plan.case
        return (
            tuple(
                sum(c.area for k in case.k_runs for c in pieces(q, k, case.mask))
                for q in case.q_runs
            ),
        )

    def seconds(self, plan: "AttentionPlan", link: Link, flops: float) -> float:
        """Estimate forward and backward; unless overridden, transfers and compute are added."""
        moved = plan.forward + plan.backward
        # backward has 5 products for the 2 of forward, 2.5 times the work (FlashAttention-2)
        return (
            3.5 * plan.computing(flops)
            + link.alpha * moved.messages
            + link.beta * float(moved.bytes)
        )


@dataclass(frozen=True, repr=False)
class AttentionPlan:
    """Plan of one attention: an engine, a case, and what the engine derived from it.

    ``chunks``  ranges of rows that are sent, with their routes, if there are any.
    ``inner``   the plan that runs while the sequence is less split (ulysses, usp).
    ``note``    text that ``sl.why`` adds to the price.

    >>> import torch, shardlib as sl
    >>> with sl.record(s=4):
    ...     q = sl.shard(torch.empty(1, 8, 64, 32, device="meta"), sl.Ring("s", 2, "zigzag"))
    ...     full = sl.planning.attention_plan(q, q, q, sl.masks.Causal(), "ring")
    ...     less = sl.planning.attention_plan(q, q, q, sl.masks.Causal(), "ring_bidirectional")
    >>> full.steps, less.forward.bytes / full.forward.bytes, set(full.flops)
    (3, Fraction(3, 4), {532480})
    >>> full
    AttentionPlan(ring of 4 ranks, 3 steps)
    """

    engine: Engine
    case: AttentionCase
    chunks: tuple[RowChunk, ...] = ()
    inner: "AttentionPlan | None" = None
    note: str = ""

    @property
    def algorithm(self) -> str:
        return self.engine.name

    @property
    def p(self) -> int:
        """Count the ranks of the ring."""
        return self.case.p

    @property
    def q_runs(self) -> Runs:
        return self.case.q_runs

    @property
    def k_runs(self) -> Runs:
        return self.case.k_runs

    @property
    def mask(self) -> Mask:
        return self.case.mask

    @property
    def steps(self) -> int:
        """Count the steps of the chunks' routes."""
        return max((len(chunk.at) for chunk in self.chunks), default=0)

    @property
    def forward(self) -> Cost:
        """Price the forward pass: bytes and messages."""
        return self._cost(self.engine.moves(self).forward)

    @property
    def backward(self) -> Cost:
        """Price the backward pass: bytes and messages."""
        return self._cost(self.engine.moves(self).backward)

    def _cost(self, moves: list[AttentionMove]) -> Cost:
        return sum((moving(self.case.axes, nbytes, messages) for nbytes, messages in moves), Cost())

    @property
    def areas(self) -> Areas:
        """Count the computed scores of each head, per step and rank."""
        return self.engine.areas(self)

    @property
    def flops(self) -> tuple[int, ...]:
        """Count each rank's flops of the forward pass; backward has five products for these two."""
        z = self.case.sizes
        per_score = z.b * z.h * 2 * (z.d + z.e)
        return tuple(sum(areas) * per_score for areas in zip(*self.areas, strict=True))

    def computing(self, flops: float) -> float:
        """Estimate the compute time of the busiest rank in the forward pass, in seconds."""
        return max(self.flops) / flops

    def __repr__(self) -> str:
        return f"AttentionPlan({self.algorithm} of {self.p} ranks, {self.steps} steps)"


@dataclass(frozen=True, eq=False)
class AttentionJob:
    """Plan with everything needed to run it except the tensors.

    ``at``     a rank's coordinate -> the global batch entries and heads of its block.
    ``whole``  (heads, length of q, length of k) of the global tensors, for the keys of dropout.

    >>> import torch, shardlib as sl
    >>> from shardlib.ops.attention.engines.ring import PassQ
    >>> class Told(PassQ):
    ...     def forward(self, job, q, k, v, bias, sink):
    ...         print(job.plan, job.axes, job.scale, list(q.shape))  # q [ranks, b, h, s/2, d]
    ...         return super().forward(job, q, k, v, bias, sink)
    >>> with sl.simulate(s=2):
    ...     q = sl.shard(torch.zeros(1, 1, 8, 4), sl.Ring("s", 2))
    ...     _ = sl.ring_attention(q, q, q, algorithm=Told())
    AttentionPlan(pass_q of 2 ranks, 1 steps) ('s',) 0.5 [2, 1, 1, 4, 4]
    """

    mesh: Mesh
    plan: AttentionPlan
    scale: float
    kernel: Kernel
    at: Callable[[dict[str, int]], At]
    whole: tuple[int, int, int]
    dropout: float = 0.0
    seed: int = 0

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """List the mesh axes of the ring, major first."""
        return self.plan.case.axes

    @cached_property
    def mask(self) -> Mask:
        return self.plan.case.mask

    def place(self, coord: dict[str, int], axes: tuple[str, ...] | None = None) -> int:
        """Return a rank's index on the ring, or on the given axes."""
        return rank_along(self.axes if axes is None else axes, coord, self.mesh.axes)


E = TypeVar("E", bound=Engine)


def register_engine(engine: E, order: int | None = None) -> E:
    """Register an engine under its name; one of the same name is replaced.

    ``order``  breaks ties: the lowest runs; the library's own are below 100.

    >>> import torch, shardlib as sl
    >>> from shardlib.ops.attention.engines.allgather import AllGather
    >>> class Eager(AllGather):
    ...     name = "eager"
    >>> _ = register_engine(Eager())
    >>> with sl.record(s=2):
    ...     q = sl.shard(torch.empty(1, 1, 8, 4, device="meta"), sl.Ring("s", 2))
    ...     price = dict(sl.why("attention", q, q, q).verdicts)["eager"]
    >>> price.forward.bytes, price.forward.messages
    (128, 1)
    >>> sl.extend.remove("attention", "eager")
    """
    enter("attention", name=engine.name, order=order)(partial(_match, engine))
    return engine


def _match(engine: Engine, case: AttentionCase) -> Match | str:
    """Price the engine's plan, with the compute time that transfers do not hide."""
    plan = engine.plan(case)
    if isinstance(plan, str):
        return plan
    forward, backward = plan.forward, plan.backward
    links = dict(case.links)
    slowest = max((links.get(a, Link()) for a in case.axes), key=lambda k: k.beta, default=Link())
    moved = replace(forward + backward, memory=0)
    hidden = engine.seconds(plan, slowest, case.rate) - moved.seconds(links)
    return Match(Layout(), plan, replace(forward, compute=hidden), backward, plan.note)


_matched = lru_cache(maxsize=256)(_match)


def planned(case: AttentionCase, algorithm: str | Engine) -> Match:
    """Plan by an engine: a value, a registered name, or with "auto" the cheapest."""
    if isinstance(algorithm, str):
        if algorithm == "auto":
            return choose("attention", case, lambda: case)
        with pinned(attention=algorithm):
            return choose("attention", case, lambda: case)
    match = _matched(_checked(algorithm), case)
    if isinstance(match, str):
        why = f"{algorithm} does not fit: {match}"
        fix, kind = case.fix()
        given = {"operands": case.operands(), "mesh": dict(case.mesh)}
        raise kind(why, op="ring_attention", fix=fix, **given)
    return replace(match, algorithm=algorithm.name)


def _checked(engine: Engine) -> Engine:
    if not callable(getattr(engine, "plan", None)):
        why = f"an algorithm is a name or an engine, not {engine!r}"
        fix = 'sl.ring_attention(q, k, v, algorithm="ring")'
        raise ShardError(why, op="ring_attention", fix=fix)
    return engine


class Peak(NamedTuple):
    """Bytes of one rank, besides its blocks of q, k, v, their gradients and the output.

    ``forward``, ``backward``  the most alive at once during each, saved tensors included.
    ``saved``                  kept from forward to backward besides q, k, v: out and lse, or more.
    """

    forward: int
    backward: int
    saved: int


def peak(plan: AttentionPlan, dtype: torch.dtype, rank: int = 0) -> Peak:
    """Predict the peak memory of ``rank`` in the plan's ring, for one attention and its gradient.

    >>> import shardlib as sl
    >>> with sl.record(s=4):
    ...     q = sl.shard(torch.empty(1, 4, 4096, 64, device="meta"), sl.Ring("s", 2, "zigzag"))
    ...     ring = sl.planning.attention_plan(q, q, q, algorithm="ring")
    ...     rsa = sl.planning.attention_plan(q, q, q, algorithm="rsa")
    >>> peak(rsa, torch.float32).backward / peak(ring, torch.float32).backward > 5
    True
    """
    engine = plan.engine
    q, k, v = blocks = _blocks(plan.case.sizes, dtype)
    job = _job(plan, q, v, rank)
    with Live(paper=True) as live:
        out, lse, saved = engine.forward(job, q, k, v, None, None)
        out = out.to(dtype)
        first = live.peak
        dout = torch.empty_like(out)
        made = {id(x): x for x in (out, lse, *saved) if all(x is not y for y in blocks)}
        kept = sum(x.untyped_storage().nbytes() for x in made.values())
        live.peak = live.now
        grads = engine.backward(job, saved, None, None, (dout, None, out, lse), False)
        last = live.peak - dout.untyped_storage().nbytes()
        del grads
    return Peak(first, last, kept)


def _blocks(z: Sizes, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (z.b, z.h, z.lq, z.d), (z.b, z.g, z.lk, z.d), (z.b, z.g, z.lk, z.e)
    q, k, v = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    return q, k, v


def _job(plan: AttentionPlan, q: Tensor, v: Tensor, rank: int) -> AttentionJob:
    """Return the job of one rank on a recorded mesh."""
    case, z = plan.case, plan.case.sizes
    mesh = record(**dict(case.mesh))
    mesh.coord = dict.fromkeys(mesh.axes, 0)
    for axis in reversed(case.axes):
        rank, mesh.coord[axis] = divmod(rank, mesh.axes[axis])
    at = At(torch.arange(z.b, device="cpu"), torch.arange(z.h, device="cpu"))
    s, t = (sum(map(length, runs)) for runs in (case.q_runs, case.k_runs))
    kernel = pick(q, v, type(case.mask) is not Full, False, case.device)
    return AttentionJob(mesh, plan, z.d**-0.5, kernel, lambda _: at, (z.h, s, t))
