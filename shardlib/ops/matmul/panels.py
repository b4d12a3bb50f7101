"""Helpers of every matmul schedule: early transfers, accumulation in fp32, and K panels."""

import math
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import Pending, axis_size, psum, start

__all__ = [
    "DimMove",
    "accumulator",
    "add_product",
    "ahead",
    "cut",
    "nothing",
    "panels",
    "partial_product",
    "plus_product",
    "post",
    "rounded",
    "wide",
    "summed_product",
]


_HALF = frozenset({torch.bfloat16, torch.float16})


class DimMove(NamedTuple):
    """Gather a dimension over mesh axes, or scatter its sum; major axis first."""

    axes: tuple[str, ...]
    dim: int


def post(f: Any, x: Tensor, moves: tuple[DimMove, ...], **how: Any) -> Pending:
    """Start the moves: all but the last are waited for.

    Differentiable where a gradient is recorded.
    """
    if torch.is_grad_enabled():
        for move in moves:
            x = f(x, move.axes, move.dim, **how)
    elif moves:
        for move in moves[:-1]:
            x = f(x, move.axes, move.dim, **how)
        return start(f, x, moves[-1].axes, moves[-1].dim, **how)
    return Pending(lambda: x)


def ahead(posted: Iterable[tuple[Pending, ...]]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the operands of step 0, 1, ...; those of step k+1 are sent while step k is computed.

    ``posted`` starts the transfers of a step, one or two, when it is asked for them.
    """
    now: tuple[Pending, ...] = ()
    for coming in chain(posted, ((),)):
        # without a loop: for one or two transfers a comprehension costs more than the wait
        if now:
            yield (now[0].wait(),) if len(now) == 1 else (now[0].wait(), now[1].wait())
        now = coming


def nothing() -> None:
    """Do nothing; used in place of a wait before anything was posted."""


def accumulator(like: Tensor, *shape: int) -> Tensor:
    """Return zeros to add products into: fp32 for half precision operands."""
    return like.new_zeros(shape, dtype=wide(like.dtype))


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which products are summed: fp32 for half precision."""
    return torch.float32 if dtype in _HALF else dtype


def add_product(c: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to c in c's precision.

    a [.., M, K], b [.., K, N], c [.., M, N].
    """
    if c.dtype != a.dtype:
        a, b = a.to(c.dtype), b.to(c.dtype)
    if c.ndim == 2:
        c.addmm_(a, b)
    else:
        c.add_(a @ b)


def plus_product(c: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """Add a @ b to c, or return it if c is None: one pass less than adding to zeros.

    a [.., M, K], b [.., K, N], c [.., M, N].
    """
    if c is None:
        return partial_product(a, b)
    add_product(c, a, b)
    return c


def partial_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a @ b as a part of a sum: half precision operands in fp32.

    a [.., M, K], b [.., K, N].
    """
    if a.dtype not in _HALF:
        return a @ b
    if a.is_cuda and a.ndim == b.ndim == 2:
        # one kernel that reads half precision and writes fp32, without copies of a and b
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def rounded(
    c: Tensor,
    dtype: torch.dtype,
    over: tuple[str, ...] = (),
    wire: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """Round an accumulator plus a bias to the operands' ``dtype``, after a sum over further axes.

    ``wire``  parts are sent in the accumulator's dtype, since they were
              rounded to ``dtype`` already.
    """
    if bias is not None:
        # every rank adds its share, since the sum over ``over`` adds up all of them
        c = c + bias.to(c.dtype) / (axis_size(over) if over else 1)
    if over:
        return psum(c, over, out=dtype, wire=c.dtype if wire else dtype)
    return c if c.dtype == dtype else c.to(dtype)


def summed_product(
    a: Tensor, b: Tensor, over: tuple[str, ...], bias: Tensor | None = None
) -> Tensor:
    """Compute a @ b + bias, summed over mesh axes.

    Half precision is multiplied in fp32, and rounded to be sent and after the sum.
    """
    if over or (bias is not None and type(bias) is not Tensor):
        return rounded(partial_product(a, b), a.dtype, over, bias=bias)
    # F.linear adds the bias before it rounds, as ``rounded`` does
    return a @ b if bias is None else F.linear(a, b.mT, bias)


class Panels(NamedTuple):
    """K panels; ``steps``: A's owner along ``col`` and slot there, B's along ``row`` and slot."""

    steps: list[tuple[int, int, int, int]]
    of_a: int  # panels that a rank owns of A, and of B
    of_b: int


@lru_cache(maxsize=256)
def panels(row: int, col: int, slices: int = 1) -> Panels:
    """Cut K into lcm(row, col) panels, so that each has one owner in both operands.

    Each panel is cut into ``slices``.

    >>> panels(1, 2).steps
    [(0, 0, 0, 0), (1, 0, 0, 1)]
    """
    n = math.lcm(row, col) * slices
    return Panels(
        [(*divmod(k, n // col), *divmod(k, n // row)) for k in range(n)], n // col, n // row
    )


def cut(x: Tensor, dim: int, parts: int) -> tuple[Tensor, ...]:
    """Return the panels of ``x`` that this rank owns, as views."""
    return x.chunk(parts, dim) if parts > 1 else (x,)
