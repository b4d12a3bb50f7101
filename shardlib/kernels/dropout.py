"""Dropout by global position as a torch operator: no mask is made, none is kept.

Each element is kept or dropped by a function of a key and its index in the global tensor: the bits
are those of ``shardlib.ops.counter_rng.kept``, on every device.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlib.kernels.active import native
from shardlib.kernels.bits import bits, signed
from shardlib.kernels.library import call, code, dense_like
from shardlib.kernels.pack import DIMS, Where, index


def bar(p: float) -> int:
    """Return the threshold of dropout: the least random int32 whose element is kept.

    >>> bar(0.0), bar(0.5)
    (-2147483648, 0)
    """
    return min(round(p * (1 << 32)), (1 << 32) - 1) - (1 << 31)


@torch.library.custom_op("shardlib::dropout", mutates_args=())
def dropout(
    x: Tensor,
    start: Sequence[int],
    step: Sequence[int],
    table: Sequence[Tensor | None],
    key: int,
    p: float,
) -> Tensor:
    """Keep each element of a block with probability 1 - p, divided by 1 - p; differentiable.

    ``start``, ``step`` and ``table`` give the positions in the global tensor, as in ``pack``.
    """
    scale = 1 / (1 - p) if p < 1 else 0.0
    size = list(x.shape) if len(start) == x.ndim else [x.numel()]
    if len(size) <= DIMS and x.is_contiguous() and native(x):
        y = torch.empty_like(x)
        places = map(list, (size, start, step, table))
        call("dropout", code(x), x, y, len(size), *places, signed(key), bar(p), p == 1, scale)
        return y
    at = index(Where(size, list(start), list(step), list(table)), x.device).reshape(-1)
    # one draw of 64 bits serves two neighbouring elements, 32 each
    halves = bits(at >> 1, key).view(torch.int32).view(-1, 2)
    mine = halves.gather(1, (at & 1)[:, None]).squeeze(1)
    # no 32-bit threshold drops everything
    keep = (mine >= bar(p)) & (p < 1)
    return (x * keep.view(x.shape)).mul_(scale).contiguous()


dropout.register_fake(dense_like)


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, *ctx.how = inputs


def _back(ctx, grad):  # type: ignore[no-untyped-def]
    return dropout(grad.contiguous(), *ctx.how), None, None, None, None, None


dropout.register_autograd(_back, setup_context=_keep)
