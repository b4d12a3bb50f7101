"""Real processes: each collective on the process group of its mesh axis.

Every function posts its transfer and returns ``finish``, which waits and returns the result; the
synchronous form is ``finish`` called at once.  Where gloo's own collective moves more than it
must (reduce-scatter is an all-reduce there) or sums in no fixed order, we send the blocks and
add them in rank order ourselves; NCCL keeps its native collectives.
"""

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlib._compat import all_gather_single, backend_name, reduce_scatter_single
from shardlib.collectives.backends.backend import (
    LARGE,
    AxisGroup,
    Finish,
    Landing,
    Pairs,
    lands_alone,
    padded,
    swaps_whole,
)
from shardlib.dtypes import is_half, wider
from shardlib.kernels import active
from shardlib.kernels.pack import dense
from shardlib.mesh import GROUPS, POSTED, Axes, Mesh, current_job, lost

holds_values = True
spans_processes = True
lead = 0


def in_streams(g: "_Group") -> bool:
    return g.native


Finished = Callable[[], object]


@dataclass(frozen=True, eq=False)
class _Group(AxisGroup):
    """A process group; ``ranks`` are global, in the order of the flattened axes."""

    index: int
    ranks: tuple[int, ...]
    # rank within the process group of each flattened index
    places: tuple[int, ...]
    # the same, None where it is 0, 1, 2, ...
    order: tuple[int, ...] | None

    @cached_property
    def handle(self) -> Any:
        """The process group of torch, which its ranks make together at their first transfer."""
        mesh = self.mesh
        if len(self.axes) == 1:
            assert mesh.device_mesh is not None
            return mesh.device_mesh.get_group(self.axes[0])
        if self.size == dist.get_world_size():
            return dist.group.WORLD
        waits = None if mesh.timeout is None else timedelta(seconds=mesh.timeout)
        # with local synchronization, ranks outside the group need not make this call
        return dist.new_group(sorted(self.ranks), timeout=waits, use_local_synchronization=True)

    @cached_property
    def native(self) -> bool:
        return backend_name(self.handle, self.mesh.device) not in ("gloo", "fake")

    @cached_property
    def turns(self) -> Iterator[int]:
        """Tags by which gloo matches a receive with a send: each transfer takes the next."""
        return _TURNS.setdefault(self.handle, itertools.cycle(range(1024)))

    def placed(self, parts: Tensor) -> Tensor:
        """Reorder parts, one for each rank along the axes, as the process group numbers them."""
        return parts if self.order is None else parts[_inverse(self.order)]


_TURNS: "weakref.WeakKeyDictionary[Any, Iterator[int]]" = weakref.WeakKeyDictionary()
"""Tags, the same on all members: one per exchange, so that none receives another's blocks.  Axes of
two meshes may share one process group, so tags are counted per process group."""


def group(mesh: Mesh, axes: Axes) -> _Group:
    assert mesh.device_mesh is not None and mesh.coord is not None, (
        "this process is not in the mesh"
    )
    at = [mesh.names.index(a) for a in axes]
    pick = tuple(slice(None) if n in axes else mesh.coord[n] for n in mesh.names)
    # dims left after picking, in mesh order
    kept = sorted(at)
    grid = mesh.device_mesh.mesh[pick].permute(*[kept.index(i) for i in at])
    ranks = tuple(grid.reshape(-1).tolist())
    # torch numbers the ranks of a group in ascending order, the flattened axes may not
    places = tuple(sorted(ranks).index(r) for r in ranks)
    order = None if places == tuple(range(len(ranks))) else places
    if (job := current_job()) is not None:
        job.release = release
        job.members[axes] = ranks
    return _Group(mesh, axes, len(ranks), ranks.index(dist.get_rank()), ranks, places, order)


def release(mesh: Mesh) -> None:
    """End every waiting transfer of this mesh, after the job has failed.

    gloo's own abort does nothing; a receive whose timeout passes closes the connection to a peer,
    so every transfer that waits on it raises.
    """
    for g in list(mesh.memo[GROUPS].values()):
        if not isinstance(g, _Group) or "handle" not in vars(g):
            continue
        if g.native:
            g.handle.abort()
            continue
        for peer in range(g.size):
            if peer != g.places[g.index]:
                with suppress(RuntimeError):
                    g.handle.recv([torch.empty(1, device="cpu")], peer, _NEVER).wait(
                        timedelta(milliseconds=1)
                    )


