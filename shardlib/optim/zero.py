"""ZeRO: any optimizer with its state, its gradients and its parameters split over data axes.

``zero(tx, axis)`` lays the parameters' local blocks, whatever their tensor-parallel layout, end
to end in flat buckets; each rank along ``axis`` updates its own 1/N of every bucket.  A bucket's
part is itself a ShardedTensor, a vector split over the parameters' axes and ``axis``, so the inner
transforms (clipping too) see ordinary values.

Per step, with P bytes of parameters on a rank: gradients pending over ``axis`` are
reduce-scattered, (N-1)/N P, and parameters gathered, (N-1)/N P.

Source: Rajbhandari et al., arXiv 1910.02054, sections 5.1 (stage 1, P_os) and 5.2 (stage 2, P_g).
"""

import itertools
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor

from shardlib.collectives import agreed, all_gather, blocks, lead, played, storage, unwrap, wrap
from shardlib.errors import BadArgument, PartialEscape, PlainTensor, ShardError, Unsupported
from shardlib.grad import frozen
from shardlib.kernels import active
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh, bind, rank_along
from shardlib.optim.buckets import Buckets, Index, Item, index, overlap, parts, unflatten
from shardlib.optim.clip import global_norm
from shardlib.optim.flat import Hops, adopt, gather, own, put_back, shard_place, unread
from shardlib.optim.gathered import Parts
from shardlib.optim.memory import Memory
from shardlib.optim.names import load_state_dict, state_dict
from shardlib.optim.sink import Sink, Summed
from shardlib.optim.spans import spans
from shardlib.optim.transform import Step, Transform, check_transform, run_in_place, runs
from shardlib.optim.trees import given_for
from shardlib.tensor import ShardedTensor, typeof

__all__ = ["ZeroState", "zero"]

Master = Literal["fp32", "bf16+rem"]


