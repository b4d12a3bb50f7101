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

from shardlib.errors import ShardError
from shardlib.optim.buckets import placed
from shardlib.optim.combine import AroundZeroState, MultiState
from shardlib.optim.matrix_owners import ByParameter
from shardlib.optim.transform import at_rest
from shardlib.optim.trees import State, first_of, names_of, zeros_like
from shardlib.placing import unshard
from shardlib.tensor import ShardedTensor, typeof


def state_dict(state: object) -> dict[str, Tensor | int | float]:
    """Return the state as a flat mapping: name -> global tensor, or plain number.

    ``sl.save`` writes it, ``sl.load`` reads it onto another mesh, and ``load_state_dict`` takes it
    at another world size, layout, stage or bucket size.  Tensors of buckets are split over the
    buckets' axes too, if a dimension divides: each rank holds about its part.  Moves each bucket
    once: (N-1)/N of its bytes, one at a time.  Where rows lie on a disk, each tensor is read when
    it is used, by all ranks together, until the next step; ``sl.save`` holds two rows at a time.
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
        if isinstance(x, ByParameter):
            out.update((keys[path], value) for path, value in x.by_parameter())
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
    # all before the first is filled: what lies in a tier is overwritten
    for keys, x in nodes:
        if isinstance(x, ByParameter) and not next(iter(keys.values()), "").startswith(empty):
            for path, kind in x.kinds().items():
                _check(keys[path], kept[keys[path]], *kind)
    with torch.no_grad():
        new = [_loaded(x, keys, kept, empty) for keys, x in nodes]
    new_state: Any = optree.tree_unflatten(tree, new)
    return new_state


def _is_flat(kept: object) -> bool:
    return isinstance(kept, Mapping) and not any(isinstance(v, Mapping) for v in kept.values())


def _loaded(
    x: Any, keys: Mapping[str, str], kept: Mapping[str, Any], empty: tuple[str, ...]
) -> Any:
    """Fill a leaf with the values of its names, or with zeros."""
    if next(iter(keys.values()), "").startswith(empty):
        return zeros_like(x)
    if isinstance(x, ByParameter):
        return x.with_values({path: kept[name] for path, name in keys.items()})
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
    paths = optree.tree_accessors(state, is_leaf=_has_names, none_is_leaf=True)
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
        return _has_names(x)

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


def _has_names(x: object) -> bool:
    return isinstance(x, ByParameter)


def _nodes(state: State) -> tuple[Nodes, Any]:
    """List (path inside the leaf -> name, leaf) of a state, and its tree.

    For a leaf that has no names of its own the path is "".
    """
    paths, leaves, tree = optree.tree_flatten_with_accessor(
        state, is_leaf=_has_names, none_is_leaf=True
    )
    inside = [list(x.kinds()) if _has_names(x) else [""] for x in leaves]
    at = [tuple(getattr(e, "field", e.entry) for e in path) for path in paths]
    rows = zip(at, leaves, inside, strict=True)
    every = [(*path, p) if _has_names(x) else path for path, x, some in rows for p in some]
    names = iter(names_of(every))
    return [
        ({p: next(names) for p in some}, x) for x, some in zip(leaves, inside, strict=True)
    ], tree


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
        return x.becomes(_flagged(placed(value, x.sharding, x.mesh).raw.clone(), x))
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
