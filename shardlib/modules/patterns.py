"""Patterns over names: of parameters in rules, of modules in ``remat``, of paths in optimizers."""

import fnmatch
import re
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Pattern", "matches"]

T = TypeVar("T")

Pattern = str | re.Pattern[str] | Callable[[str, T], bool]


def matches(pattern: Pattern[T], name: str, value: T) -> bool:
    """Check whether a glob, a regex or a function of name and value matches.

    >>> [matches(p, "h.0.mlp", None) for p in ("h.*", re.compile(r"mlp$"), lambda n, v: v is None)]
    [True, True, True]
    """
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(name, pattern)
    if isinstance(pattern, re.Pattern):
        return pattern.search(name) is not None
    return bool(pattern(name, value))
