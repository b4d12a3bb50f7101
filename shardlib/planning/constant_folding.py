"""Constant folding on the meta device: positions, masks and counts that a module makes itself.

Tensors on the meta device have no values, and a module that reads one (``if mask.all()``) would
raise.  Integer and boolean tensors computed from constants alone are therefore computed on the host
too, so that such a read returns a value; tensors computed from data stay unknown.

A plan runs the same layers on many meshes, and torch works out shapes of elementwise operations and
of products with an addend in Python, a fifth of a millisecond each: ``on_shapes`` does it once for
the same shapes.
"""

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import optree
import torch
from torch import Tensor

from shardlib._compat import DispatchMode, watcher
from shardlib.memory_tracker import tensors_in
from shardlib.opspec import Args, Func, Kwargs

# the most elements that are computed on the host
MOST = 1 << 22
_MOST_FLOATS = 1 << 16
# operations whose results' number or sizes depend on values, or that return several
_OF_VALUES = frozenset({"nonzero", "_unique2", "unbind"})
_EMPTY = torch.ops.aten.empty_strided.default
# results of one operation that are kept
_MOST_RESULTS = 1 << 13


def _limit(dtype: torch.dtype) -> int:
    return _MOST_FLOATS if dtype.is_floating_point else MOST


class Known(DispatchMode):  # type: ignore[misc, valid-type]
    """A dispatch mode that returns values of integer tensors on the meta device, where known.

    >>> with Known():
    ...     bool((torch.arange(4, device="meta").diff() == 1).all())
    True
    """

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[int, Tensor] = {}
        # an id is reused once its tensor is gone
        self.alive: dict[int, weakref.ref[Tensor]] = {}
        # kept alive: a run is told the values of others in their place
        self.told: list[Tensor] = []
        self.answers = Answers()

    def __torch_dispatch__(
        self, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is _EMPTY:
            # how results from the cache are made
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" and id(args[0]) in self.values:
            # item()
            self.answers.note(func, args, kwargs, None, self.values)
            return self.values[id(args[0])].item()
        if name in _OF_VALUES and self._is_constant(args[0]):
            found: Any = func(self.values[id(args[0])], *args[1:], **kwargs)
            return optree.tree_map(self._on_meta, found)
        out = on_shapes(func, args, kwargs)
        # masks are often made of ones in floating point
        if isinstance(out, Tensor) and out.is_meta and out.numel() <= _limit(out.dtype):
            self._learn(out, func, args, kwargs)
        return out

    def passes(self, args: Args, kwargs: Kwargs) -> bool:
        """Return whether an operation of these operands has a result of unknown values."""
        given = tensors_in((args, kwargs))
        return bool(given) and all(x.is_meta and id(x) not in self.values for x in given)

    def _is_constant(self, x: Tensor) -> bool:
        """Return whether the values of a tensor are known, and depend on none that was told."""
        return id(x) in self.values and id(x) not in self.answers.reached

    def _on_meta(self, value: Tensor) -> Tensor:
        x = torch.empty_like(value, device="meta")
        self._keep(x, value)
        return x

    def _keep(self, x: Tensor, value: Tensor) -> None:
        """Keep the values of a tensor as long as it is alive: it takes memory on paper too."""
        key = id(x)
        self.values[key] = value
        if key not in self.alive:
            self.alive[key] = weakref.ref(x, lambda _: self._gone(key))

    def _gone(self, key: int) -> None:
        del self.alive[key]
        self.values.pop(key, None)

    def tell(self, x: Tensor, value: Tensor) -> None:
        """Give a tensor on the meta device the values of one on the host."""
        self.told.append(x)
        self.answers.tell(x)
        if x.is_meta and value.numel() <= MOST:
            self._keep(x, _copy(value))

    def _learn(self, out: Tensor, func: Func, args: Args, kwargs: Kwargs) -> None:
        """Keep the values of a result, if they are known, else forget what it held before."""
        small = out.numel() <= MOST
        if small and func.overloadpacket.__name__ in ("fill_", "zero_"):
            # the values that it held before do not matter
            args = (torch.empty(out.shape, dtype=out.dtype, device="cpu"), *args[1:])
        if small and self._has_values(func, args, kwargs):
            host = {**kwargs, "device": torch.device("cpu")} if "device" in kwargs else kwargs
            self.answers.note(func, args, host, out, self.values)
            given: Any = args, host
            beside: Any = optree.tree_map(lambda x: self.values.get(id(x), x), given)
            self._keep(out, _computed(func, *beside))
        else:
            # written in place with unknown values
            self.values.pop(id(out), None)

    def _has_values(self, func: Func, args: Args, kwargs: Kwargs) -> bool:
        """Return whether the values of all operands are known, and so those of the result."""
        # uninitialised and random values are not known
        if "empty" in func.overloadpacket.__name__:
            return False
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        given = tensors_in((args, kwargs))
        if not given:
            return "device" in kwargs
        return all(id(x) in self.values or not x.is_meta for x in given)


class Answers:
    """Values that a run asked for, computed from the values that it was told.

    Of the operations that a ``Known`` computes, those whose operands it was told, and its answers:
    a run that is told others takes the same branches if its answers are the same.
    """

    def __init__(self) -> None:
        self.told: list[int] = []
        self.reached: set[int] = set()
        self.steps: list[tuple[Func, Any, Tensor | None]] = []
        self.asked = 0

    def tell(self, x: Tensor) -> None:
        """Record that the next told value is that of a tensor."""
        self.told.append(id(x))
        self.reached.add(id(x))

    def note(
        self, func: Func, args: Args, kwargs: Kwargs, out: Tensor | None, values: dict[int, Tensor]
    ) -> None:
        """Record an operation if it depends on what was told; ``out`` None: its result is asked."""
        if not any(id(x) in self.reached for x in tensors_in((args, kwargs))):
            return

        def constant(x: Any) -> Any:
            known = None if id(x) in self.reached else values.get(id(x))
            return x if known is None else _copy(known)

        given: Any = args, kwargs
        self.steps.append((func, optree.tree_map(constant, given, none_is_leaf=True), out))
        if out is None:
            self.asked = len(self.steps)
        else:
            self.reached.add(id(out))

    def of(self, told: Sequence[Tensor]) -> tuple[object, ...]:
        """Return the answers to a run that is told these values."""
        found, steps = [], self.steps[: self.asked]
        values = dict(zip(self.told, map(_copy, told), strict=True)) if steps else {}
        for func, given, out in steps:
            here: Any = optree.tree_map(lambda x: values.get(id(x), x), given, none_is_leaf=True)
            value = _computed(func, *here)
            if out is None:
                found.append(value)
            else:
                values[id(out)] = value
        return tuple(found)


def _copy(x: Tensor) -> Tensor:
    """Copy to the host: an operation in place changes the copy alone."""
    return x.detach().cpu().clone()


def _computed(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation on the host; if all rows are one expanded row, compute that row alone.

    The positions of a batch are one row, expanded a thousand times in a large batch.
    """
    count, most = _equal_rows(args)
    if count <= 1 or func._schema.is_mutable or not _by_row(func, args, most):
        if func.overloadpacket.__name__ in ("view", "_unsafe_view"):
            # an expanded row has strides of its own
            args = args[0].contiguous(), *args[1:]
        return func(*args, **kwargs)
    tree: Any = args
    first: Any = optree.tree_map(
        lambda x: x[:1] if isinstance(x, Tensor) and x.ndim == most else x, tree
    )
    out = func(*first, **kwargs)
    return out.expand(count, *out.shape[1:])


def _equal_rows(args: Args) -> tuple[int, int]:
    """Count the rows of the operands, 0 unless they are one expanded row; and their dimensions."""
    given = tensors_in(args)
    most = max((x.ndim for x in given), default=0)
    widest = [x for x in given if x.ndim == most > 1]
    # rows of stride 0 are the same memory: one of them gives all
    one = all(x.stride(0) == 0 or x.shape[0] == 1 for x in widest)
    return max((x.shape[0] for x in widest if one), default=0), most


def _by_row(func: object, args: Args, ndim: int) -> bool:
    """Return whether each row of the result depends only on the same row of the operands."""
    if torch.Tag.pointwise in func.tags:
        return True
    along = args[1] if len(args) > 1 else 0
    name = func.overloadpacket.__name__
    return name in ("cat", "cumsum") and isinstance(along, int) and along % ndim > 0


# ---------------------------------------------------------------- cache of shapes


@dataclass
class Result:
    """Result of an operation on the meta device: how to make equal tensors.

    ``forms``  size, stride and dtype of each tensor, None for one that it leaves out; no forms
               where the operation returns its first operand.
    ``one``    whether it returns a tensor, not a tuple.
    ``cost``   class of kernel, operations, and bytes read and written, once they are counted: ``work.Meter``.
    """

    forms: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ...] = ()
    one: bool = True
    cost: tuple[Any, float, int] | None = None

    def of(self, args: Args) -> Any:
        """Return the tensors."""
        if not self.forms:
            return args[0]
        made = [f and torch.empty_strided(*f[:2], dtype=f[2], device="meta") for f in self.forms]
        if self.one:
            return made[0]
        return tuple(made)


@dataclass
class Operator:
    """Facts of an operation of torch, and its results from the cache.

    ``views``  whether its results are views of its first operand.
    ``alone``  whether it returns new tensors, or its first operand.
    ``made``   operands -> its result; None where it has others than simple tensors, and runs each time.
    """

    views: bool
    alone: bool
    made: dict[Hashable, Result | None] = field(default_factory=dict)


@lru_cache(maxsize=1024)
def operator_of(func: Func) -> Operator:
    """Return the facts of an operation, from its schema."""
    schema = func._schema
    aliases = [r.alias_info for r in schema.returns]
    views = any(a is not None and not a.is_write for a in aliases)
    written = [a.alias_info is not None for a in schema.arguments]
    alone = written[0] and not any(written[1:]) if schema.is_mutable else not any(aliases)
    return Operator(views, alone and {str(r.type) for r in schema.returns} == {"Tensor"})


def on_shapes(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run an operation of torch, from the cache if its operands are on the meta device.

    >>> x = torch.empty(2, 3, device="meta")
    >>> on_shapes(torch.ops.aten.mul.Tensor, (x, x), {}).shape
    torch.Size([2, 3])
    """
    known = result_of(operator_of(func), func, args, kwargs)
    return func(*args, **kwargs) if known is None else known.of(args)


def result_of(operator: Operator, func: Func, args: Args, kwargs: Kwargs) -> Result | None:
    """Return what an operation gives, from the cache; None if it is to run each time."""
    mode = watcher()
    if not operator.alone or not (mode is None or _lets(mode, args, kwargs)):
        return None
    try:
        key = *map(_key, args), *((k, _key(x)) for k, x in kwargs.items())
    except _Values:
        return None
    made = operator.made
    if key not in made:
        if len(made) >= _MOST_RESULTS:
            made.clear()
        made[key] = _made(func(*args, **kwargs), args)
    return made[key]


def _lets(mode: object, args: Args, kwargs: Kwargs) -> bool:
    """Return whether a dispatch mode needs not see an operation of these operands."""
    return isinstance(mode, Known) and mode.passes(args, kwargs)


class _Values(Exception):
    """Raised for an operand that cannot be a cache key: a tensor with values, or another object."""


_PLAIN = {
    type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip


def _key(x: object) -> Hashable:
    kind = type(x)
    if kind is Tensor and x.is_meta:
        return x.shape, x.stride(), x.dtype, x.storage_offset()
    if kind in _PLAIN:
        # 1 and 1.0 give different dtypes
        return kind, x
    if isinstance(x, list | tuple):
        return tuple(map(_key, x))
    raise _Values


def _made(out: Any, args: Args) -> Result | None:
    """Describe how to make equal tensors; None where one shares memory or is not simply strided."""
    if args and out is args[0]:
        return Result()
    one = isinstance(out, Tensor)
    outs: list[Tensor | None] = [out]
    if not one:
        outs = [*out]
    made = [x for x in outs if x is not None]
    if any(type(x) is not Tensor or not x.is_meta or x.storage_offset() for x in made):
        return None
    found = Result(tuple(map(_form, outs)), one)
    storages = [x.untyped_storage() for x in [*made, *tensors_in(args)]]
    own = {s._cdata for s in storages[: len(made)]}
    if len(own) < len(made) or any(s._cdata in own for s in storages[len(made) :]):
        return None
    again = tensors_in(found.of(args))
    same = all(
        x.untyped_storage().nbytes() == s.nbytes() for x, s in zip(again, storages, strict=False)
    )
    if not same:
        return None
    return found


def _form(x: Tensor | None) -> tuple[torch.Size, tuple[int, ...], torch.dtype] | None:
    if x is None:
        return None
    return x.shape, x.stride(), x.dtype
