"""Transfers that are posted and not yet waited for.

A transport writes into the memory of a transfer until it is through, and what its peer sends stays
in the link: a work that is dropped before blocks every later transfer of that link.  So all that is
posted is kept here, in the order of posting, until it is waited for.  Where an exception leaves a
scope of the library (see scope.py), or a backward pass fails, ``drain`` waits for what it left
under way; where every rank raises at the same place, all of it arrives.
"""

import atexit
import os
import sys
from collections.abc import Callable, Hashable

from shardlib.errors import RankFailed, ShardError

__all__ = ["CHECKED", "POSTED", "drain", "refuse_posted"]

CHECKED = os.environ.get("SHARDLIB_CHECK", "0") not in ("", "0")
"""Whether check mode is on for the whole program."""

POSTED: dict[Hashable, Callable[[], object]] = {}
"""A transfer under way -> what finishes it, and takes it out of here."""


def drain(error: BaseException | None = None) -> None:
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
        drain()
        raise _forgotten(op, more)


def _forgotten(op: str, more: int) -> ShardError:
    return ShardError(
        f"{more} transfer{'s' * (more > 1)} that it posted {'were' if more > 1 else 'was'} not "
        "waited for",
        op=op,
        fix="y = pending.wait()",
    )


def _at_exit() -> None:
    """Tell what nobody waited for by the end of a program that no exception ended."""
    if POSTED and CHECKED and not hasattr(sys, "last_value"):
        print(_forgotten("check", len(POSTED)), file=sys.stderr)


atexit.register(_at_exit)
