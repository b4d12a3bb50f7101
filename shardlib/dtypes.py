"""Half precision: which dtypes have it, and the dtype in which their values are summed."""

from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value", bound=Tensor)

HALF = frozenset({torch.bfloat16, torch.float16})


def is_half(x: Tensor) -> bool:
    return x.dtype in HALF


@cache
def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values are summed: fp32 for half precision, else their own.

    >>> wider(torch.bfloat16), wider(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in HALF else dtype


def wide(x: Value) -> Value:
    """Convert a value to the dtype in which it is summed."""
    return x.to(torch.float32) if x.dtype in HALF else x  # type: ignore[return-value]