_NEVER = 1 << 20
"""Tag that no transfer uses."""


def _summed(blocks: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Sum in rank order; half precision in fp32."""
    out = blocks[0].to(wider(dtype), copy=True)
    for b in blocks[1:]:
        out += b
    return out.to(dtype)


def _exchange(out: Tensor, parts: Tensor, g: _Group, own: bool = True) -> list[Any]:
    """Send part j of ``parts`` to rank j and receive its part in ``out[j]``; return works.

    ``own``  whether this rank's own part must be copied too.
    """
    if g.native or parts[0].nbytes < LARGE:
        return [dist.all_to_all_single(out, parts, group=g.handle, async_op=True)]
    works = _sent_apart(out, parts, g)
    if own:
        me = g.places[g.index]
        out[me].copy_(parts[me])
    return works


def _sent_apart(
    out: Sequence[Tensor] | Tensor, parts: Sequence[Tensor] | Tensor, g: _Group
) -> list[Any]:
    """Send part j to rank j, for each other rank, and receive its part in ``out[j]``.

    Every receive is posted before any send: gloo announces a receive to the sender with a small
    message, which would queue behind a large block on the same link, and an exchange between two
    ranks would take twice as long as the link needs.
    """
    me = g.places[g.index]
    others = [i % g.size for i in range(me + 1, me + g.size)]
    return _swapped([(out[i], i) for i in reversed(others)], [(parts[i], i) for i in others], g)


_Sends = Sequence[tuple[Tensor, int]]
"""Blocks, each with the rank within the process group that it goes to or comes from."""


def _swapped(receives: _Sends, sends: _Sends, g: _Group) -> list[Any]:
    """Post receives, then sends, under one tag; return works."""
    tag = next(g.turns)
    works = [g.handle.recv([out], peer, tag) for out, peer in receives]
    return works + [g.handle.send([block], peer, tag) for block, peer in sends]


def psum(x: Tensor, g: _Group) -> Finish:
    if swaps_whole(x, g.size) and not g.native:
        x = x.contiguous()
        return _sum_of_two(x, x, torch.empty_like(x), g)
    return _all_reduce(x, g, dist.ReduceOp.SUM)


def _waited(works: Sequence[Any], out: Tensor) -> Tensor:
    """Wait for all works, and return what they write."""
    for work in works:
        work.wait()
    return out


def _sum_of_two(sent: Tensor, mine: Tensor, out: Tensor, g: _Group) -> Finish:
    """Send to the other of two ranks, and write its data plus ``mine`` to ``out``.

    For a whole vector this moves the bytes of an all-reduce in half its steps.
    """
    other = g.places[1 - g.index]
    works = _swapped([(out, other)], [(sent, other)], g)

    def finish() -> Tensor:
        return _waited(works, out).add_(mine)

    return finish


def _all_reduce(x: Tensor, g: _Group, op: Any) -> Finish:
    out = x.clone(memory_format=torch.contiguous_format)
    work = dist.all_reduce(out, op, group=g.handle, async_op=True)
    return partial(_waited, [work], out)


def pmax(x: Tensor, g: _Group) -> Finish:
    """Take the maximum; floats are compared here, since a transport's maximum may skip a NaN.

    The same bytes move.
    """
    if not x.is_floating_point() or not x.numel():
        return _all_reduce(x, g, dist.ReduceOp.MAX)
    parts = padded(x.flatten(), g.size).view(g.size, -1)
    out = torch.empty_like(parts)
    works = _exchange(out, parts, g)

    def finish() -> Tensor:
        mine = _waited(works, out).amax(0)
        whole = x.new_empty(parts.numel())
        # parts were sent by index within the process group, so they are gathered in that order
        all_gather_single(whole, mine, group=g.handle, async_op=True).wait()
        return whole[: x.numel()].view(x.shape)

    return finish


def _parts(x: Tensor, g: _Group, dim: int) -> Tensor:
    """Cut a block into one part per rank along a dimension, in the order of the process group."""
    parts = x.unflatten(dim, (g.size, x.shape[dim] // g.size)).movedim(dim, 0)
    parts = g.placed(parts)
    return dense(parts) if not x.is_cpu or active.cpu else parts.contiguous()


def _joined(works: Sequence[Any], parts: Tensor, g: _Group, dim: int) -> Tensor:
    """Wait for parts in the order of the process group, and join them along a dimension."""
    _waited(works, parts)
    parts = (parts if g.order is None else parts[list(g.order)]).movedim(0, dim)
    return (dense(parts) if not parts.is_cpu or active.cpu else parts).flatten(dim, dim + 1)


def all_gather(x: Tensor, g: _Group, dim: int) -> Finish:
    x = x.contiguous()
    out = x.new_empty(g.size * x.shape[0], *x.shape[1:])
    if g.size == 2 and not g.native and x.numel() * x.element_size() >= LARGE:
        blocks = out.view(2, *x.shape)
        works = _exchange(blocks, x.expand(2, *x.shape), g)
    else:
        works = [all_gather_single(out, x, group=g.handle, async_op=True)]
    if dim == 0 and g.order is None:
        return partial(_waited, works, out)
    return partial(_joined, works, out.unflatten(0, (g.size, x.shape[0])), g, dim)


def psum_scatter(x: Tensor, g: _Group, dim: int, wire: torch.dtype | None = None) -> Finish:
    parts, dtype = _parts(x, g, dim), x.dtype
    own = parts[g.places[g.index]]
    if g.native and wire is None:
        out = torch.empty_like(parts[0])
        works = [reduce_scatter_single(out, parts.flatten(0, 1), group=g.handle, async_op=True)]
    else:
        sent = parts.to(wire or parts.dtype)
        out = torch.empty_like(sent)
        works = _exchange(out, sent, g)

    def finish() -> Tensor:
        _waited(works, out)
        if g.native and wire is None:
            return out
        blocks = [out[i] for i in g.places]
        if wire is not None:
            blocks[g.index] = own
        return _summed(blocks, dtype)

    return finish


def psum_scatter_into(x: Tensor, g: _Group, to: Landing) -> Finish:
    parts = x.view(g.size, -1)
    out = to.out
    alike = to.wire is None and out.dtype == x.dtype
    if g.native and alike:
        work = reduce_scatter_single(out, g.placed(parts).view(-1), group=g.handle, async_op=True)
        return partial(_waited, [work], out)
    if g.native or not lands_alone(parts, to):
        return _exchanged_sum(parts, g, to)
    if g.size == 2:
        return _sum_of_two(parts[1 - g.index], parts[g.index], out, g)
    return _round_sum(parts, g, out, to.land)


def _exchanged_sum(parts: Tensor, g: _Group, to: Landing) -> Finish:
    """Send each rank its part, and add what comes in the order of ``_round_sum``."""
    own = parts[g.index]
    half = is_half(parts)
    out = to.out
    land = to.land
    sent = g.placed(parts).to(to.wire or parts.dtype)
    if land is not None and land.dtype == sent.dtype and land.numel() >= sent.numel():
        came = land[: sent.numel()].view_as(sent)
    else:
        came = torch.empty_like(sent)
    works = _exchange(came, sent, g, own=False)

    def finish() -> Tensor:
        _waited(works, came)
        blocks = [came[i] for i in g.places]
        blocks[g.index] = own
        # so that both round alike
        blocks = [*blocks[g.index + 1 :], *blocks[: g.index + 1]]
        if half or {b.dtype for b in blocks} != {out.dtype}:
            wide = torch.float32 if half else parts.dtype
            return out.copy_(_summed(blocks, wide))
        torch.add(blocks[0], blocks[1], out=out)
        for b in blocks[2:]:
            out.add_(b)
        return out

    return finish


def _rounds(n: int, size: int, pairs: int) -> list[tuple[int, int, int]]:
    """List the transfers of a ring in order: start and stop of each piece, and its hop.

    Two pieces are in transit at once, so that the link is busy while a rank adds.

    >>> _rounds(8, 3, 1)
    [(0, 4, 1), (4, 8, 1), (0, 4, 2), (4, 8, 2)]
    """
    cuts = [n * i // (2 * pairs) for i in range(2 * pairs + 1)]
    return [
        (cuts[i], cuts[i + 1], hop)
        for first in range(0, 2 * pairs, 2)
        for hop in range(1, size)
        for i in (first, first + 1)
    ]


def _round_sum(parts: Tensor, g: _Group, out: Tensor, land: Tensor | None) -> Finish:
    """Reduce and scatter round a ring.

    Part j starts at its owner's right neighbour, and every rank adds its own to what it receives
    from the left.

    A link is filled by one flow each way; three flows into one port are slower.  Every receive is
    posted well before its send: a sender without a posted receive requests one, which wakes both
    ranks twice more.  The last hop is received in ``out``, the others in ``land``, whose size
    fixes the number of pieces.  The work is done in ``finish``.
    Source: Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002, section 3.
    """
    size, n, me, tag = g.size, parts.shape[1], g.index, next(g.turns)
    left, right = g.places[me - 1], g.places[(me + 1) % size]
    room = parts.new_empty((size - 2) * (n + 1)) if land is None else land.view(-1)
    widest = max(room.numel() // (2 * (size - 2)), 1)
    steps, per = _rounds(n, size, -(-n // (2 * widest))), 2 * (size - 1)
    send, recv = g.handle.send, g.handle.recv

    def slot(k: int) -> Tensor:
        start, stop, hop = steps[k]
        if hop == size - 1:
            return out[start:stop]
        # two pieces are in transit at once, each in its own half of the room
        at = ((k % 2) * (size - 2) + hop - 1) * widest
        return room[at : at + stop - start]

    def expect(k: int) -> None:
        coming.append(recv([slot(k)], left, tag))

    def begin(k: int) -> None:
        start, stop, _ = steps[k]
        sent.append(send([parts[me - 1, start:stop]], right, tag))

    coming: deque[Any] = deque()
    sent: deque[Any] = deque()
    for k in range(per):
        expect(k)
    begin(0)
    begin(1)

    def finish() -> Tensor:
        for k, (start, stop, hop) in enumerate(steps):
            coming.popleft().wait()
            summed = slot(k).add_(parts[me - hop - 1, start:stop])
            if hop < size - 1:
                sent.append(send([summed], right, tag))
            elif k + 2 < len(steps):
                begin(k + 2)
            # the send of two steps ago, whose slot is reused now
            sent.popleft().wait()
            if k >= 2 and k + per - 2 < len(steps):
                expect(k + per - 2)
        return out

    return finish


def all_gather_into(flat: Tensor, g: _Group, ahead: bool = False) -> Finish:
    parts = flat.view(g.size, -1)
    me = g.places[g.index]
    if g.native or parts[0].nbytes < LARGE:
        if g.order is not None:
            later = all_gather(parts[g.index].clone(), g, 0)
            return lambda: flat.copy_(later())
        mine = parts[me] if g.native else parts[me].clone()
        works = [all_gather_single(flat, mine, group=g.handle, async_op=True)]
    elif not ahead and g.size > 2:
        return _round_gather(flat, parts, g)
    else:
        came = [parts[i] for i in _inverse(g.places)]
        works = _sent_apart(came, [parts[g.index]] * g.size, g)
    return partial(_waited, works, flat)


def _round_gather(flat: Tensor, parts: Tensor, g: _Group) -> Finish:
    """Gather round a ring: blocks received from the left are sent to the right."""
    size, me, tag = g.size, g.index, next(g.turns)
    left, right = g.places[me - 1], g.places[(me + 1) % size]
    steps = _rounds(parts.shape[1], size, 1)
    send = g.handle.send
    coming = [g.handle.recv([parts[me - i, a:b]], left, tag) for a, b, i in steps]
    sent = [send([parts[me, a:b]], right, tag) for a, b, _ in steps[:2]]

    def finish() -> Tensor:
        for (a, b, i), work in zip(steps, coming, strict=True):
            work.wait()
            if i < size - 1:
                sent.append(send([parts[me - i, a:b]], right, tag))
        for work in sent:
            work.wait()
        return flat

    return finish


def _inverse(order: Sequence[int]) -> list[int]:
    return [order.index(i) for i in range(len(order))]


def pslice(x: Tensor, g: _Group, dim: int) -> Finish:
    n = x.shape[dim] // g.size
    # of its own memory, as on other back ends: a view would keep all of x
    out = x.narrow(dim, g.index * n, n).clone(memory_format=torch.contiguous_format)
    return lambda: out


def place(x: Tensor, g: _Group, dim: int) -> Finish:
    n = x.shape[dim]
    out = x.new_zeros([n * g.size if d == dim else s for d, s in enumerate(x.shape)])
    out.narrow(dim, g.index * n, n).copy_(x)
    return lambda: out


def ppermutes(xs: Sequence[Tensor], g: _Group, tables: Sequence[Pairs]) -> list[Finish]:
    """Permute several at once: NCCL's group call, or on gloo every receive before any send."""
    receives, sends, outs = [], [], []
    for n, (x, pairs) in enumerate(zip(xs, tables, strict=True)):
        # also on ranks that send nothing, so that all count alike
        tag = next(g.turns)
        source = next((s for s, d in pairs if d == g.index), None)
        target = next((d for s, d in pairs if s == g.index), None)
        if source == g.index:
            outs.append(x.clone())
            continue
        x = x.contiguous()
        outs.append(torch.zeros_like(x) if source is None else torch.empty_like(x))
        if source is not None:
            receives.append((n, dist.irecv, outs[-1], source, tag))
        if target is not None:
            sends.append((n, dist.isend, x, target, tag))
    posts = [*receives, *sends]
    works: list[list[Any]] = [[] for _ in xs]
    if g.native and posts:
        ops = [dist.P2POp(f, t, g.ranks[peer], group=g.handle) for _, f, t, peer, _ in posts]
        works = [dist.batch_isend_irecv(ops)] * len(xs)
    else:
        for n, f, t, peer, tag in posts:
            works[n].append(_SEND_OR_RECV[f](g.handle, [t], g.places[peer], tag))
    return [partial(_waited, done, out) for done, out in zip(works, outs, strict=True)]


_SEND_OR_RECV = {dist.isend: dist.ProcessGroup.send, dist.irecv: dist.ProcessGroup.recv}


def all_to_all(x: Tensor, g: _Group, split_dim: int, concat_dim: int) -> Finish:
    parts = _parts(x, g, split_dim)
    out = torch.empty_like(parts)
    return partial(_joined, _exchange(out, parts, g), out, g, concat_dim)


def ragged_all_to_all(x: Tensor, g: _Group, counts: Sequence[Sequence[int]]) -> Finish:
    """Send parts of unequal length; on gloo receives are posted before sends, see ``_exchange``."""
    me = g.index
    came = [row[me] for row in counts]
    out = x.new_zeros(max(map(sum, zip(*counts, strict=True))))
    sent = list(x.contiguous()[: sum(counts[me])].split(list(counts[me])))
    got = list(out[: sum(came)].split(came))
    others = [(me + i) % g.size for i in range(1, g.size)]
    if g.native:
        outs, parts = ([blocks[i] for i in _inverse(g.places)] for blocks in (got, sent))
        works: list[Any] = [dist.all_to_all(outs, parts, group=g.handle, async_op=True)]
    else:
        receives = [(got[i], g.places[i]) for i in reversed(others) if came[i]]
        works = _swapped(receives, [(sent[i], g.places[i]) for i in others if len(sent[i])], g)
        got[me].copy_(sent[me])
    return partial(_waited, works, out)


class _PostedTransfer(tuple[Any, Tensor]):
    """One transfer and its result; calling it waits.  A tuple, since its constructor is C code."""

    __slots__ = ()

    def __call__(self) -> Tensor:
        work, out = self
        POSTED.pop(work, None)
        try:
            work.wait()
        except RuntimeError as e:
            lost(e)
            raise
        return out

    wait = __call__


def pbroadcast(x: Tensor, g: _Group, root: int) -> _PostedTransfer:
    alike = torch.contiguous_format
    out = x.contiguous() if g.index == root else torch.empty_like(x, memory_format=alike)
    return _PostedTransfer((g.handle.broadcast(out, g.places[root]), out))


def broadcasts(g: _Group) -> Callable[[Tensor, int], _PostedTransfer]:
    """Return pbroadcast over one group as a function; the group is looked up once."""
    me, places, broadcast, alike = g.index, g.places, g.handle.broadcast, torch.contiguous_format

    def post(x: Tensor, root: int) -> _PostedTransfer:
        out = x.contiguous() if root == me else torch.empty_like(x, memory_format=alike)
        try:
            work = broadcast(out, places[root])
        except RuntimeError as e:
            lost(e, None, g.ranks)
            raise
        POSTED[work] = posted = _PostedTransfer((work, out))
        return posted

    return post


def reductions(
    g: _Group, wire: torch.dtype | None = None
) -> Callable[[Tensor, Tensor, int], Callable[[], object]]:
    """Return posted preduce_into over one group as a function; the group is looked up once."""
    me, places, send, turns = g.index, g.places, None if g.native else g.handle.send, g.turns

    def add(target: Tensor, x: Tensor, root: int) -> Finished:
        dtype, tag = wire or target.dtype, next(turns)
        if send is None:
            sent = x.to(dtype, copy=True, memory_format=torch.contiguous_format)
            finish = _reduced(target, sent, g, tag, root)
        elif root == me:
            finish = _collect(target, x, g, tag, dtype)
        else:
            x = (x if x.dtype == dtype else x.to(dtype)).contiguous()
            finish = partial(_sent, send([x], places[root], tag), x, (g, tag))
        POSTED[g, tag] = finish
        return finish

    return add


def _sent(work: Any, block: Tensor, key: tuple[_Group, int]) -> None:
    """Wait until a block is sent, and keep it alive until then."""
    POSTED.pop(key, None)
    try:
        work.wait()
    except RuntimeError as e:
        lost(e, None, key[0].ranks)
        raise


def _reduced(target: Tensor, x: Tensor, g: _Group, tag: int, root: int) -> Callable[[], object]:
    work: Any = dist.reduce(x, g.ranks[root], group=g.handle, async_op=True)

    def finish() -> None:
        _sent(work, x, (g, tag))
        if g.index == root:
            target.copy_(x)

    return finish


def preduce(x: Tensor, g: _Group, root: int) -> Finish:
    if g.native:
        out = x.clone(memory_format=torch.contiguous_format)
        dist.reduce(out, g.ranks[root], group=g.handle)
        return lambda: out if g.index == root else _nothing(x)
    tag = next(g.turns)
    if g.index != root:
        sent = x.contiguous()
        work = g.handle.send([sent], g.places[root], tag)
        return lambda: _nothing(_waited([work], sent))
    return _collect(torch.empty_like(x), x, g, tag, x.dtype)


def _nothing(x: Tensor) -> Tensor:
    """Return zeros that take no memory."""
    return x.new_zeros(()).expand(x.shape)


def _collect(target: Tensor, x: Tensor, g: _Group, tag: int, wire: torch.dtype) -> Finish:
    """Sum all parts at the root, in rank order, one buffer at a time; half precision in fp32.

    The first part is received from now on, in ``target`` itself where it fits there; each other one
    after the part before it is added.
    """
    half = is_half(target)
    fits = target.dtype == wire and not half and target.is_contiguous()
    land = target if fits else torch.empty(x.shape, dtype=wire, device=x.device)
    recv, places, me = g.handle.recv, g.places, g.index
    coming = recv([land], places[0 if me else 1], tag)

    def finish() -> Tensor:
        POSTED.pop((g, tag), None)
        try:
            coming.wait()
            total = land.float() if half else target if fits else target.copy_(land)
            if me < 2:
                total.add_(x)
            for i in range(2 if me < 2 else 1, len(places)):
                if i == me:
                    total.add_(x)
                    continue
                part = torch.empty(x.shape, dtype=wire, device=x.device)
                recv([part], places[i], tag).wait()
                total.add_(part)
        except RuntimeError as e:
            lost(e, None, g.ranks)
            raise
        return target.copy_(total) if half else total

    return finish


def preduce_into(
    target: Tensor, x: Tensor, g: _Group, root: int, wire: torch.dtype
) -> Callable[[], object]:
    return reductions(g, wire)(target, x, root)
