"""Decisions of the device about a step, which the host reads in the next one.

A step whose gradients are not finite changes nothing.  On the host that is an ``if``.  On an
accelerator its results are chosen on the device.  What the host must know of the choice stands in
the state: the number that decided, ``Posted``, whose copy to the host has begun, and counts that
hang on it, ``Later``.  The copy began a step before, so the host waits only where the device is
more than a step behind.
"""

import operator
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.tensor import ShardedTensor

__all__ = ["Later", "Posted", "at_rest", "begun", "chosen", "mapped", "on_host", "told"]


def on_host(x: Tensor) -> bool:
    """Say whether the host reads a number without waiting, or nobody has it: on a mesh of shapes."""
    return x.device.type in ("cpu", "meta")


def told(x: Tensor) -> Any:
    """Return a number, for which the host waits."""
    return x.item()


class Posted:
    """A number on a device that is being copied to the host.

    ``error``  the error that the number is, if it is one; ``begun`` raises it, once.

    >>> x = Posted(torch.tensor(2.0), lambda x: ValueError(f"{x} is too much"))
    >>> x.read(), x.error(), x.error()
    (2.0, ValueError('2.0 is too much'), None)
    """

    def __init__(
        self, x: Tensor, error: Callable[[Any], Exception | None] = lambda x: None
    ) -> None:
        self._there, self._done, self._error = x, None, error
        if not on_host(x):
            self._there = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
            self._there.copy_(x, non_blocking=True)
            self._done = torch.Event(x.device)
            self._done.record()

    def read(self) -> Any:
        """Return the number; wait for its copy."""
        if self._done is not None and not self._done.query():
            self._done.synchronize()
        return self._there.item()

    def error(self) -> Exception | None:
        """Return the error, to the first who asks."""
        asked, self._error = self._error, lambda x: None
        return asked(self.read())


class Later:
    """A number that is ``made`` where the device found a step sound, else ``kept``.

    Whatever reads it waits until the device has decided.

    >>> count = Later(Posted(torch.tensor(False)), 4, 3)
    >>> count, int(count), count + 1, 2 * count, count < 4
    (3, 3, 4, 6, True)
    """

    def __init__(self, sound: Posted, made: Any, kept: Any) -> None:
        self._sound, self._made, self._kept = sound, made, kept

    def read(self) -> Any:
        """Return the number."""
        x = self._made if self._sound.read() else self._kept
        return x.read() if isinstance(x, Later) else x

    def __reduce__(self) -> Any:
        x = self.read()
        return type(x), (x,)


def _as_number() -> None:
    """Give ``Later`` the operators of numbers."""

    def first(f: Any) -> Any:
        return lambda self, *others: f(self.read(), *others)

    def second(f: Any) -> Any:
        return lambda self, other: f(other, self.read())

    for f in (int, float, bool, repr, hash, format):
        setattr(Later, f"__{f.__name__}__", first(f))
    for name in "index neg lt le gt ge eq ne".split():
        setattr(Later, f"__{name}__", first(getattr(operator, name)))
    for name in "add sub mul truediv floordiv mod pow".split():
        setattr(Later, f"__{name}__", first(getattr(operator, name)))
        setattr(Later, f"__r{name}__", second(getattr(operator, name)))


_as_number()


def begun(state: Any) -> Any:
    """Return a state whose counts the host has read, for the next step; raise the last one's error.

    Whoever asks again, with the same state, goes on: the step with the error changed nothing.
    """
    leaves = optree.tree_leaves(state)
    kinds = set(map(type, leaves))
    if Posted in kinds:
        errors = [e for x in leaves if type(x) is Posted and (e := x.error()) is not None]
        if errors:
            raise errors[0]
    if Later not in kinds:
        return state
    return mapped(lambda x: x.read() if isinstance(x, Later) else x, state)


def at_rest(tree: Any) -> Any:
    """Return a tree as a checkpoint holds it, the same on every device: nothing is to be read."""

    def own(x: Any) -> bool:
        return hasattr(type(x), "at_rest")

    def resting(x: Any) -> Any:
        if own(x):
            return type(x)(*map(at_rest, x.at_rest()))
        return x.read() if isinstance(x, Later) else x

    return mapped(resting, tree, is_leaf=own)


def chosen(sound: Tensor | None, new: Any, old: Any) -> Any:
    """Return the tensors and numbers of ``new`` where ``sound``, else those of ``old``."""
    if sound is None:
        return new
    posted: list[Posted] = []

    def choose(n: Any, o: Any) -> Any:
        if type(n) in (int, float) and type(o) in (int, float) and n != o:
            posted[:] = posted or [Posted(sound)]
            return Later(posted[0], n, o)
        if not (isinstance(n, Tensor) and isinstance(o, Tensor)):
            return n
        one, two = (x.raw if isinstance(x, ShardedTensor) else x for x in (n, o))
        if one.data_ptr() == two.data_ptr():
            return n
        raw = torch.where(sound, one, two)
        return n.becomes(raw) if isinstance(n, ShardedTensor) else raw

    return mapped(choose, new, old)


def mapped(
    f: Callable[..., Any],
    first: Any,
    *others: Any,
    is_leaf: Callable[[Any], bool] = lambda x: False,
) -> Any:
    """Map leaves as optree does, but return the objects themselves in which nothing changes.

    Where another tree has another structure, the first is returned.
    """
    if others and all(o is first for o in others):
        return first
    if isinstance(first, Tensor | int | float | None) or is_leaf(first):
        return f(first, *others)
    below, shape = optree.tree_flatten(first, is_leaf=lambda x: x is not first, none_is_leaf=True)
    if len(below) == 1 and below[0] is first:
        return f(first, *others)
    try:
        rest = [shape.flatten_up_to(o) for o in others]
    except (ValueError, TypeError, KeyError):
        return first
    new = [mapped(f, *xs, is_leaf=is_leaf) for xs in zip(below, *rest, strict=True)]
    if all(n is b for n, b in zip(new, below, strict=True)):
        return first
    return shape.unflatten(new)
