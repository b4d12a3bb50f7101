"""ZeRO: any optimizer with its state, its gradients and its parameters split over data axes.

``zero(tx, axis)`` stores the parameters' local blocks, of any tensor-parallel layout, end to end
in flat buckets; each rank along ``axis`` updates its own 1/N of every bucket.  A bucket's part is
itself a ShardedTensor, a vector split over the parameters' axes and ``axis``, so the inner
transforms (clipping too) work on ordinary values.

Per step, with P bytes of parameters on a rank: gradients pending over ``axis`` are
reduce-scattered, (N-1)/N P, and parameters gathered, (N-1)/N P.

Source: Rajbhandari et al., arXiv 1910.02054, sections 5.1 (stage 1, P_os) and 5.2 (stage 2, P_g).
"""

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.capacity import refuse_beyond
from shardlib.collectives import all_gather, blocks, played, storage, unwrap, wrap
from shardlib.errors import BadArgument, PartialEscape, ShardError, Unsupported
from shardlib.grad import frozen
from shardlib.mesh import Mesh, bind, rank_along
from shardlib.optim.buckets import Buckets, Hops, Index, parts, unflatten
from shardlib.optim.clip import global_norm
from shardlib.optim.flat import adopt, gather, own, put_back, shard_place, unread
from shardlib.optim.gathered import Parts
from shardlib.optim.index import MOST, Seen, changed, flat, index_of
from shardlib.optim.masters import Master, ZeroState, cast, only_bf16, with_master
from shardlib.optim.memory import Memory
from shardlib.optim.names import load_state_dict, state_dict
from shardlib.optim.sink import Sink, Summed
from shardlib.optim.transform import Step, Transform, check_transform, run_in_place
from shardlib.optim.trees import given_for
from shardlib.tensor import ShardedTensor, typeof

__all__ = ["zero"]


