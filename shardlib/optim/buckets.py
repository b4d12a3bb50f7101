"""Flat buckets: many parameter blocks end to end in one vector, with the offset of each.

The index is a pure value made of sizes and names.  Blocks share a bucket if they have one dtype
and are split over the same mesh axes, so that a bucket is replicated as a whole.  Slots begin at
multiples of ``ALIGN`` elements, and a bucket's length is a multiple of ``ALIGN`` times the number
of its parts, so that no cut falls inside a kernel's vector: torch's fused kernels round the
elements after the last whole vector of a call differently, and here run on whole vectors alone,
including the padding after a slot.  A bucket is cut over those of the given axes that do not
already split its leaves.
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from shardlib.collectives import blocks, played
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh, rank_along

__all__ = [
    "ALIGN", "Beside", "Bucket", "BucketSlot", "Buckets", "Hops", "Index", "Item", "Pieces",
    "SlotPart", "State", "Tree", "held", "index", "overlap", "parts", "pytree_node",
]  # fmt: skip

Tree = Any
"""A nest of dicts, tuples and lists with tensors as leaves, or ``Buckets`` of them."""

State = Any
"""A transform's state: a tree of tensors and numbers."""

ALIGN = 64
"""Elements: 512 bits of one byte each, the widest vector of any dtype."""

Hops = tuple[tuple[str, ...], ...]
"""The mesh axes of each collective that takes a bucket to its parts, in order: one, or an inner
and an outer one; none if its leaves are split over all of them already."""


_SCALAR = Layout(())


