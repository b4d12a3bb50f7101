"""fp32 values in two parts: a bfloat16, and the 16 bits that it lacks."""

import torch
from torch import Tensor

__all__ = ["halves", "joined"]


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into the nearest bfloat16, ties away from zero, and the 16 bits that it lacks.

    Rounding ties to even would need a 17th bit.

    >>> high, low = halves(torch.tensor([1.0, 3.14159]))
    >>> high, torch.equal(joined(high, low), torch.tensor([1.0, 3.14159]))
    (tensor([1.0000, 3.1406], dtype=torch.bfloat16), True)
    """
    bits = x.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def joined(high: Tensor, low: Tensor) -> Tensor:
    """Join ``halves`` to the original fp32 values."""
    bits = high.contiguous().view(torch.int16).to(torch.int32) << 16
    return (bits + low).view(torch.float32)
