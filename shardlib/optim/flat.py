"""Memory of flat buckets: parameters that are views of it, gathers and reduce-scatters on it.

Memory is pooled, since fresh pages cost as much as a sum over them.  A storage of a bucket is
``[*lead, length]``, where lead is the dimension of simulated ranks.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib._compat import storage_users
from shardlib.capacity import refuse_beyond
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
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh, bind, rank_along
from shardlib.optim.buckets import Bucket, Buckets, Hops, Index, Item, SlotPart, held
from shardlib.tensor import Place, ShardedTensor

__all__ = [
    "Memory", "Room", "adopt", "blocks_in", "gather", "gather_later", "leaf_place", "own", "own_parts", "parts_of",
    "put_back", "room_of", "scatter", "shard_place", "slot_of", "whole", "whole_place",
]  # fmt: skip


class Memory:
    """A pool of vectors that are reused, since fresh pages cost as much as a sum over them."""

    def __init__(self) -> None:
        self.free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self.lent: set[int] = set()
        self.views: dict[int, Any] = {}  # address -> the views last made of the memory there

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialised contiguous tensor; pass it to ``give`` after the last read."""
        n = math.prod(shape)
        rows = self.free.setdefault((dtype, device), [])
        # a small request must not take a large vector away
        fits = [i for i, t in enumerate(rows) if n <= t.numel() <= 2 * n]
        base = rows.pop(min(fits, key=lambda i: rows[i].numel())) if fits else None
        if base is None:
            base = _empty(n, dtype, device)
        self.lent.add(_storage(base))
        return base[:n].view(shape)

    def wide(self, like: Tensor) -> Tensor:
        """Return uninitialised fp32 memory of a tensor's shape."""
        return self.take(like.shape, torch.float32, like.device)

    def give(self, *taken: Tensor) -> None:
        """Take tensors of ``take`` back into the pool; other tensors are ignored."""
        for t in taken:
            base = t if t._base is None else t._base
            if _storage(base) not in self.lent or base.ndim != 1:
                continue
            self.lent.remove(_storage(base))
            self.free.setdefault((base.dtype, base.device), []).append(base)


class Room:
    """Memory shared by all readings of one index.

    ``order``   the buckets in the order in which the last forward read them.
    ``flying``  callbacks that wait for gradient sums in transit.
    """

    def __init__(self) -> None:
        self.memory = Memory()
        self.order: list[str] = []
        self.buffers: list[Tensor] = []
        self.flying: list[Callable[[], object]] = []

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


def room_of(index: Index) -> Room:
    """Return the memory shared by all readings of buckets of an index."""
    whole = index.whole or index
    found: Room | None = whole.__dict__.get("room")
    if found is None:
        found = whole.__dict__["room"] = Room()
    return found


def _storage(x: Tensor) -> int:
    """Return the number of a storage: on the meta device all addresses are 0."""
    return x.untyped_storage()._cdata


