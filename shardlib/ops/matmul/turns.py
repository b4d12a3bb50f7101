"""Products that follow each other: each starts the gather of the weight that the next one needs.

Forward, that is the next product of the last call, whose order is remembered; backward, the
product before.  What is gathered travels while the weight before it is multiplied, so one gathered
weight more is held at a time and nothing more is moved.  A prediction that fails costs its gather.

Source: Rajbhandari et al., arXiv 1910.02054, section 5.3, gathers each layer's weights as they are
needed; starting one layer early is Zhao et al., arXiv 2304.11277, section 3.3.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from torch import Tensor

from shardlib.collectives import Pending, all_gather, wrap
from shardlib.mesh import Mesh, bind
from shardlib.ops.matmul.schedule import Move, post
from shardlib.tensor import ShardedTensor, made_of

__all__ = ["Entry", "Turn", "idle", "in_turn", "next_turn", "planned", "read_again"]


T = TypeVar("T")


class Turn:
    """A product's weight, to be gathered by ``moves``; ``before`` and ``after`` it come these."""

    before: "Turn | None" = None
    after: "Turn | None" = None

    def __init__(self, w: Tensor, moves: tuple[Move, ...], mesh: Mesh) -> None:
        self.w, self.moves, self.mesh = w, moves, mesh
        self.coming: Pending | None = None

    def begin(self) -> None:
        """Start the gather, once."""
        if self.coming is None:
            with bind(self.mesh):
                self.coming = post(all_gather, wrap(self.w, self.mesh), self.moves)

    def taken(self) -> Pending | None:
        """The gather under way, for the one who waits for it."""
        coming, self.coming = self.coming, None
        return coming

    def onward(self) -> None:
        """Start what comes after it."""
        if self.after is not None:
            self.after.begin()

    def backward(self) -> None:
        """Start what came before it."""
        if self.before is not None:
            self.before.begin()

    def __del__(self) -> None:
        if self.coming is not None:  # nobody needed it: it must still arrive before its buffers go
            self.coming.wait()


class Entry(NamedTuple):
    """One product of a call: which parameter, whether transposed, and how it was gathered."""

    name: str
    turned: bool
    moves: tuple[Move, ...]


class _Line:
    """The products of one call so far.

    ``reads``  per product of the last call the first one that read the same X.
    """

    def __init__(self, order: list[Entry], weights: Mapping[str, Tensor], reads: list[int]) -> None:
        self.reads, self.read, self.firsts = reads, [], {}  # type: ignore[var-annotated]
        self.order, self.weights = order, weights
        self.names = {_place(w): name for name, w in weights.items()}
        self.seen: list[Entry] = []
        self.last: Turn | None = None
        self.next: Turn | None = None

    def turn(self, w: Tensor, moves: tuple[Move, ...], mesh: Mesh, again: bool) -> Turn:
        fits = self.next is not None and _same(self.next.w, w) and self.next.moves == moves
        here = self.next if fits and self.next is not None else Turn(w, moves, mesh)
        here.before, here.after = self.last, None
        if moves:
            here.after = self.next = self._following(w, moves, mesh)
        if again:
            self.last = here
        return here

    def again(self, x: ShardedTensor) -> bool | None:
        """Will a later product read this X?  As in the last call, as long as this one goes as that did.

        Else yes, though nobody knows: what is gathered for several moves no more than what is gathered for one, and
        only stays longer.
        """
        at = len(self.read)
        made_of(x)
        self.read.append(at if x.moved is None else self.firsts.setdefault(x.moved.serial, at))
        if self.reads[: at + 1] != self.read:
            return True if _NOW.guesses else None
        return self.read[-1] in self.reads[at + 1 :]

    def _following(self, w: Tensor, moves: tuple[Move, ...], mesh: Mesh) -> Turn | None:
        name = self.names.get(_place(w), "")
        turned = bool(name) and not _same(self.weights[name], w)
        self.seen.append(Entry(name, turned, moves))
        at = len(self.seen)
        if self.order[at - 1 : at] != self.seen[-1:] or at == len(self.order):
            return None
        follows = self.order[at]
        if not follows.name:
            return None
        w = self.weights[follows.name]
        return Turn(w.mT if follows.turned else w, follows.moves, mesh)


def _place(w: Tensor) -> tuple[int, int]:
    """The same for a tensor and its transpose."""
    return id(w if w._base is None else w._base), int(w.storage_offset())


def _same(a: Tensor, b: Tensor) -> bool:
    return _place(a) == _place(b) and a.shape == b.shape and a.stride() == b.stride()


class _Now(threading.local):
    line: _Line | None = None
    guesses = True
    learnt = 0  # calls that were found to read a value more than once


_NOW = _Now()


@contextmanager
def in_turn(order: list[Entry], weights: Mapping[str, Tensor], reads: list[int] | None = None) -> Iterator[None]:
    """Within it products follow each other as in ``order``, which is brought up to date at the end.

    ``weights``  the blocks that may be gathered early, by name.
    Every rank must run the same products.
    """
    before, _NOW.line = _NOW.line, _Line(order, weights, reads or [])
    try:
        yield
        order[:] = _NOW.line.seen
        if reads is not None:
            read = _NOW.line.read
            _NOW.learnt += reads != read and len(set(read)) < len(read)
            reads[:] = read
    finally:
        _NOW.line = before


@contextmanager
def idle() -> Iterator[None]:
    """Within it nothing is gathered early and no order is recorded: what runs is a repetition."""
    before, _NOW.line = _NOW.line, None
    try:
        yield
    finally:
        _NOW.line = before


def planned(plan: Callable[[], T]) -> T:
    """What ``plan`` gives when it is known how often values are read: at its second run, where the first found out."""
    before, _NOW.guesses = (_NOW.guesses, _NOW.learnt), False
    try:
        found = plan()
        return found if _NOW.learnt == before[1] else plan()
    finally:
        _NOW.guesses = before[0]


def next_turn(w: Tensor, moves: tuple[Move, ...], mesh: Mesh, again: bool) -> Turn:
    """The turn of the product that now runs; ``again``: backward will gather its weight once more."""
    return Turn(w, moves, mesh) if _NOW.line is None else _NOW.line.turn(w, moves, mesh, again)


def read_again(x: ShardedTensor) -> bool | None:
    """Will a later product of this call read X as it is?  None outside a call: nobody knows."""
    return None if _NOW.line is None else _NOW.line.again(x)
