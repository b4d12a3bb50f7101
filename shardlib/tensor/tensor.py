"""ShardedTensor: a tensor with a global shape, a layout, and this rank's block inside.

It subclasses ``torch.Tensor`` only so that modules accept it.  Every torch function on it is
looked up in ``TABLE``, which the files under ``ops/`` fill; autograd is recorded on the local
block ``raw``, so nothing is dispatched again on the way back (gradients.py).
"""

import copy
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, TypeVar, overload

import optree
import torch
from torch import Tensor

from shardlib._compat import (
    any_autocast,
    function_modes,
    intercept_proxies,
    is_dtensor,
    no_torch_function,
    patch,
    transform_called,
    under_transform,
)
from shardlib.autocast import cast
from shardlib.collectives import (
    Stacked,
    block_shape,
    first_block,
    lead,
    spans_processes,
    unwrap,
    wrap,
)
from shardlib.errors import (
    BadArgument,
    NoImplementation,
    OutOfRange,
    PartialEscape,
    PlainTensor,
    RankMismatch,
    ShardError,
    Unsupported,
    lettered,
    window,
)
from shardlib.layouts import Dim, Layout
from shardlib.memory_sharing import LINKS, WRITERS, refuse_write, written
from shardlib.mesh import Memo, Mesh, Scope, enter, leave, scope
from shardlib.opspec import Args, Func, Kwargs
from shardlib.optional import optional_text, unless_none
from shardlib.tensor.place import Place

Tree = TypeVar("Tree")
Implementation = Callable[..., Any]
Padding = Callable[[Implementation, Any, Any, Any], Any]

TABLE: dict[Any, Implementation] = {}
"""torch function -> implementation(func, args, kwargs).
Filled by ``implements`` in the files of ops/.
"""

REPEATS: set[Any] = set()
"""Functions of which a call is cached, see ``blockwise``."""

FALLBACK: list[Implementation] = []
"""The implementation for every function that is not in ``TABLE``; see ops/fallback.py."""


_UNCAST: set[Any] = set()
"""Functions that read a tensor's metadata and compute nothing: autocast does not apply to them."""


class Unfit(Exception):
    """Refusal of one call by an implementation or declaration; whole operands may still work.

    It never reaches the user: the call is run on whole tensors, or refused there.  It is not a
    TypeError, so that a bug in an implementation cannot be mistaken for it.
    """


_TAKES: dict[Any, tuple[int, Padding | None]] = {}
# functions that take all operands: the dispatcher need not look at theirs
_ANY: set[Any] = set()
_PADDING, _SKEW, _SUMS = 1, 2, 4
_KINDS = {"plain": 0, "padding": _PADDING, "skew": _SKEW, "sums": _SUMS, "all": 7}


def implements(
    *funcs: Func,
    takes: str = "sums",
    padding: Padding | None = None,
) -> Callable[[Implementation], Implementation]:
    """Register the implementation of torch functions; two for one function raise ValueError.

    The dispatcher decides by it which implementation an operand that is no plain block reaches.

    ``takes``   the operands that the implementation takes besides plain blocks, as words: "padding"
                (it reads their place itself), "skew", pending "sums"; "all" of them, or "plain".
                Others are refused, or gathered within ``sl.implicit``.
    ``padding`` handler of operands with padding, called as ``padding(implementation, func, args,
                kwargs)``.
    """
    kinds = sum(_KINDS[word] for word in takes.split())

    def enter(implementation: Implementation) -> Implementation:
        for func in dict.fromkeys(funcs):
            if func in TABLE:
                raise ValueError(
                    f"{func} has two implementations: {TABLE[func]} and {implementation}"
                )
            TABLE[func] = implementation
            _TAKES[func] = kinds, padding
            if kinds == _KINDS["all"]:
                _ANY.add(func)
        return implementation

    return enter


def _odd(values: Iterable[Any]) -> int:
    """Return which of padding, skew and pending sums the values have, also those in lists."""
    found = 0
    for x in values:
        if type(x) is ShardedTensor:
            place = x.place
            if place.shape != place.tiled:
                found |= _PADDING
            if place.layout.skew:
                found |= _SKEW
            if place.layout.partial:
                found |= _SUMS
        elif type(x) in (list, tuple):
            found |= _odd(x)
    return found


def _for_odd(odd: int, func: Func, implementation: Implementation) -> Implementation:
    """Return the implementation for such operands, or what refuses or gathers them."""
    takes, padding = _TAKES.get(func, (_SUMS, None))
    refused = odd & ~takes
    if refused & _SKEW:
        return _refuse_skew
    if refused & _PADDING and padding is None:
        return _refuse_padding
    if refused & _SUMS:
        return _refuse_pending
    return partial(padding, implementation) if odd & _PADDING and padding else implementation


class Facts:
    """Facts about one value besides its block and place, dropped with it.

    ``read``     fetches the block at each access; None where it is stored.
    ``grad``     whether what ``read`` fetches requires grad, where gradients are recorded.
    ``node``     the ``grad_fn`` for hooks that need sharded values, see autograd_function.py.
    ``derived``  cache of values derived once for all readers, see ``made_of`` in gradients.py.
    ``of``       what the cache was derived from: block, its version, whether autograd recorded it.
    ``serial``   number of the cache.
    ``tiles``    values of the rows of a table that is read one tile after another; else none.
    """

    __slots__ = ("__weakref__", "derived", "grad", "node", "of", "read", "serial", "tiles")

    def __init__(
        self, read: Callable[[], Tensor] | None = None, node: object = None, grad: bool = False
    ) -> None:
        self.read, self.node, self.grad = read, node, grad
        self.tiles: tuple[ShardedTensor, ...] = ()
        self.forget()

    def forget(self) -> None:
        """Drop the cache, which keeps the block alive."""
        self.derived: dict[Any, Any] | None = None
        self.of: tuple[Tensor | None, int, bool] = (None, 0, False)
        self.serial = -1


