"""Learning rate schedules: functions of the step, counted from 0.

Every transform that takes a rate takes a schedule instead.  The transform that counts steps calls
it once per update: its value at step i is the rate of update i + 1.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from shardlib.errors import ShardError
from shardlib.optim.transform import STEPS, Schedule, ranged

Shape = Literal["linear", "cosine", "sqrt"]


@ranged("sl.optim.constant(1e-3)")
def constant(value: float) -> Schedule:
    """Return the same value at every step.

    >>> constant(0.1)(1000)
    0.1
    """
    return lambda step: value


@ranged("sl.optim.linear(0.0, 1e-3, 100)")
def linear(start: float, end: float, steps: int) -> Schedule:
    """Go from ``start`` at step 0 to ``end`` at step ``steps`` in a line, constant after it.

    >>> f = linear(0.0, 1.0, 4)
    >>> [f(i) for i in (0, 1, 4, 9)]
    [0.0, 0.25, 1.0, 1.0]
    """
    return _fall(start, end, steps, "linear")


@ranged("sl.optim.cosine(1e-3, 0.0, 1000)")
def cosine(start: float, end: float, steps: int) -> Schedule:
    """Go from ``start`` to ``end`` in half a period of a cosine, constant after ``steps``.

    Source: Loshchilov and Hutter, arXiv 1608.03983, equation 5.

    >>> f = cosine(1.0, 0.0, 4)
    >>> [round(f(i), 4) for i in (0, 1, 2, 4, 9)]
    [1.0, 0.8536, 0.5, 0.0, 0.0]
    """
    return _fall(start, end, steps, "cosine")


@ranged("sl.optim.warmup_cosine(1e-3, 100, 1000)")
def warmup_cosine(
    peak: float, warmup: int, steps: int, *, start: float = 0.0, end: float = 0.0
) -> Schedule:
    """Rise from ``start`` to ``peak`` in ``warmup`` steps, fall to ``end`` at step ``steps``.

    Raises: ShardError if the warmup is longer than ``steps``.

    >>> f = warmup_cosine(1.0, 2, 6)
    >>> [round(f(i), 4) for i in range(8)]
    [0.0, 0.5, 1.0, 0.8536, 0.5, 0.1464, 0.0, 0.0]
    """
    if warmup > steps:
        raise ShardError(
            f"a warmup of {warmup} steps in a schedule of {steps}",
            op="warmup_cosine",
            fix=f"sl.optim.warmup_cosine({peak}, {steps // 20}, {steps})",
        )
    return joined([linear(start, peak, warmup), cosine(peak, end, steps - warmup)], [warmup])


@ranged("sl.optim.wsd(1e-3, 100, 1000, 200)", decay=STEPS)
def wsd(
    peak: float,
    warmup: int,
    steps: int,
    decay: int,
    *,
    start: float = 0.0,
    end: float = 0.0,
    shape: Shape = "linear",
) -> Schedule:
    """Warm up, stay at the peak, and decay over the last ``decay`` steps: warmup, stable, decay.

    ``shape``  of the decay; "sqrt" is ``1 - sqrt(t)``, the best in the second source.
    Source: Hu et al., arXiv 2404.06395, section 4; Haegele et al., arXiv 2405.18392.
    Raises: ShardError if warmup and decay do not fit into ``steps``.

    >>> f = wsd(1.0, 2, 8, 4)
    >>> [f(i) for i in range(10)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if warmup + decay > steps:
        raise ShardError(
            f"{warmup} steps of warmup and {decay} of decay in a schedule of {steps}",
            op="wsd",
            fix=f"sl.optim.wsd({peak}, {steps // 20}, {steps}, {steps // 5})",
        )
    if shape not in _FALLS:
        raise ShardError(
            f"a decay is one of {', '.join(map(repr, _FALLS))}, not {shape!r}",
            op="wsd",
            fix=f"sl.optim.wsd({peak}, {warmup}, {steps}, {decay}, shape='sqrt')",
        )
    fall = _fall(peak, end, decay, shape)
    parts = [linear(start, peak, warmup), constant(peak), fall]
    return joined(parts, [warmup, max(steps - decay, warmup)])


def joined(parts: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Run one schedule after another; each counts its own steps from 0.

    ``boundaries``  the step at which each part but the first begins.
    Raises: ShardError unless there is one boundary fewer than parts, in ascending order.

    >>> f = joined([constant(1.0), linear(1.0, 0.0, 2)], [3])
    >>> [f(i) for i in range(6)]
    [1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    parts, starts = list(parts), [0, *boundaries]
    if len(parts) != len(starts) or starts != sorted(starts):
        raise ShardError(
            f"{len(parts)} schedules and the boundaries {list(boundaries)}",
            op="joined",
            fix="sl.optim.joined([sl.optim.linear(0.0, 1e-3, 100), sl.optim.constant(1e-3)], "
            "[100])",
        )

    def schedule(step: int) -> float:
        at = max(i for i, s in enumerate(starts) if i == 0 or step >= s)
        return parts[at](step - starts[at])

    return schedule


_FALLS: dict[str, Callable[[float], float]] = {  # from 1 at 0 to 0 at 1
    "linear": lambda t: 1 - t,
    "cosine": lambda t: (1 + math.cos(math.pi * t)) / 2,
    "sqrt": lambda t: 1 - math.sqrt(t),
}


def _fall(start: float, end: float, steps: int, shape: Shape) -> Schedule:
    def schedule(step: int) -> float:
        if step >= steps:
            return end
        return end + (start - end) * _FALLS[shape](max(step, 0) / steps)

    return schedule
