"""Donation of values to a step, as of JAX's donated arguments: using them afterwards raises.

The results use the same memory.  If only a dict refers to its sharded values, the objects move to
the result's dict: this cannot be observed, and saves 3 us each, more than a fused kernel
takes for a small tensor.  Every other value is
created again, and the donated object raises from then on for every reference; so do the entries
left in the dicts.
"""

import operator
import sys
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.errors import ShardError
from shardlib.opspec import Args, Func, Kwargs
from shardlib.optim.buckets import Buckets
from shardlib.tensor import ShardedTensor

__all__ = ["GivenUp", "hand_over"]

_KEPT = frozenset(("raw", "place", "_is_param"))
"""Attributes that a successor keeps; anything derived from the old value is stale."""


def hand_over(params: Any, grads: Any, state: Any, after: Any) -> tuple[Any, Any]:
    """Return parameters and state ``after`` a step as new values; invalidate the donated ones.

    All memory stays in place.
    """
    made: dict[int, tuple[Any, Any]] = {}
    news = _over(params, made), _over(after, made)
    for old in (params, grads, state):
        _give_up(old)
    return news


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


def _left() -> Tensor:
    """Make the placeholder for values that moved out of a dict."""
    x = torch.empty(0, device="cpu")
    x.__class__ = GivenUp
    return x


_NAMES = operator.attrgetter("__dict__")  # vars() of each takes three times as long
_NUMBERS = frozenset((int, float, bool, str, type(None)))
_SHARDED = {ShardedTensor}
_LEFT = _left()
_ALONE = max(map(sys.getrefcount, {0: object()}.values()))
"""Reference count of an object that only one dict refers to, measured as in ``_movable``."""


def _over(tree: Any, made: dict[int, tuple[Any, Any]]) -> Any:
    """Return new values on the same memory.

    ``made``  id of an object -> that object, kept alive so that the id stays valid, and its
              successor.
    """
    kind: Any = type(tree)
    if kind in _NUMBERS:
        return tree
    if id(tree) in made:
        return made[id(tree)][1]
    new: Any
    if kind is dict or issubclass(kind, Buckets):
        new = _moved(tree) if _movable(tree) else {k: _over(x, made) for k, x in tree.items()}
        if kind is not dict:
            new = tree.like(new)
            if "pieces" in tree.__dict__:  # views of the same memory
                new.__dict__["pieces"] = tree.pieces
    elif isinstance(tree, Tensor):
        new = _again(tree)
    elif optree.is_namedtuple_class(kind):
        new = kind(*[_over(x, made) for x in tree])
    else:
        below, shape = optree.tree_flatten(tree, is_leaf=lambda x: x is not tree)
        if len(below) == 1 and below[0] is tree:
            return tree
        new = shape.unflatten([_over(x, made) for x in below])
    made[id(tree)] = tree, new
    return new


def _movable(tree: dict[Any, Any]) -> bool:
    """Return whether all of a dict's values are sharded and nothing else refers to them."""
    values = tree.values()
    return set(map(type, values)) == _SHARDED and max(map(sys.getrefcount, values)) <= _ALONE


def _moved(tree: dict[Any, Any]) -> dict[Any, Any]:
    """Move the values out of a dict."""
    values = tree.values()
    if max(map(len, map(_NAMES, values))) > 2:
        for x in values:
            for name in x.__dict__.keys() - _KEPT:
                del x.__dict__[name]
    new = dict(tree)
    tree.update(dict.fromkeys(tree, _LEFT))
    return new


def _again(x: Tensor) -> Tensor:
    if isinstance(x, ShardedTensor):
        new: Tensor = ShardedTensor(x.raw, x.place)
        if "_is_param" in x.__dict__:  # a read through the class costs more than all of this
            new._is_param = True  # type: ignore[attr-defined]
        return new
    new = x.detach().requires_grad_(x.requires_grad)
    return torch.nn.Parameter(new, x.requires_grad) if isinstance(x, torch.nn.Parameter) else new


def _give_up(tree: Any) -> None:
    kind = type(tree)
    if kind in _NUMBERS:
        return
    if kind is dict or issubclass(kind, Buckets):
        if kind is not dict:
            tree.__dict__.pop("pieces", None)
        # else its values have moved to the result
        if next(iter(tree.values()), None) is not _LEFT:
            for x in tree.values():
                _give_up(x)
    elif isinstance(tree, Tensor):
        if kind is not GivenUp:
            tree.__dict__.clear()
            tree.__class__ = GivenUp
    elif kind is tuple or kind is list or optree.is_namedtuple_class(kind):
        for x in tree:
            _give_up(x)
    else:
        below: list[Any] = optree.tree_leaves(tree, is_leaf=lambda x: x is not tree)
        if not (len(below) == 1 and below[0] is tree):
            _give_up(below)