class ShardedTensor(torch.Tensor):
    """Global tensor of which this process holds one block (under simulate: all of them).

    ``raw``    the storage: the local block, or all blocks ``[ranks, *local]`` under simulate.
    ``place``  its Place: layout, sizes, mesh, padding, deferred axes.
    ``local``  the local block as per-device code receives it; never a copy.
    ``facts``  its Facts: all else that is known of this one value; None until there are any.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     a = sl.shard(torch.ones(4, 6), "x y").requires_grad_()
    ...     (2 * a).sum().backward()
    >>> a.shape, a.local.shape, a.sharding, a.mesh  # sizes are global, blocks are local
    (torch.Size([4, 6]), torch.Size([2, 3]), Layout('x y'), Mesh(x=2 y=2, stacked))
    >>> sl.typeof(a.grad), sl.unshard(a.grad).unique()
    ('f32[4@x, 6@y]', tensor([2.]))
    """

    raw: Tensor
    place: Place
    facts: Facts | None = None

    @staticmethod
    def __new__(cls: type, raw: Tensor, place: Place) -> "ShardedTensor":
        return _wrapped(raw, place)

    def __init__(self, *_: object) -> None:
        pass

    @staticmethod
    def when_read(
        place: Place, dtype: torch.dtype, device: torch.device, facts: Facts
    ) -> "ShardedTensor":
        """Make a value whose block is fetched at each access, by ``facts.read()``."""
        make = torch.Tensor._make_wrapper_subclass
        self = make(ShardedTensor, place.shape, dtype=dtype, device=device)
        self.place, self.facts = place, facts
        return self

    def __getattr__(self, name: str) -> Any:
        """Fetch ``raw`` by calling ``facts.read()`` if it is not stored."""
        facts = self.__dict__.get("facts")
        if name == "raw" and facts is not None and facts.read is not None:
            return facts.read()
        raise AttributeError(name)

    @property
    def is_stored(self) -> bool:
        """Whether the value holds its block, and does not fetch it at each access."""
        return self.facts is None or self.facts.read is None

    def at(self, place: Place) -> "ShardedTensor":
        """Return the same local data under another Place; a lazy value stays lazy."""
        if self.facts is None or self.facts.read is None:
            return ShardedTensor(self.raw, place)
        return ShardedTensor.when_read(place, self.dtype, self.device, self.facts)

    def becomes(
        self, raw: Tensor, layout: Layout | None = None, shape: Sequence[int] | None = None
    ) -> "ShardedTensor":
        """Return a value with another block, at the same place or with a new layout or shape."""
        if layout is None and shape is None:
            return ShardedTensor(raw, self.place)
        old = self.place
        sizes = (old.shape, old.tiled) if shape is None else (torch.Size(shape),)
        return ShardedTensor(raw, old.becomes(layout or old.layout, *sizes))

    @property
    def local(self) -> Tensor:
        """This rank's block, without a copy."""
        return wrap(self.raw, self.mesh)

    # Read on every operator call; going through __torch_function__ would cost 1.5 us each time.
    @property
    def shape(self) -> torch.Size:
        return self.place.shape

    @property
    def is_padded(self) -> bool:
        """Whether the blocks tile more than ``shape``."""
        return self.place.shape != self.place.tiled

    @property
    def with_padding(self) -> "ShardedTensor":
        """The value of the padded sizes; the padding may hold anything."""
        return ShardedTensor(self.raw, self.place._replace(shape=self.place.tiled))

    @property
    def padded_shape(self) -> torch.Size:
        """Global sizes that the blocks tile, with padding where there is any."""
        return self.place.tiled

    @property
    def sharding(self) -> Layout:
        """Its layout, one token per dimension."""
        return self.place.layout

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The tokens of its layout."""
        return self.place.layout.dims

    @property
    def mesh(self) -> Mesh:
        """Its mesh."""
        return self.place.mesh

    @property
    def deferred(self) -> frozenset[str]:
        """The mesh axes over which its gradient is left unsummed."""
        return self.place.deferred

    @property
    def ndim(self) -> int:
        return len(self.place.shape)

    @property
    def dtype(self) -> torch.dtype:
        # as is_stored, without its call
        facts = self.facts
        if facts is None or facts.read is None:
            return self.raw.dtype
        return torch.Tensor.dtype.__get__(self)

    @property
    def requires_grad(self) -> bool:
        facts = self.facts
        return self.raw.requires_grad if facts is None or facts.read is None else facts.grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.raw.requires_grad = value

    @classmethod
    def __torch_function__(
        cls,
        func: Func,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        # a cached call runs torch's function on the blocks, without the checks below
        if func in REPEATS and (done := _repeated(func, args, given)) is not None:
            return done
        implementation = TABLE.get(func, _unknown)
        odd = 0 if func in _ANY else _odd(args) | (_odd(given.values()) if given else 0)
        if odd:
            implementation = _for_odd(odd, func, implementation)
        # LINKS is empty until a view of a gathered copy is made
        if LINKS:
            _check_writes(func, args, given)
        if given.get("out") is not None or (
            func in WRITERS and not _writes_ours(func, args, given)
        ):
            return FALLBACK[0](func, args, given)  # which writes it
        if (watcher := scope().listeners.watcher) is not None:
            implementation = partial(watcher, _guarded(implementation))
        if any_autocast() and func not in _UNCAST:
            return cast(_guarded(implementation), func, args, given, known=func in TABLE)
        try:
            return implementation(func, args, given)
        except (Unfit, RuntimeError, *_MISTAKES) as e:
            # ShardError is a ValueError
            return _recovered(e, func, args, given)

    def backward(
        self,
        gradient: Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        """Add the gradients of the leaves, as torch's own method does.

        torch's method first checks for subclasses in Python, as costly as a small product.
        """
        if function_modes():
            return super().backward(gradient, retain_graph, create_graph, inputs)
        given = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
        return ShardedTensor.__torch_function__(Tensor.backward, (), (self, gradient), given)

    def __array_ufunc__(self, ufunc: Func, method: str, *given: Any, **kwargs: object) -> object:
        """Compute with numpy scalars as with Python numbers; refuse numpy arrays with an error."""
        refuse_arrays(given, f"numpy.{ufunc.__name__}")
        if kwargs or method != "__call__" or ufunc.__name__ not in _OPERATORS:
            why = "numpy computes on whole arrays"
            raise call_error(
                PlainTensor, why, f"numpy.{ufunc.__name__}", "sl.unshard(x).cpu().numpy()", x=self
            )
        numbers = [
            a if isinstance(a, Tensor) or not hasattr(a, "item") else a.item() for a in given
        ]
        return _OPERATORS[ufunc.__name__](*numbers)

    def __array_function__(self, func: Func, types: object, args: Args, kwargs: Kwargs) -> Any:
        """Return sizes to numpy; refuse other functions here, by name, since some of them catch
        an operand's error and return a result.
        """
        name = func.__name__
        if name in ("shape", "ndim", "size") and len(args) == 1 and not kwargs:
            return {"shape": tuple(self.shape), "ndim": self.ndim, "size": self.numel()}[name]
        ours = getattr(torch, name, None) in TABLE
        known = f"; torch.{name} computes on sharded tensors" if ours else ""
        why = f"numpy computes on whole arrays{known}"
        raise call_error(
            PlainTensor, why, f"{func.__module__}.{name}", "sl.unshard(x).cpu().numpy()", x=self
        )

    @classmethod
    def __torch_dispatch__(
        cls, func: Func, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if func in TABLE:
            # a method that reaches dispatch without __torch_function__
            return TABLE[func](func, args, kwargs or {})
        if name := transform_called():
            raise no_transform(name, (args, kwargs or {}))
        why = f"{func} reached a ShardedTensor below its implementations (C++ code does that)"
        found = _sharded((args, kwargs or {}))
        raise call_error(NoImplementation, why, str(func), "sl.unshard(x)", found[0])

    def __repr__(self, *, tensor_contents: object = None) -> str:
        head = f"ShardedTensor({typeof(self)} on {self.mesh}"
        # one line each, so that a dictionary of parameters stays readable; x.local shows the rest
        return f"{head})" if self.raw.numel() > _SHOWN else f"{head}\n{self.local!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedTensor":
        """Copy the blocks as torch copies a tensor: a Parameter without its gradient."""
        if id(self) not in memo:
            if isinstance(self, torch.nn.Parameter):
                raw = self.raw.detach().clone().requires_grad_(self.raw.requires_grad)
            else:
                raw = copy.deepcopy(self.raw, memo)
            memo[id(self)] = _keep_kind(self, self.becomes(raw))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        if self.mesh.forked:
            # an error raised here, in a queue's feeder thread, would be lost
            return _from_a_worker, (typeof(self),)
        if spans_processes(self.mesh):
            why = "a block of a running job cannot be pickled as the whole tensor"
            raise call_error(ShardError, why, "pickle", "sl.unshard(x)", tensor=self)
        is_parameter = isinstance(self, torch.nn.Parameter)
        place = _plainly(self.place)
        return _unpickle, (self.raw.detach(), place, self.raw.requires_grad, is_parameter)


_make_wrapper = torch.Tensor._make_wrapper_subclass


def _wrapped(raw: Tensor, place: Place) -> ShardedTensor:
    """Make ``ShardedTensor(raw, place)`` in four fifths of the time of the constructor."""
    self: Any = _make_wrapper(ShardedTensor, place.shape, dtype=raw.dtype, device=raw.device)
    self.raw = raw
    self.place = place
    return self


# elements that repr prints, over all simulated ranks
_SHOWN = 64


def _from_a_worker(text: str) -> None:
    why = "a process that was forked from a rank sent it a sharded tensor"
    fix = "batches = [sl.shard(x, '...') for x in DataLoader(data, num_workers=2)]"
    raise call_error(ShardError, why, "pickle", fix, tensor=text)


# ---------------------------------------------------------------- calls on local blocks


def local_call(func: Func, mesh: Mesh, *args: object, **kwargs: object) -> Any:
    """Run a torch function on local blocks: raw tensors in ``args`` and in the result."""
    return _on_storages(func, mesh)(*args, **kwargs)


def _on_storages(func: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """Return the function of storages that computes a function of blocks."""
    return partial(_of_stacks, func, mesh) if lead(mesh) else func


def _of_stacks(func: Func, mesh: Mesh, *args: Any, **kwargs: Any) -> Any:
    """Run it on the stacked blocks of simulated ranks."""
    out = func(*[_lift(a, mesh) for a in args], **{k: _lift(v, mesh) for k, v in kwargs.items()})
    return _lower(out)


def _lift(x: Any, mesh: Mesh) -> Any:
    if type(x) is Tensor or type(x) is torch.nn.Parameter:
        return wrap(x, mesh)
    return type(x)(_lift(v, mesh) for v in x) if type(x) in (tuple, list) else x


def _lower(x: Any) -> Any:
    if isinstance(x, Stacked):
        return unwrap(x)
    return type(x)(_lower(v) for v in x) if type(x) in (tuple, list) else x


class _Repeat(NamedTuple):
    """Cached call: a torch function of the blocks, and the place of its result.

    ``rest``     arguments after the first block, where they differ from the call's own.
    ``strides``  strides of the first block, where ``run`` depends on them.
    ``moves``    whether blocks are communicated.  Such a repeat runs only without prefetch and
                 without cached derived values, and a failure raises instead of trying another way.
    """

    run: Callable[..., Any]
    place: Place
    rest: tuple[Any, ...] | None = None
    strides: tuple[int, ...] | None = None
    moves: bool = False


def blockwise(
    func: Func,
    args: Args,
    kwargs: Kwargs,
    place: Place,
    run: Callable[..., Any] | None = None,
    rest: tuple[Any, ...] | None = None,
    strided: bool = False,
    moves: bool = False,
) -> Any:
    """Run func on the local blocks and cache the call.

    The result has place ``place``.

    The next call that differs only in the operands' values runs at once, without its
    implementation.  ``args[0]`` and every other tensor of the call must be sharded, and the choice
    may depend only on the operands' places and dtypes, on whether they require grad, on the other
    arguments and on pinned algorithms.
    ``run``      the function for the blocks, where it is another than ``func``.
    ``rest``     its arguments after the first block, where they are not the call's own.
    ``strided``  whether it also depends on the first block's strides.
    ``moves``    whether ``run`` communicates, on raw blocks of any mesh.
    """
    own: Callable[..., Any] = run or func
    if not moves:
        own = _on_storages(own, place.mesh)
    repeat = _Repeat(own, place, rest, args[0].raw.stride() if strided else None, moves)
    out = _run(repeat, args, kwargs)
    if isinstance(out, Tensor | tuple) and out is not args[0] and not written(func, args, kwargs):
        key = _call_key(scope(), func, args, kwargs)
        if key is not None and func in TABLE:
            REPEATS.add(func)
            place.mesh.memo.keep("call", key, repeat)
    return out


def _repeated(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Return the result of a call cached by ``blockwise``, or None if there is none."""
    now = scope()
    key = _call_key(now, func, args, kwargs)
    if key is None:
        return None
    repeat = args[0].place.mesh.memo["call"].get(key)
    if repeat is None or (repeat.strides is not None and args[0].raw.stride() != repeat.strides):
        return None
    if repeat.moves:
        facts = args[0].facts
        if (facts is not None and facts.derived is not None) or now.call.prefetch is not None:
            return None
    try:
        return _run(repeat, args, kwargs)
    except RuntimeError as e:
        if repeat.moves:
            if (told := _explained(e, func, args, kwargs)) is not None:
                raise told from e
            raise
        if type(e) not in (RuntimeError, NotImplementedError) or _out_of_memory(e):
            # of the device or a transport: another run would meet it again
            raise
        # the implementation's error names what torch refuses
        return None


