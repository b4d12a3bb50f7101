"""Gradients on their way into buckets, while backward runs.

A gradient is copied into its bucket as soon as autograd has made it, while it is in the cache, and
autograd keeps one element in its place.  A bucket that is full is reduce-scattered at once.  Buckets
are posted in their fixed order, whatever order their gradients arrive in, so that every rank posts
the same collectives in the same order; what no gradient reached is posted at the end, as zeros.

Source: Rajbhandari et al., arXiv 1910.02054, section 5.2 (stage 2, P_os+g).
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from shardlib.collectives import psum, start, unwrap, wrap
from shardlib.mesh import Mesh, bind
from shardlib.optim.buckets import Buckets, Index
from shardlib.optim.flat import Hops, scatter, shard_place, slot_of, stack, whole_place
from shardlib.optim.memory import Memory
from shardlib.tensor import ShardedTensor

__all__ = ["Sink"]


class Sink:
    """Takes the gradients of one backward pass: ``take(leaf, gradient)``, then ``finish()``.

    ``pending``   the axes over which gradients come unsummed: those of the index, and ``also``.
    ``to``        what becomes of a full bucket: "part", it is reduce-scattered; "sum", every rank
                  gets its sum; "pending", it is kept whole and unsummed.
    ``dtypes``    of each bucket's gradients, and of the parts that are kept.
    ``most``      how many buckets may be on their way at once.
    """

    def __init__(
        self,
        index: Index,
        mesh: Mesh,
        hops: Hops,
        memory: Memory,
        dtypes: Sequence[tuple[torch.dtype, torch.dtype]],
        *,
        device: torch.device,
        to: Literal["part", "sum", "pending"] = "part",
        wire: torch.dtype | None = None,
        also: tuple[str, ...] = (),
        most: int = 2,
    ) -> None:
        self.index, self.mesh, self.hops, self.memory = index, mesh, hops, memory
        self.dtypes, self.device, self.to = dtypes, device, to
        self.wire, self.also, self.most = wire, also, most
        self.pending = (*index.axes, *also)
        self.left = [{s.leaves[0] for s in b.slots} for b in index.buckets]
        self.begun: list[Tensor | None] = [None] * len(self.left)
        self.flying: list[tuple[int, Tensor, Callable[[], Tensor]]] = []
        self.out: list[Tensor | None] = [None] * len(self.left)
        self.next = 0

    def begin(self, flats: Sequence[Tensor]) -> None:
        """Start from whole buckets that are full."""
        for b, flat in enumerate(flats):
            self.left[b].clear()
            self.begun[b] = flat

    def take(self, leaf: int, g: Tensor) -> Tensor:
        """Copy a gradient's storage into its bucket; one element stands for it from here on."""
        b, at = self.index.where[leaf]
        with torch.no_grad():
            place = slot_of(self._bucket(b), at.offset, at.shape)
            if at.leaves[0] in self.left[b]:
                place.copy_(g)
                self.left[b].discard(at.leaves[0])
            else:  # a tied leaf's second gradient
                place.add_(g)
        self._post_full()
        return g.new_empty(()).expand(g.shape)

    def finish(self) -> Buckets:
        """Post what is left, wait for all, and give the gradients."""
        with torch.no_grad():
            while self.next < len(self.left):
                self._post()
            while self.flying:
                self._land()
        index, mesh = self.index, self.mesh
        values = {}
        for bucket, raw in zip(index.buckets, self.out, strict=True):
            place = (
                shard_place(index, bucket, mesh)
                if self.to == "part"
                else whole_place(bucket, mesh, self.pending if self.to == "pending" else ())
            )
            values[bucket.name] = ShardedTensor(raw, place)  # type: ignore[arg-type]
        return Buckets(values, index, mesh)

    def _bucket(self, b: int) -> Tensor:
        flat = self.begun[b]
        if flat is None:
            bucket = self.index.buckets[b]
            shape = (*stack(self.mesh), bucket.length)
            flat = self.begun[b] = self.memory.take(shape, self.dtypes[b][0], self.device)
            for start, stop in bucket.gaps:  # they count in the norm
                flat[..., start:stop] = 0
        return flat

    def _post_full(self) -> None:
        tied = self.index.tied
        while self.next < len(self.left) and not self.left[self.next] and self.next not in tied:
            with torch.no_grad():
                self._post()

    def _post(self) -> None:
        b, self.next = self.next, self.next + 1
        bucket, flat = self.index.buckets[b], self._bucket(b)
        for slot in bucket.slots:
            if slot.leaves[0] in self.left[b]:
                flat[..., slot.offset : slot.offset + slot.length] = 0
        if self.to == "pending":
            self.out[b] = flat
            return
        while len(self.flying) >= self.most:
            self._land()
        if self.to == "sum":
            self.flying.append((b, flat, self._summed(flat)))
            return
        shape = (*stack(self.mesh), bucket.length // self.index.ways)
        out = self.memory.take(shape, self.dtypes[b][1], self.device)
        later = scatter(
            flat, out, self.mesh, self.hops, self.memory, wire=self.wire, also=self.also
        )
        self.flying.append((b, flat, later))

    def _summed(self, flat: Tensor) -> Callable[[], Tensor]:
        """Post the sum of a bucket over all pending axes; half precision is summed in fp32."""
        dtype, half = flat.dtype, flat.dtype in (torch.bfloat16, torch.float16)
        wide, narrow = (flat.float(), {"out": dtype, "wire": dtype}) if half else (flat, {})
        with bind(self.mesh):
            later = start(psum, wrap(wide, self.mesh), self.pending, **narrow)
        return lambda: unwrap(later.wait())

    def _land(self) -> None:
        b, flat, finish = self.flying.pop(0)
        self.out[b] = out = finish()
        if out is not flat:
            self.memory.give(flat)
        self.begun[b] = None


class Summed(Sink):
    """A sink whose gradients come back in the tree and the layouts of the parameters."""

    def __init__(self, *args: Any, tree: Callable[[list[Tensor]], Any], **how: Any) -> None:
        super().__init__(*args, to="sum", **how)
        self.tree = tree

    def finish(self) -> Any:
        """Wait for all sums; the gradients are views of the buckets."""
        found, index = super().finish(), self.index
        blocks: list[Any] = [None] * len(index.items)
        for i, (b, at) in index.where.items():
            blocks[i] = slot_of(found[index.buckets[b].name].raw, at.offset, at.shape)
        return self.tree(blocks)
