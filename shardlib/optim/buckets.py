"""Flat buckets: many parameter blocks end to end in one vector, and where each one stands.

The index is a pure value made of sizes and names; ``flatten`` and ``unflatten`` follow it.
Blocks share a bucket if they have one dtype and are split over the same mesh axes, so that all
of a bucket is replicated alike.  Its length divides the number of ranks it will be cut for.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["Bucket", "Item", "Slot", "flatten", "index", "unflatten"]


@dataclass(frozen=True)
class Item:
    """One leaf to place: its block's shape, its dtype and split axes, and which value it is.

    Leaves with equal ``value`` are tied and share one slot.  ``place`` says where the leaf lies, as
    text: a bucket's name carries a digest of its leaves' places, so what was made for others is not
    taken for it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[str, ...]
    value: int
    place: str = ""


@dataclass(frozen=True)
class Slot:
    """``bucket[offset : offset + length]`` holds the leaves ``leaves``, shaped ``shape``."""

    leaves: tuple[int, ...]
    offset: int
    length: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """Slots end to end, then padding up to ``length``."""

    name: str
    dtype: torch.dtype
    axes: tuple[str, ...]
    slots: tuple[Slot, ...]
    length: int


@lru_cache(maxsize=256)
def index(items: tuple[Item, ...], ways: int, most_bytes: int) -> tuple[Bucket, ...]:
    """Buckets of at most ``most_bytes`` (or one leaf), each divisible in ``ways`` parts.

    >>> items = (Item("w", (2, 3), torch.float32, (), 0), Item("b", (3,), torch.float32, (), 1))
    >>> [(b.length, [s.offset for s in b.slots]) for b in index(items, 4, 1 << 20)]
    [(12, [0, 6])]
    """
    tied: dict[int, list[int]] = {}
    for i, item in enumerate(items):
        tied.setdefault(item.value, []).append(i)
    kinds: dict[tuple[torch.dtype, tuple[str, ...]], list[list[Slot]]] = {}
    for leaves in tied.values():
        item = items[leaves[0]]
        length = math.prod(item.shape)
        runs = kinds.setdefault((item.dtype, item.axes), [[]])
        end = runs[-1][-1].offset + runs[-1][-1].length if runs[-1] else 0
        if runs[-1] and (end + length) * item.dtype.itemsize > most_bytes:
            runs.append([])
            end = 0
        runs[-1].append(Slot(tuple(leaves), end, length, item.shape))
    out = []
    for (dtype, axes), runs in kinds.items():
        for k, slots in enumerate(runs):
            used = slots[-1].offset + slots[-1].length
            places = "\n".join(f"{s.shape} {items[s.leaves[0]].place}" for s in slots)
            digest = hashlib.blake2b(places.encode(), digest_size=4).hexdigest()
            name = f"{str(dtype).removeprefix('torch.')} {' '.join(axes) or '.'} {k} {digest}"
            out.append(Bucket(name, dtype, axes, tuple(slots), -(-used // ways) * ways))
    return tuple(out)


def flatten(blocks: Sequence[Tensor], bucket: Bucket) -> Tensor:
    """The bucket's vector [length] from all leaves' local blocks."""
    parts = [blocks[slot.leaves[0]].reshape(-1) for slot in bucket.slots]
    pad = bucket.length - bucket.slots[-1].offset - bucket.slots[-1].length
    return torch.cat([*parts, parts[0].new_zeros(pad)] if pad else parts)


def unflatten(flat: Tensor, bucket: Bucket) -> dict[int, Tensor]:
    """Leaf number -> its block, a view of the vector."""
    out = {}
    for slot in bucket.slots:
        block = flat[slot.offset : slot.offset + slot.length].reshape(slot.shape)
        out.update(dict.fromkeys(slot.leaves, block))
    return out
