"""Trees of parameters, gradients and state, mapped leaf by leaf over their local blocks.

None stands for a frozen leaf.  Blocks are combined by position, so trees must have the same
structure, and their leaves the same layouts.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from shardlib.capacity import refuse_beyond
from shardlib.errors import PartialEscape, ShardError
from shardlib.grad import frozen
from shardlib.mesh import Mesh
from shardlib.optim.buckets import Buckets
from shardlib.optim.replicas import compare
from shardlib.tensor import ShardedTensor, typeof

__all__ = [
    "EmptyState", "apply_updates", "each", "given_for", "moments", "names_of", "need", "nothing",
    "ready", "refuse_copies", "settled", "trainable", "wide", "zeros_like",
]  # fmt: skip


class EmptyState(NamedTuple):
    """The state of a transform without memory."""


Params = TypeVar("Params")


def apply_updates(params: Params, updates: object) -> Params:
    """Add updates to parameters, rounded once to the parameters' dtype.

    Leaves that required grad still do.

    Raises: ShardError if an update's layout differs from its parameter's.

    >>> apply_updates({"w": torch.ones(2)}, {"w": torch.full((2,), -0.5)})
    {'w': tensor([0.5000, 0.5000])}
    """
    old: Any = params
    new = each(lambda p, u: (p + u).to(p.dtype), old, updates, op="apply_updates")

    def flagged(n: Any, p: Any) -> Any:
        return n.requires_grad_(p.requires_grad) if isinstance(n, Tensor) and n is not p else n

    found: Any = optree.tree_map(flagged, new, old)
    compare("apply_updates", found)
    return found


def each(f: Callable[..., Tensor], first: Any, *others: Any, op: str = "update") -> Any:
    """Map a function over the leaves' blocks; results have the layout of ``first``'s leaves.

    If a leaf is None in any tree, or not a tensor, ``first``'s is returned unchanged.
    Raises: ShardError if the trees differ, or a leaf's layout in one of them differs from that in
            ``first``.
    """

    def one(x: Any, *more: Any) -> Any:
        if not isinstance(x, Tensor) or any(m is None for m in more):
            return x
        for m in more:
            _alike(x, m, op)
        raws = [m.raw if isinstance(m, ShardedTensor) else m for m in more]
        if isinstance(x, ShardedTensor):
            out = f(x.raw, *raws)
            return ShardedTensor(out, x.place._replace(deferred=frozenset()))
        return f(x, *raws)

    with torch.no_grad():
        _same_tree(first, others)
        return optree.tree_map(one, first, *others, none_is_leaf=True)


def names_of(paths: Sequence[tuple[Any, ...]]) -> list[str]:
    """Join each path's keys by dots, so that no two paths of a tree have one name.

    If keys contain dots that would make two names equal, the keys of that level are quoted and
    their dots escaped.

    >>> names_of([("h", 0, "w"), ("h.1", "w")]), names_of([("h", "w"), ("h.w",)])
    (['h.0.w', 'h.1.w'], ["'h'.w", "'h\\\\.w'"])
    """
    plain = [".".join(map(str, path)) if path[-1:] != ("",) else _folded(path) for path in paths]
    if len(set(plain)) == len(plain):
        return plain
    below: dict[Any, list[int]] = {}
    for i, path in enumerate(paths):
        below.setdefault((type(path[0]), path[0]), []).append(i)
    rows: list[tuple[Any, str]] = [("", "")] * len(plain)
    for (_, key), some in below.items():
        for i, name in zip(some, names_of([paths[i][1:] for i in some]), strict=True):
            rows[i] = key, name
    joined = [f"{key}.{name}" if name else str(key) for key, name in rows]
    if len(set(joined)) == len(joined):
        return joined
    quoted = [repr(key).replace("\\", r"\\").replace(".", r"\.") for key, _ in rows]
    return [f"{q}.{name}" if name else q for q, (_, name) in zip(quoted, rows, strict=True)]


def _folded(path: tuple[Any, ...]) -> str:
    """Join keys of which the last are empty: like a bare leaf's empty path, they add nothing."""
    name = ""
    for key in reversed(path):
        name = f"{key}.{name}" if name else str(key)
    return name


