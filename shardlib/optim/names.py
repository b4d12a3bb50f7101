"""State by name: optimizer state as global tensors, for any other mesh, layout or stage.

A bucket's cut depends on its mesh and its size in bytes, so a part means nothing elsewhere.  Here
each part becomes part of its parameter's tensor: ``mu.h.0.attn.weight`` is the first moment of that
parameter, in its shape.  A state without buckets has the same names.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import optree
import torch
from torch import Tensor

from shardlib.collectives import pslice, unwrap, wrap
from shardlib.errors import ShardError
from shardlib.layouts import Dim, Layout
from shardlib.mesh import Mesh, bind
from shardlib.optim.buckets import Bucket, Buckets, Item, fill_slots
from shardlib.optim.combine import AroundZeroState, MultiState
from shardlib.optim.matrix_owners import Owned
from shardlib.optim.transform import at_rest
from shardlib.optim.trees import State, first_of, names_of, zeros_like
from shardlib.placing import reshard, shard, unshard, whole_of
from shardlib.tensor import ShardedTensor, typeof


def state_dict(state: object) -> dict[str, Tensor | int | float]:
    """Return the state as a flat mapping: name -> global tensor, or plain number.

    ``sl.save`` writes it, ``sl.load`` reads it onto another mesh, and ``load_state_dict`` takes it
    at another world size, layout, stage or bucket size.  Tensors of buckets are split over the
    buckets' axes too, if a dimension divides: each rank holds about its part.  Moves each bucket
    once: (N-1)/N of its bytes, one at a time.
    Raises: ShardError for a cycle of ``multi_steps`` around ``zero``, or of pending gradients, that
            has begun: its accumulated gradients are still unreduced and cannot be saved in the
            middle of a cycle.

    >>> import shardlib as sl
    >>> with sl.simulate(data=2, x=2):
    ...     params = {"w": sl.shard(torch.ones(4, 6), "x .")}
    ...     tx = sl.optim.zero(sl.optim.adamw(0.1), axis="data")
    ...     kept = state_dict(tx.init(params))
    >>> {name: x if isinstance(x, int) else sl.typeof(x) for name, x in kept.items()}
    {'count': 0, 'mu.w': 'f32[4@x, 6@data]', 'nu.w': 'f32[4@x, 6@data]'}
    """
    state = at_rest(state)
    _no_cycle(state)
    out: dict[str, Any] = {}
    for keys, x in _nodes(state)[0]:
        if isinstance(x, Buckets | Owned):
            found = x.by_parameter() if isinstance(x, Owned) else _by_parameter(x)
            out.update((keys[path], value) for path, value in found)
        elif x is not None:  # frozen
            out[keys[""]] = x
    return out


Kept = TypeVar("Kept")
Nodes = list[tuple[dict[str, str], Any]]


def load_state_dict(state: Kept, kept: Mapping[str, object]) -> Kept:
    """Fill ``state`` with the values of ``state_dict``, from any layout.

    ``state``  as ``tx.init(params)`` makes it, on the present mesh and layouts.
    ``kept``   global tensors, plain or of any mesh and layout, and numbers.
    Raises: ShardError if a name is missing or unknown, or a size or dtype differs: then it is the
            state of another model, or of another transform; also for a state that is valid only in
            its own layout, such as that of ``adam8bit``, in another, and, with ``multi_steps``
            around ``zero``, for a state saved in the middle of a cycle.

    >>> import shardlib as sl
    >>> tx, params = sl.optim.sgd(0.1, 0.9), {"w": torch.ones(4)}
    >>> _, state = tx.update(params, tx.init(params), params)
    >>> with sl.simulate(data=2):
    ...     zero = sl.optim.zero(tx, axis="data")
    ...     empty = zero.init({"w": sl.shard(torch.ones(4), ".")})
    ...     again = load_state_dict(empty, state_dict(state))
    >>> again.count, sl.unshard(state_dict(again)["trace.w"])
    (1, tensor([1., 1., 1., 1.]))
    """
    if not _is_flat(kept):
        raise ShardError(
            "what state_dict gave is a flat mapping from names to values, "
            f"not {type(kept).__name__}",
            op="load_state_dict",
            fix="kept = sl.optim.state_dict(state)",
        )
    state = at_rest(state)
    nodes, tree = _nodes(state)
    _same_blocks(nodes, kept)
    empty = _empty(state, nodes, kept)
    kept = {name: x for name, x in kept.items() if not name.startswith(empty)}
    names = [name for keys, x in nodes if x is not None for name in keys.values()]
    _same_names({name for name in names if not name.startswith(empty)}, set(kept))
    with torch.no_grad():
        new = [_loaded(x, keys, kept, empty) for keys, x in nodes]
    new_state: Any = optree.tree_unflatten(tree, new)
    return new_state


def _is_flat(kept: object) -> bool:
    return isinstance(kept, Mapping) and not any(isinstance(v, Mapping) for v in kept.values())


def _loaded(
    x: Any, keys: Mapping[str, str], kept: Mapping[str, Any], empty: tuple[str, ...]
) -> Any:
    """Fill a leaf, buckets or owners' state with the values of its names, or with zeros."""
    if next(iter(keys.values()), "").startswith(empty):
        return zeros_like(x)
    if isinstance(x, Buckets):
        return _buckets(x, keys, kept)
    if isinstance(x, Owned):
        return _owned(x, keys, kept)
    return _like(x, keys[""], kept.get(keys[""]))


