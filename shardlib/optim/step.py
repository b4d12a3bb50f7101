"""One step of an optimizer on memory that the caller donates, as of JAX's donated arguments.

The results use the same memory, and using the donated values afterwards raises: a parameter or a
gradient for every reference, a state in every tree that was donated.  Sharded values of a state's
dicts move to the result, as creating a value takes longer than a fused kernel does for a small
tensor: a reference to one of them, outside of its dict, is to the new state.

In check mode replicated parameters and states are compared by their digests after an update, and
the optimizer's numbers too: a rate that differs by rank cannot be found in a split state, which has
no replicas, although every rank's share is then updated by another rule.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from shardlib.collectives import checking, verify
from shardlib.errors import ShardError
from shardlib.grad import value_and_grad
from shardlib.opspec import Args, Func, Kwargs
from shardlib.optim.buckets import Buckets
from shardlib.optim.norms import global_norm
from shardlib.optim.transform import (
    Step,
    Transform,
    begun,
    check_transform,
    kept_whole,
    run_in_place,
)
from shardlib.optim.trees import (
    State,
    Tree,
    blocks_of,
    check_gradient,
    each,
    given_for,
    is_bucketed,
    with_raw,
)
from shardlib.tensor import ShardedTensor, raw_of


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
Kept = TypeVar("Kept")


def step(
    tx: Transform, params: Params, grads: object, state: Kept, *, norm: bool = False
) -> tuple[Params, Kept, Info]:
    """Update parameters in place: ``params, state, info = step(tx, params, grads, state)``.

    All three are donated: their memory becomes that of the results, one fused kernel overwrites
    many tensors at once, and using the old values afterwards raises.  The values of a state are in
    the new state alone; a reference to one of them is to its new value.  A graph made before the
    step cannot run backward any more.  ``tx.update`` does the same without side effects.
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
    # it may hold the gradients a second time
    del mine
    news = hand_over(params, grads, state, after)
    compare("optim.step", *news, tx, lr=told.lr, skipped=told.skipped)
    return *news, Info(told.norm, told.lr, told.unchanged)


def value_and_step(
    f: Callable[..., Any], tx: Transform, **how: Any
) -> Callable[..., tuple[Any, Any, Any, Info]]:
    """Turn a loss into ``(params, state, ...) -> (loss, params, state, info)``: a step of ``tx``.

    Parameters and state are donated, as by ``step``.  In memory tiers, where no transform needs all
    gradients together (a norm, a mean of several), a block is updated as soon as backward has its
    gradient, and no gradient waits: 2 bytes less for each bfloat16 parameter.  If backward raises
    then, some parameters are updated already.
    ``how``  arguments of ``value_and_grad``; with micro-batches gradients are added up first.

    >>> import shardlib as sl
    >>> with sl.simulate(data=2):
    ...     params = {"w": sl.shard(torch.ones(4), ".")}
    ...     tx = sl.optim.sgd(0.25)
    ...     step = value_and_step(lambda p: p["w"].square().sum(), tx)
    ...     loss, params, state, info = step(params, tx.init(params))
    >>> loss.item(), params["w"].local, info.lr
    (4.0, tensor([0.5000, 0.5000, 0.5000, 0.5000]), 0.25)
    """
    check_transform(tx, "optim.value_and_step")
    both = value_and_grad(f, **how)

    def run(params: Any, state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Info]:
        told = Step()
        eager = None
        if tx.eager is not None and not how.get("microbatches"):
            eager = tx.eager(params, begun(state), told)
        if eager is None:
            loss, grads = both(params, *args, **kwargs)
            return loss, *step(tx, params, grads, state)
        with eager as after:
            loss, _ = both(params, *args, **kwargs)
        news = hand_over(params, (), state, after())
        return loss, *news, Info(told.norm, told.lr, told.unchanged)

    return run


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


def _alike(params: Tree, grads: Tree) -> None:
    """Check that gradients match the parameters' blocks, which are combined by position.

    It runs first, because a later refusal could come after a change.
    """
    leaves, tree = optree.tree_flatten(params)
    for p, g in zip(leaves, given_for(tree, grads, "optim.step"), strict=True):
        if g is not None and isinstance(p, Tensor):
            check_gradient(p, g, "optim.step")
    ids = [id(raw_of(p)) for p in leaves]
    if len(set(ids)) < len(ids):
        raise _tied(params, ids)


