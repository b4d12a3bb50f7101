"""Transfers that are posted and not yet waited for.

A transport writes into the memory of a transfer until it is through, and what its peer sends stays
in the link: a work that is dropped before blocks every later transfer of that link.  So all that is
posted is kept here, in the order of posting, until it is waited for.  Where an exception leaves a
scope of the library (see scope.py), or a backward pass fails, ``settle`` waits for what it left
under way; where every rank raises at the same place, all of it arrives.
"""

from collections.abc import Callable, Hashable

from shardlib.errors import RankFailed, ShardError

__all__ = ["POSTED", "refuse_posted", "settle"]

POSTED: dict[Hashable, Callable[[], object]] = {}
"""A transfer under way -> what finishes it, and takes it out of here."""


def settle(error: BaseException | None = None) -> None:
    """Finish all that is under way, since ``error`` left it; drop it where the transport failed.

    Who holds one of these transfers finds its result in it.
    """
    if isinstance(error, GeneratorExit):  # a generator is closed when its memory goes
        return
    try:
        while POSTED and not isinstance(error, RankFailed):
            next(iter(POSTED.values()))()
    except Exception:  # a peer is gone; the error that led here is the one to tell
        pass
    POSTED.clear()


def refuse_posted(op: str, before: int) -> None:
    """Refuse to end a call in which more was posted than waited for, once all has arrived.

    Raises: ShardError.
    """
    more = len(POSTED) - before
    if more > 0:
        settle()
        raise ShardError(
            f"{more} transfer{'s' * (more > 1)} that it posted {'were' if more > 1 else 'was'} "
            "not waited for",
            op=op,
            fix="y = pending.wait()",
        )