def zero(
    tx: Transform,
    axis: str | Sequence[str],
    stage: int = 1,
    *,
    bucket_mb: float | None = None,
    master: Master | None = None,
    reduce_dtype: torch.dtype | None = None,
    gather_dtype: torch.dtype | None = None,
    inner: str | None = None,
    keep: bool = False,
) -> Transform:
    """Split ``tx``'s state over mesh axes; parameters and gradients keep their layouts.

    ``tx``            any transform except those that need the tree's structure, or have no trait.
    ``axis``          one mesh axis or several, the first of them major.  A parameter's state is
                      split over those axes that do not split the parameter already.
    ``stage``         0: nothing is split: ``value_and_grad(loss, into=tx)`` sums gradients over
                      ``axis`` in buckets while backward runs, and returns them in the parameters'
                      layouts.
                      1: the state is split.
                      2: gradients too: ``value_and_grad(loss, into=tx)`` reduce-scatters each
                      bucket while backward still runs, and keeps only parts.
                      3: parameters too: ``params = tx.shard(params)`` keeps only parts, and
                      ``apply`` and ``value_and_grad`` gather them group by group when they are
                      read.
    ``bucket_mb``     the most MiB in one bucket, unless one parameter has more; None: 25.  At stage
                      2 a small model then has several buckets in transit during backward: on slow
                      links this hides them, on ranks that share cores it costs CPU time.
    ``master``        "fp32": also keep the parameters' parts in fp32; "bf16+rem": only the 16 bits
                      that a bfloat16 parameter lacks of fp32.
    ``reduce_dtype``  in which gradients are sent; None: their own; half precision is summed in
                      fp32.
    ``gather_dtype``  in which parameters are sent; None: their own; a narrower one needs a master.
    ``inner``         a second axis, with faster links: parts are cut over both, and gradients are
                      reduced over ``inner`` first, so that only 1/inner of them is sent over
                      ``axis``.
    ``keep``          at stage 3: keep gathered parameters for backward instead of gathering them
                      again.

    Gradients may be ``+ sum(axis)`` (``value_and_grad(..., pending=axis)``: reduce-scattered here),
    in buckets (``value_and_grad(..., into=tx)``), or already summed (sliced, nothing moves).
    Frozen parameters are in no bucket.  Updates equal ``tx``'s own, bit for bit, given the same
    reduced gradient.
    Raises: Unsupported for transforms that need the tree's structure, and for those without a
    trait.

    >>> import shardlib as sl
    >>> with sl.simulate(data=2, x=2):
    ...     params = {"w": sl.shard(torch.ones(4, 6), "x .")}
    ...     tx = sl.optim.zero(sl.optim.adamw(0.1), axis="data")
    ...     state = tx.init(params)
    ...     updates, state = tx.update(params, state, params)
    >>> sl.typeof(updates["w"]), *(sl.typeof(m) for m in state.mu.values())  # one bucket
    ('f32[4@x, 6]', 'f32[256@(x data)]')
    """
    check_transform(tx, "zero")
    if not isinstance(axis, str | Sequence) or not all(isinstance(a, str) for a in axis):
        raise BadArgument(
            f"axis={axis!r} is no name of a mesh axis, nor several",
            op="zero",
            fix='sl.optim.zero(tx, axis="data")',
        )
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    _check(tx, axes, stage, master, reduce_dtype, gather_dtype, inner)
    cut = axes if inner is None else (inner, *axes)
    hops: Hops = (cut,) if inner is None else ((inner,), axes)
    if bucket_mb is not None and not (isinstance(bucket_mb, int | float) and 0 < bucket_mb < 2**40):
        raise ShardError(
            f"bucket_mb={bucket_mb!r}: a bucket has more than 0 MiB",
            op="zero",
            fix='sl.optim.zero(tx, axis="data", bucket_mb=4.0)',
        )
    most_bytes = MOST if bucket_mb is None else int(bucket_mb * 2**20)
    memory, seen = Memory(), Seen(hops, most_bytes, tx.groups)
    # stage 3: one bucket per group of a module block, of any size
    apart = Seen(hops, 1 << 62, tx.groups, True, keep)

    def sink_for(
        where: Index, mesh: Mesh, like: Sequence[Tensor], room: Memory, **how: Any
    ) -> Sink:
        """Make a sink for gradients with the dtypes of ``like``, one leaf of each bucket."""
        # a sum sent in half precision is not worth fp32 parts
        exact = reduce_dtype is None or reduce_dtype == torch.float32
        dtypes = [(t.dtype, _wide(t.dtype) if exact else t.dtype) for t in like]
        wires = {t.dtype for t in like} - {reduce_dtype}
        wire = reduce_dtype if reduce_dtype is not None and wires else None
        return Sink(where, mesh, room, dtypes, device=like[0].device, wire=wire, **how)

    def reduced(grads: Any, where: Index, mesh: Mesh, room: Memory) -> Buckets:
        """Return the parts of the summed gradients."""
        if isinstance(grads, Buckets):
            _same_index(grads.index, where, mesh)
            if _is_cut(grads):
                return grads
            flats = [grads[b.name].raw for b in where.buckets]
            partial = {a for g in grads.values() for a in g.sharding.partial}
            sink = sink_for(where, mesh, flats, room, also=tuple(sorted(partial - set(cut))))
            sink.begin(flats)
            return sink.finish()
        partial = _pending(grads, cut)
        if partial is None:
            return _parts(grads, where, mesh, grads=True)
        firsts = [grads[b.slots[0].leaves[0]].raw for b in where.buckets]
        also = tuple(a for a in partial if a not in cut)
        sink = sink_for(where, mesh, firsts, room, also=also)
        for b in where.buckets:
            for slot in b.slots:
                for i in slot.leaves:
                    sink.take(i, grads[i].raw)
        return sink.finish()

    def init(params: Any) -> Any:
        if stage == 3:
            return begun(_own(_parted(params)))
        leaves, held, tree = flat(params)
        where, mesh = seen.index(params, leaves, held, tree)
        if all(unread(x) for x in leaves):  # a graph would keep the old blocks
            # here, because a copy of all needs least memory while nothing else is alive
            adopt(leaves, where, mesh)
        return begun(_parts(leaves, where, mesh))

    def begun(parts: Buckets) -> Any:
        if master is None:
            return tx.init(parts)
        full = cast(parts, torch.float32)
        if master == "fp32":
            return ZeroState(tx.init(full), full)
        only_bf16(parts, axes[0] if len(axes) == 1 else axes)
        return ZeroState(tx.init(full), cast(parts, torch.int16, zeros=True))

    def followed(
        grads: Any, state: Any, leaves: list[Any], where: Index, mesh: Mesh
    ) -> tuple[Any, Index]:
        """Move the state into the gradients' buckets, which may have a recorded order."""
        if not isinstance(grads, Buckets) or grads.index is where or grads.index == where:
            return state, where
        if grads.index.items != where.items or not _moves(state):
            _same_index(grads.index, where, mesh)
        return moved(state, leaves, grads.index, mesh), grads.index

    def moved(state: Any, leaves: list[Any], where: Index, mesh: Mesh) -> Any:
        """Move the state into other buckets, by name, as ``load_state_dict`` does."""
        return load_state_dict(begun(_parts(leaves, where, mesh)), state_dict(state))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ShardError(
                "zero needs the parameters", op="zero", fix="tx.update(grads, state, params)"
            )
        if master is not None:
            raise Unsupported(
                "an update added to half precision parameters would round the master away",
                op="zero",
                fix="params, state, info = sl.optim.step(tx, params, grads, state)",
            )
        if stage == 3:
            mine, given = _alike_parts(params, grads, state)
            updates, state = tx.update(given, state, mine)
            return _with_frozen(params, updates), state
        leaves, held, tree = flat(params)
        where, mesh = seen.index(params, leaves, held, tree, state)
        given = _given(grads, leaves, held, tree)
        with torch.no_grad():
            state, where = followed(given, state, leaves, where, mesh)
            with bind(mesh):
                parts = reduced(given, where, mesh, Memory())
            updates, state = tx.update(parts, state, _parts(leaves, where, mesh))
            blocks: dict[int, Tensor] = {}
            with bind(mesh):
                for bucket in where.buckets:
                    whole = wrap(updates[bucket.name].raw, mesh)
                    whole = all_gather(whole, bucket.over, 0) if bucket.over else whole
                    blocks.update(unflatten(whole, bucket))
        out = iter([p.becomes(unwrap(blocks[i])) for i, p in enumerate(leaves)])
        return optree.tree_unflatten(tree, [None if f else next(out) for f in held]), state

    def step_on_parts(grads: Any, state: Any, params: Any, step: Step) -> Any:
        mine, given = _alike_parts(params, grads, state)
        seen.keep_pieces(given)
        if step.ask and step.norm is None:
            step.norm = global_norm(given)
        if master is None:
            state = run_in_place(tx, given, state, mine, step)
        else:
            state = with_master(tx, given, state, mine, step, master, memory)
        params.index.room.memory.give(*(g.raw for g in given.values()))
        return state

    def donate(grads: Any, state: Any, params: Any, step: Step) -> Any:
        if (master is None) == isinstance(state, ZeroState):
            kept = "one" if master is None else "none"
            raise ShardError(
                f"master={master!r}, and the state was made with {kept}",
                op="zero",
                fix="state = tx.init(params)",
            )
        if stage == 3:
            return step_on_parts(grads, state, params, step)
        leaves, held, tree, raws = seen.flat(params)
        where, mesh = seen.index(params, leaves, held, tree, state)
        given = _given(grads, leaves, held, tree)
        state, where = followed(given, state, leaves, where, mesh)
        with bind(mesh):  # bind settles transfers that an exception left posted
            parts = reduced(given, where, mesh, memory)
        seen.keep_pieces(parts)
        if step.ask:
            step.norm = global_norm(parts)
        flats = seen.adopt(leaves, where, mesh, raws)
        mine = seen.own(flats, where, mesh)
        if master is None:
            state = run_in_place(tx, parts, state, mine, step)
        else:
            state = with_master(tx, parts, state, mine, step, master, memory)
        put_back(flats, mine)
        # a skipped step changed no parameter
        if not step.skipped:
            _send(flats, mine, state, where, mesh)
        memory.give(*(g.raw for g in parts.values()))
        if isinstance(given, Buckets):  # only now: a refused step keeps its gradients
            memory.give(*(g.raw for g in given.values()))
        better = seen.better(where)  # no gradients are in transit now
        if better is not None and _moves(state):
            seen.take(better)
            return moved(state, leaves, better, mesh)
        return state

    def _send(flats: list[Tensor], mine: Buckets, state: Any, where: Index, mesh: Mesh) -> None:
        if gather_dtype is None or all(f.dtype == gather_dtype for f in flats):
            gather(flats, where, mesh)
            return
        # gather a narrow copy, and widen it into the parameters
        narrow = [memory.take(f.shape, gather_dtype, f.device) for f in flats]
        part = own(narrow, where, mesh)
        for small, p in zip(part.pieces, mine.pieces, strict=True):
            small.copy_(p)
        put_back(narrow, part)
        gather(narrow, where, mesh)
        for small, whole in zip(narrow, flats, strict=True):
            whole.copy_(small)
        memory.give(*narrow)

    def sink(params: Any) -> Sink | None:
        if stage == 3:  # the gradient of a part is reduced by the backward of its gather
            _parted(params)
            return None
        leaves, held, tree, _ = seen.flat(params)
        where, mesh = seen.index(params, leaves, held, tree)
        like = [leaves[b.slots[0].leaves[0]].raw for b in where.buckets]
        if stage == 1:  # kept whole, and accumulated in fp32
            dtypes = [(_wide(t.dtype), _wide(t.dtype)) for t in like]
            return Sink(where, mesh, memory, dtypes, device=like[0].device, to="pending")
        if stage == 0:
            dtypes = [(t.dtype, t.dtype) for t in like]
            tree = _gradients(params, leaves)
            how = {"device": like[0].device, "heard": seen.hears(where, mesh, at_once=True)}
            return Summed(where, mesh, Memory(), dtypes, tree=tree, **how)
        heard = seen.hears(where, mesh)
        # four in transit: on slow links backward must not wait for them
        return sink_for(where, mesh, like, memory, heard=heard, most=4, ahead=True)

    if stage == 0:
        return tx._replace(sink=sink)

    def shard(params: Any) -> Any:
        if stage < 3 or isinstance(params, Parts):
            return params
        leaves, tree = optree.tree_flatten(params)
        held = frozen(leaves)
        asked = [isinstance(x, ShardedTensor) and x.raw.requires_grad for x in leaves]
        # detached, no leaf counts as frozen, so frozen ones get buckets too
        every = optree.tree_map(lambda x: x.detach() if any(held) else x, params)
        where, mesh = apart.index(every, optree.tree_leaves(every), held, tree)
        out = Parts(dict(_parts(optree.tree_leaves(every), where, mesh)), where, mesh)
        for bucket in where.buckets:
            flags = {asked[i] for s in bucket.slots for i in s.leaves}
            out[bucket.name].raw.requires_grad_(flags == {True})
        return out

    return Transform(init, update, tx.trait, donate=donate, sink=sink, shard=shard, heeds=True)