class ZeroState(NamedTuple):
    """The state of the inner transform, and what makes half precision parameters exact.

    ``master``  the parameters' parts in fp32, or 16 bits that the parameters lack of them.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(data=2):
    ...     w = {"w": sl.shard(torch.zeros(4, dtype=torch.bfloat16), "...")}
    ...     tx = sl.optim.zero(sl.optim.adamw(1e-3), axis="data", master="fp32")
    ...     state = tx.init(w)
    >>> [sl.typeof(bucket) for bucket in state.master.values()]  # a half of each on every rank
    ['f32[128@data]']
    """

    inner: Any
    master: Buckets


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

    ``tx``            any transform but those of the tree's structure, and those that declare no
                      trait.
    ``axis``          one mesh axis or several, the first of them major.
    ``stage``         0: nothing is split: ``value_and_grad(loss, into=tx)`` sums gradients over
                      ``axis`` in buckets while backward runs, and gives them in the parameters'
                      layouts.
                      1: the state is split.
                      2: gradients too: ``value_and_grad(loss, into=tx)`` reduce-scatters each
                      bucket while backward still runs, and keeps parts alone.
                      3: parameters too: ``params = tx.shard(params)`` keeps parts alone, and
                      ``apply`` and ``value_and_grad`` gather them group by group while they are
                      read.
    ``bucket_mb``     the most MiB in one bucket, unless one parameter has more; None: 25.  At stage
                      2 several of a small model are on their way during backward: where links are
                      slow that hides them, where ranks share cores it costs CPU time.
    ``master``        "fp32": parts of the parameters are kept in fp32 beside them; "bf16+rem": only
                      the 16 bits that a bfloat16 parameter lacks of fp32.
    ``reduce_dtype``  in which gradients travel, else as they come; half precision is summed in
                      fp32.
    ``gather_dtype``  in which parameters travel, else their own; a narrower one needs a master.
    ``inner``         a second axis, of faster links: parts lie over both, gradients are first
                      reduced over ``inner``, so that over ``axis`` only 1/inner of them travels.
    ``keep``          of stage 3: gathered parameters stay for backward, instead of being gathered
                      again.

    Gradients come ``+ sum(axis)`` (``value_and_grad(..., pending=axis)``: reduce-scattered here),
    in buckets (``value_and_grad(..., into=tx)``), or already summed (sliced, nothing moves).
    Frozen parameters are in no bucket.  Updates equal ``tx``'s own, bit for bit, given the same
    reduced gradient.
    Raises: Unsupported for transforms of the tree's structure, and of no trait.

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
    most_bytes = _MOST if bucket_mb is None else int(bucket_mb * 2**20)
    memory, seen = Memory(), _Seen(cut, most_bytes, tx.groups)
    apart = _Seen(cut, 1 << 62, tx.groups, True, hops, keep)

    def sink_for(
        where: Index, mesh: Mesh, like: Sequence[Tensor], room: Memory, **how: Any
    ) -> Sink:
        """Buckets of gradients as ``like``, one of each bucket's leaves."""
        exact = reduce_dtype is None or reduce_dtype == torch.float32
        dtypes = [(t.dtype, _wide(t.dtype) if exact else t.dtype) for t in like]
        wires = {t.dtype for t in like} - {reduce_dtype}
        wire = reduce_dtype if reduce_dtype is not None and wires else None
        return Sink(where, mesh, hops, room, dtypes, device=like[0].device, wire=wire, **how)

    def reduced(grads: Any, where: Index, mesh: Mesh, room: Memory) -> Buckets:
        """Return the parts of the summed gradients."""
        if isinstance(grads, Buckets):
            _same_index(grads.index, where, mesh)
            if _is_cut(grads):
                return grads
            flats = [grads[b.name].raw for b in where.buckets]
            sink = sink_for(where, mesh, flats, room, also=_also(grads, cut))
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
        leaves, held, tree = _flat(params)
        where, mesh = seen.index(params, leaves, held, tree)
        if all(unread(x) for x in leaves):  # a graph would go on with the old blocks
            adopt(leaves, where, mesh)  # a copy of all is least while nothing else is alive
        return begun(_parts(leaves, where, mesh))

    def begun(parts: Buckets) -> Any:
        if master is None:
            return tx.init(parts)
        full = _cast(parts, torch.float32)
        if master == "fp32":
            return ZeroState(tx.init(full), full)
        _only_bf16(parts, axes[0] if len(axes) == 1 else axes)
        return ZeroState(tx.init(full), _cast(parts, torch.int16, zeros=True))

    def followed(
        grads: Any, state: Any, leaves: list[Any], where: Index, mesh: Mesh
    ) -> tuple[Any, Index]:
        """Move the state into the gradients' buckets, which may follow a recorded order."""
        if not isinstance(grads, Buckets) or grads.index is where or grads.index == where:
            return state, where
        if grads.index.items != where.items or not _moves(state):
            _same_index(grads.index, where, mesh)
        return moved(state, leaves, grads.index, mesh), grads.index

    def moved(state: Any, leaves: list[Any], where: Index, mesh: Mesh) -> Any:
        """Move the state into other buckets: by name, as if it were loaded."""
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
        leaves, held, tree = _flat(params)
        where, mesh = seen.index(params, leaves, held, tree, state)
        given = _given(grads, leaves, held, tree)
        with torch.no_grad():
            state, where = followed(given, state, leaves, where, mesh)
            parts = reduced(given, where, mesh, Memory())
            updates, state = tx.update(parts, state, _parts(leaves, where, mesh))
            blocks: dict[int, Tensor] = {}
            with bind(mesh):
                for bucket in where.buckets:
                    whole = all_gather(wrap(updates[bucket.name].raw, mesh), cut, 0)
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
            state = _with_master(tx, given, state, mine, step, master, memory)
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
        parts = reduced(given, where, mesh, memory)
        seen.keep_pieces(parts)
        if step.ask:
            step.norm = global_norm(parts)
        flats = seen.adopt(leaves, where, mesh, raws)
        mine = seen.own(flats, where, mesh)
        if master is None:
            state = run_in_place(tx, parts, state, mine, step)
        else:
            state = _with_master(tx, parts, state, mine, step, master, memory)
        put_back(flats, mine)
        if not step.skipped:
            _send(flats, mine, state, where, mesh)
        memory.give(*(g.raw for g in parts.values()))
        if isinstance(given, Buckets):  # not before: what is refused keeps its gradients
            memory.give(*(g.raw for g in given.values()))
        better = seen.better(where)  # no gradients are on their way now
        if better is not None and _moves(state):
            seen.take(better)
            return moved(state, leaves, better, mesh)
        return state

    def _send(flats: list[Tensor], mine: Buckets, state: Any, where: Index, mesh: Mesh) -> None:
        if gather_dtype is None or all(f.dtype == gather_dtype for f in flats):
            gather(flats, mesh, hops)
            return
        narrow = [memory.take(f.shape, gather_dtype, f.device) for f in flats]
        part = own(narrow, where, mesh)
        for small, p in zip(part.pieces, mine.pieces, strict=True):
            small.copy_(p)
        put_back(narrow, part)
        gather(narrow, mesh, hops)
        for small, flat in zip(narrow, flats, strict=True):
            flat.copy_(small)
        memory.give(*narrow)

    def sink(params: Any) -> Sink | None:
        if stage == 3:  # the gradient of a part is reduced where the part was gathered
            _parted(params)
            return None
        leaves, held, tree, _ = seen.flat(params)
        where, mesh = seen.index(params, leaves, held, tree)
        like = [leaves[b.slots[0].leaves[0]].raw for b in where.buckets]
        if stage == 1:  # kept whole, and added up in fp32
            dtypes = [(_wide(t.dtype), _wide(t.dtype)) for t in like]
            return Sink(where, mesh, hops, memory, dtypes, device=like[0].device, to="pending")
        if stage == 0:
            dtypes = [(t.dtype, t.dtype) for t in like]
            tree = _gradients(params, leaves)
            how = {"device": like[0].device, "heard": seen.hears(where, mesh, at_once=True)}
            return Summed(where, mesh, hops, Memory(), dtypes, tree=tree, **how)
        heard = seen.hears(where, mesh)
        # on slow links backward must not wait for what is on its way
        return sink_for(where, mesh, like, memory, heard=heard, most=4, ahead=True)

    if stage == 0:
        return tx._replace(sink=sink)

    def shard(params: Any) -> Any:
        if stage < 3 or isinstance(params, Parts):
            return params
        leaves, tree = optree.tree_flatten(params)
        held = frozen(leaves)
        asked = [isinstance(x, ShardedTensor) and x.raw.requires_grad for x in leaves]
        every = optree.tree_map(lambda x: x.detach() if any(held) else x, params)
        where, mesh = apart.index(every, optree.tree_leaves(every), held, tree)
        out = Parts(dict(_parts(optree.tree_leaves(every), where, mesh)), where, mesh)
        for bucket in where.buckets:
            flags = {asked[i] for s in bucket.slots for i in s.leaves}
            out[bucket.name].raw.requires_grad_(flags == {True})
        return out

    return Transform(init, update, tx.trait, donate=donate, sink=sink, shard=shard)