def _run(repeat: _Repeat, args: Args, kwargs: dict[str, Any]) -> Any:
    run, place, rest, _, _ = repeat
    if rest is not None:
        given = [args[0].raw, *rest]
        out = run(*given)
    else:
        given = [a.raw if type(a) is ShardedTensor else a for a in args]
        if kwargs:
            named = {k: a.raw if type(a) is ShardedTensor else a for k, a in kwargs.items()}
            out = run(*given, **named)
        else:
            out = run(*given)
    if out is given[0]:
        # torch's function returned its operand, so return ours
        return args[0]
    return _wrapped(out, place) if isinstance(out, Tensor) else out


_NUMBERS = frozenset((int, float, bool, str, type(None), torch.dtype))


def _call_key(now: Scope, func: Func, args: Args, kwargs: Kwargs) -> tuple[Any, ...] | None:
    """Return the cache key of a call, or None if it must not be cached.

    The key holds everything that distinguishes calls except their operands' values.  It is also
    None while a watcher, budget or kernel choice is active.
    """
    if not args or type(args[0]) is not ShardedTensor or any_autocast():
        return None
    policy = now.policy
    listened = now.listeners.watcher is not None or now.call.region is not None
    if listened or policy.budget is not None or policy.backend != "auto":
        return None
    key: tuple[Any, ...] = (func, policy, Memo.version)
    for a in (*args, *kwargs, *kwargs.values()) if kwargs else args:
        kind = type(a)
        if kind is ShardedTensor:
            facts = a.facts
            if facts is None or facts.read is None:
                key += (a.place, a.raw.dtype, a.raw.requires_grad)
            elif facts.tiles:
                # its place does not say so
                return None
            else:
                key += (a.place, a.dtype, facts.grad and torch.is_grad_enabled())
        elif kind in _NUMBERS:
            key += (kind, a)
        elif kind is tuple or kind is torch.Size:
            for n in a:
                # 2.0 and True hash and compare equal to ints but behave differently
                if type(n) is not int:
                    return None
            key += (a,)
        else:
            return None
    return key


