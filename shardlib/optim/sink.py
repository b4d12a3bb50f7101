"""Gradient sinks: gradients are copied into buckets, which are reduced while backward runs.

A gradient is copied into its bucket as soon as autograd has made it, while it is in the cache, and
autograd keeps one element in its place.  A full bucket is reduce-scattered at once.  Buckets are
posted in their fixed order, whatever order their gradients arrive in, so that every rank posts the
same collectives in the same order; slots without a gradient are filled with zeros and posted at
the end.

Source: Rajbhandari et al., arXiv 1910.02054, section 5.2 (stage 2, P_os+g).
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from shardlib._compat import foreach_ops
from shardlib.collectives import psum, start, storage_shape, unwrap, wrap
from shardlib.dtypes import HALF
from shardlib.mesh import Mesh, bind
from shardlib.optim.buckets import Bucket, Buckets, Index, Memory, Tree
from shardlib.optim.index import Arrival, IndexCache
from shardlib.tensor import ShardedTensor

FLYING = 4
"""Buckets of gradients in transit at once at stage 2: on slow links backward must not wait for them."""

_zero: Callable[[list[Tensor]], object] = foreach_ops()["zero_"]


class Lies:
    """Views of a bucket's memory: its slots as blocks, and the gaps between them, made once."""

    def __init__(self, flat: Tensor, bucket: Bucket) -> None:
        self.flat = flat
        self.bucket = bucket
        self.kind = (flat.shape, flat.dtype)
        self.slots = [s.of(flat) for s in bucket.slots]
        self.gaps = [flat[..., start:stop] for start, stop in bucket.gaps]
        self.stand: list[Tensor | None] = [None] * len(self.slots)

    def stands_for(self, n: int, g: Tensor) -> Tensor:
        """Return one element expanded to the shape and dtype of a gradient of slot ``n``."""
        found = self.stand[n]
        if found is None or found.dtype is not g.dtype or found.shape != g.shape:
            found = self.stand[n] = g.new_empty(()).expand(g.shape)
        return found


