"""Ledger of bytes: what each memory tier holds, by kind, and the most that it may hold.

The ledger is the limit: memory is allocated only after it was entered, and an entry beyond the
budget raises.  Kinds are ``KINDS``.
"""

import threading
import weakref
from collections import Counter
from contextlib import suppress
from typing import Any

from shardlib.capacity import bytes_in
from shardlib.errors import BadArgument, ShardError

KINDS = ("parameters", "gathered", "gradients", "state", "activations", "buffers")
"""Parts of parameters; whole buckets; gradients; optimizer state; saved for backward; other."""


class Ledger:
    """Bytes of each tier and kind: held now, at the peak, and the budget.

    ``budget``  tier -> the most bytes, a number or a text such as "8GB"; None: any number.

    >>> ledger = Ledger(device="1MiB", host=None)
    >>> ledger.enter("device", "gradients", 600_000)
    >>> ledger.leave("device", "gradients", 600_000)
    >>> ledger.held["device"].total(), ledger.peak["device"], ledger.left("device")
    (0, 600000, 1048576)
    """

    def __init__(self, **budget: float | str | None) -> None:
        self.budget = {tier: tier_bytes(tier, most) for tier, most in budget.items()}
        self.held = {tier: Counter[str]() for tier in budget}
        self.peaks = {tier: Counter[str]() for tier in budget}
        self.peak = dict.fromkeys(budget, 0)
        # pools of buffers
        self.pools: weakref.WeakSet[Any] = weakref.WeakSet()
        # users of the device, each of which frees what it does not use now
        self.idle: list[weakref.ref[Any]] = []
        self._lock = threading.Lock()

    def left(self, tier: str) -> int:
        """Return the bytes that may still be entered."""
        most = self.budget[tier]
        return 1 << 62 if most is None else most - self.held[tier].total()

    def trim(self, tier: str) -> None:
        """Free the buffers of a tier that no tensor refers to."""
        for pool in list(self.pools):
            if pool.tier == tier:
                pool.trim()

    def free(self, nbytes: int, asking: object) -> None:
        """Have the other users of the device free what is idle, until it has so many bytes left."""
        for ref in list(self.idle):
            user = ref()
            if user is None:
                self.idle.remove(ref)
            elif user is not asking and nbytes > self.left("device"):
                user.give_way(nbytes)

    def enter(self, tier: str, kind: str, nbytes: int) -> None:
        """Enter bytes that are allocated next.  Raises: ShardError if they exceed the budget."""
        assert kind in KINDS, kind
        with self._lock:
            held = self.held[tier]
            if nbytes > self.left(tier):
                raise self.full(tier, f"{nbytes:,} bytes of {kind} do not fit", nbytes)
            held[kind] += nbytes
            self.peaks[tier][kind] = max(self.peaks[tier][kind], held[kind])
            self.peak[tier] = max(self.peak[tier], held.total())

    def leave(self, tier: str, kind: str, nbytes: int) -> None:
        """Remove bytes that were freed."""
        with self._lock:
            self.held[tier][kind] -= nbytes
            assert self.held[tier][kind] >= 0, f"more {kind} left the {tier} than were entered"

    def entries_of(self, owner: object) -> list[tuple[str, str, int]]:
        """Return a list for what an owner has entered: (tier, kind, bytes), which leave with it."""
        ours = list[tuple[str, str, int]]()
        weakref.finalize(owner, self.leave_all, ours).atexit = False
        return ours

    def leave_all(self, entries: list[tuple[str, str, int]]) -> None:
        """Remove all of an owner's entries."""
        while entries:
            self.leave(*entries.pop())

    def full(self, tier: str, why: str, nbytes: int) -> ShardError:
        """Build the error for bytes that do not fit beside those that are held."""
        held = self.held[tier]
        found = ", ".join(f"{kind} {n:,}" for kind, n in held.items() if n) or "nothing"
        return ShardError(
            f"{why}: the {tier} tier holds {found} of {self.budget[tier]:,} bytes",
            op="tiers",
            fix=f"sl.optim.Tiers({tier}={held.total() + nbytes})",
        )


def tier_bytes(tier: str, most: float | str | None) -> int | None:
    """Return a number of bytes that was given for a tier; None: any.  Raises: BadArgument."""
    if most is None:
        return None
    found = 0.0
    if isinstance(most, int | float | str) and not isinstance(most, bool):
        with suppress(BadArgument):
            found = bytes_in(most)
    if not 1 <= found < 1 << 62:
        fix = f'sl.optim.Tiers({tier}="8GB")'
        raise BadArgument(f"{tier}={most!r} is no number of bytes", op="tiers", fix=fix)
    return int(found)
