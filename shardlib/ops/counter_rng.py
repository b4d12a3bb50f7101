"""Counter-based random numbers: functions of a key and an element's position in the global tensor.

64 bits per position: splitmix64, whose state after i steps is key + i * odd constant, so any
element's bits follow from its position alone.  Positions are those of the true tensor, also where
blocks are padded.

Bits become numbers in fp64, or in fp32 where that is enough, and are rounded once.  Chunks are a
multiple of 64 elements and too small for threads: torch's vector loops and their scalar tails
differ in the last bit, and a number must not depend on its offset in a block.

Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014; the
constants of the finaliser are Stafford's variant 13.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.collectives import blocks, played, storage
from shardlib.kernels.bits import bits
from shardlib.kernels.pack import DIMS, Where, box
from shardlib.layouts import Layout
from shardlib.mesh import uploaded
from shardlib.tensor import ShardedTensor

# elements at once: they fit a cache, and torch starts threads only for more
_STEP = 1 << 14

Make = Callable[[Tensor], Tensor]
"""Function from 1-D bits to as many numbers; it may overwrite the bits."""


def keep_mask(index: Tensor, key: int, p: float) -> Tensor:
    """Return booleans, true with probability 1 - p, independently per index."""
    out = torch.empty(index.shape, dtype=torch.bool, device=index.device)
    index, flat = index.reshape(-1), out.view(-1)
    step = 2 * _STEP if index.device.type == "cpu" else max(index.numel(), 1)
    for at in range(0, index.numel(), step):
        found = bits(index[at : at + step], key).bitwise_and_((1 << 53) - 1)
        torch.ge(found, int(p * (1 << 53)), out=flat[at : at + step])
    return out


@dataclass(frozen=True)
class Pairs:
    """Maker of numbers that need 32 bits: two neighbours in the last dimension share 64.

    ``make``  [m] -> [m, 2].
    """

    make: Make


Maker = Make | Pairs
"""Maker of one number from 64 bits, or of two."""


def kept(p: float) -> Pairs:
    """Return a maker of booleans, true with probability 1 - p, to 32 bits."""
    # compared as signed int32, hence the shift by 2^31
    bar = min(round(p * (1 << 32)), (1 << 32) - 1) - (1 << 31)
    if p == 1:
        return Pairs(lambda h: torch.zeros(len(h), 2, dtype=torch.bool, device=h.device))
    return Pairs(lambda h: _halves(h).ge(bar))


def _halves(h: Tensor) -> Tensor:
    """Return the low and the high 32 bits, as int32."""
    return h.view(torch.int32).view(-1, 2)


# ---------------------------------------------------------------- bits as numbers


# bits of the significand
DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def half_open(h: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1), in fp64, with all its digits."""
    return (h >> 11).bitwise_and_((1 << 53) - 1).double().mul_(2.0**-53)


