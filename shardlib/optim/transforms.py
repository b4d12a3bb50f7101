"""Optimizer transforms in optax's shape: ``init(params)`` and ``update(grads, state, params)``.

A transform is two pure functions; state is a pytree of tensors like the parameters; ``chain``
composes.  On sharded leaves everything here runs on the local blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from shardlib.collectives import played, psum, storage, unwrap, wrap
from shardlib.errors import PartialEscape, ShardError
from shardlib.grad import frozen
from shardlib.mesh import Mesh, bind
from shardlib.optim.transform import (
    TRAITS,
    Step,
    Transform,
    divide,
    fused,
    keep,
    pieces,
    run_in_place,
)
from shardlib.tensor import ShardedTensor, typeof

__all__ = [
    "Transform", "adam", "adamw", "apply_updates", "chain", "clip_by_global_norm", "each",
    "global_norm", "identity", "lion", "masked", "scale", "scale_by_schedule", "set_to_zero",
    "sgd", "trainable",
]  # fmt: skip

Schedule = Callable[[int], float]


class EmptyState(NamedTuple):
    """Nothing to remember."""


class MomentState(NamedTuple):
    """Steps taken, first and second moments."""

    count: int
    mu: Any
    nu: Any


class TraceState(NamedTuple):
    """Steps taken and a running trace of gradients."""

    count: int
    trace: Any


def each(f: Callable[..., Tensor], first: Any, *others: Any, op: str = "update") -> Any:
    """Map over leaves by their blocks; the result lies where ``first``'s leaf lies.

    None stands for a frozen leaf: where any tree has one, ``first``'s stays
    as it is, and so does what is no tensor.
    Raises: ShardError where the trees differ, or a leaf lies
            otherwise in one of them than in ``first``.
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


def _alike(x: Tensor, other: Any, op: str) -> None:
    """Blocks are combined by position, so they must be the same part of the same tensor."""
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
        why, fix, mesh = "are not both sharded", "sl.shard(y, sl.layout_of(x), x.mesh)", x.mesh
    else:
        why, fix, mesh = "are not both sharded", "sl.shard(x, sl.layout_of(y), y.mesh)", other.mesh
    kind = typeof(other) if isinstance(other, Tensor) else type(other).__name__
    raise ShardError(
        f"leaves of two trees {why}",
        op=op,
        operands={"x": typeof(x), "y": kind},
        mesh=mesh,
        fix=fix,
    )


def trainable(params: Any) -> Any:
    """The tree with None for each frozen leaf: one that requires no grad where another does."""
    leaves, tree = optree.tree_flatten(params)
    return optree.tree_unflatten(
        tree, [None if f else x for x, f in zip(leaves, frozen(leaves), strict=True)]
    )


def _moments(params: Any) -> Any:
    """Zeros for every leaf that will have a gradient."""
    return each(torch.zeros_like, trainable(params))


def _same_tree(first: Any, others: Sequence[Any]) -> None:
    paths, _, tree = optree.tree_flatten_with_path(first, none_is_leaf=True)
    for other in others:
        theirs, _, structure = optree.tree_flatten_with_path(other, none_is_leaf=True)
        if structure != tree:
            names = [".".join(map(str, p)) for p in set(paths) ^ set(theirs)]
            raise ShardError(
                f"the trees differ at {', '.join(sorted(names)[:4]) or 'their root'}",
                op="update",
                fix="tx.update({k: grads.get(k) for k in params}, state, params)",
            )


def _ready(grads: Any, op: str, moments: Any = None) -> None:
    """Gradients that are summed, each with the moment that ``init`` made for it."""
    if moments is not None:
        _same_tree(grads, [moments])
        with_moment = optree.tree_leaves(moments, none_is_leaf=True)
        for g, m in zip(optree.tree_leaves(grads, none_is_leaf=True), with_moment, strict=True):
            if g is not None and m is None:
                raise ShardError(
                    "a gradient came for a leaf that was frozen when the state was made",
                    op=op,
                    operands={"gradient": typeof(g)},
                    fix="state = tx.init(params)",
                )
    for g in optree.tree_leaves(grads):
        if isinstance(g, ShardedTensor) and g.sharding.partial:
            raise PartialEscape(
                f"a gradient's sum over {', '.join(g.sharding.partial)} is still pending",
                op=op,
                operands={"gradient": typeof(g)},
                mesh=g.mesh,
                fix=f"sl.optim.zero(tx, axis={g.sharding.partial[0]!r})",
            )


def _need(params: Any, op: str) -> None:
    if params is None:
        raise ShardError(f"{op} needs the parameters", op=op, fix="tx.update(grads, state, params)")


def _rate(lr: float | Schedule, count: int) -> float:
    return lr(count) if callable(lr) else lr


