"""Operator declarations: a signature as text, and a label for each dimension of its operands.

    declare('''
        cumsum(input, dim, *, dtype=None)
        sort(input, dim: int = -1, descending: bool = False, *, stable=None)
    ''')(along)

A line is a signature as torch's documentation prints it; lines that share a name are its overloads.
The function that it decorates, or is called with, maps the bound call (tensors are Slots) to
labels, see dims.py; the common ones are in this file.  A bare name stands for torch's function, Tensor's method and
torch.nn.functional's function, ``linalg.inv`` for one function of that module.  A function declared
twice is an error.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardlib import autocast
from shardlib.errors import BadArgument
from shardlib.ops.dims import Labels, rows_call
from shardlib.ops.each_rank import FlatCall
from shardlib.ops.padding import beside, the_dim
from shardlib.ops.signatures import ArgumentSlot, binder
from shardlib.opspec import OPERATORS, Args, Func, Kind, Kwargs, OpSpec, homes, lines, records
from shardlib.tensor import ShardedTensor, Unfit, implements, torch_refuses

Bound = dict[str, Any]
Labelling = Callable[[Bound], Labels]
"""Function from a bound call to the labels of its operands."""


@dataclass(frozen=True)
class Declared:
    """Declaration of an operator, for tests of its labels."""

    functions: tuple[Any, ...]
    bind: Func
    labels: Labelling


DECLARED: dict[str, Declared] = {}
"""Every declared operator that this torch has, by its name."""


def declare(text: str) -> Callable[[Labelling], Labelling]:
    """Register for every operator of a table the implementation that the decorated labels describe."""

    def enter(labels: Labelling) -> Labelling:
        _enter(OpSpec(text, "own"), labels)
        return labels

    return enter


def of_kind(kind: Kind, labels: Labelling) -> None:
    """Register the operators of a kind by the labels that all of them have."""
    for spec in OPERATORS:
        if spec.kind == kind and (kind == "rows" or "(" in spec.names):
            _enter(spec, labels)


def operator(spec: OpSpec) -> None:
    """Declare how an operator of torch.library runs on blocks, by a record as torch's own have.

    ``spec``  its name with the library's, "mine::f", and where the kind is "along" its signature;
              kind "pointwise", "rows", "along" or "matrices"; ``cast`` and ``itself`` count too.

    The operator runs on each rank's blocks.  Layouts that do not fit its kind are refused, or gathered
    within ``sl.implicit``.  Shapes are found by its fake implementation, gradients by the
    one that torch.library registered.
    Raises: BadArgument for another kind, an operator that torch lacks or that writes to an operand,
            or one that is declared already.

    >>> import torch, shardlib as sl
    >>> @torch.library.custom_op("shardlib_example::centred", mutates_args=())
    ... def centred(x: torch.Tensor, dim: int) -> torch.Tensor:
    ...     return x - x.mean(dim, keepdim=True)
    >>> _ = centred.register_fake(lambda x, dim: torch.empty_like(x))
    >>> sl.extend.operator(sl.extend.OpSpec("shardlib_example::centred(x, dim)", "along"))
    >>> with sl.simulate(x=2):
    ...     a = sl.shard(torch.arange(6.0).reshape(2, 3), "x .")
    ...     sl.unshard(centred(a, 1))
    tensor([[-1.,  0.,  1.],
            [-1.,  0.,  1.]])
    """
    for name in spec.entries:
        overloads = homes(name) if "::" in name else []
        why = ""
        if spec.kind not in _BY_LABELS:
            why = f"kind {spec.kind!r} is none of {', '.join(map(repr, _BY_LABELS))}"
        elif not overloads:
            why = "no operator of torch.library has this name"
        elif any(f._schema.is_mutable for f in overloads[1:]):
            why = "it writes to an operand"
        elif name in DECLARED:
            why = "it is declared already"
        if why:
            raise BadArgument(f"{name}: {why}", op="extend.operator")
    _enter(spec, _BY_LABELS[spec.kind])
    OPERATORS.append(spec)
    records.cache_clear()
    autocast.forget()


def _enter(spec: OpSpec, labels: Labelling) -> None:
    itself = spec.itself
    for name, signature in spec.entries.items():
        bind = binder(signature) if signature else _bare

        def implementation(func: Func, args: Args, kwargs: Kwargs, bind: Func = bind) -> object:
            x = args[0] if args else None
            if itself is not None and isinstance(x, ShardedTensor) and itself(x.raw):
                return x
            return rows_call(func, args, kwargs, lambda a, k: labels(bind(*a, **k)))

        functions = homes(name)
        if functions:
            implements(*functions, takes="all")(implementation)
            autocast.DECLARED.update(functions)
            DECLARED[name] = Declared(tuple(functions), bind, labels)


def _bare(*args: object, **kwargs: object) -> Bound:
    """Bind a call of an operator without a signature: all its arguments are alike."""
    return {"args": (*args, *kwargs.values())}


def by_signature(
    signature: str, *funcs: Func, along_dim: bool = False, **how: Any
) -> Callable[[Func], Func]:
    """Register an implementation that takes torch's function, then the arguments of its signature.

    ``along_dim``  it works along ``dim``; the other dimensions of its operands may have padding.
    ``how``        as in ``implements``.
    """
    bind = binder(signature)
    if along_dim:
        how["padding"] = beside(the_dim(bind))

    def enter(body: Func) -> Func:
        def implementation(func: Func, args: Args, kwargs: Kwargs) -> object:
            return body(func, *bind(*args, **kwargs).values())

        implements(*funcs, **how)(implementation)
        return body

    return enter


def spelled(text: str, takes: str = "all") -> Callable[[Func], Func]:
    """Declare operators as a composition of others: a function of the bound arguments.

    It may accept calls that torch refuses, so torch is tried first on meta tensors.

    ``takes``  its operands, as in ``implements``.
    """

    def enter(body: Func) -> Func:
        for name, signature in lines(text).items():
            implements(*homes(name), takes=takes)(partial(_taken, binder(signature), body))
        return body

    return enter


def _taken(bind: Func, body: Func, func: Func, args: Args, kwargs: Kwargs) -> object:
    call = FlatCall.of(func, *args, **kwargs)
    met = next((x.mesh for x in call.tensors if isinstance(x, ShardedTensor)), None)

    def check() -> None:
        if (refused := torch_refuses(func, args, kwargs)) is not None:
            raise refused

    if met is None:
        check()
    else:
        met.memo("taken", call.key, check)
    return body(**bind(*args, **kwargs))


# ---------------------------------------------------------------- labels


def slots(value: object) -> list[ArgumentSlot]:
    """Return the tensors of a bound call, in order."""
    if isinstance(value, ArgumentSlot):
        return [value]
    if isinstance(value, tuple | list):
        return [s for v in value for s in slots(v)]
    return [s for v in value.values() for s in slots(v)] if isinstance(value, dict) else []


def where(value: Any, ndim: int) -> set[int]:
    """Return the dimensions that an argument names; None and nothing name all."""
    if value is None or value == () or value == []:
        return set(range(ndim))
    found = value if isinstance(value, tuple | list) else (value,)
    if any(not isinstance(d, int) or not -max(1, ndim) <= d < max(1, ndim) for d in found):
        raise Unfit(f"dimensions {found}")
    return {d % ndim for d in found} if ndim else set()


def rows(bound: Bound, whole: Callable[[ArgumentSlot], set[int]] = lambda s: set()) -> Labels:
    """Label every dimension a row, counted from the right so that operands broadcast.

    Dimensions in ``whole`` get no label.
    """
    return {s.at: rows_but(whole(s), s.ndim, -s.ndim) for s in slots(bound)}


def rows_but(whole: Collection[int], ndim: int, first: int = 0) -> tuple[Any, ...]:
    """Label each dimension by its number, counted from ``first``, but those in ``whole``."""
    return tuple(None if d in whole else first + d for d in range(ndim))


def labelled(*operands: tuple[Any, tuple[Any, ...]]) -> Labels:
    """Return the labels of those operands, (argument, labels) each, that are tensors."""
    return {s.at: mine for s, mine in operands if isinstance(s, ArgumentSlot)}


def along(bound: Bound) -> Labels:
    """Keep the dimensions whole that ``dim``, ``dims`` or ``dimension`` name.

    For an fft with sizes ``s`` and no dim, the last ones.
    """
    value = next(bound[k] for k in ("dim", "dims", "dimension") if k in bound)
    if value is None and (sizes := bound.get("s")) is not None:
        value = tuple(range(-1 if isinstance(sizes, int) else -len(sizes), 0))
    return rows(bound, lambda s: where(value, s.ndim))


def last(n: int) -> Labelling:
    """Keep the last ``n`` dimensions whole."""
    return lambda bound: rows(bound, lambda s: set(range(max(0, s.ndim - n), s.ndim)))


def leading(n: int, *alike: str) -> Labelling:
    """Label all but the last ``n`` dimensions of the first operand, and of ``alike``, rows.

    The other operands are whole.
    """

    def labels(bound: Bound) -> Labels:
        first, *rest = slots(bound)
        cut = [first, *slots([bound[k] for k in alike])]
        out: Labels = {s.at: (None,) * s.ndim for s in rest}
        return out | {s.at: rows_but(range(s.ndim - n, s.ndim), s.ndim) for s in cut}

    return labels


_BY_LABELS: dict[str, Labelling] = {
    "pointwise": rows,
    "rows": rows,
    "along": along,
    "matrices": last(2),
}
"""The kinds of which labels say all."""
