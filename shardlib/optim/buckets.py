"""Flat buckets: many parameter blocks end to end in one vector, with the offset of each.

The index is a pure value made of sizes and names.  Blocks share a bucket if they have one dtype
and are split over the same mesh axes, so that a bucket is replicated as a whole.  Slots begin at
multiples of ``ALIGN`` elements, and a bucket's length is a multiple of ``ALIGN`` times the number
of its parts, so that no cut falls inside a kernel's vector: torch's fused kernels round the
elements after the last whole vector of a call differently, and here run on whole vectors alone,
including the padding after a slot.  A bucket is cut over those of the given axes that do not
already split its leaves.

Memory is pooled, since fresh pages cost as much as a sum over them.  A storage of a bucket is
``[*lead, length]``, where lead is the dimension of simulated ranks.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from shardlib._compat import storage_users
from shardlib.capacity import LARGE, refuse_beyond
from shardlib.collectives import (
    blocks,
    gather_into,
    lead,
    played,
    psum,
    scatter_into,
    storage,
    storage_shape,
    unwrap,
    wrap,
)
from shardlib.dtypes import wider
from shardlib.errors import ShardError
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh, bind, rank_along
from shardlib.optim.tiles import joined, joined_block, joined_place, joined_shape
from shardlib.placing import reshard, shard, whole_of
from shardlib.tensor import Facts, Place, ShardedTensor

Tree = Any
"""A nest of dicts, tuples and lists with tensors as leaves, or ``Buckets`` of them."""

State = Any
"""A transform's state: a tree of tensors and numbers."""

ALIGN = 64
"""Elements: 512 bits of one byte each, the widest vector of any dtype."""

Hops = tuple[tuple[str, ...], ...]
"""The mesh axes of each collective that takes a bucket to its parts, in order: one, or an inner
and an outer one; none if its leaves are split over all of them already."""


AxisSizes = tuple[tuple[str, int], ...]
"""The axes of a mesh with their sizes, as a key."""

_SCALAR = Layout(())


def vector(length: int, axes: Sequence[str], mesh: Mesh, unsummed: Iterable[str] = ()) -> Place:
    """Return the place of a vector that is split over axes, in blocks of this length."""
    size = torch.Size([length * mesh.axis_size(tuple(axes))])
    return Place(Layout((Dim(tuple(axes)),), tuple(unsummed)), size, mesh)


