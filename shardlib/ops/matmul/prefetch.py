"""Prefetch of gathered weights: each product starts the next one's all-gather, as FSDP does.

In forward, the next product is that of the last call, whose order is recorded; in backward, the
product before.  The gather runs while the weight before it is multiplied, so one gathered weight
more is held at a time and nothing more is moved.  A gather is used only for the weight that it was
made from; one that no product takes costs its bytes, and is waited for when the call, or the
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
from shardlib.ops.matmul.function import DimMove, post
from shardlib.tensor import ShardedTensor, made_of

T = TypeVar("T")


class Gather:
    """Gather of a product's weight by ``moves``, linked to the gathers ``before`` and ``after``.

    ``started``  the gathers of the same call that are under way, to find those never taken.
    """

    __slots__ = ("after", "before", "mesh", "moves", "started", "transfer", "w")

    def __init__(
        self, w: Tensor, moves: tuple[DimMove, ...], mesh: Mesh, started: "list[Gather]"
    ) -> None:
        self.w, self.moves, self.mesh, self.started = w, moves, mesh, started
        self.before: Gather | None = None
        self.after: Gather | None = None
        self.transfer: Pending | None = None

    def start(self) -> None:
        """Start the gather, once."""
        if self.transfer is None:
            with bind(self.mesh):
                self.transfer = post(all_gather, wrap(self.w, self.mesh), self.moves)
            self.started.append(self)

    def take(self) -> Pending | None:
        """Return the gather under way, for the product that waits for it."""
        transfer = self.transfer
        if transfer is not None:
            self.transfer = None
            self.started.remove(self)
        return transfer

    def start_next(self) -> None:
        """Start the gather that follows this one."""
        if self.after is not None:
            self.after.start()

    def start_previous(self) -> None:
        """Start the gather before this one; backward waits at its end for gathers not taken."""
        if self.before is not None and self.before.transfer is None:
            self.before.start()
            after_backward(self.before.drop, drain)

    def drop(self) -> None:
        """Wait for a gather that no product took: it must complete before its buffers are freed."""
        transfer = self.take()
        if transfer is not None:
            transfer.wait()


ALONE = Gather(None, (), None, [])  # type: ignore[arg-type]
"""The gather of a product that has no neighbours, and starts its own."""


class Entry(NamedTuple):
    """Product of a call: its parameter, whether transposed, and how it was gathered."""

    name: str
    transposed: bool
    moves: tuple[DimMove, ...]


class _ProductOrder:
    """Products of one call so far.

    ``order``    the products of the last call.
    ``weights``  the blocks that may be gathered early, by name.
    ``reads``    for each product of the last call, the first one that read the same X.
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

    def gather(self, w: Tensor, moves: tuple[DimMove, ...], mesh: Mesh, again: bool) -> Gather:
        """Return the gather of the current product; its successor is known from here on."""
        if not self.weights:
            # those of parts are gathered when they are read, and a gather keeps its weight
            return ALONE
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
        """Predict whether a later product reads this X, from the last call if this one is alike.

        Otherwise guess yes: a gather for several products moves no more than a gather for one, and
        is only kept longer.  While a call is planned, None instead of a guess.
        """
        at = len(self.read)
        made_of(x)
        facts = x.facts
        kept = facts is not None and facts.derived is not None
        self.read.append(self.firsts.setdefault(facts.serial, at) if kept else at)
        if self.reads[: at + 1] != self.read:
            return None if scope().listeners.rehearsal else True
        return self.read[-1] in self.reads[at + 1 :]

    def end(self) -> None:
        """Wait for every gather that no product took."""
        for gather in list(self.started):
            gather.drop()

    def _following(self, w: Tensor, moves: tuple[DimMove, ...], mesh: Mesh) -> Gather | None:
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
    """Return the same id for a tensor and its transpose, valid while the call holds its weights."""
    return id(w if w._base is None else w._base), int(w.storage_offset())


def _same(a: Tensor, b: Tensor) -> bool:
    return _place(a) == _place(b) and a.shape == b.shape and a.stride() == b.stride()


@contextmanager
def prefetching(
    order: list[Entry], weights: Mapping[str, Tensor], reads: list[int] | None = None
) -> Iterator[None]:
    """Expect products in the order of ``order``, which is updated at the end.

    ``weights``  the blocks that may be gathered early, by name.
    Every rank must run the same products.  A call in another thread
    may update ``order`` meanwhile.
    """
    call = _ProductOrder(list(order), weights, list(reads or []))
    try:
        with within(prefetch=call):
            yield
        order[:] = call.seen
        if reads is not None:
            reads[:] = call.read
    finally:
        call.end()


def not_prefetching() -> within:
    """Gather nothing early and record no order, for code that repeats a call."""
    return within(prefetch=None)


def planned(rehearse: Callable[[], object], plan: Callable[[], T]) -> T:
    """Return ``plan()``, run after ``rehearse()`` has recorded how often values are read.

    The rehearsal runs forward alone, about a third of a step.
    """
    with within(rehearsal=True):
        rehearse()
        return plan()


def next_gather(w: Tensor, moves: tuple[DimMove, ...], mesh: Mesh, again: bool) -> Gather:
    """Return the gather of the current product.

    ``again``: backward will gather its weight once more.
    """
    call = scope().call.prefetch
    return ALONE if call is None else call.gather(w, moves, mesh, again)