def has_padding(values: Iterable[Any]) -> bool:
    """Check whether one of the values, or of the values in a list among them, is padded."""
    return bool(_odd(values) & _PADDING)


def _refuse_skew(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Refuse a call whose implementation assumes that blocks are placed without skew."""
    found = _sharded((args, kwargs))
    x = next(x for x in found if x.sharding.skew)
    why = f"{func.__name__} has no implementation for skewed blocks"
    fix = f"sl.reshard(x, {str(x.sharding.aligned)!r})"
    raise call_error(Unsupported, why, func, fix, tensor=x)


def _refuse_pending(func: Func, args: Args, kwargs: Kwargs) -> object:
    found = _sharded((args, kwargs))
    raise partial_escape(func.__name__, next(x for x in found if x.sharding.partial))


def _refuse_padding(func: Func, args: Args, kwargs: Kwargs) -> object:
    """Refuse a call that would read padding, unless the fallback can run it."""
    if _asks_no_value(func):
        return _unknown(func, args, kwargs)
    with suppress(ShardError):
        return FALLBACK[0](func, args, kwargs, None)
    found = _sharded((args, kwargs))
    x = next(x for x in found if x.is_padded)
    why = (
        f"{func.__name__} has no implementation for padded blocks: it might read the padding, "
        f"which makes {list(x.padded_shape)} of {list(x.shape)}"
    )
    raise call_error(Unsupported, why, func, "sl.shard(sl.unshard(x), '...')", tensor=x)


def _writes_ours(func: Func, args: Args, kwargs: Kwargs) -> bool:
    """Check whether every tensor that the call writes to is sharded."""
    return all(isinstance(t, ShardedTensor) for t in written(func, args, kwargs))


def _check_writes(func: Func, args: Args, kwargs: Kwargs) -> None:
    for x in written(func, args, kwargs):
        if isinstance(x, ShardedTensor):
            try:
                refuse_write(x.raw, func.__name__, {"tensor": typeof(x)}, x.mesh)
            except ShardError as e:
                raise _of_gradcheck() or e from None


def refuse_arrays(args: Sequence[Any], op: str) -> None:
    """Refuse an array of another library among the operands.  Raises: PlainTensor."""
    for a in args:
        if getattr(a, "ndim", 0) and not isinstance(a, Tensor):
            ours = next(x for x in args if isinstance(x, ShardedTensor))
            why = "an array met a sharded tensor, and nothing says where its data sits"
            fix = 'sl.shard(torch.as_tensor(array), "...")'
            raise call_error(PlainTensor, why, op, fix, array=f"{a.dtype} {list(a.shape)}", x=ours)


_OPERATORS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul,
    "divide": operator.truediv, "floor_divide": operator.floordiv, "remainder": operator.mod,
    "power": operator.pow, "equal": operator.eq, "not_equal": operator.ne, "less": operator.lt,
    "less_equal": operator.le, "greater": operator.gt, "greater_equal": operator.ge,
}  # fmt: skip
"""numpy's names of the operators that its scalars can be part of."""

_MENDED = (Unfit, NoImplementation, Unsupported, PartialEscape, RankMismatch)
"""Refusals of an implementation after which whole operands may still work."""

_MISTAKES = (
    TypeError, AttributeError, LookupError, ValueError, ArithmeticError, AssertionError,
    RecursionError,
)  # fmt: skip
"""Errors that bad arguments cause in an implementation; torch may have a better one for them."""


def _recovered(e: Exception, func: Func, args: Args, kwargs: Kwargs) -> object:
    """Run a call whose implementation raised on whole operands, or raise the best error for it."""
    if isinstance(e, ShardError) and (told := _of_gradcheck()) is not None:
        raise told from e
    if isinstance(e, _MENDED):
        return _otherwise(e, func, args, kwargs)
    if isinstance(e, _MISTAKES) and not isinstance(e, ShardError):
        raise torch_refuses(func, args, kwargs) or e from None
    if isinstance(e, RuntimeError) and (told := _explained(e, func, args, kwargs)) is not None:
        raise told from e
    raise e


def _otherwise(refusal: Exception, func: Func, args: Args, kwargs: Kwargs) -> object:
    """Run a refused call on whole operands, if they may be gathered; else raise the refusal."""
    if getattr(refusal, "final", False):
        raise refusal
    try:
        return FALLBACK[0](func, args, kwargs, refusal)
    except ShardError as e:
        told = refusal if isinstance(refusal, ShardError) else e
        bad = None if isinstance(told, BadArgument) else torch_refuses(func, args, kwargs)
        told = told if bad is None else bad
        told.final = True
        raise told from None
    except (RuntimeError, *_MISTAKES) as e:
        raise torch_refuses(func, args, kwargs) or e from None


_OF_META = re.compile("meta|data-dependent|data_ptr|fake impl", re.IGNORECASE)
"""Words of torch's refusal of a tensor without values, whatever the call."""


def torch_refuses(func: Func, args: Args, kwargs: Kwargs) -> BadArgument | None:
    """Return the error for a call that torch refuses on whole tensors too, so no layout helps.

    torch is called on meta tensors, which hold no values: functions that depend on values raise
    NotImplementedError there.  Meta tensors have no graph either, so autograd functions are not
    tried.
    """
    if getattr(func, "__module__", "") == "torch.autograd" or func is Tensor.backward:
        return None

    def bare(x: object) -> Any:
        return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x

    a, k = optree.tree_map(bare, (args, kwargs), none_is_leaf=True)  # type: ignore[arg-type, misc]
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            func(*a, **k)
    except (NotImplementedError, RecursionError, ArithmeticError):
        # some divide by a count of 0
        return None
    except (*_MISTAKES, ValueError, RuntimeError) as e:
        text = str(e).partition("\n")[0]
        if _OF_META.search(text):
            return None
        found = _sharded((args, kwargs))
        kind = OutOfRange if isinstance(e, IndexError) else BadArgument
        return kind(
            f"torch refuses this call: {text}",
            op=getattr(func, "__name__", str(func)),
            operands={f"operand {i}": typeof(x) for i, x in enumerate(found)},
            mesh=next((x.mesh for x in found), None),
        )
    return None


def _explained(e: RuntimeError, func: Func, args: Args, kwargs: Kwargs) -> ShardError | None:
    """Return a better error for torch's own, or for what whole tensors fail at too; else None."""
    if name := under_transform():
        return no_transform(transform_called() or name, args)
    if _NOT_OVERWRITTEN in str(e):
        return _not_overwritten(func, args)
    return None if _out_of_memory(e) else torch_refuses(func, args, kwargs)


def _out_of_memory(e: RuntimeError) -> bool:
    return any(word in str(e) for word in ("out of memory", "allocate memory", "enough memory"))


_NOT_OVERWRITTEN = "is a view and is being modified inplace"


def _not_overwritten(func: Func, args: Args) -> Unsupported:
    """Return the error for a write to a block that is a view made by an autograd function."""
    found = _sharded(args)
    why = "autograd lets nothing be written to a view of what one of its functions returned"
    return call_error(Unsupported, why, func, "x = x.clone()", *found)


def _of_gradcheck() -> Unsupported | None:
    """Build the error for torch.autograd.gradcheck, which changes one element of an input at a
    time; None where another function called.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == "torch.autograd.gradcheck":
            return Unsupported(
                "torch.autograd.gradcheck changes one element of an input at a time, which lies in "
                "one block: give it whole tensors",
                op="gradcheck",
                fix="torch.autograd.gradcheck(lambda t: sl.unshard(f(sl.shard(t, '...'))), "
                "sl.unshard(x).detach().requires_grad_())",
            )
        if not name.startswith(("torch.", "shardlib.")):
            break
        frame = frame.f_back
    return None


def heard(run: Callable[..., Any], verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a library verb, through the watcher's ``verb`` method if it has one."""
    if name := under_transform():
        # autograd's functions cannot run in it
        raise no_transform(name, args)
    told = getattr(scope().listeners.watcher, "verb", None)
    if told is None:
        return run(*args, **kwargs)
    return told(lambda _, a, k: run(*a, **k), verb, args, kwargs)


def _guarded(implementation: Implementation) -> Implementation:
    def run(func: Func, args: Args, kwargs: Kwargs) -> object:
        try:
            return implementation(func, args, kwargs)
        except (Unfit, *_MISTAKES) as e:
            return _recovered(e, func, args, kwargs)

    return run


def _plainly(place: Place) -> tuple[Any, ...]:
    """Convert a place to types that torch.load accepts with ``weights_only``."""
    layout, shape, mesh, tiled, deferred, out, merged = place
    text = unless_none(str, out)
    return str(layout), tuple(tiled), mesh, tuple(shape), sorted(deferred), text, merged


def _unpickle(raw: Tensor, place: Any, grad: bool, is_parameter: bool) -> ShardedTensor:
    lies, tiled, mesh, shape, deferred, out, merged = place
    x = ShardedTensor(
        raw.requires_grad_(grad),
        Place(
            Layout.parse(lies),
            # earlier versions wrote None where nothing is padded
            torch.Size(shape or tiled),
            mesh,
            torch.Size(tiled),
            frozenset(deferred),
            unless_none(Layout.parse, out),
            merged,
        ),
    )
    return torch.nn.Parameter(x, requires_grad=grad) if is_parameter else x  # type: ignore[return-value]


# lets torch.load(weights_only=True) read us
torch.serialization.add_safe_globals([_unpickle])


def _keep_kind(old: ShardedTensor, new: ShardedTensor) -> ShardedTensor:
    """Mark the copy of an nn.Parameter as an nn.Parameter."""
    if isinstance(old, torch.nn.Parameter):
        new._is_param = True
    return new


# ---------------------------------------------------------------- types as text


_SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint8: "u8", torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def _of_leaves(f: Callable[[Tensor], object], x: Any) -> object:
    """Call ``f`` on each tensor of a tree; other leaves stay.  Raises: PlainTensor."""
    if optree.tree_structure(x).is_leaf():
        raise no_tensor(x, f.__name__)
    return optree.tree_map(lambda leaf: f(leaf) if isinstance(leaf, Tensor) else leaf, x)


def named_tensors(x: object, op: str) -> dict[str, Tensor]:
    """List a tree's tensors by their paths, as ``b.0``; a single tensor has the empty path.

    Raises: PlainTensor for a value that is no tensor and no tree of them.
    """
    tree: Any = x
    paths, leaves, spec = optree.tree_flatten_with_path(tree)
    named = {
        ".".join(map(str, p)): v
        for p, v in zip(paths, leaves, strict=True)
        if isinstance(v, Tensor)
    }
    if not named and (leaves or spec.is_leaf()):
        raise no_tensor(x, op)
    return named


def no_tensor(x: object, op: str, layout: str = "...") -> PlainTensor:
    """Return the error for a value that is no tensor, with a line that makes one from it."""
    made = "torch.ones(2, 2)"
    if isinstance(x, torch.nn.Module):
        made = "dict(x.named_parameters())"
    elif isinstance(x, int | float | complex | list | tuple) or hasattr(x, "__array__"):
        made = "torch.as_tensor(x)"
    if op in ("typeof", "summary"):
        fix = f"sl.{op}({made})"
    else:
        placed = f"sl.shard({made}, {layout!r})"
        fix = f"sl.{op}({placed})" if op in ("layout_of", "visualize") else placed
    text = repr(x) if isinstance(x, str | int | float | complex) else ""
    why = f"{type(x).__name__} is no tensor, and no tree of them"
    given = {"given": window(text, 0, 60)} if text else {}
    return PlainTensor(why, op=op, operands=given, fix=fix)


@overload
def typeof(x: Tensor) -> str: ...
@overload
def typeof(x: Tree) -> Tree: ...
def typeof(x: object) -> object:
    """Write dtype, global sizes and the axes that split them, as ``f32[512@x, 512@y]``.

    Given a tree, returns the tree of these texts; leaves that are no tensors stay as they are.
    Raises: PlainTensor for a value that is no tensor.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     w = sl.shard(torch.zeros(4, 6), "x y")
    >>> sl.typeof(w), sl.typeof({"w": w, "step": 3}), sl.typeof(torch.zeros(3))
    ('f32[4@x, 6@y]', {'w': 'f32[4@x, 6@y]', 'step': 3}, 'f32[3]')
    """
    if not isinstance(x, Tensor):
        return _of_leaves(typeof, x)
    if is_dtensor(x):
        # its type does not name the mesh
        nowhere: Any = None
        place = Place(Layout.from_dtensor(x), x.shape, nowhere)
        x = ShardedTensor(torch.empty(0, dtype=x.dtype, device="meta"), place)
    if not isinstance(x, ShardedTensor):
        return f"{_SHORT.get(x.dtype, str(x.dtype))}[{', '.join(map(str, x.shape))}]"
    dims = x.dims
    body = ", ".join(
        f"{n}@{d}" if d.is_split else str(n) for n, d in zip(x.shape, dims, strict=True)
    )
    tail = optional_text("{{sum:{}}}", " ".join(x.sharding.partial))
    skew = optional_text("{{skew:{}}}", x.sharding.skew)
    padded = f"{{padded:{list(x.padded_shape)}}}" if x.is_padded else ""
    return f"{_SHORT.get(x.dtype, str(x.dtype))}[{body}]{tail}{skew}{padded}"


@overload
def layout_of(x: Tensor) -> Layout: ...
@overload
def layout_of(x: object) -> object: ...
def layout_of(x: object) -> object:
    """Read the layout of a sharded tensor or DTensor; of a tree, the tree of its layouts.

    Raises: PlainTensor for a value without a layout.

    >>> import shardlib as sl
    >>> with sl.simulate(x=2):
    ...     w, b = sl.shard(torch.zeros(4, 6), "x ."), sl.shard(torch.zeros(4), "x")
    >>> sl.layout_of(w), sl.layout_of({"w": w, "b": b})
    (Layout('x .'), {'w': Layout('x .'), 'b': Layout('x')})
    """
    if isinstance(x, ShardedTensor):
        return x.sharding
    if not isinstance(x, Tensor):
        return _of_leaves(layout_of, x)
    if is_dtensor(x):
        return Layout.from_dtensor(x)
    raise call_error(
        PlainTensor, "a plain tensor has no layout", "layout_of", 'sl.shard(x, "...")', tensor=x
    )


def raw_of(x: Any) -> Any:
    """Return the block of a sharded value, a plain value itself."""
    return x.raw if isinstance(x, ShardedTensor) else x


def block_strides(x: ShardedTensor) -> tuple[int, ...]:
    """Return the strides of a block, without the dimension of simulated ranks."""
    return block_of(x).stride()


def is_dense(x: ShardedTensor) -> bool:
    """Check whether the whole tensor would be contiguous.

    A block has its tensor's order of strides.  torch ignores the stride of a dimension with one
    position; here it is still compared, since it shows where the dimension came in that order and
    whether the block was sliced.
    """
    size = block_shape(x.raw, x.mesh)
    expected = 1
    for n, stride, whole in zip(
        reversed(size), reversed(block_strides(x)), reversed(x.padded_shape), strict=True
    ):
        if whole == 1:
            continue
        if stride != expected:
            return 0 in size
        expected *= n
    return True


def type_or_class(x: object) -> str:
    """Write a tensor's type, or the class of any other value, for an error."""
    return typeof(x) if isinstance(x, Tensor) else type(x).__name__


def block_of(x: ShardedTensor) -> Tensor:
    """Return one rank's block; under simulate rank 0's."""
    return first_block(x.raw, x.mesh)


_INSTEAD = {
    "vmap": "torch.vmap(f)(sl.unshard(x))",
    "make_dual": "torch.autograd.functional.jvp(f, x, sl.shard(tangent, sl.layout_of(x)))",
    "grad": "sl.grad(f)(x)",
    "grad_and_value": "sl.value_and_grad(f)(x)",
    "vjp": "torch.autograd.functional.vjp(f, x)",
    "jvp": "torch.autograd.functional.jvp(f, x, sl.shard(tangent, sl.layout_of(x)))",
    "jacrev": "torch.autograd.functional.jacobian(f, x)",
    "jacfwd": "torch.autograd.functional.jacobian(f, x)",
    "hessian": "torch.autograd.functional.hessian(f, x)",
}


def no_transform(name: str, args: Args = (), fix: str = "") -> Unsupported:
    """Return the error for a sharded value under one of torch.func's transforms."""
    found = _sharded(args)
    refusal = Unsupported(
        f"torch.func's {name} does not know sharded values",
        op=f"torch.func.{name}",
        operands=lettered(map(typeof, found)),
        mesh=next((x.mesh for x in found), None),
        fix=fix or _INSTEAD.get(name, "f(sl.unshard(x))"),
    )
    refusal.final = True
    return refusal


def no_trace(name: str) -> Unsupported:
    """Return the error for a sharded value in a trace that would keep its blocks as constants."""
    why = f"{name} records calls on plain tensors, and would keep this value's blocks as constants"
    return Unsupported(why, op=name, fix="f(sl.unshard(x))")


def refuse_trace() -> None:
    """Raise under torch.jit.trace or make_fx, which record neither communication nor layouts."""
    if torch.jit.is_tracing():
        raise no_trace("torch.jit.trace")
    if isinstance(scope().listeners.watcher, _Traced):
        raise no_trace("make_fx")


class _Traced:
    """Watcher while make_fx records: it refuses each call."""

    def __call__(self, run: Func, func: Func, args: Args, kwargs: Kwargs) -> object:
        raise no_trace("make_fx")

    verb = __call__


patch("make_fx", lambda: intercept_proxies(lambda mode: enter(mode, watcher=_Traced()), leave))

# properties that are functions of the values
_VALUES = frozenset("real imag H mH".split())


def _asks_no_value(func: Func) -> bool:
    """Check whether it is a property without an implementation that does not depend on values."""
    known = func in TABLE or getattr(func, "__name__", "") not in ("__get__", "__set__")
    return not known and getattr(func.__self__, "__name__", "") not in _VALUES


def _unknown(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    if _asks_no_value(func):
        with no_torch_function():
            return func(*args, **kwargs)
    return FALLBACK[0](func, args, kwargs)


def no_implementation(
    func: Func, args: tuple[Any, ...], kwargs: dict[str, Any], why: str = ""
) -> NoImplementation:
    """Return the error for a function that has no implementation."""
    name = getattr(func, "__name__", str(func))
    found = _sharded((args, kwargs))
    reason = f"no implementation of {name}" + optional_text(": {}", why)
    return call_error(NoImplementation, reason, name, "sl.unshard(x)" if found else "", *found)


def on_shapes(func: Func, mesh: Mesh) -> Unsupported:
    """Return the error for a result that depends on values, on a recorded mesh without values."""
    name = getattr(func, "__name__", str(func))
    why = f"what {name} answers hangs on values, and a recorded mesh has shapes alone"
    fix = f"sl.simulate({', '.join(f'{n}={s}' for n, s in mesh.axes.items())})"
    if scope().call.stage is not None:
        why = f"what {name} answers hangs on values, and stages are cut by shapes alone"
        fix = "loss = lambda params, *batch: apply(params, *batch).mean()"
    return Unsupported(why, op=name, mesh=mesh, fix=fix)


Error = TypeVar("Error", bound=ShardError)


def call_error(
    kind: type[Error], why: str, op: Func | str, fix: str = "", /, *tensors: Tensor, **named: object
) -> Error:
    """Return the error of a call, with the types of its tensors and their mesh.

    ``tensors``  are named x, y, z, ...; of ``named`` values, those that are no tensors are text.
    """
    given = lettered(tensors) | named
    return kind(
        why,
        op=op if isinstance(op, str) else getattr(op, "__name__", str(op)),
        operands={k: typeof(v) if isinstance(v, Tensor) else v for k, v in given.items()},
        mesh=next((x.mesh for x in given.values() if isinstance(x, ShardedTensor)), None),
        fix=fix,
    )


def refuse_sums(op: str, *values: ShardedTensor) -> None:
    """Raise PartialEscape for the first value that is a pending sum."""
    for x in values:
        if x.sharding.partial:
            raise partial_escape(op, x)


def partial_escape(op: str, x: ShardedTensor) -> PartialEscape:
    """Return the error for a pending sum used where its value is needed."""
    bare = str(x.sharding.bare) or "..."
    why = f"the sum over {', '.join(x.sharding.partial)} is still pending, and {op} needs its value"
    return call_error(PartialEscape, why, op, f"sl.reshard(x, {bare!r})", tensor=x)


def _sharded(tree: object) -> list[ShardedTensor]:
    """List the sharded tensors among arguments."""
    leaves = optree.tree_leaves(tree, none_is_leaf=True)  # type: ignore[arg-type]
    return [x for x in leaves if isinstance(x, ShardedTensor)]