def _check(
    tx: Transform,
    axes: tuple[str, ...],
    stage: int,
    master: Any,
    reduce_dtype: Any,
    gather_dtype: Any,
    inner: str | None,
) -> None:
    if not axes:
        raise ShardError(
            "there is no axis to split over", op="zero", fix='sl.optim.zero(tx, axis="data")'
        )
    name = repr(axes[0] if len(axes) == 1 else axes)
    if type(stage) is not int or not 0 <= stage <= 3:
        raise ShardError(
            f"there is no stage {stage}; 1 splits state, 2 gradients too, 3 parameters too",
            op="zero",
            fix=f"sl.optim.zero(tx, axis={name}, stage=2)",
        )
    if stage == 0 and (master or gather_dtype or reduce_dtype):
        raise ShardError(
            "stage 0 splits nothing, so it has no master and no dtypes of its own",
            op="zero",
            fix=f"sl.optim.zero(tx, axis={name}, stage=0)",
        )
    if stage and tx.trait in (None, "tree"):
        raise Unsupported(
            "nobody said what this transform's update of one element depends on, and zero shows it "
            "flat vectors of many parameters"
            if tx.trait is None
            else "this transform looks at the tree, and zero shows it flat vectors of many parameters",
            op="zero",
            fix=f'tx = sl.optim.zero(tx._replace(trait="elementwise"), axis={name})  # if that alone',
        )
    if master not in (None, "fp32", "bf16+rem"):
        raise ShardError(
            f"master={master!r} is none of 'fp32', 'bf16+rem', None",
            op="zero",
            fix=f'sl.optim.zero(tx, axis={name}, master="fp32")',
        )
    for what, dtype in (("reduce_dtype", reduce_dtype), ("gather_dtype", gather_dtype)):
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ShardError(
                f"{what}={dtype!r} is no floating point dtype",
                op="zero",
                fix=f"sl.optim.zero(tx, axis={name}, {what}=torch.bfloat16)",
            )
    if gather_dtype is not None and master != "fp32":
        raise ShardError(
            "parameters gathered in another dtype than their own lose what no master keeps",
            op="zero",
            fix=f'sl.optim.zero(tx, axis={name}, master="fp32", gather_dtype={gather_dtype})',
        )
    if gather_dtype is not None and stage == 3:
        raise Unsupported(
            "the parts of stage 3 are gathered in their own dtype",
            op="zero",
            fix=f'sl.optim.zero(tx, axis={name}, stage=3, master="fp32")  # of bfloat16 parameters',
        )
    if inner is not None and inner in axes:
        raise ShardError(
            f"inner={inner!r} is in axis= already",
            op="zero",
            fix=f"sl.optim.zero(tx, axis={name})",
        )