def apply_updates(params: Any, updates: Any) -> Any:
    """params + updates, in the parameters' dtype; leaves that required grad still do.

    Raises: ShardError where an update lies otherwise than its parameter.

    >>> apply_updates({"w": torch.ones(2)}, {"w": torch.full((2,), -0.5)})
    {'w': tensor([0.5000, 0.5000])}
    """
    new = each(lambda p, u: p + u.to(p.dtype), params, updates, op="apply_updates")

    def flagged(n: Any, p: Any) -> Any:
        return n.requires_grad_(p.requires_grad) if isinstance(n, Tensor) and n is not p else n

    return optree.tree_map(flagged, new, params)


def identity() -> Transform:
    """Updates are the gradients."""
    return Transform(lambda params: EmptyState(), lambda grads, state, params=None: (grads, state))


def chain(*transforms: Transform) -> Transform:
    """Apply transforms in order.

    >>> tx = chain(clip_by_global_norm(1.0), scale(-0.5))
    >>> state = tx.init(torch.zeros(2))
    >>> tx.update(torch.tensor([3.0, 4.0]), state)[0]
    tensor([-0.3000, -0.4000])
    """

    def init(params: Any) -> Any:
        return tuple(t.init(params) for t in transforms)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new = []
        for t, s in zip(transforms, state, strict=True):
            grads, s = t.update(grads, s, params)
            new.append(s)
        return grads, tuple(new)

    def donate(grads: Any, state: Any, params: Any, step: Step) -> Any:
        new = []
        for t, s in zip(transforms[:-1], state, strict=False):
            if t.rescale is not None:
                new.append(t.rescale(grads, s, params, step))
                continue
            divide(grads, step)
            grads, later = t.update(grads, s, params)
            new.append(keep(s, later))
        new += [run_in_place(t, grads, s, params, step) for t, s in [(transforms[-1], state[-1])]]
        return tuple(new)

    trait = max((t.trait for t in transforms), key=TRAITS.index, default="elementwise")
    return Transform(init, update, trait, donate if transforms else None)


def scale(factor: float) -> Transform:
    """Multiply updates by a number."""
    return Transform(
        lambda params: EmptyState(), lambda g, s, p=None: (each(lambda x: x * factor, g), s)
    )


def scale_by_schedule(schedule: Schedule) -> Transform:
    """Multiply updates by ``schedule(step)``, steps counted from 0."""
    return Transform(
        lambda params: 0, lambda g, s, p=None: (each(lambda x: x * schedule(s), g), s + 1)
    )


def sgd(lr: float | Schedule, momentum: float = 0.0, nesterov: bool = False) -> Transform:
    """Stochastic gradient descent, as torch.optim.SGD."""

    def init(params: Any) -> TraceState:
        return TraceState(0, _moments(params) if momentum else ())

    def update(grads: Any, state: TraceState, params: Any = None) -> tuple[Any, TraceState]:
        _ready(grads, "sgd", state.trace if momentum else None)
        rate = _rate(lr, state.count)
        if not momentum:
            return each(lambda g: g * -rate, grads), TraceState(state.count + 1, ())
        trace = each(lambda t, g: t * momentum + g, state.trace, grads)
        ahead = momentum if nesterov else 0.0
        step = each(lambda g, t: (g + t * ahead if ahead else t) * -rate, grads, trace)
        return step, TraceState(state.count + 1, trace)

    return Transform(init, update)