_MOST = 25 << 20
"""Bytes of a bucket, where none are asked for."""

_WORTH = 0.05
"""By how much more of the gradients must still be to come, for buckets to be made anew."""

# asked of every leaf at every step
_RAW, _PLACE, _ASKS = map(operator.attrgetter, ("raw", "place", "requires_grad"))


class _Seen:
    """The findings of zero about the trees that it saw: their index, and lists of views."""

    def __init__(
        self,
        axes: tuple[str, ...],
        most_bytes: int,
        groups: Any,
        apart: bool = False,
        hops: Hops = (),
        keep: bool = False,
    ) -> None:
        self.axes = axes
        self.most_bytes = most_bytes
        self.groups = groups
        self.apart = apart
        self.hops = hops
        self.keep = keep
        self.found: dict[tuple[Item, ...], Index] = {}
        self.heard: dict[int, Index] = {}
        self.waiting: dict[int, Index] = {}
        self.last: tuple[Any, ...] = ()
        self.lists: dict[str, tuple[Any, Any]] = {}
        self.held: tuple[Any, list[Tensor], list[Tensor]] = (None, [], [])
        self.names: tuple[list[str], Any, Any] = ([], None, None)

    def flat(self, params: Any) -> tuple[list[Any], list[bool], Any, list[Tensor] | None]:
        """Return what ``_flat`` does, and the leaves' blocks where they were looked at.

        A dict of last time's names is not looked through again.
        """
        names, chosen, tree = self.names
        if type(params) is dict and chosen is not None and list(params) == names:
            every = list(chosen(params))
            try:
                raws = list(map(_RAW, every))
            except AttributeError:  # it holds other trees now, or plain tensors
                return *_flat(params), None
            asks = list(map(_ASKS, raws))
            if all(asks) or True not in asks:
                return every, [False] * len(asks), tree, raws
            some, kept = (list(itertools.compress(x, asks)) for x in (every, raws))
            return some, [not a for a in asks], tree, kept
        leaves, held, tree = _flat(params)
        if type(params) is dict and len(held) == len(params) > 1:
            self.names = list(params), operator.itemgetter(*tree.entries()), tree
        return leaves, held, tree, None

    def index(
        self, params: Any, leaves: list[Any], held: list[bool], tree: Any, state: Any = None
    ) -> tuple[Index, Mesh]:
        """Return the index of these leaves; ``state``'s own, which must be one of them.

        ``held``, ``tree``  as ``_flat`` gives them; where ``leaves`` are all, frozen ones too, those
                            lie in buckets of their own.
        Gradients arrive about in the opposite order of the modules, until their order was heard.
        """
        theirs = _index_of(state)
        if self.last and (theirs is None or theirs is self.last[-1]):
            before, *same, mesh, where = self.last
            try:
                places = list(map(_PLACE, leaves))
            except AttributeError:  # a plain one, which is refused below
                places = []
            alike = len(places) == len(before) and same == [held, tree]
            if alike and all(map(operator.is_, places, before)):
                return where, mesh
        paths, order, words = _named(params, self.groups)
        if self.apart:
            names = _groups(paths, order)
            words = [f"{n} {w}".strip() for n, w in zip(names, words, strict=True)]
        if any(held) and len(held) == len(leaves):
            words = [f"{w} frozen" if f else w for w, f in zip(words, held, strict=True)]
        mesh, items = _items(leaves, paths, words, self.axes)
        if theirs is not None:
            if theirs.items != items:
                raise _changed(theirs.items, items, mesh)
            self.found.setdefault(items, theirs)
        if items not in self.found:
            ways, arrive = mesh.axis_size(self.axes), order[::-1]
            made = index(items, self.axes, ways, self.most_bytes, arrive)
            if self.hops:
                made = replace(made, hops=self.hops, keep=self.keep)
            self.found[items] = made
        where = self.found[items] if theirs is None else theirs
        self.last = [p.place for p in leaves], held, tree, mesh, where
        return where, mesh

    def hears(
        self, where: Index, mesh: Mesh, at_once: bool = False
    ) -> Callable[[list[int]], object] | None:
        """Return a listener for the order of the first backward's gradients.

        Better buckets are made of it, and used from the next step on, for gradients that are still
        to be added up lie in the old ones; ``at_once`` where nothing else lies in them.
        """
        if id(where) in self.heard or len(where.buckets) < 2:
            return None

        def hear(order: list[int]) -> None:
            self.heard[id(where)] = where
            said = agreed("arrival of gradients", mesh, order)
            if said is None:
                return
            rest = (i for b in where.buckets for s in b.slots for i in s.leaves)
            every = tuple(dict.fromkeys((*said, *rest)))
            made = index(where.items, where.axes, where.ways, self.most_bytes, every)
            if overlap(made, said) < overlap(where, said) + _WORTH:
                return
            self.heard[id(made)] = made
            if at_once:
                self.take(made)
            else:
                self.waiting[id(where)] = made

        return hear

    def better(self, where: Index) -> Index | None:
        """Return the re-ordered buckets, if there are any."""
        return self.waiting.pop(id(where), None) if self.waiting else None

    def take(self, where: Index) -> None:
        self.found[where.items], self.last = where, ()

    def adopt(
        self, leaves: list[Any], where: Index, mesh: Mesh, raws: list[Tensor] | None = None
    ) -> list[Tensor]:
        """Return what ``adopt`` does, without asking again about the very blocks that it gave."""
        raws = list(map(_RAW, leaves)) if raws is None else raws
        index, before, flats = self.held
        if index is where and all(map(operator.is_, raws, before)):
            return flats
        flats = adopt(leaves, where, mesh)
        self.held = where, [x.raw for x in leaves], flats
        return flats

    def keep_pieces(self, parts: Buckets) -> None:
        """Give the gradients the views that were made last time, where they lie in that memory."""
        key = (parts.index, [x.raw.data_ptr() for x in parts.values()])
        at, found = self.lists.get("grads", (None, None))
        if at == key:
            parts.__dict__["pieces"] = found
        else:
            self.lists["grads"] = (key, parts.pieces)

    def own(self, flats: list[Tensor], where: Index, mesh: Mesh) -> Buckets:
        """Return each rank's own part of the parameters."""
        key = (where, [f.data_ptr() for f in flats])
        at, found = self.lists.get("own", (None, None))
        if at == key and not lead(mesh):  # under simulate there are copies in it
            return found
        made = own(flats, where, mesh)
        self.lists["own"] = (key, made)
        return made


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