@dataclass(frozen=True)
class Item:
    """A leaf to place in a bucket: its block's shape, dtype, split axes and identity.

    Leaves with equal ``value`` are tied and share one slot.  ``place`` is the text of the leaf's
    layout and mesh: a bucket's name has a digest of its leaves' places, so that buckets of other
    leaves are not mistaken for it.  ``whole`` is the global shape, ``tiled`` the one that its
    blocks tile, with padding.  Leaves of different groups, each a word or a tuple of groups, share
    no bucket.  ``first`` is the first row of a tile in the block of its parameter, whose path it has.
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
    first: int | None = None

    def place_in(self, layout: Layout, mesh: Mesh, deferred: frozenset[str] = frozenset()) -> Place:
        """Return the place of the leaf in a layout, of its true and its tiled sizes."""
        return Place(layout, torch.Size(self.whole), mesh, torch.Size(self.tiled), deferred)


@dataclass(frozen=True)
class BucketSlot:
    """A slot of a bucket: ``bucket[offset : offset + length]`` is ``leaves``, shaped ``shape``."""

    leaves: tuple[int, ...]
    offset: int
    length: int
    shape: tuple[int, ...]

    def of(self, flat: Tensor) -> Tensor:
        """Return the slot of a bucket's storage as blocks, a view."""
        part = flat[..., self.offset : self.offset + self.length]
        return part.view((*part.shape[:-1], *self.shape))


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
        # of its leaves' places: many slots are hashed slowly
        return hash(self.name)

    @cached_property
    def part_length(self) -> int:
        """The elements of a part."""
        return self.length // self.ways

    @cached_property
    def over(self) -> tuple[str, ...]:
        """The axes over which it is cut, major first."""
        return tuple(a for hop in self.hops for a in hop)

    @cached_property
    def tied(self) -> bool:
        """Whether it has tied leaves, which give several gradients per slot."""
        return any(len(s.leaves) > 1 for s in self.slots)

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of the padding between and after slots."""
        starts = [*(s.offset for s in self.slots[1:]), self.length]
        ends = [s.offset + s.length for s in self.slots]
        return tuple((a, b) for a, b in zip(ends, starts, strict=True) if a < b)

    def place(self, mesh: Mesh, whole: bool = False, unsummed: Iterable[str] = ()) -> Place:
        """Return the place of its parts, or of the whole, unsummed over some axes.

        Axes that split its leaves are left out of these.
        """
        if whole:
            return vector(self.length, self.axes, mesh, set(unsummed) - set(self.axes))
        return vector(self.part_length, (*self.axes, *self.over), mesh)

    def gather_later(self, flat: Tensor, mesh: Mesh, *, ahead: bool = True) -> Callable[[], object]:
        """Post the all-gather of the whole bucket in place; a second hop follows in ``finish``.

        ``ahead``  the caller does other work before it calls the returned function.
        """
        if len(self.hops) == 1:
            return gather_into(flat, mesh, self.hops[0], ahead=ahead)
        inner, outer = self.hops
        views = own_parts(flat, inner, mesh)
        part = storage(views, mesh)
        first = gather_into(part, mesh, outer, ahead=ahead)

        def finish() -> None:
            first()
            for view, block in zip(views, blocks(part, mesh), strict=True):
                if view is not block:
                    # a copy, where one process has several ranks
                    view.copy_(block)
            gather_into(flat, mesh, inner)()

        return finish

    def scatter(
        self,
        flat: Tensor,
        out: Tensor,
        mesh: Mesh,
        memory: "Memory",
        *,
        wire: torch.dtype | None = None,
        also: tuple[str, ...] = (),
        ahead: bool = True,
    ) -> Callable[[], Tensor]:
        """Post the reduce-scatter of the bucket into ``out``, which ``finish`` returns.

        Without hops the bucket is its own part, and ``out`` may be its memory.
        ``also``   axes over which the parts are summed too, without being cut.
        ``ahead``  the caller does other work before it calls the returned function; else at most
                   ``_ROOM`` elements of memory are needed.
        """
        if not self.hops:
            return lambda: _summed_over(out if out is flat else out.copy_(flat), mesh, also)
        first, *rest = self.hops
        inner = mesh.axis_size(first)
        mid = out
        if rest:
            mid = memory.take((*flat.shape[:-1], flat.shape[-1] // inner), out.dtype, out.device)
        room = flat.shape if ahead or wire is not None else (min(flat.numel(), _ROOM),)
        # received in ``mid``
        pair = inner == 2 and wire is None and mid.dtype == flat.dtype
        land = None if pair else memory.take(room, wire or flat.dtype, flat.device)
        finish_first = scatter_into(flat, mid, mesh, first, wire=wire, land=land, ahead=ahead)

        def finish() -> Tensor:
            finish_first()
            if land is not None:
                memory.give(land)
            if rest:
                scatter_into(mid, out, mesh, rest[0], wire=wire)()
                memory.give(mid)
            return _summed_over(out, mesh, also)

        return finish


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
    sizes: AxisSizes
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
            self._subsets[names] = replace(self, buckets=chosen, whole=self.all)
        return self._subsets[names]

    @property
    def all(self) -> "Index":
        """The index of all buckets."""
        return self.whole or self

    @cached_property
    def room(self) -> "Room":
        """Memory shared by all readings of its buckets."""
        return self.whole.room if self.whole else Room()

    def of_parts(self, raws: Sequence[Tensor], mesh: Mesh) -> "Buckets":
        """Return buckets of these parts."""
        places: list[Place] = self.__dict__.get("places", [])
        if not places or places[0].mesh is not mesh:
            places = self.__dict__["places"] = [b.place(mesh) for b in self.buckets]
        names = [b.name for b in self.buckets]
        return Buckets(zip(names, map(ShardedTensor, raws, places), strict=True), self, mesh)

    def firsts(self, row: Sequence[Any]) -> list[Any]:
        """List the entry of each bucket's first leaf in a list of entries by leaf."""
        return [row[b.slots[0].leaves[0]] for b in self.buckets]

    def blocks(self, flats: Sequence[Tensor]) -> dict[int, Tensor]:
        """Map each leaf's number to its block in whole buckets, a view."""
        rows = [(i, flats[b], self.buckets[b].slots[n]) for i, (b, n) in self.where.items()]
        return {i: slot.of(flat) for i, flat, slot in rows}

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


