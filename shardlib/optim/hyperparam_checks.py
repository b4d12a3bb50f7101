"""Ranges of hyperparameters, checked when a transform is made, and rates at a step."""

import inspect
import math
from collections.abc import Callable
from functools import wraps
from numbers import Integral, Real
from typing import Any, NamedTuple, ParamSpec, TypeVar

from torch import Tensor

from shardlib.errors import BadArgument

__all__ = [
    "AMOUNT", "COUNT", "NUMBER", "POSITIVE", "SHARE", "STEPS", "Range", "Schedule", "at_step", "ranged"
]  # fmt: skip

Schedule = Callable[[int], float]
"""A hyperparameter as a function of the step, counted from 0."""

Hyper = ParamSpec("Hyper")
Made = TypeVar("Made")


class Range(NamedTuple):
    """A range of valid numbers, and its description in errors."""

    said: str
    fits: Callable[[Any], bool]
    whole: bool = False


AMOUNT = Range("0 or more, and finite", lambda n: 0 <= n < math.inf)
SHARE = Range("at least 0 and less than 1", lambda n: 0 <= n < 1)  # a weight of the old value
POSITIVE = Range("more than 0", lambda n: n > 0)
NUMBER = Range("a finite number", math.isfinite)
COUNT = Range("a whole number, 1 or more", lambda n: n >= 1, whole=True)
STEPS = Range("a whole number, 0 or more", lambda n: n >= 0, whole=True)

_NAMED = {
    **dict.fromkeys(("b1", "b2", "momentum", "decay"), SHARE),
    **dict.fromkeys(("lr", "eps", "weight_decay", "lr_decay", "start"), AMOUNT),
}


def ranged(
    fix: str = "", **ranges: Range
) -> Callable[[Callable[Hyper, Made]], Callable[Hyper, Made]]:
    """Check hyperparameters by the names of their arguments, as torch does.

    ``ranges``  of arguments without a common range.
    ``fix``     a valid call.
    ``None`` is valid if it is the default, a function where a schedule is.
    Raises: BadArgument for a number out of range, and for other types.

    >>> ranged()(lambda lr, b1=0.9: lr)(-1.0)
    Traceback (most recent call last):
    shardlib.errors.BadArgument: <lambda>: lr=-1.0 is not 0 or more, and finite...
    """
    known = _NAMED | ranges

    def around(make: Callable[Hyper, Made]) -> Callable[Hyper, Made]:
        own = inspect.signature(make).parameters
        names = tuple(own)

        @wraps(make)
        def made(*args: Hyper.args, **kwargs: Hyper.kwargs) -> Made:
            for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
                range_ = known.get(name) if name in own else None  # else Python refuses the call
                left = value is None and own[name].default is None if range_ else True
                if range_ is None or left or (name == "lr" and callable(value)):
                    continue
                if not _in(range_, value):
                    raise BadArgument(
                        f"{name}={value!r} is not {range_.said}",
                        op=make.__name__,
                        fix=fix or f"sl.optim.{make.__name__}(1e-3)",
                    )
            return make(*args, **kwargs)

        return made

    return around


def _in(range_: Range, value: Any) -> bool:
    if isinstance(value, Tensor):
        return not range_.whole
    kind = Integral if range_.whole else Real
    return isinstance(value, kind) and not isinstance(value, bool) and range_.fits(value)


def at_step(lr: float | Schedule, count: int) -> float:
    """Return the rate at step ``count``, from 0, of a number or a schedule.

    Raises: BadArgument if a schedule returns an invalid rate.
    """
    if not callable(lr):
        return lr
    rate = lr(count)
    if isinstance(rate, Real) and not AMOUNT.fits(rate):
        raise BadArgument(
            f"the schedule gives {rate} at step {count}: a rate is {AMOUNT.said}",
            op="schedule",
            fix="sl.optim.warmup_cosine(1e-3, 100, 1000)",
        )
    return rate