def _groups(paths: Sequence[str], order: Sequence[int]) -> list[str]:
    """Group the parameters that are gathered together.

    Those of one block of the module are, which its path counts; and those between blocks.

    ``order``  numbers of the paths in the order of the modules.

    >>> paths = ["wte.weight", "wpe.weight", "h.0.attn.weight", "h.0.mlp.bias", "ln_f.weight"]
    >>> _groups(paths, range(5))
    ['at 0', 'at 0', 'h.0', 'h.0', 'at 3']
    """
    out = [""] * len(paths)
    between = 0
    for place, i in enumerate(order):
        found = re.match(r"(.*?\.\d+|\d+)(\.|$)", paths[i])
        if found:
            out[i], between = found.group(1), place
        else:
            out[i] = f"at {between}"
    return out


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
    """Return parameters and gradients, of the buckets that are trained."""
    mine = _own(_parted(params))
    theirs = _index_of(state)
    ours = mine.index.whole or mine.index
    if theirs is not None and theirs is not ours and theirs.items != ours.items:
        raise _changed(theirs.items, ours.items, mine.mesh)
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


def _flat(params: Any) -> tuple[list[Any], list[bool], Any]:
    """Return the leaves that are trained, which of all are frozen, and the tree."""
    every, tree = optree.tree_flatten(params)
    held = frozen(every)
    if True in held:
        return [x for x, f in zip(every, held, strict=True) if not f], held, tree
    return every, held, tree