def _tied(params: Tree, ids: list[int]) -> ShardError:
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


def _parted(grads: Tree) -> Tree:
    """Copy gradients that share memory: one tensor for two leaves, or a repeated element."""
    leaves, tree = optree.tree_flatten(grads)
    raws = [raw_of(g) for g in leaves]
    # gradients that were summed together are views of one vector
    held: dict[int, list[int]] = {}
    for i, raw in enumerate(raws):
        if isinstance(raw, Tensor) and raw.numel():
            held.setdefault(raw.untyped_storage().data_ptr(), []).append(i)
    for some in held.values():
        if len(some) == 1 and raws[some[0]].is_contiguous():
            continue
        for i in _shared(some, leaves):
            raw = raws[i].detach().clone(memory_format=torch.contiguous_format)
            leaves[i] = with_raw(leaves[i], raw)
    return optree.tree_unflatten(tree, leaves)


def _shared(some: list[int], leaves: list[Any]) -> set[int]:
    """Find tensors in one storage that repeat an element, or share some with an earlier one.

    Blocks of simulated ranks are compared one by one: parts of one vector alternate by rank.
    """
    rows = []
    for i in some:
        mine = blocks_of(leaves[i])
        rows += [(b.storage_offset(), _end(b), i, 0 in b.stride()) for b in mine]
    found, end = set(), 0
    for start, stop, i, repeats in sorted(rows):
        if repeats or start < end:
            found.add(i)
        else:
            end = stop
    return found


def _end(x: Tensor) -> int:
    """Return the offset in its storage after its last element."""
    reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return int(x.storage_offset() + reach + 1)


# ---------------------------------------------------------------- donation


_KEPT = frozenset(("raw", "place", "_is_param"))
"""Attributes that a successor keeps; anything derived from the old value is stale."""


def hand_over(params: Tree, grads: Tree, state: State, after: Any) -> tuple[Any, Any]:
    """Return parameters and state ``after`` a step as new trees; invalidate the donated ones.

    All memory stays in place.  Sharded values of the state's dicts are moved to new dicts; every
    other value is created again.
    """
    old, tree = optree.tree_flatten(params)  # type: ignore[arg-type]
    leaves = _in_leaves(old, grads)
    ended: Any = grads, [x for x in _apart(state) if not _moves(x)]
    ended = [x for x in old + optree.tree_leaves(ended) if isinstance(x, Tensor)]
    gone = set(map(id, ended))
    made = dict(zip(map(id, old), leaves, strict=False))

    def stays(x: Any) -> bool:
        return _moves(x) and gone.isdisjoint(map(id, x.values()))

    def successor(x: Any) -> Any:
        new = made.get(id(x))
        if new is None and id(x) in gone:
            new = made[id(x)] = _again(x)
        elif new is None and stays(x):
            new = made[id(x)] = _moved(x)
        return x if new is None else new

    news = optree.tree_unflatten(tree, leaves or list(map(successor, old)))
    after = optree.tree_map(successor, after, is_leaf=stays)
    for one in filter(_moves, _apart(state)):
        one.update(dict.fromkeys(one, _LEFT))
    for x in ended:
        if type(x) is not GivenUp:
            x.__dict__ = {}
            x.__class__ = GivenUp
    return news, after


def _in_leaves(params: list[Any], grads: Tree) -> Sequence[Any]:
    """Put parameters into the leaves that were made of them for these gradients.

    Only the function that was differentiated knows these leaves, and it has ended.  Return none if
    the gradients are of other values, or parameters are not all sharded.
    """
    before, leaves = grads.leaves if isinstance(grads, Buckets) else Buckets.leaves
    if len(before) != len(params) or not all(map(operator.is_, before, params)):
        return []
    if set(map(type, params)) != _SHARDED or len(set(map(id, params))) < len(params):
        return []
    del grads.leaves
    for x, leaf in zip(params, leaves, strict=True):
        kept = x.__dict__
        leaf.__dict__ = {n: kept[n] for n in kept.keys() & _KEPT} if len(kept) > 2 else kept
    return leaves


def _apart(state: State) -> list[Any]:
    """List a state's leaves, of which a dict of sharded values is one."""
    return optree.tree_leaves(state, is_leaf=_moves)