def trainable(params: Any) -> Any:
    """Replace frozen leaves by None: those without grad in a tree where another requires it."""
    leaves, tree = optree.tree_flatten(params)
    held = frozen(leaves)
    if not any(held):
        return params
    return optree.tree_unflatten(
        tree, [None if f else x for x, f in zip(leaves, held, strict=True)]
    )


def moments(params: Any) -> Any:
    """Make zeros for every trained leaf, in fp32 for half precision.

    A moment in half precision would not change at all by less than 1/256 of itself.
    """
    tree = trainable(params)
    half = {x.dtype for x in optree.tree_leaves(tree) if isinstance(x, Tensor)} & HALF
    if half:
        warnings.warn(
            f"parameters in {' and '.join(sorted(str(d) for d in half))} are updated without a "
            "master copy: changes of less than 1/256 of a weight are lost (their moments are "
            'fp32); keep one: sl.optim.mixed(tx), or sl.optim.zero(tx, axis, master="fp32")',
            stacklevel=_users(),
        )
    return zeros_like(tree)


def refuse_copies(tree: Any, dtype: Callable[[torch.dtype], torch.dtype]) -> None:
    """Refuse copies of the leaves' blocks in other dtypes where they do not fit in the device."""
    found = [x for x in optree.tree_leaves(tree) if isinstance(x, Tensor)]
    raws = [x.raw if isinstance(x, ShardedTensor) else x for x in found]
    if raws:
        nbytes = sum(x.numel() * dtype(x.dtype).itemsize for x in raws)
        refuse_beyond(nbytes, raws[0].device, "init", getattr(found[0], "mesh", None))


def zeros_like(tree: Any) -> Any:
    """Make zeros in the leaves' layouts, in fp32 for half precision.

    Raises: ShardError where all of them do not fit in the device.
    """
    refuse_copies(tree, wide)
    return each(lambda x: torch.zeros_like(x, dtype=wide(x.dtype)), tree)


def settled(tree: Any) -> Any:
    """Drop pending sums from the layouts; valid for blocks that are then filled with zeros."""

    def one(x: Any) -> Any:
        if not isinstance(x, ShardedTensor) or not x.sharding.partial:
            return x
        return ShardedTensor(x.raw, x.place._replace(layout=x.sharding.bare, deferred=frozenset()))

    return optree.tree_map(one, tree)


def nothing(grads: Any, params: Any = None) -> Any:
    """Make updates of zeros, in the parameters' layouts if they are given.

    The gradients' layouts may differ: pending, or in buckets.
    """
    like = settled(grads) if params is None else trainable(params)
    return each(torch.zeros_like, like)