def _gradients(params: Any, leaves: list[Any]) -> Callable[[list[Tensor]], Any]:
    """Make the tree of gradients from the blocks of the trained leaves' gradients."""
    every, tree = optree.tree_flatten(params)
    held = frozen(every)

    def made(blocks: list[Tensor]) -> Any:
        found = iter(
            ShardedTensor(raw, p.place._replace(deferred=frozenset(), out_layout=None))
            for raw, p in zip(blocks, leaves, strict=True)
        )
        return optree.tree_unflatten(tree, [None if f else next(found) for f in held])

    return made


def _named(params: Any, groups: Any) -> tuple[list[str], tuple[int, ...], list[str]]:
    """Return the trained leaves' paths, numbers in the order of the tree as made, and groups.

    optree sorts dicts by key; the order in which they were made is that of the modules.
    """
    paths, leaves, tree = optree.tree_flatten_with_path(params)
    kept = [i for i, f in enumerate(frozen(leaves)) if not f]
    number = {at: i for i, at in enumerate(kept)}
    made = _as_made(params, optree.tree_unflatten(tree, range(len(leaves))))
    names = [".".join(map(str, path)) for path in paths]
    words = [""] * len(leaves)
    if groups is not None:
        every = optree.tree_leaves(params, none_is_leaf=True)
        found = zip(every, groups(params), strict=True)
        words = [word for x, word in found if x is not None]
    order = tuple(number[at] for at in made if at in number)
    return [names[i] for i in kept], order, [words[i] for i in kept]


