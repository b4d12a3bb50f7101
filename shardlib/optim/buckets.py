"""Flat buckets: many parameter blocks end to end in one vector, and where each one stands.

The index is a pure value made of sizes and names; ``flatten`` and ``unflatten`` follow it.
Blocks share a bucket if they have one dtype and are split over the same mesh axes, so that all
of a bucket is replicated alike.  Its length divides the number of ranks it will be cut for.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.collectives import blocks, played
from shardlib.mesh import Mesh, rank_along

__all__ = [
    "Bucket", "Buckets", "Item", "Part", "Slot", "flatten", "index", "parts", "unflatten",
]  # fmt: skip


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


@dataclass(frozen=True)
class Part:
    """``shard[start : start + length]`` is ``slot``'s elements from ``at`` on."""

    slot: Slot
    start: int
    at: int
    length: int


@lru_cache(maxsize=4096)
def parts(bucket: Bucket, rank: int, ways: int) -> tuple[Part, ...]:
    """What rank ``rank`` of ``ways`` holds of a bucket, slot by slot; what is empty is left out.

    >>> items = (Item("w", (2, 3), torch.float32, (), 0), Item("b", (3,), torch.float32, (), 1))
    >>> (bucket,) = index(items, 2, 1 << 20)
    >>> [(p.slot.offset, p.start, p.at, p.length) for p in parts(bucket, 1, 2)]
    [(0, 0, 5, 1), (6, 1, 0, 3)]
    """
    n, out = bucket.length // ways, []
    lo = rank * n
    for slot in bucket.slots:
        a, b = max(lo, slot.offset), min(lo + n, slot.offset + slot.length)
        if a < b:
            out.append(Part(slot, a - lo, a - slot.offset, b - a))
    return tuple(out)


class Buckets(dict[str, Any]):
    """Bucket name -> this rank's part of it, a vector; a node of trees that keeps its index.

    ``index``  the buckets, in order.   ``axes``  what they are cut over.   ``mesh``  its mesh.
    ``paths``  leaf number -> the parameter's path, as ``Slot.leaves`` counts them.
    """

    def __init__(
        self,
        values: Mapping[str, Any] | Iterable[tuple[str, Any]],
        index: tuple[Bucket, ...],
        axes: tuple[str, ...],
        mesh: Mesh,
        paths: tuple[str, ...] = (),
    ) -> None:
        super().__init__(values)
        self.index, self.axes, self.mesh, self.paths = index, axes, mesh, paths

    def like(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> "Buckets":
        """Other values under the same index."""
        return Buckets(values, self.index, self.axes, self.mesh, self.paths)

    @cached_property
    def held(self) -> list[tuple[Bucket, int, Part]]:
        """(bucket, number of the rank among those played here, part) of each piece, in order."""
        ways = self.mesh.axis_size(self.axes)
        places = [rank_along(self.axes, c, self.mesh.axes) for c in played(self.mesh)]
        return [
            (bucket, i, part)
            for bucket in self.index
            for i, rank in enumerate(places)
            for part in parts(bucket, rank, ways)
        ]

    @cached_property
    def pieces(self) -> list[Tensor]:
        """The parts of the slots as plain vectors, views made once: what is written to them stays."""
        ranks = {b.name: blocks(self[b.name].raw.detach(), self.mesh) for b in self.index}
        return [ranks[b.name][i][part.start : part.start + part.length] for b, i, part in self.held]

    def __reduce__(self) -> Any:
        return Buckets, (dict(self), self.index, self.axes, self.mesh, self.paths)


def _flat(tree: Buckets) -> tuple[list[Any], Any, list[str]]:
    names = [b.name for b in tree.index]
    return [tree[n] for n in names], (tree.index, tree.axes, tree.mesh, tree.paths), names


def _unflat(where: Any, children: Iterable[Any]) -> Buckets:
    return Buckets(zip([b.name for b in where[0]], children, strict=True), *where)


optree.register_pytree_node(
    Buckets,
    _flat,
    _unflat,
    namespace=optree.registry.__GLOBAL_NAMESPACE,  # type: ignore[attr-defined]
)