HALF = frozenset({torch.bfloat16, torch.float16})


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which such values are accumulated: fp32 for half precision."""
    return torch.float32 if dtype in HALF else dtype


def _users() -> int:
    """Count the frames from the caller to the first outside this package, for warnings."""
    frame, depth = sys._getframe(2), 2
    here = str(Path(__file__).parent)
    while frame is not None and frame.f_back is not None:
        if not frame.f_code.co_filename.startswith(here):
            return depth
        frame, depth = frame.f_back, depth + 1
    return depth


def ready(grads: Any, op: str, moments: Any = None) -> None:
    """Refuse pending gradients, and gradients without a moment made by ``init``."""
    same = isinstance(grads, Buckets) and getattr(moments, "index", None) is grads.index
    tree: Any = grads
    if moments is not None and not same:
        _same_tree(grads, [moments])
        with_moment = optree.tree_leaves(moments, none_is_leaf=True)
        for g, m in zip(optree.tree_leaves(tree, none_is_leaf=True), with_moment, strict=True):
            if g is not None and m is None:
                raise ShardError(
                    "a gradient came for a leaf that was frozen when the state was made",
                    op=op,
                    operands={"gradient": typeof(g)},
                    fix="state = tx.init(params)",
                )
    for g in grads.values() if same else optree.tree_leaves(tree):
        # each rank would step by its own summand
        if isinstance(g, ShardedTensor) and g.place.layout.partial:
            raise PartialEscape(
                f"a gradient's sum over {', '.join(g.sharding.partial)} is still pending",
                op=op,
                operands={"gradient": typeof(g)},
                mesh=g.mesh,
                fix=f"sl.optim.zero(tx, axis={g.sharding.partial[0]!r})",
            )


def given_for(tree: Any, grads: Any, op: str) -> list[Any]:
    """List the gradients of a tree's leaves in order; ``tree`` is the parameters' structure.

    Raises: ShardError if the gradients have another structure.
    """
    try:
        return tree.flatten_up_to(grads)
    except (ValueError, TypeError, KeyError):
        raise ShardError(
            "the gradients are another tree than the parameters",
            op=op,
            fix="loss, grads = sl.value_and_grad(f)(params)",
        ) from None


def need(params: Any, op: str) -> None:
    """Raise an error if the parameters are missing."""
    if params is None:
        raise ShardError(f"{op} needs the parameters", op=op, fix="tx.update(grads, state, params)")


def _alike(x: Tensor, other: Any, op: str) -> None:
    """Check that blocks, which are combined by position, are the same part of a tensor."""
    if not (isinstance(x, ShardedTensor) or isinstance(other, ShardedTensor)):
        return
    if isinstance(x, ShardedTensor) and isinstance(other, ShardedTensor):
        same_place = x.sharding == other.sharding and x.mesh is other.mesh
        if same_place and x.padded_shape == other.padded_shape and x.shape == other.shape:
            return
        if x.mesh is not other.mesh:
            why, fix = (
                f"lie on different meshes, {x.mesh} and {other.mesh}",
                "sl.shard(sl.unshard(y), sl.layout_of(x), x.mesh)",
            )
        elif x.shape != other.shape or x.padded_shape != other.padded_shape:
            why, fix = "have different sizes", "tx.init(x)"
        elif other.sharding.partial and not x.sharding.partial:
            raise PartialEscape(
                f"a leaf's sum over {', '.join(other.sharding.partial)} is still pending, and the "
                "other's is not",
                op=op,
                operands={"x": typeof(x), "y": typeof(other)},
                mesh=x.mesh,
                fix="sl.reshard(y, sl.layout_of(x))",
            )
        else:
            why, fix = "lie differently", "sl.reshard(y, sl.layout_of(x))"
        mesh: Mesh | None = x.mesh
    elif isinstance(x, ShardedTensor):
        why = "are not both sharded"
        fix = "sl.shard(y, sl.layout_of(x), x.mesh)"
        mesh = x.mesh
    else:
        why = "are not both sharded"
        fix = "sl.shard(x, sl.layout_of(y), y.mesh)"
        mesh = other.mesh
    kind = typeof(other) if isinstance(other, Tensor) else type(other).__name__
    raise ShardError(
        f"leaves of two trees {why}",
        op=op,
        operands={"x": typeof(x), "y": kind},
        mesh=mesh,
        fix=fix,
    )


def _same_tree(first: Any, others: Sequence[Any]) -> None:
    paths, _, tree = optree.tree_flatten_with_path(first, none_is_leaf=True)
    for other in others:
        theirs, _, structure = optree.tree_flatten_with_path(other, none_is_leaf=True)
        if structure != tree:
            names = names_of(list(set(paths) ^ set(theirs)))
            raise ShardError(
                f"the trees differ at {', '.join(sorted(names)[:4]) or 'their root'}",
                op="update",
                fix="tx.update({k: grads.get(k) for k in params}, state, params)",
            )
