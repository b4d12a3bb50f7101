"""Comparison of tensors and figures with those that are right, as the checks of this room do it."""

import torch
from torch import Tensor

from shardlib.placing import whole_of

__all__ = ["alike", "close", "difference", "normal", "whole"]


def normal(*shape: int, seed: int) -> Tensor:
    """Draw a tensor of normal numbers in fp64, on the CPU.

    >>> normal(2, 3, seed=0).shape, bool((normal(4, seed=1) == normal(4, seed=1)).all())
    (torch.Size([2, 3]), True)
    """
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=draw, device="cpu")


def whole(x: Tensor) -> Tensor:
    """Return the values of a tensor, sharded or not, outside the graph."""
    return whole_of(x).detach()


def difference(got: Tensor, want: Tensor, least: float = 1e-12) -> float:
    """Return the largest difference, relative to the largest finite value or to ``least``.

    Equal infinities do not differ, nor does NaN from NaN; tensors of other shapes differ by inf.

    >>> difference(torch.tensor([1.0, float("inf")]), torch.tensor([2.0, float("inf")]))
    0.5
    """
    got, want = whole(got), whole(want).to(got.device)
    if got.shape != want.shape:
        return float("inf")
    if not want.numel():
        return 0.0
    # inf - inf is NaN although they are equal
    same = (got == want) | (got.isnan() & want.isnan())
    if not (got.is_floating_point() or got.is_complex()):
        got, want = got.double(), want.double()
    apart = torch.where(same, torch.zeros_like(got), got - want).abs().max()
    off = float(apart / want.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp_min(least))
    return off if off == off else float("inf")


def close(law: str, got: Tensor, want: Tensor, most: float = 1e-12) -> None:
    """Check that two tensors differ by at most ``most``, of the largest value if that exceeds 1.

    Raises: AssertionError naming the law.
    """
    if got.shape != want.shape:
        raise AssertionError(f"{law}: has the shape {list(got.shape)}, not {list(want.shape)}")
    if not (off := difference(got, want, 1.0)) <= most:
        raise AssertionError(f"{law}: differs from dense by {off:.1e}")


def alike(law: str, got: object, want: object) -> None:
    """Check that two figures are equal.

    Raises: AssertionError naming the law.
    """
    if got != want:
        raise AssertionError(f"{law}: {got} and {want}")