def _as_made(tree: Any, numbers: Any) -> list[int]:
    """List the leaves' numbers, dicts in the order in which they were filled."""
    if type(tree) is dict:
        return [n for key in tree for n in _as_made(tree[key], numbers[key])]
    if type(tree) in (list, tuple):
        pairs = zip(tree, numbers, strict=True)
        return [n for one, number in pairs for n in _as_made(one, number)]
    return optree.tree_leaves(numbers)  # type: ignore[return-value]


def _given(grads: Any, leaves: list[Any], held: list[bool], tree: Any) -> Any:
    """Return the trained leaves' gradients: a list, or Buckets."""
    if isinstance(grads, Buckets):
        return grads
    given = [g for g, f in zip(given_for(tree, grads, "zero"), held, strict=True) if not f]
    _lie_alike(leaves, given)
    return given


def _moves(state: Any) -> bool:
    """Say whether a state, numbers aside, lies in buckets by element and can go into others."""
    every = optree.tree_leaves(state, is_leaf=lambda x: isinstance(x, Buckets))
    return all(
        all(x[b.name].raw.shape[-1] * x.index.ways == b.length for b in x.index.buckets)
        if isinstance(x, Buckets)
        else not isinstance(x, Tensor) or x.numel() == 1
        for x in every
    )


def _index_of(state: Any) -> Index | None:
    """Return the index that a state was made for."""
    found = _first(state)
    return None if found is None else found.index.whole or found.index


def _first(state: Any) -> Buckets | None:
    """Return the first buckets of a state."""
    if isinstance(state, Buckets):
        return state
    if isinstance(state, tuple | list):
        return next((b for x in state if (b := _first(x)) is not None), None)
    if state is None or isinstance(state, int | float | Tensor):
        return None
    found = optree.tree_leaves(state, is_leaf=lambda x: isinstance(x, Buckets))
    return next((x for x in found if isinstance(x, Buckets)), None)