def adamw(
    lr: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Transform:
    """Adam with decoupled weight decay, as torch.optim.AdamW.

    Source: Loshchilov and Hutter, arXiv 1711.05101.
    """

    def init(params: Any) -> MomentState:
        return MomentState(0, _moments(params), _moments(params))

    def update(grads: Any, state: MomentState, params: Any = None) -> tuple[Any, MomentState]:
        _ready(grads, "adamw", state.mu)
        if weight_decay:
            _need(params, "adamw")
        count, rate = state.count + 1, _rate(lr, state.count)
        mu = each(lambda m, g: m.lerp(g, 1 - b1), state.mu, grads)
        nu = each(lambda v, g: (v * b2).addcmul_(g, g, value=1 - b2), state.nu, grads)
        size, root = rate / (1 - b1**count), (1 - b2**count) ** 0.5

        def step(_: Tensor, m: Tensor, v: Tensor, *p: Tensor) -> Tensor:
            u = (m * -size).div_((v.sqrt() / root).add_(eps))
            return u.add_(p[0], alpha=-rate * weight_decay) if p else u

        updates = each(step, grads, mu, nu, *([params] if weight_decay else []))
        return updates, MomentState(count, mu, nu)

    def donate(grads: Any, state: MomentState, params: Any, step: Step) -> MomentState:
        _ready(grads, "adamw", state.mu)
        count, rate = state.count + 1, _rate(lr, state.count)
        g, p, m, v = pieces(grads, params, state.mu, state.nu)
        how = {"lr": rate, "beta1": b1, "beta2": b2, "weight_decay": weight_decay, "eps": eps}
        done = fused("adamw", (p, g, m, v), step, count, **how, amsgrad=False, maximize=False)
        if not done:
            return run_in_place(Transform(init, update), grads, state, params, step)
        step.lr = rate
        return state._replace(count=count)

    return Transform(init, update, donate=donate)


def adam(lr: float | Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Transform:
    """Adam: ``adamw`` without decay."""
    return adamw(lr, b1, b2, eps, weight_decay=0.0)


def lion(
    lr: float | Schedule, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.0
) -> Transform:
    """Sign of an interpolated momentum.  Source: Chen et al., arXiv 2302.06675."""

    def init(params: Any) -> TraceState:
        return TraceState(0, _moments(params))

    def update(grads: Any, state: TraceState, params: Any = None) -> tuple[Any, TraceState]:
        _ready(grads, "lion", state.trace)
        if weight_decay:
            _need(params, "lion")
        rate = _rate(lr, state.count)
        sign = each(lambda g, m: m.lerp(g, 1 - b1).sign_(), grads, state.trace)
        if weight_decay:
            sign = each(lambda s, p: s + p * weight_decay, sign, params)
        trace = each(lambda m, g: m.lerp(g, 1 - b2), state.trace, grads)
        return each(lambda s: s * -rate, sign), TraceState(state.count + 1, trace)

    return Transform(init, update)


def masked(tx: Transform, mask: Any) -> Transform:
    """Apply ``tx`` where ``mask`` (a tree of bools, or a function of the tree) is true.

    The rest passes unchanged, as in optax: ``apply_updates`` would then ADD its raw gradients.  For
    leaves that are to stay as they are: ``chain(masked(adamw(1e-3), mask), masked(set_to_zero(),
    lambda t: optree.tree_map(operator.not_, mask)))``, or ``requires_grad_(False)``, for which no
    gradient is computed at all.

    >>> rest = {"w": False, "b": True}
    >>> tx = chain(masked(scale(-1.0), {"w": True, "b": False}), masked(set_to_zero(), rest))
    >>> grads = {"w": torch.ones(1), "b": torch.ones(1)}
    >>> tx.update(grads, tx.init(grads))[0]
    {'w': tensor([-1.]), 'b': tensor([0.])}
    """

    def chosen(tree: Any) -> dict[int, Any]:
        flags: list[Any] = optree.tree_leaves(_tree(mask, tree))
        leaves = optree.tree_leaves(tree, none_is_leaf=True)
        return {i: x for i, (x, on) in enumerate(zip(leaves, flags, strict=True)) if on}

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        new, state = tx.update(chosen(grads), state, None if params is None else chosen(params))
        leaves, tree = optree.tree_flatten(grads, none_is_leaf=True)
        return optree.tree_unflatten(tree, [new.get(i, g) for i, g in enumerate(leaves)]), state

    return Transform(lambda params: tx.init(chosen(params)), update, "tree")


def set_to_zero() -> Transform:
    """Updates of zero: what it is given stays as it is."""
    return Transform(
        lambda params: EmptyState(), lambda g, s, p=None: (each(torch.zeros_like, g), s)
    )


def _tree(mask: Any, tree: Any) -> Any:
    return mask(tree) if callable(mask) else mask


def global_norm(tree: Any) -> Tensor:
    """Euclidean norm of all leaves together, each element counted once whatever its layout.

    Squares accumulate in fp64; one collective over the whole mesh.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     global_norm({"a": sl.shard(torch.ones(4, 4), "x y"), "b": sl.shard(torch.ones(9), ".")})
    tensor(5., dtype=torch.float64)
    """
    _ready(tree, "global_norm")
    total = torch.zeros((), dtype=torch.float64)
    per_mesh: dict[Mesh, Tensor] = {}
    for x in optree.tree_leaves(tree):
        if not isinstance(x, ShardedTensor):
            total = (
                total.to(x.device)
                + torch.linalg.vector_norm(x.detach(), dtype=torch.float64).square()
            )
            continue
        copies = x.mesh.size
        for axis in x.sharding.axes:
            copies //= x.mesh.axes[axis]
        flat = x.raw.detach().reshape(len(played(x.mesh)), -1)
        squares = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).square() / copies
        per_mesh[x.mesh] = per_mesh[x.mesh] + squares if x.mesh in per_mesh else squares
    for mesh, squares in per_mesh.items():
        local = storage(list(squares), mesh)
        with bind(mesh):
            total = (
                total.to(squares.device)
                + unwrap(psum(wrap(local, mesh), mesh.names)).reshape(-1)[0]
            )
    return total.sqrt()


def clip_by_global_norm(max_norm: float) -> Transform:
    """Scale all updates so that their global norm is at most ``max_norm``."""

    def scale(norm: Tensor) -> Tensor:
        return ((norm + 1e-6) / max_norm).clamp(min=1.0)

    def update(grads: Any, state: EmptyState, params: Any = None) -> tuple[Any, EmptyState]:
        by = scale(global_norm(grads))
        return each(lambda g: g / by.to(g.device, g.dtype), grads), state

    def rescale(grads: Any, state: EmptyState, params: Any, step: Step) -> EmptyState:
        norm = global_norm(grads) if step.scale is None else global_norm(grads) / step.scale
        step.norm = norm
        step.divide(scale(norm))
        return state

    return Transform(lambda params: EmptyState(), update, "norm", rescale=rescale)