@dataclass(frozen=True)
class Item:
    """A leaf to place in a bucket: its block's shape, dtype, split axes and identity.

    Leaves with equal ``value`` are tied and share one slot.  ``place`` is the text of the leaf's
    layout and mesh: a bucket's name has a digest of its leaves' places, so that buckets of other
    leaves are not mistaken for it.  ``whole`` is the global shape, ``tiled`` the one that its
    blocks tile, with padding.  Leaves of different groups, each a word or a tuple of groups, share
    no bucket.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    axes: tuple[str, ...]
    value: int
    place: str = ""
    whole: tuple[int, ...] = ()
    group: Any = ""
    layout: Layout = _SCALAR
    tiled: tuple[int, ...] = ()


@dataclass(frozen=True)
class BucketSlot:
    """A slot of a bucket: ``bucket[offset : offset + length]`` is ``leaves``, shaped ``shape``."""

    leaves: tuple[int, ...]
    offset: int
    length: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """A vector of slots, each at a multiple of ALIGN, then padding up to ``length``.

    ``axes``  those that split its leaves.
    ``hops``  the collectives that take it to its ``ways`` parts.
    """

    name: str
    dtype: torch.dtype
    axes: tuple[str, ...]
    slots: tuple[BucketSlot, ...]
    length: int
    hops: Hops
    ways: int

    def __hash__(self) -> int:
        return hash(self.name)  # of its leaves' places: many slots are hashed slowly

    @cached_property
    def over(self) -> tuple[str, ...]:
        """The axes over which it is cut, major first."""
        return tuple(a for hop in self.hops for a in hop)

    @cached_property
    def tied(self) -> bool:
        """Whether it has tied leaves, which give several gradients per slot."""
        return any(len(s.leaves) > 1 for s in self.slots)

    @cached_property
    def layout(self) -> Layout:
        """The layout of its parts: split over its parameters' axes and its own."""
        return Layout((Dim((*self.axes, *self.over)),))

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of the padding between and after slots."""
        starts = [*(s.offset for s in self.slots[1:]), self.length]
        ends = [s.offset + s.length for s in self.slots]
        return tuple((a, b) for a, b in zip(ends, starts, strict=True) if a < b)


@dataclass(frozen=True, eq=False)
class Index:
    """The position of each leaf in its bucket, and the axes over which buckets are cut.

    ``items``    the leaves, in the order of their tree.
    ``buckets``  in the order in which backward fills them.
    ``hops``     axes to cut over; for each bucket, without those that split its leaves.
    ``sizes``    the mesh's axes.
    ``whole``    the index of all buckets, if these are some of them.
    ``keep``     whether gathered buckets stay for backward.
    """

    items: tuple[Item, ...]
    buckets: tuple[Bucket, ...]
    hops: Hops
    sizes: tuple[tuple[str, int], ...]
    whole: "Index | None" = None
    keep: bool = False

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    @cached_property
    def where(self) -> dict[int, tuple[int, int]]:
        """Leaf number -> (bucket number, number of its slot there)."""
        return {
            i: (b, n)
            for b, bucket in enumerate(self.buckets)
            for n, slot in enumerate(bucket.slots)
            for i in slot.leaves
        }

    def subset(self, names: tuple[str, ...]) -> "Index":
        """Return the index of some buckets; the same object for the same names."""
        if names not in self._subsets:
            chosen = tuple(b for b in self.buckets if b.name in names)
            self._subsets[names] = replace(self, buckets=chosen, whole=self.whole or self)
        return self._subsets[names]

    @cached_property
    def _subsets(self) -> dict[tuple[str, ...], "Index"]:
        return {}

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.items, self.buckets, self.hops, self.sizes

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Index) and self._key == other._key)

    def __hash__(self) -> int:
        return hash(self.buckets)

    def __reduce__(self) -> Any:
        return Index, (*self._key, self.whole, self.keep)


@lru_cache(maxsize=256)
def index(
    items: tuple[Item, ...],
    hops: Hops,
    sizes: tuple[tuple[str, int], ...],
    most_bytes: int,
    order: tuple[int, ...] | None = None,
) -> Index:
    """Deal leaves to buckets of at most ``most_bytes`` (or one leaf), divisible in their parts.

    ``order``  leaf numbers in the order in which they enter, in which their gradients should
               arrive.

    >>> items = (Item("w", (2, 3), torch.float32, (), 0), Item("b", (3,), torch.float32, (), 1))
    >>> found = index(items, (("x",),), (("x", 4),), 1 << 20)
    >>> [(b.length, b.ways, [s.offset for s in b.slots]) for b in found.buckets]
    [(256, 4, [0, 64])]
    """
    tied: dict[int, list[int]] = {}
    for i, item in enumerate(items):
        tied.setdefault(item.value, []).append(i)
    entering: dict[int, Item] = {}
    for i in range(len(items)) if order is None else order:
        entering.setdefault(items[i].value, items[i])
    begun: dict[Any, list[BucketSlot]] = {}
    done: list[tuple[Any, list[BucketSlot]]] = []
    for item in entering.values():
        key, length = (item.dtype, item.axes, item.group), math.prod(item.shape)
        slots = begun.setdefault(key, [])
        end = _up(slots[-1].offset + slots[-1].length, ALIGN) if slots else 0
        if slots and (end + length) * item.dtype.itemsize > most_bytes:
            done.append((key, slots))
            slots = begun[key] = []
            end = 0
        slots.append(BucketSlot(tuple(tied[item.value]), end, length, item.shape))
    done += begun.items()
    return Index(
        items,
        tuple(_bucket(items, k, key, slots, hops, sizes) for k, (key, slots) in enumerate(done)),
        hops,
        sizes,
    )


def _bucket(
    items: Sequence[Item],
    k: int,
    key: Any,
    slots: list[BucketSlot],
    hops: Hops,
    sizes: tuple[tuple[str, int], ...],
) -> Bucket:
    dtype, axes, group = key
    left = (tuple(a for a in hop if a not in axes) for hop in hops)
    hops = tuple(hop for hop in left if hop)
    ways = math.prod(n for a, n in sizes if any(a in hop for hop in hops))
    # the number comes first, so that no words of groups can make two names equal
    words = f"{k} {str(dtype).removeprefix('torch.')} {' '.join(axes) or '.'}"
    name = f"{words} {' '.join(_words(group))} {_digest(items, slots)}".replace("  ", " ")
    used = slots[-1].offset + slots[-1].length
    length = max(_up(used, ALIGN * ways), ALIGN * ways)
    return Bucket(name, dtype, axes, tuple(slots), length, hops, ways)


def _digest(items: Sequence[Item], slots: Sequence[BucketSlot]) -> str:
    """Compute a digest of the leaves' places, so that a state of other leaves lacks the name."""
    places = repr([[(items[i].path, s.shape, items[i].place) for i in s.leaves] for s in slots])
    return hashlib.blake2b(places.encode(), digest_size=8).hexdigest()


def _words(group: object) -> Iterator[str]:
    """List the words of a group, which may be pairs of groups."""
    if isinstance(group, tuple):
        for one in group:
            yield from _words(one)
    else:
        yield str(group)