def _items(
    leaves: list[Any], paths: list[str], words: list[str], cut: tuple[str, ...]
) -> tuple[Mesh, tuple[Item, ...]]:
    items: list[Item] = []
    values: dict[int, int] = {}
    for i, (p, path, word) in enumerate(zip(leaves, paths, words, strict=True)):
        if not isinstance(p, ShardedTensor):
            raise PlainTensor(
                "zero splits sharded parameters; this one is plain",
                op="zero",
                operands={"parameter": typeof(p)},
                fix="params = sl.shard(params, '...')",
            )
        p.mesh.axis_size(cut, "zero", "tx = sl.optim.zero(tx, axis={})")
        for axis in cut:
            if axis in p.sharding.axes:
                other = tuple(Dim() if axis in d.axes else d for d in p.dims)
                raise ShardError(
                    f"parameter {path!r} is split over {axis!r} already, which zero is to split",
                    op="zero",
                    operands={"x": typeof(p)},
                    mesh=p.mesh,
                    fix=f"sl.reshard(x, {str(Layout(other))!r})",
                )
        # an axis of one rank splits nothing, and must not make a bucket of its own
        axes = tuple(a for a in p.mesh.names if a in p.sharding.axes and p.mesh.axes[a] > 1)
        shape = p.sharding.local_shape(tuple(p.padded_shape), p.mesh)
        place = f"{p.sharding} of {list(p.padded_shape)} on {p.mesh.axes}"
        value = values.setdefault(id(p.raw), i)
        whole, tiled = tuple(p.shape), tuple(p.padded_shape)
        layout = p.sharding.bare
        items.append(Item(path, shape, p.raw.dtype, axes, value, place, whole, word, layout, tiled))
    if not leaves:
        raise ShardError(
            "there are no parameters",
            op="zero",
            fix="apply, params = sl.parallelize(module, rules); state = tx.init(params)",
        )
    return leaves[0].mesh, tuple(items)


def _changed(old: Sequence[Item], new: Sequence[Item], mesh: Mesh) -> ShardError:
    """Make the error for a state that was made for other parameters."""
    before, now = {i.path: i for i in old}, {i.path: i for i in new}
    gone = [p for p in before if p not in now]
    come = [p for p in now if p not in before]
    other = [
        p for p in now if p in before and replace(now[p], value=0) != replace(before[p], value=0)
    ]
    kept = not (gone or come) and all(
        (now[p].whole, now[p].dtype) == (before[p].whole, before[p].dtype) for p in other
    )
    told = [
        f"{what} {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        for what, names in (("without", gone), ("with", come), ("and otherwise", other))
        if names
    ]
    operands = {}
    if other:
        one, two = before[other[0]], now[other[0]]
        operands = {
            "when made": f"{other[0]} {list(one.shape)} {one.dtype} {one.place}",
            "now": f"{other[0]} {list(two.shape)} {two.dtype} {two.place}",
        }
    return ShardError(
        f"the state was made for other parameters: they are {'; '.join(told)}",
        op="zero",
        operands=operands,
        mesh=mesh,
        fix="state = sl.optim.load_state_dict(tx.init(params), sl.optim.state_dict(state))"
        if kept
        else "state = tx.init(params)",
    )


def _same_index(theirs: Index, ours: Index, mesh: Mesh) -> None:
    if theirs != ours:
        if theirs.items != ours.items:
            raise _changed(ours.items, theirs.items, mesh)
        raise ShardError(
            "the gradients lie in other buckets than the state",
            op="zero",
            mesh=mesh,
            fix="loss, grads = sl.value_and_grad(f, into=tx)(params)",
        )


def _lie_alike(params: list[Any], grads: list[Any]) -> None:
    """Check that each gradient is split as its parameter: blocks go into buckets by position."""
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
    """Return the axes over which gradients are still to be summed; None where they are.

    All of them or none, and then ``axes`` among them.
    """
    partial = {g.sharding.partial if isinstance(g, ShardedTensor) else () for g in grads}
    if partial <= {()}:
        return None
    if len(partial) == 1 and set(axes) <= set(first := next(iter(partial))):
        return first
    odd = next(g for g in grads if not set(axes) <= set(g.sharding.partial))
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


def _also(grads: Buckets, cut: tuple[str, ...]) -> tuple[str, ...]:
    first = next(iter(grads.values()))
    return tuple(a for a in first.sharding.partial if a not in cut)


