"""Routes of keys round a ring: the rank that holds a chunk of rows at each step, as a value.

A *chunk* is a range of rows of every rank's block that is sent round.  Its route lists the rank
that holds each owner's chunk at each step.  Sums (the gradients of keys) visit the same ranks one
step later and are then sent to their owner, so forward and backward take one hop per stop, and a
full ring 3 (p - 1) transfers in all.  Ring, bidirectional ring, double ring and halo differ in
routes.
"""

from dataclasses import dataclass

__all__ = ["RowChunk", "Pairs", "once_round"]

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
    inner = p if inner is None else inner
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
