"""Schedule of loads: which chunks a device holds at each moment of a step that repeats.

The order of uses repeats from step to step, so the next use of every chunk is known, and Belady's
rule applies: the chunk whose next use is last is dropped.  Chunks are loaded up to ``depth`` uses
early, where that drops nothing that is needed sooner.

Of L equal chunks read forward, then backward, with room for C, a step loads 2 (L - C); if the
update makes the copies stale, 2 L - C.

Source: Belady, IBM Systems Journal 5 (1966); Fang et al., arXiv 2108.05818, section 8.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

State = Literal["absent", "loading", "resident", "used", "dirty", "storing"]

TRANSITIONS: dict[tuple[State, str], State] = {
    ("absent", "load"): "loading",
    ("loading", "loaded"): "resident",
    ("resident", "use"): "used",
    ("used", "use"): "used",
    ("used", "release"): "resident",
    ("used", "update"): "dirty",
    ("dirty", "store"): "storing",
    ("storing", "stored"): "resident",
    ("resident", "drop"): "absent",
}
"""(state of a chunk's copy on the device, event) -> state; other events are faults.

A loading chunk is first waited for, a dirty one first stored: neither is dropped."""


class Uses:
    """The order in which the chunks of one step are used, which the next step repeats.

    >>> uses = Uses("abba")
    >>> uses.after("a", 0), uses.after("a", 3), uses.after("b", 2)  # of the next step: 4 + ...
    (3, 4, 5)
    """

    def __init__(self, order: Sequence[str], stale: Collection[str] = ()) -> None:
        self.order = tuple(order)
        self.stale = frozenset(stale)
        self._at: dict[str, list[int]] = {}
        for i, chunk in enumerate(self.order):
            self._at.setdefault(chunk, []).append(i)

    def after(self, chunk: str, at: int) -> int:
        """Return the position of a chunk's next use after ``at``, counted on into the next step.

        A copy that the update makes stale has no use there, nor a chunk that was never used.
        """
        found = self._at.get(chunk, [])
        i = bisect_right(found, at)
        if i < len(found):
            return found[i]
        if not found or chunk in self.stale:
            return 2 * len(self.order)
        return len(self.order) + found[0]

    def find(self, chunk: str, at: int) -> int:
        """Return the position at which a step goes on that uses this chunk after position ``at``.

        Uses between were left out; ``at`` if the chunk has none after it.
        """
        found = self._at.get(chunk, [])
        i = bisect_right(found, at)
        return next(iter(found[i:]), at)

    def coming(self, at: int, depth: int) -> Iterator[tuple[int, str]]:
        """List (position, chunk) of the next uses; a step's end is passed by valid copies alone."""
        n = len(self.order)
        for j in range(at + 1, min(at + depth, at + n) + 1):
            chunk = self.order[j % n]
            if j >= n and chunk in self.stale:
                return
            yield j, chunk


Move = tuple[Literal["load", "drop"], str]
"""A chunk, and whether it is loaded or dropped."""


def moves(
    uses: Uses, at: int, now: str, held: Collection[str], sizes: Mapping[str, int], room: int, depth: int = 1,
    used: Collection[str] = (),
) -> list[Move] | None:  # fmt: skip
    """List the moves at the moment at which chunk ``now`` is used; None if it does not fit.

    ``at``     the position in the order of uses.
    ``held``   chunks on the device.
    ``sizes``  bytes of each.
    ``room``   bytes that they may take together.
    ``depth``  how many uses early chunks are loaded.
    ``used``   other chunks in use, which stay.

    >>> uses, sizes = Uses("abccba"), dict.fromkeys("abc", 1)
    >>> moves(uses, 1, "b", {"a", "b"}, sizes, 2)
    [('drop', 'a'), ('load', 'c')]
    """
    found, here = list[Move](), dict.fromkeys(held)
    for j, chunk in ((at, now), *uses.coming(at, depth)):
        if chunk in here:
            continue
        need, rows, gone = sum(sizes[c] for c in (*here, chunk)) - room, [], list[str]()
        if need > 0:
            # ties are broken by name, the same on all ranks
            rows = [(uses.after(c, at), c) for c in here if c != now and c not in used]
        for last, other in sorted(rows, reverse=True):
            if need <= 0 or at < j >= last:
                break
            gone.append(other)
            need -= sizes[other]
        if need > 0:
            if j == at:
                return None
            break
        for other in gone:
            del here[other]
            found.append(("drop", other))
        here[chunk] = None
        found.append(("load", chunk))
    return found


def repeated(
    uses: Uses, sizes: Mapping[str, int], room: int, depth: int = 1
) -> list[list[Move]] | None:
    """List the moves at each use once steps repeat; None if the room is too small."""
    held: set[str] = set()
    found: list[list[Move]] = []
    for _ in range(8):
        begin, found = set(held), []
        for at, now in enumerate(uses.order):
            made = moves(uses, at, now, held, sizes, room, depth)
            if made is None:
                return None
            found.append(made)
            for kind, chunk in made:
                (held.discard if kind == "drop" else held.add)(chunk)
        held -= uses.stale
        if held == begin:
            break
    return found


def loads(uses: Uses, sizes: Mapping[str, int], room: int, depth: int = 1) -> list[str] | None:
    """List the chunks that a step loads once steps repeat; None if the room is too small.

    >>> sizes = dict.fromkeys("abcd", 1)
    >>> len(loads(Uses("abcddcba"), sizes, 2)), len(loads(Uses("abcddcba", "abcd"), sizes, 2))
    (4, 6)
    """
    found = repeated(uses, sizes, room, depth)
    if found is None:
        return None
    return [chunk for made in found for kind, chunk in made if kind == "load"]
