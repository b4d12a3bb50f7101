"""Values that may be missing, and the parts of a text that are made of them."""

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


def unless_none(
    f: Callable[Concatenate[T, P], R], x: T | None, *args: P.args, **kwargs: P.kwargs
) -> R | None:
    """Call a function on a value and further arguments; None without a value.

    >>> unless_none(int, "7"), unless_none(int, "ff", 16), unless_none(int, None)
    (7, 255, None)
    """
    return None if x is None else f(x, *args, **kwargs)


def optional_text(form: str, value: object) -> str:
    """Write a value into a form; the empty text without a value, as of a count of 0.

    >>> names = ["a", "b", "c"]
    >>> names[0] + optional_text(" and {} more", len(names) - 1), optional_text(": {!r}", "")
    ('a and 2 more', '')
    """
    return form.format(value) if value else ""
