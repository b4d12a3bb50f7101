"""Signatures: binding calls to torch's argument names.

An operator's signature is text, one line per overload, as torch's documentation prints it:

    var(input, dim: ints = None, *, correction: number = 1, keepdim: bool = False)
    var(input, dim: ints, unbiased: bool, keepdim: bool = False)
    flip(input, *dims: int)

Each line is compiled at the first call into a function of those parameters whose body checks the
annotated types and returns the arguments by name, so Python's own call machinery does the binding:
by position, by keyword in any order, with defaults.  A call that fits no line raises Unfit, and the
dispatcher then calls torch itself on whole operands; no argument is ever dropped.

``*dims`` takes ints, one sequence, or ``dims=``.  ``out=None`` is accepted everywhere; any other
``out`` fits no line (ops/fallback.py writes it).  numpy's names (``axis``, ``keepdims``, ``x``,
``x2``) and the method's ``self`` stand for torch's where torch's were not given.
"""

import ast
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from shardlib.errors import BadArgument, OutOfRange
from shardlib.opspec import Args, Func, Kwargs
from shardlib.tensor import Unfit, call_error


class ArgumentSlot:
    """Placeholder for a tensor while a call is bound: its index and shape, not its value."""

    __slots__ = ("at", "ndim", "shape")

    def __init__(self, at: int, shape: Sequence[int]) -> None:
        self.at = at
        self.shape = shape
        self.ndim = len(shape)


def _is_int(v: object) -> bool:
    return isinstance(v, int) and not isinstance(v, bool)


def _is_tensor(v: object) -> bool:
    return isinstance(v, Tensor | ArgumentSlot)


# annotation -> whether a value fits; unlike in Python, bool is not an int here
_TYPES: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "bool": lambda v: isinstance(v, bool),
    "ints": lambda v: _is_int(v) or (isinstance(v, tuple | list) and all(map(_is_int, v))),
    "number": lambda v: isinstance(v, int | float | complex) and not isinstance(v, bool),
    "tensor": _is_tensor,
    "tensors": lambda v: isinstance(v, tuple | list) and all(map(_is_tensor, v)),
    "none": lambda v: v is None,
}
_OMITTED = object()
_ALIASES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "x2": "other", "self": "input"}


def _indices(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return sizes as ints: torch takes tensors of one element too."""
    if any(isinstance(v, Tensor) for v in values):
        return tuple(operator.index(v) if isinstance(v, Tensor) else v for v in values)
    return values


def _compiled(line: str) -> Func:
    """Compile one overload as a function of its parameters that returns them by name."""
    tree = ast.parse(f"def {line.strip()}: pass").body[0]
    assert isinstance(tree, ast.FunctionDef), "a signature is one line of a def"
    a = tree.args
    plain = [*a.posonlyargs, *a.args]
    several = [a.vararg] if a.vararg else []
    names = [p.arg for p in (*plain, *several, *a.kwonlyargs)]
    optional = {p.arg for p in (*plain[len(plain) - len(a.defaults) :], *a.kwonlyargs)}
    checks = []
    for p in [*plain, *a.kwonlyargs]:
        if isinstance(p.annotation, ast.Name):
            spare = f"{p.arg} is not None and " if p.arg in optional else ""
            checks.append(
                f"    if {spare}not _is_{p.annotation.id}({p.arg}): raise TypeError({p.arg!r})"
            )
        p.annotation = None
    if a.vararg:
        # by position, as one sequence, or by keyword
        v = a.vararg.arg
        annotation = ast.unparse(a.vararg.annotation) if a.vararg.annotation else ""
        a.vararg.annotation = None
        a.kwonlyargs.append(ast.arg(arg=f"_{v}"))
        a.kw_defaults.append(ast.Name(id="_OMITTED", ctx=ast.Load()))
        checks += [
            f"    if _{v} is not _OMITTED: {v} = {v} or tuple(_{v}) "
            f"if isinstance(_{v}, (tuple, list)) else (_{v},)",
            f"    elif len({v}) == 1 and isinstance({v}[0], (tuple, list)): {v} = tuple({v}[0])",
        ]
        if annotation == "int":
            checks.append(f"    {v} = _indices({v})")
    if not any(p.arg == "out" for p in a.kwonlyargs):
        a.kwonlyargs.append(ast.arg(arg="out"))
        a.kw_defaults.append(ast.Constant(None))
        checks.append("    if out is not None: raise TypeError('out')")
    tree.body = [ast.Pass()]
    head = ast.unparse(ast.fix_missing_locations(tree)).rsplit(":", 1)[0]
    body = "\n".join([*checks, "    return {" + ", ".join(f"{n!r}: {n}" for n in names) + "}"])
    scope: Kwargs = {"_OMITTED": _OMITTED, "_indices": _indices} | {
        f"_is_{n}": f for n, f in _TYPES.items()
    }
    exec(f"{head}:\n{body}", scope)
    made = scope[tree.name]
    if a.vararg:
        v = a.vararg.arg

        def renamed(*args: object, **kwargs: object) -> Kwargs:
            if v in kwargs:
                kwargs[f"_{v}"] = kwargs.pop(v)
            return made(*args, **kwargs)

        return renamed
    return made


@cache
def binder(signature: str) -> Func:
    """Return a function (*args, **kwargs) -> arguments by name, by the first line that fits.

    Raises: Unfit.

    >>> binder("var(input, dim: ints = None, *, correction: number = 1)")(0, axis=1)
    {'input': 0, 'dim': 1, 'correction': 1}
    """

    def compiled(*args: object, **kwargs: object) -> Kwargs:
        """Compile at the first call: compiling all at import would take a third of its time."""
        lines[:] = [_compiled(line) for line in signature.strip().splitlines() if line.strip()]
        return lines[0](*args, **kwargs)

    lines: list[Func] = [compiled]

    def later(error: TypeError, args: Args, kwargs: Kwargs) -> Kwargs:
        for bind in lines[1:]:
            try:
                return bind(*args, **kwargs)
            except TypeError:
                continue
        if kwargs.keys() & _ALIASES.keys():
            renamed = {str(_ALIASES.get(n, n)): v for n, v in kwargs.items()}
            if len(renamed) == len(kwargs):
                # otherwise one argument came under two names
                return call(*args, **renamed)
        raise Unfit(str(error)) from None

    def call(*args: object, **kwargs: object) -> Kwargs:
        try:
            return lines[0](*args, **kwargs)
        except TypeError as e:
            return later(e, args, kwargs)

    return call


def dim_of(dim: int, ndim: int, op: str) -> int:
    """Count a dimension from the front, as torch does: -1 is the last, and a scalar has one.

    >>> dim_of(-1, 3, "sum")
    2
    """
    n = ndim or 1
    if not -n <= dim < n:
        why = f"dimension out of range (expected to be in range of [{-n}, {n - 1}], but got {dim})"
        raise call_error(OutOfRange, why, op, dimensions=ndim)
    return dim % n


def dims_of(dims: Iterable[int] | int, ndim: int, op: str) -> tuple[int, ...]:
    """Count several dimensions from the front; they must differ."""
    found = tuple(dim_of(d, ndim, op) for d in ((dims,) if isinstance(dims, int) else dims))
    if len(set(found)) < len(found):
        raise BadArgument(f"a dimension appears more than once in {list(found)}", op=op)
    return found
