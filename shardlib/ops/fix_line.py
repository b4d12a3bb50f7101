"""Fix lines of errors: a call of torch, with its operands named, as a line of code that runs."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import optree
import torch

from shardlib.errors import lettered
from shardlib.ops.each_rank import FlatCall
from shardlib.opspec import Func, writes


def fix_line(call: FlatCall, to: Mapping[int, str] = {}, most: float = 0) -> str:
    """Return the call with its operands named x, y, z, ..., as a line that runs.

    ``to``    layouts of the arguments that are resharded first, by position.
    ``most``  bytes that may move, where the call writes to an operand.
    """
    names = {i: letter for letter, i in lettered(call.at).items()}
    title = _title(call.func)
    name = title.rpartition(".")[2]
    in_place = writes(name)
    parts: list[_Text] = []
    for i, x in enumerate(call.leaves):
        text = names.get(i) or _written(x)
        if i in to and not in_place:
            text = f"sl.reshard({text}, {to[i]!r})"
        parts.append(_Text(text))
    a, k = optree.tree_unflatten(call.tree, parts)
    if name in _SPREAD and len(a) == 1 and isinstance(a[0], tuple | list):
        # torch's Python wrapper passes its tensors on as one sequence
        a = a[0]
    line = f"{title}({', '.join([*map(_text, a), *(f'{n}={_text(v)}' for n, v in k.items())])})"
    return f"with sl.implicit({math.ceil(most)}): {line}" if in_place or "out" in k else line


_SPREAD = frozenset("block_diag broadcast_tensors cartesian_prod meshgrid".split())


def _title(func: Func) -> str:
    """Return the qualified name of a function, as torch.overrides lists it or as it says itself."""
    if type(func).__name__.startswith("OpOverload"):
        # torch.ops.aten.f.default
        return f"torch.ops.{func!s}"
    if listed := torch.overrides.resolve_name(func):
        return listed
    name = getattr(func, "__name__", "f")
    wrapped = getattr(torch, name, func) is not func and name not in _SPREAD
    if inspect.isbuiltin(func) and wrapped:
        # torch's function of this name is in Python, and takes
        # other arguments than the aten function that it calls
        return f"torch.ops.aten.{name}"
    module = getattr(func, "__module__", None) or "torch"
    return f"{module}.{name}" if module.startswith("torch") else f"torch.{name}"


class _Text(str):
    __slots__ = ()


def _text(x: Any) -> str:
    if isinstance(x, _Text):
        return str(x)
    if isinstance(x, list):
        return f"[{', '.join(map(_text, x))}]"
    if isinstance(x, tuple):
        return f"({', '.join(map(_text, x))}{',' if len(x) == 1 else ''})"
    return repr(x)


def _written(x: Any) -> str:
    text = repr(x)
    if text.startswith("<") or text in ("inf", "nan", "-inf"):
        return f"float({text!r})"
    return text
