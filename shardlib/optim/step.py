"""One step of an optimizer on memory that the caller donates."""

import itertools
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from shardlib.errors import ShardError
from shardlib.optim.clip import global_norm
from shardlib.optim.donation import hand_over
from shardlib.optim.later import begun
from shardlib.optim.replicas import compare
from shardlib.optim.transform import Step, Transform, check_transform, kept_whole, run_in_place
from shardlib.optim.trees import given_for
from shardlib.tensor import ShardedTensor, typeof

__all__ = ["Info", "step"]


class Info(NamedTuple):
    """Figures of a step.

    ``norm``     the gradients' global norm before clipping, if a clip or ``norm=True`` computed it.
    ``lr``       the rate of the last transform that has one.
    ``skipped``  whether parameters and state did not change.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2):
    ...     w, g = ({"w": sl.shard(x, "x")} for x in (torch.zeros(4), torch.ones(4)))
    ...     tx = sl.optim.sgd(0.1)
    ...     *_, info = sl.optim.step(tx, w, g, tx.init(w), norm=True)
    >>> float(info.norm), info.lr, info.skipped
    (2.0, 0.1, False)
    """

    norm: Tensor | None
    lr: float | None
    skipped: bool | Tensor


Params = TypeVar("Params")
State = TypeVar("State")


def step(
    tx: Transform, params: Params, grads: object, state: State, *, norm: bool = False
) -> tuple[Params, State, Info]:
    """Update parameters in place: ``params, state, info = step(tx, params, grads, state)``.

    All three are donated: their memory becomes that of the results, one fused kernel overwrites
    many tensors at once, and using the old values afterwards raises.  A graph made before the step
    cannot run backward any more.  ``tx.update`` does the same without side effects.
    ``norm``  compute the gradients' global norm even if nothing clips: one collective.
    Raises: ShardError if gradients and parameters differ, or the state was made for others; then
            nothing has changed.

    >>> import shardlib as sl
    >>> with sl.simulate(data=2):
    ...     params = {"w": sl.shard(torch.ones(4), ".")}
    ...     tx = sl.optim.zero(sl.optim.adamw(0.1), axis="data")
    ...     state = tx.init(params)
    ...     loss, grads = sl.value_and_grad(lambda p: (p["w"] ** 2).sum(), into=tx)(params)
    ...     new, state, info = step(tx, params, grads, state, norm=True)
    >>> new["w"].local, info.norm, info.lr
    (tensor([0.8990, 0.8990, 0.8990, 0.8990]), tensor(4., dtype=torch.float64), 0.1)
    """
    check_transform(tx, "optim.step")
    mine = grads
    # zero checks and copies its trees itself
    if tx.shard is kept_whole:
        _alike(params, grads)
        mine = _parted(grads)
    told = Step(ask=norm)
    if norm and tx.shard is kept_whole:
        told.norm = global_norm(mine)
    after = run_in_place(tx, mine, begun(state), params, told)
    del mine  # it may hold the gradients a second time
    news = hand_over(params, grads, state, after)
    compare("optim.step", *news, tx, lr=told.lr, skipped=told.skipped)
    return *news, Info(told.norm, told.lr, told.unchanged)


def _alike(params: Any, grads: Any) -> None:
    """Check that gradients match the parameters' blocks, which are combined by position.

    It runs first, because a later refusal could come after a change.
    """
    leaves, tree = optree.tree_flatten(params)
    for p, g in zip(leaves, given_for(tree, grads, "optim.step"), strict=True):
        if g is not None and isinstance(p, Tensor) and not _same_part(p, g):
            raise ShardError(
                "a gradient lies otherwise than its parameter",
                op="optim.step",
                operands={"parameter": typeof(p), "gradient": _kind(g)},
                mesh=p.mesh if isinstance(p, ShardedTensor) else None,
                fix="loss, grads = sl.value_and_grad(f)(params)",
            )
    ids = [id(p.raw if isinstance(p, ShardedTensor) else p) for p in leaves]
    if len(set(ids)) < len(ids):
        raise _tied(params, ids)


def _same_part(p: Tensor, g: Any) -> bool:
    """Return whether a gradient's blocks are those parts of it that the parameter's are."""
    if not isinstance(g, Tensor) or p.shape != g.shape:
        return False
    if not isinstance(p, ShardedTensor):
        return True
    # tx refuses a pending sum
    same = isinstance(g, ShardedTensor) and g.mesh is p.mesh
    return same and g.sharding.bare == p.sharding.bare  # type: ignore[union-attr]


def _tied(params: Any, ids: list[int]) -> ShardError:
    """Build the error for one parameter at two places of the tree."""
    again = next(i for i, one in enumerate(ids) if one in ids[:i])
    accessors = optree.tree_accessors(params)
    first, second = (accessors[i].codify("params") for i in (ids.index(ids[again]), again))
    return ShardError(
        f"{first} and {second} are one parameter, at two places of the tree, and it would be "
        "updated twice",
        op="optim.step",
        fix=f"del {second}; state = tx.init(params)",
    )


def _parted(grads: Any) -> Any:
    """Copy gradients that share memory: one tensor for two leaves, or a repeated element."""
    leaves, tree = optree.tree_flatten(grads)
    raws = [g.raw if isinstance(g, ShardedTensor) else g for g in leaves]
    held: dict[int, list[int]] = {}  # gradients that were summed together are views of one vector
    for i, raw in enumerate(raws):
        if isinstance(raw, Tensor) and raw.numel():
            held.setdefault(raw.untyped_storage().data_ptr(), []).append(i)
    for some in held.values():
        for i in _shared(some, raws):
            raw = raws[i].detach().clone(memory_format=torch.contiguous_format)
            leaves[i] = leaves[i].becomes(raw) if isinstance(leaves[i], ShardedTensor) else raw
    return optree.tree_unflatten(tree, leaves)


def _shared(some: list[int], raws: list[Tensor]) -> list[int]:
    """List tensors in one storage that repeat an element, or share some with an earlier one."""
    ends = sorted((raws[i].storage_offset(), _end(raws[i])) for i in some)
    apart = all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
    kept: list[Tensor] = []
    found = []
    for i in some:
        raw = raws[i]
        if 0 in raw.stride() or (not apart and any(_overlap(raw, x) for x in kept)):
            found.append(i)
        else:
            kept.append(raw)
    return found


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one storage may share elements.

    Adjacent columns of rows with one stride, as in parts of simulated ranks' vectors, share none.
    """
    (low_a, high_a), (low_b, high_b) = ((x.storage_offset(), _end(x)) for x in (a, b))
    if high_a <= low_b or high_b <= low_a:
        return False
    row = a.stride(0) if a.ndim and b.ndim and a.stride(0) == b.stride(0) else 0
    if row <= 0 or a.shape[0] != b.shape[0]:
        return True
    (one, n), (two, m) = (
        (x.storage_offset() % row, _end(x[0]) - x.storage_offset()) for x in (a, b)
    )
    inside = one + n <= row and two + m <= row
    return not (inside and (one + n <= two or two + m <= one))


def _end(x: Tensor) -> int:
    """Return the offset in its storage after its last element."""
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return int(x.storage_offset() + reach + 1)


def _kind(g: Any) -> str:
    return typeof(g) if isinstance(g, Tensor) else type(g).__name__
