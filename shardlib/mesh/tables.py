"""Constant tables on a device: each is copied there once, so that a step uploads nothing."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=4096)
def uploaded(
    numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Copy a tuple or a range to a device once; the tensor is shared, so nothing may write to it.

    It is made outside inference mode, even if the first call is under it: a later backward may
    save it.

    >>> uploaded((0, 2, 5), torch.device("cpu")) is uploaded((0, 2, 5), torch.device("cpu"))
    True
    """
    with torch.inference_mode(False):
        return torch.tensor(numbers, dtype=dtype, device=device)