def _same_blocks(nodes: Nodes, kept: Mapping[str, Any]) -> None:
    """Refuse a state of other blocks than those that it was made in."""
    for keys, x in nodes:
        name = keys.get("", "")
        if name.rpartition(".")[2] == "made_for" and kept.get(name, x) != x:
            raise _refused(
                "this state's blocks are of neighbours in the layout and world size that it was "
                "made in; here other elements lie side by side",
                {"state": name},
            )


def _same_names(wanted: set[str], given: set[str]) -> None:
    """Refuse a state with other names."""
    differences = {"lacks": sorted(wanted - given), "has": sorted(given - wanted)}
    told = [f"{what} {first_of(names)}" for what, names in differences.items() if names]
    if told:
        raise _refused(f"this is the state of another model or transform: it {' and '.join(told)}")


def _empty(state: State, nodes: Nodes, kept: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the name prefixes of accumulated gradients whose cycle has not begun in ``kept``.

    Such gradients are zero and need not be loaded; around ``zero`` a state has none.
    Raises: ShardError for a cycle that has begun, if ``state`` is around ``zero``.
    """
    paths = optree.tree_accessors(state, is_leaf=_is_buckets, none_is_leaf=True)
    minis = [keys[""] for (keys, _), path in zip(nodes, paths, strict=True) if _is_mini(path)]
    every, out = [name for keys, _ in nodes for name in keys.values()], []
    for mini in minis:
        total, count = mini.removesuffix("mini") + "total", kept.get(mini)
        if not count:
            out.append(total)
        elif not any(name.startswith(total) for name in every):
            raise _refused(
                f"{count} gradients are accumulated in this state, and around zero they are "
                "accumulated as they come: keep a state when a cycle ends"
            )
    return tuple(out)


def _is_mini(path: Any) -> bool:
    """Return whether a path leads to the first field of a MultiState."""
    return bool(path) and issubclass(path[-1].type, MultiState) and path[-1].entry == 0


def _no_cycle(state: State) -> None:
    """Refuse accumulated gradients that are unreduced: they depend on the layout of their step."""
    cycles: list[MultiState] = []

    def seen(x: Any) -> bool:
        if isinstance(x, MultiState):
            cycles.append(x)
        return _is_buckets(x)

    optree.tree_leaves(state, is_leaf=seen, none_is_leaf=True)
    for cycle in cycles:
        sums = optree.tree_leaves(cycle.total)
        pending = any(isinstance(x, ShardedTensor) and x.sharding.partial for x in sums)
        if cycle.mini and (pending or isinstance(cycle, AroundZeroState)):
            raise ShardError(
                f"{cycle.mini} gradients are added up as they came, for a step that is still to be "
                "made: keep the state when a cycle ends",
                op="state_dict",
                fix="params, state, info = sl.optim.step(tx, params, grads, state)",
            )


def _is_buckets(x: object) -> bool:
    return isinstance(x, Buckets | Owned)


def _nodes(state: State) -> tuple[Nodes, Any]:
    """List (path inside the leaf -> name, leaf) of a state, and its tree; buckets are leaves here.

    For a leaf that is no bucket the path is "".
    """
    paths, leaves, tree = optree.tree_flatten_with_accessor(
        state, is_leaf=_is_buckets, none_is_leaf=True
    )
    inside = [x.paths_held if _is_buckets(x) else [""] for x in leaves]
    at = [tuple(getattr(e, "field", e.entry) for e in path) for path in paths]
    rows = zip(at, leaves, inside, strict=True)
    every = [(*path, p) if _is_buckets(x) else path for path, x, some in rows for p in some]
    names = iter(names_of(every))
    return [
        ({p: next(names) for p in some}, x) for x, some in zip(leaves, inside, strict=True)
    ], tree


# ---------------------------------------------------------------- buckets


def _by_parameter(x: Buckets) -> list[tuple[str, ShardedTensor]]:
    out = {}
    for name in x:  # one at a time, for the memory
        one = x.subset((name,))
        with torch.no_grad():
            blocks = one.whole()
        (bucket,) = one.index.buckets
        for slot in bucket.slots:
            first = slot.leaves[0]
            value = _cut(blocks[first], x.index.items[first], x.mesh, bucket)
            out.update((i, (x.index.items[i].path, value)) for i in slot.leaves)
    return [out[i] for i in sorted(out)]


def _cut(block: Tensor, item: Item, mesh: Mesh, bucket: Bucket) -> ShardedTensor:
    """Return a block as a value, split over its bucket's axes too if a dimension divides."""
    ways, dims = bucket.ways, list(item.layout.dims)
    # prefer a dimension that no axis splits yet
    for d, dim in sorted(enumerate(dims), key=lambda at: len(at[1].axes)):
        plain = dim == Dim(dim.axes) and item.whole[d] == item.tiled[d] and not item.layout.skew
        if ways > 1 and plain and item.shape[d] and not item.shape[d] % ways:
            with bind(mesh):
                block = unwrap(pslice(wrap(block, mesh), bucket.over, d))
            dims[d] = Dim((*dim.axes, *bucket.over))
            break
    layout = Layout(tuple(dims), (), item.layout.skew)
    return ShardedTensor(block.clone(), item.place_in(layout, mesh))


def _buckets(x: Buckets, keys: Mapping[str, str], kept: Mapping[str, Any]) -> Buckets:
    """Make buckets like ``x`` with the values of these names."""
    leaves: list[Any] = [None] * len(x.index.items)
    for i, (b, _) in x.index.where.items():
        item = x.index.items[i]
        key = keys[item.path]
        _check(key, kept[key], item.whole, x[x.index.buckets[b].name].dtype)
        leaves[i] = _placed(kept[key], item.layout, x.mesh)
    # keep the gaps between slots from init: in adam8bit a code of 0 is not the number 0
    new = x.like({n: v.becomes(_flagged(v.raw.clone(), v)) for n, v in x.items()})
    fill_slots(new, leaves)
    return new


def _owned(x: Owned, keys: Mapping[str, str], kept: Mapping[str, Any]) -> Owned:
    """Fill owners' state with the values of these names."""
    found = {path: kept[keys[path]] for path in x.paths_held}
    for path, value in found.items():
        _check(keys[path], value, x.shape(path), x.vector.dtype)
    return x.with_values(found)


def _placed(value: Tensor, layout: Layout, mesh: Any) -> ShardedTensor:
    if isinstance(value, ShardedTensor) and value.mesh is mesh and not value.is_padded:
        try:
            return reshard(value, layout)  # type: ignore[return-value]
        except ShardError:
            pass  # it does not divide there: padded below
    return shard(whole_of(value), layout, mesh, pad=True)  # type: ignore[return-value]


def _like(x: Any, name: str, value: Any) -> Any:
    """Fill a leaf that is no bucket."""
    if x is None:
        return None
    if not isinstance(x, Tensor):
        number = int | float
        if isinstance(value, Tensor) or (isinstance(x, number) and not isinstance(value, number)):
            raise _other(name, repr(x), value)
        return value
    _check(name, value, tuple(x.shape), x.dtype)
    if isinstance(x, ShardedTensor):
        new = _placed(value, x.sharding, x.mesh)
        return x.becomes(_flagged(new.raw.clone(), x))
    return _flagged(unshard(value) if isinstance(value, ShardedTensor) else value.clone(), x)


def _flagged(new: Tensor, x: Tensor) -> Tensor:
    """Copy ``requires_grad`` from the replaced value, so that frozen values stay frozen."""
    return new.detach().requires_grad_(x.requires_grad)


def _check(name: str, value: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.dtype != dtype:
        raise _other(name, f"{dtype} {list(shape)}", value)


def _other(name: str, wanted: str, value: object) -> ShardError:
    kind = typeof(value) if isinstance(value, Tensor) else repr(value)
    why = f"{name!r} is of another kind in this state than in the one that was kept"
    return _refused(why, {"wanted": wanted, "kept": kind})


def _refused(why: str, operands: dict[str, str] | None = None) -> ShardError:
    """Build the error for a state that cannot be loaded."""
    fix = "state = tx.init(params)"
    return ShardError(why, op="load_state_dict", operands=operands or {}, fix=fix)
