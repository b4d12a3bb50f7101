"""Prefetch of gathered weights: each product starts the next one's all-gather, as FSDP does.

Forward, the next one is that of the last call, whose order is remembered; backward, the product
before.  The gather travels while the weight before it is multiplied, so one gathered weight more is
held at a time and nothing more is moved.  A gather is handed over only to the very weight that it
was made of; one that no product takes costs its bytes, and is waited for when the call, or the
backward pass, ends.

Source: Rajbhandari et al., arXiv 1910.02054, section 5.3, gathers each layer's weights as they are
needed; starting one layer early is Zhao et al., arXiv 2304.11277, section 3.3.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from torch import Tensor

from shardlib._compat import after_backward
from shardlib.collectives import Pending, all_gather, wrap
from shardlib.mesh import Mesh, bind, drain, scope, within
from shardlib.ops.matmul.panels import Move, post
from shardlib.tensor import ShardedTensor, made_of

__all__ = [
    "Entry",
    "Gather",
    "next_gather",
    "not_prefetching",
    "planned",
    "prefetching",
]


T = TypeVar("T")


class Gather:
    """The gather of a product's weight by ``moves``; ``before`` and ``after`` it come these.

    ``started``  the gathers of the same call that are under way, for those that nobody takes.
    """

    __slots__ = ("after", "before", "mesh", "moves", "pending", "started", "w")

    def __init__(
        self, w: Tensor, moves: tuple[Move, ...], mesh: Mesh, started: "list[Gather]"
    ) -> None:
        self.w, self.moves, self.mesh, self.started = w, moves, mesh, started
        self.before: Gather | None = None
        self.after: Gather | None = None
        self.pending: Pending | None = None

    def start(self) -> None:
        """Start the gather, once."""
        if self.pending is None:
            with bind(self.mesh):
                self.pending = post(all_gather, wrap(self.w, self.mesh), self.moves)
            self.started.append(self)

    def take(self) -> Pending | None:
        """Give the gather under way, for the product that waits for it."""
        pending = self.pending
        if pending is not None:
            self.pending = None
            self.started.remove(self)
        return pending

    def start_next(self) -> None:
        """Start the gather that follows this one."""
        if self.after is not None:
            self.after.start()

    def start_previous(self) -> None:
        """Start the gather before this one; backward waits at its end for what nobody took."""
        if self.before is not None and self.before.pending is None:
            self.before.start()
            after_backward(self.before.drop, drain)

    def drop(self) -> None:
        """Wait for what no product took: it must arrive before its buffers go."""
        pending = self.take()
        if pending is not None:
            pending.wait()


class Entry(NamedTuple):
    """One product of a call: which parameter, whether transposed, and how it was gathered."""

    name: str
    transposed: bool
    moves: tuple[Move, ...]


class _Call:
    """The products of one call so far.

    ``order``    those of the last call.
    ``weights``  the blocks that may be gathered early, by name.
    ``reads``    per product of the last call the first one that read the same X.
    """

    def __init__(self, order: list[Entry], weights: Mapping[str, Tensor], reads: list[int]) -> None:
        self.order, self.weights = order, weights
        self.names = {_place(w): name for name, w in weights.items()}
        self.seen: list[Entry] = []
        self.last: Gather | None = None
        self.next: Gather | None = None
        self.started: list[Gather] = []
        self.reads = reads
        self.read: list[int] = []
        self.firsts: dict[int, int] = {}

    def gather(self, w: Tensor, moves: tuple[Move, ...], mesh: Mesh, again: bool) -> Gather:
        """Return the gather of the product that runs now, whose successor is known from here on."""
        expected = self.next
        if expected is not None and _same(expected.w, w) and expected.moves == moves:
            here = expected
        else:
            here = Gather(w, moves, mesh, self.started)
            if moves and expected is not None:
                expected.drop()
        here.before, here.after = self.last, None
        if moves:
            here.after = self.next = self._following(w, moves, mesh)
        if again:
            self.last = here
        return here

    def again(self, x: ShardedTensor) -> bool | None:
        """Say whether a later product reads this X: as in the last call, if this one goes alike.

        Else yes, though it is a guess: what is gathered for several moves no more than what is
        gathered for one, and only stays longer.
        """
        at = len(self.read)
        made_of(x)
        self.read.append(at if x.made is None else self.firsts.setdefault(x.made.serial, at))
        if self.reads[: at + 1] != self.read:
            return True if scope().rehearsal is None else None
        return self.read[-1] in self.reads[at + 1 :]

    def end(self) -> None:
        """Wait for every gather that no product took."""
        for gather in list(self.started):
            gather.drop()

    def _following(self, w: Tensor, moves: tuple[Move, ...], mesh: Mesh) -> Gather | None:
        name = self.names.get(_place(w), "")
        transposed = bool(name) and not _same(self.weights[name], w)
        self.seen.append(Entry(name, transposed, moves))
        at = len(self.seen)
        if self.order[at - 1 : at] != self.seen[-1:] or at == len(self.order):
            return None
        follows = self.order[at]
        if not follows.name:
            return None
        w = self.weights[follows.name]
        return Gather(w.mT if follows.transposed else w, follows.moves, mesh, self.started)


def _place(w: Tensor) -> tuple[int, int]:
    """Return what is the same for a tensor and its transpose alone: the call holds its weights."""
    return id(w if w._base is None else w._base), int(w.storage_offset())


def _same(a: Tensor, b: Tensor) -> bool:
    return _place(a) == _place(b) and a.shape == b.shape and a.stride() == b.stride()


class _Rehearsal:
    """A plan of a call without guesses; ``learnt`` counts calls reading a value repeatedly."""

    learnt = 0


@contextmanager
def prefetching(
    order: list[Entry], weights: Mapping[str, Tensor], reads: list[int] | None = None
) -> Iterator[None]:
    """Expect products in the order of ``order``, which is brought up to date at the end.

    ``weights``  the blocks that may be gathered early, by name.
    Every rank must run the same products.  Another thread's call
    may bring ``order`` up to date meanwhile.
    """
    call, rehearsal = _Call(list(order), weights, list(reads or [])), scope().rehearsal
    try:
        with within(prefetch=call):
            yield
        order[:] = call.seen
        if reads is not None:
            if rehearsal is not None:
                rehearsal.learnt += call.reads != call.read and len(set(call.read)) < len(call.read)
            reads[:] = call.read
    finally:
        call.end()


def not_prefetching() -> within:
    """Gather nothing early and record no order: what runs inside is a repetition."""
    return within(prefetch=None)


def planned(rehearse: Callable[[], object], plan: Callable[[], T]) -> T:
    """Give what ``plan`` gives once it is known how often values are read, by ``rehearse``.

    That is forward alone, which takes a third of a step.
    """
    rehearsal = _Rehearsal()
    with within(rehearsal=rehearsal):
        rehearse()
        return plan()


def next_gather(w: Tensor, moves: tuple[Move, ...], mesh: Mesh, again: bool) -> Gather:
    """Give the gather of the product that runs now.

    ``again``: backward will gather its weight once more.
    """
    call = scope().prefetch
    return Gather(w, moves, mesh, []) if call is None else call.gather(w, moves, mesh, again)
