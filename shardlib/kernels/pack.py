"""Copies of blocks of a tensor into buffers that are sent, and out of those received.

The position of a block's element in a dense tensor is a sum over the block's dimensions: of a start
plus a step per index, or of a table's entry, all counted in elements.  This covers contiguous
boxes, every n-th row, zigzag and striped orders, and permuted dimensions.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from shardlib.kernels.active import serving
from shardlib.kernels.library import call

DIMS = 8
# bytes per element that the kernel copies
_SIZES = (1, 2, 4, 8)


class Where(NamedTuple):
    """The positions of a block: per dimension its size, and start and step, or a table."""

    size: list[int]
    start: list[int]
    step: list[int]
    table: list[Tensor | None]


def box(held: Sequence[Sequence[int]], strides: Sequence[int], device: torch.device) -> Where:
    """Compute the positions of a box from its indices and the stride of each dimension.

    >>> box([range(2, 4), (0, 3)], [4, 1], torch.device("cpu"))
    Where(size=[2, 2], start=[8, 0], step=[4, 0], table=[None, tensor([0, 3])])
    """
    out = Where([], [], [], [])
    for places, stride in zip(held, strides, strict=True):
        run = isinstance(places, range)
        out.size.append(len(places))
        out.start.append(places.start * stride if run and len(places) else 0)
        out.step.append(places.step * stride if run else 0)
        out.table.append(None if run else _table(tuple(places), stride, device))
    if not out.size:  # of no dimensions
        return Where([1], [0], [1], [None])
    return out


@lru_cache(maxsize=256)
def _table(places: tuple[int, ...], stride: int, device: torch.device) -> Tensor:
    return torch.tensor(places, dtype=torch.int64, device=device) * stride


def packable(x: Tensor, dims: int) -> bool:
    """Return whether the kernel copies blocks of ``dims`` dimensions of this tensor."""
    fits = dims <= DIMS and x.element_size() in _SIZES and x.is_contiguous()
    return fits and not x.is_meta and serving(x)


def index(where: Where, device: torch.device | None = None) -> Tensor:
    """List the positions of a block's elements in the dense tensor, in the block's shape."""
    out = torch.zeros((), dtype=torch.int64, device=device)
    for d, (n, start, step, table) in enumerate(zip(*where, strict=True)):
        at = start + torch.arange(n, device=device) * step if table is None else table
        out = out.unsqueeze(-1) + at if d else at
    return out.reshape(where[0])


def at_front(size: Sequence[int]) -> tuple[list[int], list[int], list[Tensor | None]]:
    """Compute the start, step and table of a block that is a dense tensor itself.

    >>> at_front([2, 3])
    ([0, 0], [3, 1], [None, None])
    """
    step = [1]
    for n in reversed(list(size)[1:]):
        step.insert(0, step[0] * n)
    return [0] * len(size), step[: len(size)], [None] * len(size)


Places = Sequence[int]
Tables = Sequence[Tensor | None]


@torch.library.custom_op("shardlib::copy_box_", mutates_args=("into",))
def copy_box_(
    into: Tensor,
    x: Tensor,
    size: Places,
    start: Places,
    step: Places,
    table: Tables,
    put_start: Places,
    put_step: Places,
    put_table: Tables,
) -> None:
    """Copy a box of a dense tensor to a box of another, of the same size and dtype, in place."""
    if packable(x, len(size)) and packable(into, len(size)) and x.dtype == into.dtype:
        places = (start, step, table, put_start, put_step, put_table)
        call("copy", x.element_size(), x, into, len(size), list(size), *map(list, places))
        return
    take = Where(list(size), list(start), list(step), list(table))
    put = Where(list(size), list(put_start), list(put_step), list(put_table))
    into.view(-1)[index(put, x.device)] = x.reshape(-1)[index(take, x.device)]


def copy_box(
    into: Tensor, x: Tensor, put: Sequence[Sequence[int]], take: Sequence[Sequence[int]]
) -> None:
    """Copy the positions ``take`` of each dimension of x to the positions ``put`` of ``into``."""
    one = box(take, x.stride(), x.device)
    _, *two = box(put, into.stride(), into.device)
    copy_box_(into, x, *one, *two)


@torch.library.custom_op("shardlib::pack", mutates_args=())
def pack(x: Tensor, size: Places, start: Places, step: Places, table: Tables) -> Tensor:
    """Copy a box of a dense tensor; differentiable where no element is taken twice."""
    out = x.new_empty(tuple(size))
    copy_box_(out, x, size, start, step, table, *at_front(size))
    return out


@pack.register_fake
def _(x: Tensor, size: Places, *_: object) -> Tensor:
    return x.new_empty(tuple(size))


@torch.library.custom_op("shardlib::unpack", mutates_args=())
def unpack(
    block: Tensor, shape: Places, size: Places, start: Places, step: Places, table: Tables
) -> Tensor:
    """Copy a block to its box of a dense tensor of zeros; differentiable, as ``pack``."""
    out = block.new_zeros(tuple(shape))
    copy_box_(out, block.contiguous(), size, *at_front(size), start, step, table)
    return out


@unpack.register_fake
def _(block: Tensor, shape: Places, *_: object) -> Tensor:
    return block.new_empty(tuple(shape))


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, *ctx.how = inputs
    ctx.shape = list(x.shape)


def _pack_back(ctx, grad):  # type: ignore[no-untyped-def]
    return unpack(grad, ctx.shape, *ctx.how), *[None] * 4


def _unpack_back(ctx, grad):  # type: ignore[no-untyped-def]
    return pack(grad.contiguous(), *ctx.how[1:]).view(ctx.shape), *[None] * 5


pack.register_autograd(_pack_back, setup_context=_keep)
unpack.register_autograd(_unpack_back, setup_context=_keep)


def dense(x: Tensor) -> Tensor:
    """Return ``x.contiguous()``; permuted dimensions are copied 16 bytes at a time.

    Torch's own copy runs where the last dimension is not dense, or no kernel is available.
    """
    if x.is_contiguous() or not x.numel() or x.stride(-1) != 1 or x.requires_grad:
        return x.contiguous()
    size, step = _joined(list(x.shape), list(x.stride()))
    if len(size) > DIMS or min(step) < 0 or x.element_size() not in _SIZES or not serving(x):
        return x.contiguous()
    # a view of the storage, from the first element to the last
    reach = 1 + sum((n - 1) * s for n, s in zip(size, step, strict=True))
    flat = x.as_strided((reach,), (1,))
    return pack(flat, size, [0] * len(size), step, [None] * len(size)).view(x.shape)


def _joined(size: list[int], step: list[int]) -> tuple[list[int], list[int]]:
    """Join dimensions that are contiguous in memory, so that fewer describe the same positions.

    >>> _joined([2, 3, 4, 5], [60, 5, 15, 1]), _joined([2, 3, 4], [12, 4, 1])
    (([2, 3, 4, 5], [60, 5, 15, 1]), ([24], [1]))
    """
    sizes, steps = [size[-1]], [step[-1]]
    for n, s in zip(size[-2::-1], step[-2::-1], strict=True):
        if n == 1:
            continue
        if s == sizes[0] * steps[0]:
            sizes[0] *= n
        else:
            sizes.insert(0, n)
            steps.insert(0, s)
    return sizes, steps
