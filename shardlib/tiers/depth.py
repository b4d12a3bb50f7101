"""Depth of reading ahead, from the seconds that uses and loads of chunks took.

A load is hidden if the uses between its posting and its chunk's use take as long as it does.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from shardlib.collectives import Moment
from shardlib.tiers.mover import Ticket

MOST = 8
"""Uses; a load that is not hidden so early waits for the link."""


def depth_of(uses: Sequence[float], loads: Sequence[float]) -> int:
    """Return how many uses early to post loads, so that each ends in time, and one more.

    ``uses``   seconds of each use of a step, in order.
    ``loads``  seconds of the load of each use's chunk.  It may wait for the load before it.

    >>> depth_of([1.0] * 6, [0.5] * 6), depth_of([1.0] * 6, [0.5, 0.5, 0.5, 2.5, 0.5, 0.5])
    (2, 4)
    """
    found = 1
    for at, load in enumerate(loads[: len(uses)]):
        n, covered = 0, 0.0
        while n < at and covered < load:
            n += 1
            covered += uses[at - n]
        if covered >= load:
            found = max(found, n)
    return min(found + 1, MOST)


class Times:
    """Seconds of each use of a step without the wait for its chunk, and of each chunk's load.

    A context is the wait: it ends a use, and begins the next.
    ``device``    the accelerator whose clock counts; None: the host's.
    ``measures``  whether they are noted; else it costs nothing.
    """

    def __init__(self, device: torch.device | None, measures: bool) -> None:
        self.device = device
        self.clear(measures)

    def clear(self, measures: bool) -> None:
        """Begin a step."""
        self.measures = measures
        self.loads: dict[str, Ticket] = {}
        self.began: list[Any] = []
        self.ended: list[Any] = []

    def __enter__(self) -> None:
        if self.measures and self.began:
            self.ended.append(self._now())

    def __exit__(self, *_: object) -> None:
        if self.measures:
            self.began.append(self._now())

    def depth(self, order: Sequence[str]) -> int:
        """Return the depth for a step of this order, which was measured."""
        self.__enter__()
        if self.device is not None and self.ended:
            self.ended[-1].event.synchronize()
        uses = [seconds(*span) for span in zip(self.began, self.ended, strict=True)]
        loads = {c: seconds(*t.span) for c, t in self.loads.items() if t.span is not None}
        return depth_of(uses, [loads.get(chunk, 0.0) for chunk in order])

    def _now(self) -> Any:
        return time.perf_counter() if self.device is None else Moment(self.device)


def seconds(began: Any, ended: Any) -> float:
    """Return the seconds between two moments of the host's clock or a device's."""
    if isinstance(began, Moment):
        return ended.seconds_since(began)
    return ended - began