def index(
    items: tuple[Item, ...],
    hops: Hops,
    sizes: AxisSizes,
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
    sizes: AxisSizes,
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
def parts(bucket: Bucket, rank: int, ways: int) -> tuple[SlotPart, ...]:
    """List the slots' parts in the part ``rank`` of ``ways`` of a bucket; empty ones are left out.

    >>> items = (Item("w", (9, 9), torch.float32, (), 0), Item("b", (3,), torch.float32, (), 1))
    >>> (bucket,) = index(items, (("x",),), (("x", 2),), 1 << 20).buckets
    >>> [(p.slot.offset, p.start, p.at, p.length) for p in parts(bucket, 1, 2)]
    [(128, 0, 0, 3)]
    """
    n, out = bucket.length // ways, []
    lo = rank * n
    for slot in bucket.slots:
        a, b = max(lo, slot.offset), min(lo + n, slot.offset + slot.length)
        if a < b:
            out.append(SlotPart(slot, a - lo, a - slot.offset, b - a))
    return tuple(out)


Named = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Items of a dict: a mapping, or pairs."""

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
    ``leaves`` of gradients, the parameters' leaves and those that were differentiated in their
               place: a step makes the new parameters of the latter.
    """

    leaves: tuple[Sequence[Any], Sequence[Any]] = (), ()

    def __init__(self, values: Named, index: Index, mesh: Mesh) -> None:
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

    def kinds(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Map the path of each parameter in these buckets to its shape and dtype."""
        items, where, buckets = self.index.items, self.index.where, self.index.buckets
        dtypes = {i: self[buckets[where[i][0]].name].dtype for i in sorted(where)}
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for i, dtype in dtypes.items():
            path, whole = items[i].path, items[i].whole
            if items[i].first:
                whole = joined_shape((found[path][0], whole))
            found[path] = whole, dtype
        return found

    def by_parameter(self) -> list[tuple[str, ShardedTensor]]:
        """List (path, the parameter's numbers), split over the buckets' axes too if these divide.

        Moves: (N-1)/N of the buckets' bytes, one bucket at a time; those of rows on a disk when the
        values are read, by all ranks together.
        """
        out, held = {}, dict[str, dict[int, Tensor]]()
        for bucket in self.index:
            x = self[bucket.name]
            since = getattr(x.facts and x.facts.read, "since", None)
            late = _LateBlocks(self.subset((bucket.name,)), held, since)
            for slot in bucket.slots:
                item = self.index.items[slot.leaves[0]]
                place = item.place_in(item.layout, self.mesh)
                at = place if item.first is not None else finer(place, bucket.over)
                read = partial(late.block, slot.leaves[0], place, at.layout)
                value = ShardedTensor.when_read(at, x.dtype, x.device, Facts(read))
                if since is None:
                    value = ShardedTensor(value.raw, at)
                own = ((i, self.index.items[i]) for i in slot.leaves)
                out.update((i, (of.path, of.first, value)) for i, of in own)
            if since is None:
                held.clear()
        return list(joined((out[i] for i in sorted(out)), _table).items())

    def with_values(self, values: Mapping[str, Tensor]) -> "Buckets":
        """Return a copy with the numbers of each path replaced; what lies in a tier is overwritten."""
        return self.like({n: self._filled(self.subset((n,)), values) for n in self})

    def _filled(self, one: "Buckets", values: Mapping[str, Tensor]) -> ShardedTensor:
        """Return the value of one bucket with the numbers of each path replaced."""
        rows = [(i, one.index.items[i]) for i in one.index.where]
        leaves = {
            i: _tile(placed(values[item.path], item.layout, self.mesh), item) for i, item in rows
        }
        ((name, x),) = one.items()
        # keep the gaps between slots: in adam8bit a code of 0 is not the number 0
        raw = x.raw.detach().clone()
        new = x.becomes(raw.requires_grad_(x.requires_grad))
        fill_slots(one.like({name: new}), [leaves.get(i) for i in range(len(one.index.items))])
        fill = getattr(x.facts and x.facts.read, "fill", None)
        if fill is None:
            return new
        fill(raw.detach())
        return x.at(x.place)

    def subset(self, names: tuple[str, ...]) -> "Buckets":
        """Return the buckets of these names, in the same memory."""
        return type(self)({n: self[n] for n in names}, self.index.subset(names), self.mesh)

    def like(self, values: Named) -> "Buckets":
        """Return buckets of other values with the same index."""
        return type(self)(values, self.index, self.mesh)

    def whole(self) -> dict[int, Tensor]:
        """Gather parts to whole buckets, in new memory; map each leaf's number to its block."""
        rows = [(self[b.name], storage_shape(self.mesh, b.length)) for b in self.index]
        flats = [torch.empty(shape, dtype=x.dtype, device=x.device) for x, shape in rows]
        self._copy_to(flats)
        # as bytes: gloo knows no int16
        gather([flat.view(torch.uint8) for flat in flats], self.index, self.mesh)
        return self.index.blocks(flats)

    def put_back(self, flats: Sequence[Tensor]) -> None:
        """Copy the parts back into the buckets of ``own``, if they are copies."""
        if lead(self.mesh):
            self._copy_to(flats)

    def _copy_to(self, flats: Sequence[Tensor]) -> None:
        for flat, bucket, part in zip(flats, self.index, self.values(), strict=True):
            views = own_parts(flat, bucket.over, self.mesh)
            for view, block in zip(views, blocks(part.raw, self.mesh), strict=True):
                view.copy_(block)

    def __reduce__(self) -> Any:
        return type(self), (dict(self), self.index, self.mesh)


def _table(path: str, tiles: Sequence[ShardedTensor]) -> ShardedTensor:
    """Return the value of a table from its tiles."""
    place = joined_place(tiles)
    if all(x.is_stored for x in tiles):
        return ShardedTensor(joined_block(tiles), place)
    facts = Facts(partial(joined_block, tiles))
    return ShardedTensor.when_read(place, tiles[0].dtype, tiles[0].device, facts)


def _tile(x: ShardedTensor, item: Item) -> ShardedTensor:
    """Return the rows of a value that an item has: all, or those of its tile."""
    if item.first is None:
        return x
    return x.becomes(x.raw.narrow(-2, item.first, item.shape[0]), shape=item.whole)


class _LateBlocks:
    """Blocks of the parameters of one bucket, which is gathered when one of them is read.

    ``held``   bucket -> its blocks: the last two that were read.
    ``check``  raises if the bucket was changed since.
    """

    def __init__(
        self, one: Buckets, held: dict[str, dict[int, Tensor]], check: Callable[[], object] | None
    ) -> None:
        self.one, self.held, self.check = one, held, check

    def block(self, leaf: int, place: Place, layout: Layout) -> Tensor:
        """Return a copy of a parameter's block in a layout that may be finer."""
        if self.check is not None:
            self.check()
        (name,) = self.one
        if name not in self.held:
            if len(self.held) > 1:
                del self.held[next(iter(self.held))]
            with torch.no_grad():
                self.held[name] = self.one.whole()
        value = ShardedTensor(self.held[name][leaf], place)
        # a copy, which does not keep the bucket alive
        return reshard(value, layout).raw.clone()  # type: ignore[attr-defined]


def finer(place: Place, axes: tuple[str, ...]) -> Place:
    """Return the place of a value that is split over these axes too, if they divide a dimension.

    One that no axis splits yet is preferred.
    """
    # an axis of one rank may split it already
    axes = tuple(a for a in axes if a not in place.layout.axes)
    ways = place.mesh.axis_size(axes)
    sizes = place.layout.local_shape(tuple(place.tiled), place.mesh)
    for d, dim in sorted(enumerate(place.dims), key=lambda at: len(at[1].axes)):
        plain = dim == Dim(dim.axes) and place.shape[d] == place.tiled[d]
        if ways > 1 and plain and sizes[d] and not sizes[d] % ways:
            layout = Layout((*place.dims[:d], Dim((*dim.axes, *axes)), *place.dims[d + 1 :]))
            return place.becomes(layout, place.shape, place.tiled)
    return place


def placed(value: Tensor, layout: Layout, mesh: Mesh) -> ShardedTensor:
    """Return a value, plain or of any mesh and layout, in a layout, padded where it must be."""
    if isinstance(value, ShardedTensor) and value.mesh is mesh and not value.is_padded:
        try:
            return reshard(value, layout)  # type: ignore[return-value]
        except ShardError:
            # it does not divide there: padded below
            pass
    return shard(whole_of(value), layout, mesh, pad=True)  # type: ignore[return-value]


def held(bucket: Bucket, mesh: Mesh, ways: int) -> list[tuple[int, SlotPart]]:
    """List (number of the rank in this process, part of a slot that it holds) of a bucket.

    ``ways``  the number of parts that the bucket is cut to: its own, or 1 if it is whole.
    """
    over = bucket.over if ways > 1 else ()
    return [
        (i, part)
        for i, c in enumerate(played(mesh))
        for part in parts(bucket, rank_along(over, c, mesh.axes), ways)
    ]


# ---------------------------------------------------------------- memory


class Memory:
    """A pool of vectors that are reused, since fresh pages cost as much as a sum over them."""

    slack = 1.5
    """The most times as many elements as are asked for: a part of two takes no whole vector."""

    def __init__(self) -> None:
        self.free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self.lent: set[int] = set()
        # address -> the views last made of the memory there
        self.views: dict[int, Any] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised contiguous tensor; pass it to ``give`` after the last read."""
        n = math.prod(shape)
        rows = self.free.setdefault((dtype, device), [])
        # a small request must not take a large vector away
        fits = [i for i, t in enumerate(rows) if n <= t.numel() <= self.slack * n]
        base = rows.pop(min(fits, key=lambda i: rows[i].numel())) if fits else None
        if base is None:
            base = self._made(n, dtype, device)
        self.lent.add(_storage(base))
        return base[:n].view(shape)

    @contextmanager
    def anew(self) -> Iterator[None]:
        """Use none of the vectors that are free, and keep none that is given meanwhile."""
        free, self.free = self.free, {}
        views, self.views = self.views, {}
        try:
            yield
        finally:
            self.free, self.views = free, views

    def clear(self) -> None:
        """Let go of the vectors that are free."""
        self.free.clear()
        self.views.clear()

    def _made(self, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return _empty(n, dtype, device)

    def give(self, *taken: Tensor) -> None:
        """Take tensors of ``take`` back into the pool; other tensors are ignored."""
        for t in taken:
            base = t if t._base is None else t._base
            if _storage(base) not in self.lent or base.ndim != 1:
                continue
            self.lent.remove(_storage(base))
            self.free.setdefault((base.dtype, base.device), []).append(base)


class Room:
    """Memory shared by all readings of one index, and records of its use.

    ``memory``    a pool of vectors, with ``take`` and ``give``.
    ``order``     the buckets in the order in which the last forward read them.
    ``flying``    callbacks that wait for gradient sums in transit.
    ``reading``   returns the reading that gathered last, if it is alive.
    ``recorded``  whether the order of gradients is known.
    ``better``    the index of buckets in that order, until it is used.
    ``activations``  keeps saved tensors of regions with ``remat="host"``, of parameters in tiers.
    ``paper``  on paper, the cache of parameters in tiers, and the list of chunks that are used.
    """

    def __init__(self) -> None:
        self.memory: Any = Memory()
        self.order: list[str] = []
        self.buffers: list[Tensor] = []
        self.flying: list[Callable[[], object]] = []
        self.reading: Callable[[], Any] = lambda: None
        self.recorded = False
        self.better: Index | None = None
        self.activations: Any = None
        self.paper: Any = None

    def buffer(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a gather buffer that no tensor uses any more, or a new one."""
        n = math.prod(shape)
        for t in self.buffers:
            fits = n <= t.numel() <= 2 * n and (t.dtype, t.device) == (like.dtype, like.device)
            # 1: only this list refers to the storage
            if fits and storage_users(t) == 1:
                return t[:n].view(shape)
        self.buffers = [t for t in self.buffers if storage_users(t) > 1 or t.numel() >= n]
        self.buffers.append(_empty(n, like.dtype, like.device))
        return self.buffers[-1][:n].view(shape)


def _storage(x: Tensor) -> int:
    """Return the number of a storage: on the meta device all addresses are 0."""
    return x.untyped_storage()._cdata


def _empty(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate memory that later calls may write to, also if this one is in inference mode."""
    # the allocator of an accelerator refuses by itself, at no cost
    if device.type == "cpu" and n * dtype.itemsize > LARGE:
        refuse_beyond(n * dtype.itemsize, device, "zero")
    with torch.inference_mode(False):
        return torch.empty(n, dtype=dtype, device=device)


# ---------------------------------------------------------------- storages of buckets


_ROOM = 2 << 20
"""The most elements of receive buffer of a reduce-scatter that is waited for at once."""


def adopt(leaves: Sequence[ShardedTensor], index: Index, mesh: Mesh) -> list[Tensor]:
    """Return the buckets' storages of which these leaves are views, each in its slot.

    Leaves stored elsewhere are moved.  Their blocks stay the same tensors, with other memory:
    graphs that use them, hooks and gradients stay theirs.
    """
    found = _lie_in(leaves, index, mesh)
    if found is not None:
        return found
    flats = []
    for bucket in index.buckets:
        first = leaves[bucket.slots[0].leaves[0]].raw
        nbytes = math.prod(storage_shape(mesh, bucket.length)) * first.element_size()
        refuse_beyond(nbytes, first.device, "zero", mesh)
        flat = first.detach().new_zeros(storage_shape(mesh, bucket.length))
        flats.append(flat)
        for s in bucket.slots:
            block = s.of(flat)
            block.copy_(leaves[s.leaves[0]].raw.detach())
            for i in s.leaves:
                leaves[i].raw.data = block
    return flats


def _lie_in(leaves: Sequence[ShardedTensor], index: Index, mesh: Mesh) -> list[Tensor] | None:
    found = []
    for bucket in index.buckets:
        first = leaves[bucket.slots[0].leaves[0]].raw
        shape = storage_shape(mesh, bucket.length)
        # the storage must be exactly the bucket's
        if first.untyped_storage().nbytes() != math.prod(shape) * first.element_size():
            return None
        flat = first.detach().as_strided(shape, (bucket.length, 1)[-len(shape) :], 0)
        for slot in bucket.slots:
            lies = _where(slot.of(flat))
            if any(_where(leaves[i].raw) != lies for i in slot.leaves):
                return None
        found.append(flat)
    return found


def _where(x: Tensor) -> tuple[object, ...]:
    """Return where a tensor lies: its storage, offset and strides."""
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.stride()


def own_parts(flat: Tensor, over: tuple[str, ...], mesh: Mesh) -> list[Tensor]:
    """List, for each rank in this process, its part of a bucket cut over these axes, as views."""
    n = flat.shape[-1] // mesh.axis_size(over)
    places = [rank_along(over, c, mesh.axes) for c in played(mesh)]
    return [b[i * n : (i + 1) * n] for b, i in zip(blocks(flat, mesh), places, strict=True)]


def own(flats: Sequence[Tensor], index: Index, mesh: Mesh) -> Buckets:
    """Return each rank's own part of whole buckets: views, or copies under simulate.

    See ``Buckets.put_back``.
    """
    rows = zip(index, flats, strict=True)
    raws = [storage(own_parts(flat.detach(), b.over, mesh), mesh) for b, flat in rows]
    return index.of_parts(raws, mesh)


def parts_of(
    leaves: Sequence[ShardedTensor], index: Index, mesh: Mesh, *, grads: bool = False
) -> Buckets:
    """Return this rank's part of every bucket of summed values, without making a whole bucket.

    ``grads``  they are gradients: those of tied leaves are added, and half precision is widened.
    """
    rows = [(b, x.raw) for b, x in zip(index, index.firsts(leaves), strict=True)]
    dtypes = [wider(x.dtype) if grads else x.dtype for _, x in rows]
    sizes = [b.part_length * dtype.itemsize for (b, _), dtype in zip(rows, dtypes, strict=True)]
    nbytes = sum(sizes) * len(played(mesh))
    if nbytes > LARGE:
        refuse_beyond(nbytes, mesh.device, "zero", mesh)
    shapes = [storage_shape(mesh, b.part_length) for b in index]
    made = zip(rows, shapes, dtypes, strict=True)
    # of parameters in host memory too
    zeros = [torch.zeros(s, dtype=dtype, device=mesh.device) for _, s, dtype in made]
    out = index.of_parts(zeros, mesh)
    fill_slots(out, leaves, add_tied=grads)
    return out


def fill_slots(into: Buckets, leaves: Sequence[Any], *, add_tied: bool = False) -> None:
    """Write this rank's part of every leaf to its slot, and nothing between the slots.

    ``add_tied``  tied leaves have different values, which are added; else the first one's is used.
    """
    mesh = into.mesh
    every = [() if x is None else blocks(x.raw.detach(), mesh) for x in leaves]
    for bucket in into.index:
        mine = blocks(into[bucket.name].raw.detach(), mesh)
        for r, p in held(bucket, mesh, bucket.ways):
            to = mine[r][p.start : p.start + p.length]
            first, *tied = (every[i][r].reshape(-1)[p.at : p.at + p.length] for i in p.slot.leaves)
            to.copy_(first)
            if add_tied:
                for other in tied:
                    to.add_(other)


def gather(flats: Sequence[Tensor], index: Index, mesh: Mesh) -> None:
    """All-gather whole buckets in place, all posted at once."""
    with bind(mesh):
        rows = zip(flats, index, strict=True)
        for finish in [b.gather_later(flat, mesh, ahead=False) for flat, b in rows if b.hops]:
            finish()


def _summed_over(part: Tensor, mesh: Mesh, also: tuple[str, ...]) -> Tensor:
    if also:
        with bind(mesh):
            part.copy_(unwrap(psum(wrap(part, mesh), also)))
    return part