# ---------------------------------------------------------------- stage 3


def _parted(params: Any) -> Parts:
    if not isinstance(params, Parts):
        raise ShardError(
            "stage 3 trains parts of parameters, and these are whole",
            op="zero",
            fix="params = tx.shard(params)",
        )
    return params


def _own(params: Buckets) -> Buckets:
    """Return the buckets that are trained."""
    asked = {x.requires_grad for x in params.values()}
    if len(asked) == 1:
        return params
    held = frozen(list(params.values()))
    return params.subset(tuple(n for n, f in zip(params, held, strict=True) if not f))


def _alike_parts(params: Any, grads: Any, state: Any) -> tuple[Buckets, Buckets]:
    """Return parameters and gradients of the trained buckets, checked to match."""
    mine = _own(_parted(params))
    theirs = index_of(state)
    ours = mine.index.whole or mine.index
    if theirs is not None and theirs is not ours and theirs.items != ours.items:
        raise changed(theirs.items, ours.items, mine.mesh)
    if not isinstance(grads, Buckets) or not grads.keys() >= mine.keys():
        raise ShardError(
            "the gradients are another tree than the parameters",
            op="zero",
            fix="loss, grads = sl.value_and_grad(f)(params)",
        )
    if grads.index is mine.index:
        given = grads
    else:
        _same_index(grads.index.whole or grads.index, ours, mine.mesh)
        given = mine.like({n: grads[n] for n in mine})
    _summed(given)
    return mine, given