def _empty(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate memory that later calls may write to, also if this one is in inference mode."""
    if device.type == "cpu":  # the allocator of an accelerator refuses by itself, at no cost
        refuse_beyond(n * dtype.itemsize, device, "zero")
    with torch.inference_mode(False):
        return torch.empty(n, dtype=dtype, device=device)


# ---------------------------------------------------------------- storages of buckets


_ROOM = 2 << 20
"""The most elements of receive buffer of a reduce-scatter that is waited for at once."""


def slot_of(flat: Tensor, offset: int, shape: Sequence[int]) -> Tensor:
    """Return a slot of a bucket's storage as blocks, a view."""
    part = flat[..., offset : offset + math.prod(shape)]
    return part.view((*part.shape[:-1], *shape))


def shard_place(bucket: Bucket, mesh: Mesh) -> Place:
    """Return the place of a bucket's parts, split over its parameters' axes and its own."""
    size = bucket.length * mesh.axis_size(bucket.axes)
    return Place(bucket.layout, torch.Size([size]), mesh)


def whole_place(bucket: Bucket, mesh: Mesh, over: tuple[str, ...]) -> Place:
    """Return the place of whole buckets, unsummed over those of these axes that do not split them."""
    size = bucket.length * mesh.axis_size(bucket.axes)
    layout = Layout((Dim(bucket.axes),), tuple(sorted(set(over) - set(bucket.axes))))
    return Place(layout.resolve(1), torch.Size([size]), mesh)


def leaf_place(
    item: Item, layout: Layout, mesh: Mesh, deferred: frozenset[str] = frozenset()
) -> Place:
    """Return the place of a leaf that is whole, in a layout of its true and its tiled sizes."""
    true = None if item.whole == item.tiled else torch.Size(item.whole)
    return Place(layout, torch.Size(item.tiled), mesh, true, deferred)


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
            block = slot_of(flat, s.offset, s.shape)
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
            lies = _where(slot_of(flat, slot.offset, slot.shape))
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

    See ``put_back``.
    """
    values: dict[str, ShardedTensor] = {}
    for bucket, flat in zip(index.buckets, flats, strict=True):
        raw = storage(own_parts(flat.detach(), bucket.over, mesh), mesh)
        values[bucket.name] = ShardedTensor(raw, shard_place(bucket, mesh))
    return Buckets(values, index, mesh)


def parts_of(
    leaves: Sequence[ShardedTensor], index: Index, mesh: Mesh, *, grads: bool = False
) -> Buckets:
    """Return this rank's part of every bucket of summed values, without making a whole bucket.

    ``grads``  they are gradients: those of tied leaves are added, and half precision is widened.
    """
    dtypes = {b.name: leaves[b.slots[0].leaves[0]].raw.dtype for b in index}
    if grads:
        dtypes = {name: wider(dtype) for name, dtype in dtypes.items()}
    nbytes = sum(b.length // b.ways * dtypes[b.name].itemsize for b in index)
    refuse_beyond(nbytes * len(played(mesh)), mesh.device, "zero", mesh)
    every = [() if x is None else blocks(x.raw.detach(), mesh) for x in leaves]
    out = {}
    for bucket in index:
        like = every[bucket.slots[0].leaves[0]]
        n, dtype = bucket.length // bucket.ways, dtypes[bucket.name]
        rows = [x.new_zeros(n, dtype=dtype) for x in like]
        for _, r, p in held(bucket, mesh):
            mine = [every[i][r] for i in p.slot.leaves]
            _fill(rows[r][p.start : p.start + p.length], p, mine if grads else mine[:1])
        out[bucket.name] = ShardedTensor(storage(rows, mesh), shard_place(bucket, mesh))
    return Buckets(out, index, mesh)


def _fill(to: Tensor, part: SlotPart, blocks: Sequence[Tensor]) -> None:
    """Fill a slot's part with the sum of its leaves' blocks."""
    one, *tied = (x.reshape(-1)[part.at : part.at + part.length] for x in blocks)
    to.copy_(one)
    for other in tied:
        to.add_(other)


def put_back(flats: Sequence[Tensor], mine: Buckets) -> None:
    """Copy the parts back into the buckets of ``own``, if they are copies."""
    if lead(mine.mesh):
        _copy_parts(flats, mine)


def _copy_parts(flats: Sequence[Tensor], mine: Buckets) -> None:
    for flat, bucket, part in zip(flats, mine.index, mine.values(), strict=True):
        views = own_parts(flat, bucket.over, mine.mesh)
        for view, block in zip(views, blocks(part.raw, mine.mesh), strict=True):
            view.copy_(block)


def whole(mine: Buckets) -> dict[int, Tensor]:
    """Gather parts to whole buckets, in new memory; map each leaf's number to its block."""
    rows = [(b, mine[b.name].raw) for b in mine.index]
    flats = [raw.new_empty(storage_shape(mine.mesh, b.length)) for b, raw in rows]
    _copy_parts(flats, mine)
    # as bytes: gloo knows no int16
    gather([flat.view(torch.uint8) for flat in flats], mine.index, mine.mesh)
    return blocks_in(flats, mine.index)


def blocks_in(flats: Sequence[Tensor], index: Index) -> dict[int, Tensor]:
    """Map each leaf's number to its block in whole buckets, a view."""
    rows = [(i, flats[b], index.buckets[b].slots[n]) for i, (b, n) in index.where.items()]
    return {i: slot_of(flat, slot.offset, slot.shape) for i, flat, slot in rows}


def gather(flats: Sequence[Tensor], index: Index, mesh: Mesh) -> None:
    """All-gather whole buckets in place, all posted at once."""
    with bind(mesh):
        rows = zip(flats, index, strict=True)
        for finish in [gather_later(flat, mesh, b.hops, ahead=False) for flat, b in rows if b.hops]:
            finish()


def gather_later(
    flat: Tensor, mesh: Mesh, hops: Hops, *, ahead: bool = True
) -> Callable[[], object]:
    """Post the all-gather of a whole bucket in place; a second hop follows in ``finish``.

    ``ahead``  the caller does other work before it calls the returned function.
    """
    if len(hops) == 1:
        return gather_into(flat, mesh, hops[0], ahead=ahead)
    inner, outer = hops
    views = own_parts(flat, inner, mesh)
    part = storage(views, mesh)
    first = gather_into(part, mesh, outer, ahead=ahead)

    def finish() -> None:
        first()
        for view, block in zip(views, blocks(part, mesh), strict=True):
            if view is not block:  # a copy, where one process has several ranks
                view.copy_(block)
        gather_into(flat, mesh, inner)()

    return finish


def scatter(
    flat: Tensor,
    out: Tensor,
    mesh: Mesh,
    hops: Hops,
    memory: Memory,
    *,
    wire: torch.dtype | None = None,
    also: tuple[str, ...] = (),
    ahead: bool = True,
) -> Callable[[], Tensor]:
    """Post the reduce-scatter of a bucket into ``out``, which ``finish`` returns.

    ``hops``   none: the bucket is its own part, and ``out`` may be its memory.
    ``also``   axes over which the parts are summed too, without being cut.
    ``ahead``  the caller does other work before it calls the returned function; else at most
               ``_ROOM`` elements of memory are needed.
    """
    if not hops:
        return lambda: _beside(out if out is flat else out.copy_(flat), mesh, also)
    first, *rest = hops
    inner = mesh.axis_size(first)
    mid = out
    if rest:
        mid = memory.take((*flat.shape[:-1], flat.shape[-1] // inner), out.dtype, out.device)
    room = flat.shape if ahead or wire is not None else (min(flat.numel(), _ROOM),)
    pair = inner == 2 and wire is None and mid.dtype == flat.dtype  # received in ``mid``
    land = None if pair else memory.take(room, wire or flat.dtype, flat.device)
    finish_first = scatter_into(flat, mid, mesh, first, wire=wire, land=land, ahead=ahead)

    def finish() -> Tensor:
        finish_first()
        if land is not None:
            memory.give(land)
        if rest:
            scatter_into(mid, out, mesh, rest[0], wire=wire)()
            memory.give(mid)
        return _beside(out, mesh, also)

    return finish


def _beside(part: Tensor, mesh: Mesh, also: tuple[str, ...]) -> Tensor:
    if also:
        with bind(mesh):
            part.copy_(unwrap(psum(wrap(part, mesh), also)))
    return part
