"""Decisions of the device about a step, which the host reads one step later.

A step whose gradients are not finite changes nothing.  On the host that is an ``if``.  On an
accelerator its results are chosen on the device; the host reads the number that chose when the next
step begins.  The copy of that number began a step before, so the host waits only where the device
is more than a step behind.
"""

from typing import Any

import optree
import torch
from torch import Tensor

from shardlib.tensor import ShardedTensor

__all__ = ["begun", "chosen", "counted", "on_host", "post", "rolled_back", "told"]

_COMING: dict[int, tuple[Tensor, Tensor, torch.Event]] = {}
"""Address of a number -> the number, which keeps the address its own; its copy; the copy's end."""


def on_host(x: Tensor) -> bool:
    """Say whether the host reads a number without waiting, or nobody has it: on a mesh of shapes."""
    return x.device.type in ("cpu", "meta")


def post(x: Tensor) -> Tensor:
    """Begin to copy a number on a device to the host, where ``told`` finds it a step later."""
    there = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    there.copy_(x, non_blocking=True)
    done = torch.Event(x.device)
    done.record()
    _COMING[x.data_ptr()] = x, there, done
    return x


def told(x: Any) -> Any:
    """Return a number; of a tensor what ``post`` copied, which the host waits for where it did not.

    >>> told(2), told(torch.tensor(2))
    (2, 2)
    """
    if not isinstance(x, Tensor):
        return x
    found = _COMING.pop(x.data_ptr(), None)
    if found is None:
        return x.item()
    _, there, done = found
    if not done.query():
        done.synchronize()
    return there.item()


def _number(x: Any) -> bool:
    return type(x) in (int, float)


def counted(state: Any) -> tuple[Any, ...]:
    """List the numbers of a state that the host counts, such as steps taken."""
    return tuple(x for x in optree.tree_leaves(state) if _number(x))


def begun(params: Any, state: Any) -> tuple[Any, ...]:
    """Return what ``rolled_back`` takes before the first step: () where the host decides."""
    first = next((x for x in optree.tree_leaves(params) if isinstance(x, Tensor)), None)
    if first is None or on_host(first):
        return ()
    return torch.ones((), dtype=torch.bool, device=first.device), *counted(state)


def rolled_back(state: Any, ago: tuple[Any, ...]) -> Any:
    """Give a state the numbers that it had before the last step, where that one was passed over.

    ``ago``  whether it was not, on the device, and those numbers; () where the host decided.
    """
    if not ago or told(ago[0]):
        return state
    numbers = iter(ago[1:])
    return optree.tree_map(lambda x: next(numbers) if _number(x) else x, state)


def chosen(sound: Tensor | None, new: Any, old: Any) -> Any:
    """Return the tensors of ``new`` where ``sound``, else those of ``old``; alike in structure."""
    if sound is None:
        return new

    def choose(n: Any, o: Any) -> Any:
        if not (isinstance(n, Tensor) and isinstance(o, Tensor)):
            return n
        one, two = (x.raw if isinstance(x, ShardedTensor) else x for x in (n, o))
        if one.data_ptr() == two.data_ptr():
            return n
        raw = torch.where(sound, one, two)
        return n.becomes(raw) if isinstance(n, ShardedTensor) else raw

    if optree.tree_structure(new) != optree.tree_structure(old):
        return new
    return optree.tree_map(choose, new, old)