def _summed(grads: Buckets) -> None:
    odd = next((g for g in grads.values() if g.place.layout.partial), None)
    if odd is not None:
        raise PartialEscape(
            "the gradient of a part is summed already, and this one is pending",
            op="zero",
            operands={"gradient": typeof(odd)},
            mesh=odd.mesh,
            fix="loss, grads = sl.value_and_grad(f)(params)",
        )


def _with_frozen(params: Parts, updates: Buckets) -> Parts:
    return params.like({n: updates.get(n) for n in params})  # type: ignore[return-value]


# ---------------------------------------------------------------- trees and their index


def _gradients(params: Any, leaves: list[Any]) -> Callable[[list[Tensor]], Any]:
    """Return a function that builds the tree of gradients from the trained leaves' blocks."""
    every, tree = optree.tree_flatten(params)
    held = frozen(every)

    def made(blocks: list[Tensor]) -> Any:
        found = iter(
            ShardedTensor(raw, p.place._replace(deferred=frozenset(), out_layout=None))
            for raw, p in zip(blocks, leaves, strict=True)
        )
        return optree.tree_unflatten(tree, [None if f else next(found) for f in held])

    return made


def _given(grads: Any, leaves: list[Any], held: list[bool], tree: Any) -> Any:
    """Return the trained leaves' gradients: a list, or Buckets."""
    if isinstance(grads, Buckets):
        return grads
    given = [g for g, f in zip(given_for(tree, grads, "zero"), held, strict=True) if not f]
    _lie_alike(leaves, given)
    return given


