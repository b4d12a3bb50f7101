"""Fix lines of errors: a call of torch, with its operands named, as a line of code that runs."""

import inspect
from typing import Any

import optree
import torch

from shardlib.errors import lettered

__all__ = ["fix_line"]


def fix_line(
    func: Any, leaves: list[Any], tree: Any, at: list[int], to: dict[int, str], most: int
) -> str:
    """Return the call with its operands named x, y, z, ..., as a line that runs."""
    names = {i: name for name, i in lettered(at).items()}
    below = type(func).__name__.startswith("OpOverload")  # whose name torch gives without its home
    title = _title(func) if below else torch.overrides.resolve_name(func) or _title(func)
    writes = (
        (title.endswith("_") and not title.endswith("__")) or ".__i" in title or "setitem" in title
    )
    parts = []
    for i, x in enumerate(leaves):
        if i in names:
            parts.append(
                _Text(names[i] if writes or i not in to else f"sl.reshard({names[i]}, {to[i]!r})")
            )
        else:
            parts.append(_Text(_written(x)))
    a, k = optree.tree_unflatten(tree, parts)
    if title.rpartition(".")[2] in _SPREAD and len(a) == 1 and isinstance(a[0], tuple | list):
        a = a[0]  # torch's Python wrapper passes its tensors on as one sequence
    line = f"{title}({', '.join([*map(_text, a), *(f'{n}={_text(v)}' for n, v in k.items())])})"
    return f"with sl.implicit({most}): {line}" if writes or "out" in k else line


_SPREAD = frozenset("block_diag broadcast_tensors cartesian_prod meshgrid".split())


def _title(func: Any) -> str:
    """Return the qualified name of a function that torch.overrides does not list."""
    name = getattr(func, "__name__", "f")
    if type(func).__name__.startswith("OpOverload"):  # torch.ops.aten.f.default
        return f"torch.ops.{func!s}"
    if (
        inspect.isbuiltin(func) and getattr(torch, name, func) is not func and name not in _SPREAD
    ):  # torch's function of this name is in Python, and takes
        return f"torch.ops.aten.{name}"  # other arguments than the aten function that it calls
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
    return (
        text
        if not text.startswith("<") and text not in ("inf", "nan", "-inf")
        else f"float({text!r})"
    )