class Filling:
    """A bucket that gradients fill.

    ``dtypes``  of its gradients, and of its parts.
    ``left``    the numbers of its slots without a gradient.
    ``flat``    its memory, in the end its result.
    ``lies``    the views of that memory; None: it is the caller's, or the result.
    """

    def __init__(self, bucket: Bucket, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        self.bucket = bucket
        self.dtypes = dtypes
        self.left = set(range(len(bucket.slots)))
        self.flat: Tensor | None = None
        self.lies: Lies | None = None


@dataclass(eq=False)
class Sink:
    """A sink for one backward's gradients: ``take(leaf, gradient)``, then ``finish()``.

    ``over``      the axes over which gradients are unsummed, without those that split their leaf:
                  those of the index, and ``also``.
    ``to``        the fate of a full bucket: "part", reduce-scattered; "sum", summed on every rank;
                  "whole", kept whole and unsummed.
    ``dtypes``    of each bucket's gradients, and of its parts.
    ``most``      the most buckets in transit at once.
    ``ahead``     whether gradients come from a running backward.
    ``heard``     called at the end with the order of the leaves' gradients.
    ``give``      from all buckets to the result of ``finish``.
    ``leaves``    the result's, see ``Buckets``.
    """

    index: Index
    mesh: Mesh
    memory: Memory
    dtypes: Sequence[tuple[torch.dtype, torch.dtype]]
    _: KW_ONLY
    device: torch.device
    to: Literal["part", "sum", "whole"] = "part"
    wire: torch.dtype | None = None
    also: tuple[str, ...] = ()
    most: int = 2
    ahead: bool = False
    heard: Arrival | None = None
    give: Callable[[Buckets], Any] = lambda found: found

    def __post_init__(self) -> None:
        self.where = self.index.where
        self.filled = list(map(Filling, self.index.buckets, self.dtypes))
        # a single bucket is full only at the end
        self.ahead &= len(self.filled) > 1
        self.over = (*(a for hop in self.index.hops for a in hop), *self.also)
        self.order: list[int] = []
        self.flying: list[tuple[Filling, Callable[[], Tensor]]] = []
        self.next = 0
        self.leaves: Any = (), ()

    def begin(self, flats: Sequence[Tensor]) -> None:
        """Start from full buckets."""
        for one, flat in zip(self.filled, flats, strict=True):
            one.left.clear()
            one.flat = flat

    def take(self, leaf: int, g: Tensor) -> Tensor:
        """Copy a gradient into its bucket; return an expanded element that replaces it."""
        b, n = self.where[leaf]
        one = self.filled[b]
        g = g.detach() if g.requires_grad else g
        lies = one.lies or self._lies(one)
        if n in one.left:
            lies.slots[n].copy_(g)
            one.left.remove(n)
            self.order.append(leaf)
        else:
            # a tied leaf's second gradient
            lies.slots[n].add_(g)
        if not one.left and b == self.next:
            with torch.no_grad():
                self._post_full()
        return lies.stands_for(n, g)

    def finish(self) -> Any:
        """Post the remaining buckets, wait for all, and return the gradients."""
        with torch.no_grad():
            while self.next < len(self.filled):
                self._post()
            while self.flying:
                self._land()
        if self.heard is not None:
            self.heard(self.order)
        raws = [x.flat for x in self.filled if x.flat is not None]
        if self.to == "part":
            return self._given(self.index.of_parts(raws, self.mesh))
        unsummed = self.over if self.to == "whole" else ()
        places = [b.place(self.mesh, whole=True, unsummed=unsummed) for b in self.index]
        names, values = (b.name for b in self.index), map(ShardedTensor, raws, places)
        return self._given(Buckets(zip(names, values, strict=True), self.index, self.mesh))

    def _given(self, found: Buckets) -> Any:
        found.leaves = self.leaves
        return self.give(found)

    def _lies(self, one: Filling) -> Lies:
        """Take memory for a bucket, and zero its gaps."""
        bucket, dtype = one.bucket, one.dtypes[0]
        flat = self.memory.take(storage_shape(self.mesh, bucket.length), dtype, self.device)
        lies = self.memory.views.get(flat.data_ptr())
        if lies is None or lies.bucket is not bucket or lies.kind != (flat.shape, dtype):
            lies = self.memory.views[flat.data_ptr()] = Lies(flat, bucket)
        if lies.gaps:
            # they would count in the norm
            _zero(lies.gaps)
        one.lies, one.flat = lies, flat
        return lies

    def _post_full(self) -> None:
        # a tied slot may receive another gradient: its bucket waits for ``finish``
        for one in self.filled[self.next :]:
            if one.left or one.bucket.tied:
                return
            self._post()

    def _post(self) -> None:
        one = self.filled[self.next]
        self.next += 1
        if one.left:
            lies = one.lies or self._lies(one)
            _zero([lies.slots[n] for n in one.left])
        if self.to == "whole":
            return
        # bounds the memory of buckets in transit
        while len(self.flying) >= self.most:
            self._land()
        post = self._summed if self.to == "sum" else self._scattered
        # allocated when its first slot was filled or zeroed
        assert one.flat is not None
        self.flying.append((one, post(one.flat, one)))

    def _scattered(self, flat: Tensor, one: Filling) -> Callable[[], Tensor]:
        """Post the reduce-scatter of a bucket."""
        bucket, dtype, out = one.bucket, one.dtypes[1], flat
        also = tuple(a for a in self.also if a not in bucket.axes)
        if bucket.hops or also or dtype != flat.dtype:
            shape = storage_shape(self.mesh, bucket.part_length)
            out = self.memory.take(shape, dtype, self.device)
        how = {"wire": self.wire, "also": also, "ahead": self.ahead}
        return bucket.scatter(flat, out, self.mesh, self.memory, **how)

    def _summed(self, flat: Tensor, one: Filling) -> Callable[[], Tensor]:
        """Post the sum of a bucket over ``over``; half precision is summed in fp32."""
        over = tuple(a for a in self.over if a not in one.bucket.axes)
        if not over:
            return lambda: flat
        dtype, half = flat.dtype, flat.dtype in HALF
        wide, narrow = (flat.float(), {"out": dtype, "wire": dtype}) if half else (flat, {})
        with bind(self.mesh):
            later = start(psum, wrap(wide, self.mesh), over, **narrow)
        return lambda: unwrap(later.wait())

    def _land(self) -> None:
        one, finish = self.flying.pop(0)
        out = finish()
        # those of ``begin`` are the caller's, and a bucket without hops is its own part
        if one.flat is not None and out is not one.flat and one.lies is not None:
            self.memory.give(one.flat)
        one.flat, one.lies = out, None


def summing(params: Tree, cache: IndexCache) -> Sink:
    """Make a sink of sums on every rank, in the parameters' tree and layouts: stage 0 of ``zero``."""
    at = cache.find(params)
    like = at.where.firsts(at.raws)
    places = [p.place._replace(deferred=frozenset(), out_layout=None) for p in at.leaves]

    def as_params(found: Buckets) -> Tree:
        views = at.where.blocks([x.raw for x in found.values()])
        return at.unflatten(ShardedTensor(views[i], place) for i, place in enumerate(places))

    return Sink(
        at.where,
        at.mesh,
        Memory(),
        [(t.dtype, t.dtype) for t in like],
        device=at.mesh.device,
        to="sum",
        heard=cache.on_arrival(at.where, at.mesh, at_once=True),
        give=as_params,
    )
