"""Transfers that are posted and not yet waited for.

A transport writes into the memory of a transfer until it completes, and data that its peer has sent
stays in the connection: a work object that is dropped early blocks every later transfer there.  So
all posted transfers are kept here, in the order of posting, until they are waited for.  Where an
exception leaves a scope of the library (see scope.py), or a backward pass fails, ``drain`` waits
for the transfers left under way; if every rank raises at the same place, all of them complete.
"""

import atexit
import os
import sys
from collections.abc import Callable, Hashable

from shardlib.errors import RankFailed, ShardError

CHECKED = os.environ.get("SHARDLIB_CHECK", "0") not in ("", "0")
"""Whether check mode is on for the whole program."""

POSTED: dict[Hashable, Callable[[], object]] = {}
"""Transfer under way -> function that finishes it and removes the entry."""


def drain(error: BaseException | None = None) -> None:
    """Finish all transfers that ``error`` left under way; drop them if the transport failed.

    A holder of one of these transfers still finds its result in it.
    """
    if isinstance(error, GeneratorExit):
        # raised by garbage collection, at a time of its own
        return
    try:
        while POSTED and not isinstance(error, RankFailed):
            next(iter(POSTED.values()))()
    except Exception:
        # a peer is gone; the error that led here is more useful
        pass
    POSTED.clear()


def refuse_posted(op: str, before: int) -> None:
    """Raise if a call ends with posted transfers that were not waited for; complete them first.

    Raises: ShardError.
    """
    more = len(POSTED) - before
    if more > 0:
        drain()
        raise _forgotten(op, more)


def _forgotten(op: str, more: int) -> ShardError:
    what = "1 transfer that it posted was"
    if more > 1:
        what = f"{more} transfers that it posted were"
    return ShardError(f"{what} not waited for", op=op, fix="y = pending.wait()")


def _at_exit() -> None:
    """Print the transfers never waited for, when a program ends without an exception."""
    if POSTED and CHECKED and not hasattr(sys, "last_value"):
        print(_forgotten("check", len(POSTED)), file=sys.stderr)


atexit.register(_at_exit)