def _moves(state: Any) -> bool:
    """Return whether every tensor of the state is stored in element-wise buckets.

    It can then be re-bucketed.
    """
    every = optree.tree_leaves(state, is_leaf=lambda x: isinstance(x, Buckets))
    return all(
        all(x[b.name].raw.shape[-1] * b.ways == b.length for b in x.index.buckets)
        if isinstance(x, Buckets)
        else not isinstance(x, Tensor) or x.numel() == 1
        for x in every
    )


def _same_index(theirs: Index, ours: Index, mesh: Mesh) -> None:
    if theirs != ours:
        if theirs.items != ours.items:
            raise changed(ours.items, theirs.items, mesh)
        raise ShardError(
            "the gradients lie in other buckets than the state",
            op="zero",
            mesh=mesh,
            fix="loss, grads = sl.value_and_grad(f, into=tx)(params)",
        )


def _lie_alike(params: list[Any], grads: list[Any]) -> None:
    """Check that each gradient is split as its parameter: blocks are combined by position."""
    for p, g in zip(params, grads, strict=True):
        alike = isinstance(g, ShardedTensor) and isinstance(p, ShardedTensor) and g.mesh is p.mesh
        if (
            not alike
            or g.dims != p.dims
            or g.sharding.skew != p.sharding.skew
            or g.shape != p.shape
        ):
            bare = isinstance(p, ShardedTensor)
            raise ShardError(
                "a gradient lies otherwise than its parameter"
                if g is not None
                else "a parameter has no gradient",
                op="zero",
                operands={
                    "parameter": typeof(p),
                    "gradient": typeof(g) if isinstance(g, Tensor) else str(g),
                },
                mesh=p.mesh if bare else None,
                fix="sl.value_and_grad(loss)(params)",
            )


def _pending(grads: list[Any], axes: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the axes over which gradients are pending; None if they are summed.

    Each gradient must be pending over all of them, without those that split its leaf, and ``axes``
    must be among them; or none may be pending.
    """
    every = {a for g in grads if isinstance(g, ShardedTensor) for a in g.sharding.partial}
    if not every:
        return None
    asked = every | set(axes)
    odd = next((g for g in grads if asked - set(g.sharding.axes) != set(g.sharding.partial)), None)
    if odd is None:
        return tuple(sorted(asked))
    names = axes[0] if len(axes) == 1 else axes
    raise PartialEscape(
        f"every gradient must be pending over {names!r}, or none pending at all",
        op="zero",
        operands={"gradient": typeof(odd)},
        mesh=odd.mesh,
        fix=f"sl.value_and_grad(loss, pending={names!r})",
    )


def _is_cut(grads: Buckets) -> bool:
    return not any(g.sharding.partial for g in grads.values())


# ---------------------------------------------------------------- parts of buckets


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _parts(leaves: list[Any], where: Index, mesh: Mesh, *, grads: bool = False) -> Buckets:
    """Return this rank's part of every bucket of summed values, without making a whole bucket.

    ``grads``  they are gradients: those of tied leaves are added, and half precision is widened.
    """
    out = {}
    dtypes = [_wide(b.dtype) if grads else b.dtype for b in where.buckets]
    sizes = [b.length // b.ways * d.itemsize for b, d in zip(where.buckets, dtypes, strict=True)]
    refuse_beyond(sum(sizes) * len(played(mesh)), mesh.device, "zero", mesh)
    with torch.no_grad():
        every = [blocks(x.raw, mesh) for x in leaves]
        for bucket, dtype in zip(where.buckets, dtypes, strict=True):
            first = every[bucket.slots[0].leaves[0]][0]
            ranks = [rank_along(bucket.over, c, mesh.axes) for c in played(mesh)]
            rows = [first.new_zeros(bucket.length // bucket.ways, dtype=dtype) for _ in ranks]
            for r, rank in enumerate(ranks):
                for p in parts(bucket, rank):
                    to = rows[r][p.start : p.start + p.length]
                    one, *tied = (
                        every[i][r].reshape(-1)[p.at : p.at + p.length] for i in p.slot.leaves
                    )
                    to.copy_(one)
                    for other in tied if grads else ():
                        to.add_(other)
            raw = storage(rows, mesh)
            out[bucket.name] = ShardedTensor(raw, shard_place(bucket, mesh))
    return Buckets(out, where, mesh)