class GivenUp(torch.Tensor):
    """The class of a tensor whose memory was donated: every use raises."""

    @classmethod
    def __torch_function__(
        cls, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        raise _used()

    def __getattr__(self, name: str) -> Any:
        if name in ("raw", "place", "local", "mesh", "sharding", "padded_shape"):
            raise _used()
        raise AttributeError(name)


def _used() -> ShardError:
    return ShardError(
        "this value was given up to optim.step, which overwrote it",
        op="optim.step",
        fix="params, state, info = sl.optim.step(tx, params, grads, state)",
    )


# vars() of each takes three times as long
_NAMES = operator.attrgetter("__dict__")
_SHARDED = {ShardedTensor}
_LEFT = torch.empty(0, device="cpu")
"""The placeholder for values that moved out of a dict."""
_LEFT.__class__ = GivenUp


def _moves(x: Any) -> bool:
    """Return whether an object is a dict, or buckets, whose values are all sharded."""
    return (type(x) is dict or is_bucketed(x)) and set(map(type, x.values())) == _SHARDED


def _moved(tree: Any) -> Any:
    """Return the same values in a new dict, without what was derived from them before."""
    values = tree.values()
    if max(map(len, map(_NAMES, values))) > 2:
        for x in values:
            for name in x.__dict__.keys() - _KEPT:
                del x.__dict__[name]
    return tree.like(tree) if is_bucketed(tree) else dict(tree)


def _again(x: Tensor) -> Tensor:
    if isinstance(x, ShardedTensor):
        # a value that is fetched when it is read stays so
        new: Tensor = x.at(x.place)
        if "_is_param" in x.__dict__:
            # a read through the class costs more than all of this
            new._is_param = True  # type: ignore[attr-defined]
        return new
    new = x.detach().requires_grad_(x.requires_grad)
    return torch.nn.Parameter(new, x.requires_grad) if isinstance(x, torch.nn.Parameter) else new


# ---------------------------------------------------------------- comparison of ranks, in check mode


def compare(op: str, params: Tree, state: State = None, tx: object = None, **said: object) -> None:
    """Compare, in check mode, parameters, state and numbers with those of the other ranks.

    ``tx``    the transform, whose closures' numbers are compared.
    ``said``  other numbers that must be the same on every rank.
    Raises: RankFailed naming the first difference, with both values.
    """
    mode = checking()
    if mode is None:
        return
    mode.note(op)
    values: dict[Any, dict[str, Any]] = {}
    numbers = {f"{op}: {name}": x for name, x in said.items() if not isinstance(x, Tensor)}
    numbers |= {f"tx{name}": x for name, x in _numbers(tx, "", set())}
    for root, tree in (("params", params), ("state", state)):
        paths, leaves, _ = optree.tree_flatten_with_accessor(tree)
        for path, x in zip(paths, leaves, strict=True):
            name = path.codify(root)
            if isinstance(x, ShardedTensor):
                values.setdefault(x.mesh, {})[name] = x.raw, x.sharding
            elif isinstance(x, int | float | str):
                numbers[name] = x
    for mesh, some in values.items():
        verify(op, mesh, some, "tx = sl.optim.sgd(0.1)  # the same on every rank", said=numbers)


def _numbers(x: object, at: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """List the numbers and strings that functions and methods refer to, with their names."""
    if isinstance(x, int | float | str):
        yield at, x
        return
    if id(x) in seen:
        return
    seen.add(id(x))
    for name, value in _inside(x):
        yield from _numbers(value, at + name, seen)


def _inside(x: object) -> list[tuple[str, Any]]:
    """List what a function, method, mapping or sequence refers to, with names."""
    if isinstance(x, MethodType):
        return [("", x.__func__), *((f".{n}", v) for n, v in vars(x.__self__).items())]
    if isinstance(x, FunctionType):
        names = x.__code__.co_freevars
        cells = [(f".{n}", _held(c)) for n, c in zip(names, x.__closure__ or (), strict=True)]
        return cells + [(f".{i}", v) for i, v in enumerate(x.__defaults__ or ())]
    if isinstance(x, partial):
        given = [(f".{i}", v) for i, v in enumerate(x.args)]
        return [("", x.func), *given, *_inside(x.keywords)]
    if isinstance(x, Mapping):
        return [(f".{n}", v) for n, v in x.items()]
    if isinstance(x, tuple | list):
        fields = getattr(x, "_fields", None) or range(len(x))
        return [(f".{n}", v) for n, v in zip(fields, x, strict=True)]
    return []


def _held(cell: object) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
