"""Replica check after an update, in check mode: replicas and hyperparameters are compared.

Replicated parameters and states are compared by their digests.  The optimizer's numbers are
compared too: a rate that differs by rank cannot be found in a split state, which has no replicas,
although every rank's share is then updated by another rule.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import optree
from torch import Tensor

from shardlib.collectives import checking, verify
from shardlib.tensor import ShardedTensor

__all__ = ["compare"]


def compare(op: str, params: Any, state: Any = None, tx: Any = None, **said: Any) -> None:
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


def _numbers(x: Any, at: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """List the numbers and strings that functions and methods refer to, with their names."""
    if isinstance(x, int | float | str):
        yield at, x
        return
    if id(x) in seen:
        return
    seen.add(id(x))
    for name, value in _inside(x):
        yield from _numbers(value, at + name, seen)


def _inside(x: Any) -> list[tuple[str, Any]]:
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


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