def _up(n: int, by: int) -> int:
    return -(-n // by) * by


def overlap(where: Index, order: Sequence[int]) -> float:
    """Compute the mean share of the gradients that is still to come when a byte is posted.

    ``order``  the leaves' numbers in the order in which their gradients come; buckets are posted in
               their own order, each when it is full.  1/2 is perfect overlap; 0: everything is
               posted at the end of backward.

    >>> items = tuple(Item(n, (64,), torch.float32, (), i) for i, n in enumerate("abcd"))
    >>> one, other = (index(items, (), (), 256, order) for order in ((3, 2, 1, 0), (0, 1, 2, 3)))
    >>> overlap(one, (3, 2, 1, 0)), overlap(other, (3, 2, 1, 0))
    (0.375, 0.0)
    """
    sizes = [math.prod(item.shape) * item.dtype.itemsize for item in where.items]
    left = total = sum(sizes[s.leaves[0]] for b in where.buckets for s in b.slots)
    coming = {}
    for i in order:
        coming[i] = left = left - sizes[i]
    now, found = total, 0
    for bucket in where.buckets:
        # a bucket is posted when its last gradient has come, but never before the one before it
        now = min([now, *(coming.get(i, 0) for s in bucket.slots for i in s.leaves)])
        found += now * sum(sizes[s.leaves[0]] for s in bucket.slots)
    return found / max(total, 1) ** 2


@dataclass(frozen=True)
class SlotPart:
    """A part of a slot: ``shard[start : start + length]`` is ``slot``'s elements from ``at`` on."""

    slot: BucketSlot
    start: int
    at: int
    length: int


@lru_cache(maxsize=4096)
def parts(bucket: Bucket, rank: int) -> tuple[SlotPart, ...]:
    """List the parts of slots that rank ``rank`` holds of a bucket; empty parts are left out.

    >>> items = (Item("w", (9, 9), torch.float32, (), 0), Item("b", (3,), torch.float32, (), 1))
    >>> (bucket,) = index(items, (("x",),), (("x", 2),), 1 << 20).buckets
    >>> [(p.slot.offset, p.start, p.at, p.length) for p in parts(bucket, 1)]
    [(128, 0, 0, 3)]
    """
    n, out = bucket.length // bucket.ways, []
    lo = rank * n
    for slot in bucket.slots:
        a, b = max(lo, slot.offset), min(lo + n, slot.offset + slot.length)
        if a < b:
            out.append(SlotPart(slot, a - lo, a - slot.offset, b - a))
    return tuple(out)


class Pieces(list[Tensor]):
    """Plain tensors for a kernel, with properties that every step needs, computed once.

    ``roots``  tensors that share version counters with all pieces.
    ``runs``   (first, after the last) of pieces that are adjacent in memory, each padded to a whole
               vector of any kernel: the padding after it is unused.  None if not known.
    """

    def __init__(
        self,
        pieces: Iterable[Tensor],
        roots: Iterable[Tensor] | None = None,
        runs: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        super().__init__(pieces)
        self.roots = list(self if roots is None else roots)
        self.runs = None if runs is None else tuple(runs)

    def beside(self, *others: "Pieces") -> "Beside":
        """Return the joint properties of these lists and others, cached from the last step."""
        found: Beside | None = self.__dict__.get("_beside")
        if found is None or list(map(id, found.others)) != list(map(id, others)):
            found = self.__dict__["_beside"] = _beside(self, *others)
        return found

    def joined(self) -> list[Tensor]:
        """Return each run as one vector, in the same memory, padding included."""
        out = []
        for first, end in self.runs or ():
            one, last = self[first], self[end - 1]
            n = last.storage_offset() - one.storage_offset() + _rounded(last.numel())
            out.append(one.as_strided((n,), (1,)))
        return out


class Beside(NamedTuple):
    """The joint properties of lists of pieces for one kernel call, computed once.

    ``dtype``  their one floating point dtype, if they have one.
    ``runs``   the lists with each run as one vector; None if not known.
    ``count``  the step counter for each vector, the same tensor for all.
    """

    others: tuple[Pieces, ...]
    dtype: torch.dtype | None
    roots: list[Tensor]
    contiguous: bool
    runs: list[list[Tensor]] | None
    count: list[Tensor]


def _beside(*rows: Pieces) -> Beside:
    first, every = rows[0], list(itertools.chain(*rows))
    dtype, *more = {t.dtype for t in every} or {torch.float32}
    one_float = not more and dtype.is_floating_point
    dense = all(map(Tensor.is_contiguous, every))
    runs = None
    if dense and first.runs is not None and {row.runs for row in rows} == {first.runs}:
        runs = [row.joined() for row in rows]
    device = first[0].device if first else None
    # torch's fused kernels take a step count per tensor: here all share one
    one = torch.zeros((), dtype=torch.float32, device=device)
    count = [one] * len(first if runs is None else runs[0])
    roots = list(itertools.chain(*(row.roots for row in rows)))
    return Beside(rows[1:], dtype if one_float else None, roots, dense, runs, count)


Node = TypeVar("Node", bound=type[Any])


def pytree_node(kind: Node) -> Node:
    """Register a class as a pytree node, by its ``tree_flatten`` and ``tree_unflatten``."""
    everywhere = optree.registry.__GLOBAL_NAMESPACE  # type: ignore[attr-defined]
    made = kind.tree_flatten, kind.tree_unflatten
    optree.register_pytree_node(kind, *made, namespace=everywhere)
    return kind


@pytree_node
class Buckets(dict[str, Any]):
    """A mapping from bucket name to this rank's part, a vector; a pytree node with its index.

    ``index``  the Index of the buckets.
    ``mesh``   the mesh over whose axes they are cut.
    """

    def __init__(
        self, values: Mapping[str, Any] | Iterable[tuple[str, Any]], index: Index, mesh: Mesh
    ) -> None:
        super().__init__(values)
        self.index, self.mesh = index, mesh

    def tree_flatten(self) -> tuple[list[Any], Any, list[str]]:
        """Return the values, what they are of, and their names."""
        names = [b.name for b in self.index.buckets]
        return [self[n] for n in names], (self.index, self.mesh), names

    @classmethod
    def tree_unflatten(cls, where: tuple[Index, Mesh], children: Iterable[Any]) -> "Buckets":
        """Build buckets of other values."""
        names = [b.name for b in where[0].buckets]
        return cls(zip(names, children, strict=True), *where)

    @property
    def paths(self) -> tuple[str, ...]:
        """Leaf number -> the parameter's path, as ``Slot.leaves`` counts them."""
        return tuple(item.path for item in self.index.items)

    @property
    def paths_held(self) -> list[str]:
        """The paths of the parameters in these buckets, which may be some of all."""
        return [self.index.items[i].path for i in sorted(self.index.where)]

    def subset(self, names: tuple[str, ...]) -> "Buckets":
        """Return the buckets of these names, in the same memory."""
        out = type(self)({n: self[n] for n in names}, self.index.subset(names), self.mesh)
        if "pieces" in self.__dict__:
            rows = zip(self.held, self.pieces, strict=True)
            some = (p for (bucket, _, _), p in rows if bucket.name in out)
            out.__dict__["pieces"] = Pieces(some, [x.raw for x in out.values()], _runs(out.held))
        return out

    def like(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> "Buckets":
        """Return buckets of other values with the same index."""
        return type(self)(values, self.index, self.mesh)

    @property
    def are_whole(self) -> bool:
        """Whether these are whole buckets with a pending sum, not each rank's part."""
        # some buckets may be None, and one with a single part is always whole
        cut = (b for b in self.index.buckets if b.ways > 1 and self[b.name] is not None)
        first = next(cut, None)
        return first is not None and self[first.name].raw.shape[-1] == first.length

    @property
    def gone(self) -> set[str]:
        """The names of the buckets that are None."""
        return {name for name, x in self.items() if x is None}

    @cached_property
    def held(self) -> list[tuple[Bucket, int, SlotPart]]:
        """(bucket, number of the rank in this process, part) of each piece, in order.

        Buckets that are None, such as frozen parameters' gradients, have no pieces.
        """
        if not self.are_whole:
            kept = [b for b in self.index if self[b.name] is not None]
            return [at for b in kept for at in held(b, self.mesh)]
        return [
            (bucket, i, SlotPart(slot, slot.offset, 0, slot.length))
            for bucket in self.index.buckets
            for i in range(len(played(self.mesh)))
            for slot in bucket.slots
            if slot.length
        ]

    @cached_property
    def pieces(self) -> Pieces:
        """The slots' parts as plain vectors: views, made once, so writes change the buckets."""
        raws = {name: x.raw.detach() for name, x in self.items() if x is not None}
        ranks = {name: blocks(raw, self.mesh) for name, raw in raws.items()}
        views = (
            ranks[b.name][i][part.start : part.start + part.length] for b, i, part in self.held
        )
        return Pieces(views, raws.values(), _runs(self.held))

    def __reduce__(self) -> Any:
        return type(self), (dict(self), self.index, self.mesh)


def held(bucket: Bucket, mesh: Mesh) -> list[tuple[Bucket, int, SlotPart]]:
    """List (bucket, number of the rank in this process, part) of each piece, in order."""
    return [
        (bucket, i, part)
        for i, c in enumerate(played(mesh))
        for part in parts(bucket, rank_along(bucket.over, c, mesh.axes))
    ]


def _rounded(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _runs(held: Sequence[tuple[Bucket, int, SlotPart]]) -> list[tuple[int, int]]:
    """List (first, after the last) of pieces that are adjacent in memory, in whole vectors."""
    out: list[tuple[int, int]] = []
    for k, (bucket, i, part) in enumerate(held):
        before = held[k - 1] if k else None
        if before is not None and before[0] is bucket and before[1] == i:
            last = before[2]
            if last.start + _rounded(last.length) == part.start:
                out[-1] = (out[-1][0], k + 1)
                continue
        out.append((k, k + 1))
    return out