def open_unit(h: Tensor) -> Tensor:
    """Return uniform numbers in (0, 1), never either end: 52 bits and a half."""
    return (h >> 12).bitwise_and_((1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)


def unit(dtype: torch.dtype) -> Maker:
    """Return a maker of uniform numbers in [0, 1), with as many digits as ``dtype`` has.

    In fp64 for fp64, else in fp32.
    """
    if dtype not in DIGITS or dtype == torch.float64:
        return half_open
    digits = DIGITS[dtype]
    mask = (1 << digits) - 1
    return Pairs(
        lambda h: (_halves(h) >> (32 - digits)).bitwise_and_(mask).float().mul_(2.0**-digits)
    )


def normal(h: Tensor) -> Tensor:
    """Return normal numbers of mean 0 and variance 1, by the inverse of their distribution."""
    return torch.special.ndtri(open_unit(h))


def gaussian(dtype: torch.dtype) -> Maker:
    """Return ``normal`` for fp64; otherwise Box-Muller, two numbers from 64 bits in fp32."""
    if dtype == torch.float64:
        return normal

    def make(h: Tensor) -> Tensor:
        # + 0.5, since log(0) is infinite; the signed high half makes an angle between -pi and pi
        radius = (
            h.bitwise_and(0xFFFFFFFF).float().add_(0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
        )
        angle = (h >> 32).float().mul_(math.pi * 2.0**-31)
        return torch.stack([angle.cos().mul_(radius), angle.sin_().mul_(radius)], -1)

    return Pairs(make)


def then(make: Maker, f: Callable[[Tensor], Tensor]) -> Make | Pairs:
    """Return ``make`` followed by ``f``, which may overwrite the numbers."""
    if isinstance(make, Pairs):
        return Pairs(lambda h: f(make.make(h)))
    return lambda h: f(make(h))


# ---------------------------------------------------------------- blocks


def drawn(
    x: ShardedTensor, key: int, make: Maker, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Return the raw blocks of the numbers that ``make`` computes at ``x``'s positions.

    ``out`` is filled if given.
    """
    out = x.raw.new_empty(x.raw.shape, dtype=dtype) if out is None else out
    if out.is_meta or not out.numel():
        return out
    place = x.place
    axes = tuple(place.mesh.axes.items())
    held = place.layout, tuple(place.tiled), axes
    for block, coord in zip(blocks(out, place.mesh), played(place.mesh), strict=True):
        of_rank = (*held, tuple(coord.values()), tuple(x.shape), isinstance(make, Pairs))
        flat = block.view(-1)
        if out.device.type == "cpu" and len(flat) <= _STEP:
            index, paired = _only(*of_rank)
            flat.copy_(_numbers(index, key, make, paired)[: len(flat)])
            continue
        tables, paired = _tables(*of_rank, out.device)
        each = 1 + paired
        for at, index in _chunks(tables, out.device):
            n = index.numel() * each
            if out.device.type == "cpu" and index.numel() % 64:
                index = F.pad(index, (0, -index.numel() % 64))
            flat[at * each : at * each + n] = _numbers(index, key, make, paired)[:n]
    return out


def places(x: ShardedTensor) -> list[Where] | None:
    """Return the positions of this process's blocks in the true tensor, for kernels.

    None if there are more dimensions than kernels support.
    """
    size = tuple(x.padded_shape)
    strides = [1]
    for n in reversed(tuple(x.shape)[1:]):
        strides.insert(0, strides[0] * n)
    if len(size) > DIMS:
        return None
    layout, device = x.sharding.resolve(len(size)), x.raw.device
    held = [layout.indices(size, x.mesh, coord) for coord in played(x.mesh)]
    return [box(h, strides[: len(size)], device) for h in held]


def _numbers(index: Tensor, key: int, make: Maker, paired: bool) -> Tensor:
    """Return ``make``'s number at each index, or at both positions of each pair."""
    if not isinstance(make, Pairs):
        return make(bits(index, key))
    if paired:
        return make.make(bits(index, key)).view(-1)
    both = make.make(bits(index >> 1, key))
    return both.gather(1, (index & 1)[:, None]).squeeze(1)


@lru_cache(maxsize=64)
def _only(*place: Any) -> tuple[Tensor, bool]:
    """Return the positions of a block that is one chunk, filled up to a multiple of 64."""
    host = torch.device("cpu")
    tables, paired = _tables(*place, host)
    index = torch.cat([c for _, c in _chunks(tables, host)])
    return F.pad(index, (0, -len(index) % 64)), paired


def along(x: ShardedTensor, dim: int) -> Tensor:
    """Return the global positions along one dimension of every element.

    Shaped to broadcast with the raw block.
    """
    size, ndim, device = tuple(x.padded_shape), len(x.padded_shape), x.raw.device
    layout = x.sharding.resolve(ndim)
    held = [layout.indices(size, x.mesh, coord)[dim] for coord in played(x.mesh)]
    found = storage(
        [uploaded(h if isinstance(h, range) else tuple(h), device) for h in held], x.mesh
    )
    shape = [*found.shape[:-1], *[1] * dim, -1, *[1] * (ndim - 1 - dim)]
    return found.reshape(shape)


@lru_cache(maxsize=256)
def _tables(
    layout: Layout,
    size: tuple[int, ...],
    axes: tuple[tuple[str, int], ...],
    coord: tuple[int, ...],
    whole: tuple[int, ...],
    pairs: bool,
    device: torch.device,
) -> tuple[tuple[Tensor, ...], bool]:
    """Return, per dimension, the share of each of the block's positions in the linear index.

    With ``pairs``, the linear index of pairs and True, if the block holds both elements of each,
    one after the other.
    """
    sizes = dict(axes)
    held = layout.resolve(len(size)).indices(size, sizes, dict(zip(sizes, coord, strict=True)))
    stride = 1
    out = []
    for d in range(len(size) - 1, -1, -1):
        index = held[d]
        if isinstance(index, range):
            table = torch.arange(index.start, index.stop, index.step, device="cpu")
        else:
            table = torch.tensor(list(index), device="cpu")
        out.append(table.to(torch.int64) * stride)
        stride *= whole[d]
    out.reverse()
    last = out[-1] if out else torch.ones(1, dtype=torch.int64, device="cpu")
    alone = (
        len(last) % 2
        or last[0] % 2
        or not torch.equal(last, torch.arange(len(last), device="cpu") + last[0])
    )
    if not pairs or alone or any(bool((t % 2).any()) for t in out[:-1]):
        return tuple(t.to(device) for t in out), False
    return tuple(t.to(device) for t in (*(t // 2 for t in out[:-1]), last[::2] // 2)), True


def _chunks(tables: tuple[Tensor, ...], device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Yield (offset in the flat block, linear positions from there on), a cache full at a time."""
    sizes = [len(t) for t in tables]
    if 0 in sizes:
        return
    step = _STEP if device.type == "cpu" else math.prod(sizes)
    cut = len(sizes)
    columns = 1
    while cut and (columns < 128 or columns * sizes[cut - 1] <= step):
        cut -= 1
        columns *= sizes[cut]
    rows, column = _outer(tables[:cut], device), _outer(tables[cut:], device)
    if columns > step:
        for r in range(len(rows)):
            for c in range(0, columns, step):
                yield r * columns + c, column[c : c + step] + rows[r]
        return
    many = max(1, step // columns)
    for r in range(0, len(rows), many):
        yield r * columns, (rows[r : r + many, None] + column).flatten()


def _outer(tables: tuple[Tensor, ...], device: torch.device) -> Tensor:
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for t in tables:
        total = (total[:, None] + t).flatten()
    return total