# ---------------------------------------------------------------- parts of buckets


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _parts(leaves: list[Any], where: Index, mesh: Mesh, *, grads: bool = False) -> Buckets:
    """Return this rank's part of every bucket of values not pending; never a whole bucket.

    ``grads``  they are gradients: those of tied leaves are added, and half precision is widened.
    """
    out = {}
    ranks = [rank_along(where.axes, c, mesh.axes) for c in played(mesh)]
    with torch.no_grad():
        every = [blocks(x.raw, mesh) for x in leaves]
        for bucket in where.buckets:
            first = every[bucket.slots[0].leaves[0]][0]
            dtype = _wide(first.dtype) if grads else first.dtype
            rows = [first.new_zeros(bucket.length // where.ways, dtype=dtype) for _ in ranks]
            for r, rank in enumerate(ranks):
                for p in parts(bucket, rank, where.ways):
                    to = rows[r][p.start : p.start + p.length]
                    one, *tied = (
                        every[i][r].reshape(-1)[p.at : p.at + p.length] for i in p.slot.leaves
                    )
                    to.copy_(one)
                    for other in tied if grads else ():
                        to.add_(other)
            raw = storage(rows, mesh)
            out[bucket.name] = ShardedTensor(raw, shard_place(where, bucket, mesh))
    return Buckets(out, where, mesh)


def _cast(parts: Buckets, dtype: torch.dtype, *, zeros: bool = False) -> Buckets:
    """Copy to another dtype."""
    made = {
        name: ShardedTensor(
            torch.zeros_like(x.raw, dtype=dtype) if zeros else x.raw.to(dtype, copy=True), x.place
        )
        for name, x in parts.items()
    }
    return parts.like(made)


def _only_bf16(parts: Buckets, where: str | tuple[str, ...]) -> None:
    odd = next((x for x in parts.values() if x.raw.dtype != torch.bfloat16), None)
    if odd is not None:
        raise ShardError(
            f"the remainder of {odd.raw.dtype} parameters is not 16 bits",
            op="zero",
            operands={"parameters": typeof(odd)},
            mesh=odd.mesh,
            fix=f'tx = sl.optim.zero(tx, axis={where!r}, master="fp32")',
        )


def _with_master(
    tx: Transform,
    parts: Buckets,
    state: ZeroState,
    mine: Buckets,
    step: Step,
    master: Master,
    memory: Memory,
) -> ZeroState:
    """Step the parameters in fp32, and write their rounded values into ``mine``."""
    if master == "fp32":
        step.beside = state.master, mine
        inner = run_in_place(tx, parts, state.inner, state.master, step)
        if step.beside is not None:
            step.beside = None
            for p, m in zip(mine.pieces, state.master.pieces, strict=True):
                p.copy_(m)
        return ZeroState(inner, state.master)
    first = next(iter(mine.values())).raw
    if tx.halves and (not first.is_cpu or active.cpu) and active.serving(first):
        step.beside = mine, state.master
        inner = run_in_place(tx, parts, state.inner, mine, step)
        step.beside = None  # where the step was passed over it is still there
        return ZeroState(inner, state.master)
    raws = {n: memory.take(x.raw.shape, torch.float32, x.raw.device) for n, x in parts.items()}
    full = parts.like({n: ShardedTensor(raw.zero_(), parts[n].place) for n, raw in raws.items()})
    rows = runs(mine, state.master, full)
    for p, rest, m in spans(*rows):
        m.copy_(joined(p, rest))
    inner = run_in_place(tx, parts, state.inner, full, step)
    for p, rest, m in spans(*rows):
        high, low = halves(m)
        p.copy_(high)
        rest.copy_(low)
    memory.give(*raws.values())
    return ZeroState(inner, state.master)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into the nearest bfloat16, ties away from zero, and the 16 bits that it lacks.

    Rounding ties to even would need 17.

    >>> high, low = halves(torch.tensor([1.0, 3.14159]))
    >>> high, torch.equal(joined(high, low), torch.tensor([1.0, 3.14159]))
    (tensor([1.0000, 3.1406], dtype=torch.bfloat16), True)
    """
    bits = x.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def joined(high: Tensor, low: Tensor) -> Tensor:
    """Join ``halves`` to the fp32 values that they were."""
    bits = high.contiguous().view(torch.int16).to(torch.int32) << 16
    return (bits + low).view(torch.float32)
