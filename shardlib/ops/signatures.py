"""Calls bound to torch's argument names.

An operator's signature is text, one line per overload, as torch's documentation prints it:

    var(input, dim=None, *, correction=1, keepdim=False)
    var(input, dim, unbiased: bool, keepdim=False)
    flip(input, *dims: int)

Each line is compiled once into a function of those parameters whose body checks the annotated
types and returns the arguments by name, so Python's own call machinery does the binding.
``*dims`` takes ints, one sequence, or ``dims=``.
"""

import ast
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

__all__ = ["Slot", "binder"]


class Slot:
    """Stands for a tensor while a call is bound: what an argument is for, not its value."""

    __slots__ = ("at", "ndim", "shape")

    def __init__(self, at: int, shape: Any) -> None:
        self.at, self.shape, self.ndim = at, shape, len(shape)


_TYPES: dict[str, Any] = {
    "int": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "bool": lambda v: isinstance(v, bool),
    "ints": lambda v: (
        (isinstance(v, int) and not isinstance(v, bool))
        or (isinstance(v, tuple | list) and all(isinstance(i, int) for i in v))
    ),
    "number": lambda v: isinstance(v, int | float | complex) and not isinstance(v, bool),
    "tensor": lambda v: isinstance(v, Tensor | Slot),
    "tensors": lambda v: isinstance(v, tuple | list) and all(isinstance(t, Tensor | Slot) for t in v),
}
_OMITTED = object()


def _compiled(line: str) -> Callable[..., dict[str, Any]]:
    tree = ast.parse(f"def {line.strip()}: pass").body[0]
    assert isinstance(tree, ast.FunctionDef)
    a = tree.args
    plain = [*a.posonlyargs, *a.args]
    names = [p.arg for p in plain] + ([a.vararg.arg] if a.vararg else []) + [p.arg for p in a.kwonlyargs]
    checks = []
    optional = {p.arg for p in plain[len(plain) - len(a.defaults) :]} | {p.arg for p in a.kwonlyargs}
    for p in [*plain, *a.kwonlyargs]:
        if isinstance(p.annotation, ast.Name):
            spare = f"{p.arg} is not None and " if p.arg in optional else ""
            checks.append(f"    if {spare}not _is_{p.annotation.id}({p.arg}): raise TypeError({p.arg!r})")
        p.annotation = None
    if a.vararg:  # ints, one sequence of them, or by keyword
        v = a.vararg.arg
        a.vararg.annotation = None
        a.kwonlyargs.append(ast.arg(arg=f"_{v}"))
        a.kw_defaults.append(ast.Name(id="_OMITTED", ctx=ast.Load()))
        checks += [
            f"    if _{v} is not _OMITTED: {v} = ({v} or _{v}) if isinstance(_{v}, (tuple, list)) else (_{v},)",
            f"    elif len({v}) == 1 and isinstance({v}[0], (tuple, list)): {v} = tuple({v}[0])",
        ]
    if not any(p.arg == "out" for p in a.kwonlyargs):
        a.kwonlyargs.append(ast.arg(arg="out"))
        a.kw_defaults.append(ast.Constant(None))
        checks.append("    if out is not None: raise TypeError('out')")
    tree.body = [ast.Pass()]
    head = ast.unparse(ast.fix_missing_locations(tree)).rsplit(":", 1)[0]
    body = "\n".join([*checks, "    return {" + ", ".join(f"{n!r}: {n}" for n in names) + "}"])
    scope: dict[str, Any] = {"_OMITTED": _OMITTED} | {f"_is_{n}": f for n, f in _TYPES.items()}
    exec(f"{head}:\n{body}", scope)
    made = scope[tree.name]
    if a.vararg:
        v = a.vararg.arg
        inner = made
        return lambda *args, **kw: inner(*args, **({f"_{v}": kw.pop(v)} if v in kw else {}), **kw)
    return made


@cache
def binder(signature: str) -> Callable[..., dict[str, Any]]:
    """call(*args, **kwargs) -> arguments by name, of the first line that fits.  Raises: TypeError."""
    lines = [_compiled(line) for line in signature.strip().splitlines() if line.strip()]

    def later(error: TypeError, args: Any, kwargs: Any) -> dict[str, Any]:
        for bind in lines[1:]:
            try:
                return bind(*args, **kwargs)
            except TypeError:
                continue
        if kwargs.keys() & _NUMPY.keys():
            return call(*args, **{_NUMPY.get(str(n), str(n)): v for n, v in kwargs.items()})
        raise error

    def call(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return lines[0](*args, **kwargs)
        except TypeError as e:
            return later(e, args, kwargs)

    return call


_NUMPY = {"axis": "dim", "keepdims": "keepdim", "x": "input", "x2": "other"}  # torch takes these too
