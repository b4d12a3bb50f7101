"""The calls of a step: torch's own functions, in order, with the values that each reads and gives.

A module's forward and its loss run once on shapes, on a mesh of one rank.  Every call is kept with
its arguments of global sizes, so that it can run again under any layouts of what it reads.
"""

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import optree
from torch import Tensor, nn

from shardlib.mesh import record, within
from shardlib.modules import parallelize
from shardlib.modules.paths import Paths
from shardlib.opspec import Args, Func, Kwargs
from shardlib.placing import shard
from shardlib.planning.constant_folding import Known
from shardlib.tensor import ShardedTensor


class Value(NamedTuple):
    """A value of the step, in the place of a tensor among the arguments of a call."""

    number: int


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a step.

    ``args``, ``kwargs``  its arguments, with a ``Value`` for each sharded tensor.
    ``reads``, ``gives``  the numbers of these values, and of its results.
    ``module``  path of the submodule whose forward makes it.
    ``key``     equal for calls that compute the same of the values they read.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    module: str
    key: Hashable

    @property
    def name(self) -> str:
        """The function's name; of several that run as one, the first one's."""
        func = getattr(self.func, "first", self.func)
        return getattr(func, "__name__", str(func))

    def at(self, module: str) -> str:
        """Write the call with the path of a module, as ``gelu of h.0``."""
        return " of ".join(filter(None, (self.name, module)))

    def run(self, values: Sequence[ShardedTensor]) -> list[ShardedTensor]:
        """Call the function with these values for what it reads, and return the sharded results."""
        at = dict(zip(self.reads, values, strict=True))
        given: Any = self.args, self.kwargs
        placed: Any = optree.tree_map(
            lambda x: at[x.number] if isinstance(x, Value) else x,
            given,
            is_leaf=_is_value,
            none_is_leaf=True,
        )
        args, kwargs = placed
        return _sharded(self.func(*args, **kwargs))


@dataclass(frozen=True)
class Several:
    """Functions that read one value and run as one call: what they gather is gathered once."""

    functions: tuple[Callable[..., Any], ...]

    @property
    def first(self) -> Callable[..., Any]:
        """The first of the functions."""
        return self.functions[0]

    def __call__(self, *calls: tuple[Args, Kwargs]) -> list[Any]:
        """Call each function with its arguments."""
        return [f(*a, **k) for f, (a, k) in zip(self.functions, calls, strict=True)]


@dataclass
class StepCalls:
    """The calls of a step, and what its values are.

    ``parameters``, ``inputs``  number -> name, of values that no call gives.
    ``constants``  number -> value, of those that the module makes itself.
    ``shapes``     number -> global sizes; ``floating`` those of floating point.
    ``ends``       number -> the place of the last call during which a call's result is held: that
                   of the last one that reads it, or a later one where Python holds it longer.
    ``loss``       the number of the loss.
    ``apply``      what was called: some calls read its modules.

    >>> import torch
    >>> mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> step = calls_of(mlp, (torch.empty(6, 4),), lambda apply, params, x: apply(params, x).sum())
    >>> [c.name for c in step.calls]
    ['linear', 'relu', 'linear', 'sum']
    >>> step.parameters[step.calls[0].reads[1]], step.inputs[step.calls[0].reads[0]]
    ('0.weight', 0)
    """

    calls: list[Call] = field(default_factory=list)
    parameters: dict[int, str] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    constants: dict[int, ShardedTensor] = field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    floating: set[int] = field(default_factory=set)
    ends: dict[int, int] = field(default_factory=dict)
    loss: int = 0
    apply: object = None


def calls_of(
    module: nn.Module, inputs: Sequence[Tensor], loss: Callable[..., Any],
    layer: Callable[[str], str] = lambda _: "",
) -> StepCalls:  # fmt: skip
    """Record the calls of ``loss(apply, params, *inputs)`` on shapes.

    Products that read the same value are one call, as they gather it once (decision 0005).

    ``layer``  path of a submodule -> its layer: products of several layers, as of what an encoder
               gives to each layer of a decoder, stay apart.
    Raises: the errors of the module's forward on shapes.
    """
    with record(one=1) as mesh, Paths() as paths, Known():
        apply, params = parallelize(module, [("*", "...")], mesh=mesh)
        recorder = _Recorder(paths)
        found = recorder.found
        found.parameters = {recorder.give(p): n for n, p in params.items()}
        given = [shard(x.detach().to("meta"), "...", mesh) for x in inputs]
        found.inputs = {recorder.give(x): i for i, x in enumerate(given)}
        with within(watcher=recorder):
            out = loss(apply, params, *given)
        found.loss, found.apply = recorder.numbers[id(out)], apply
        del out
    calls, places = _joined(found, layer)
    held = {n: places[at] for n, at in found.ends.items()}
    ends = {n: at for at, call in enumerate(calls) for n in call.reads} | {found.loss: len(calls)}
    for _, some in itertools.groupby(enumerate(calls), lambda item: layer(item[1].module)):
        of_layer = [*some]
        last, _ = of_layer[-1]
        for at, call in of_layer:
            # what is held behind its layer would be held for each of the layers like it
            ends |= {n: max(ends.get(n, at), min(held.get(n, at), last)) for n in call.gives}
    return replace(found, calls=calls, ends=ends)


class _Recorder:
    """A watcher that keeps each outermost call on sharded tensors."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.found = StepCalls()
        self.numbers: dict[int, int] = {}
        # an id is used again once its tensor is gone
        self.alive: dict[int, weakref.ref[ShardedTensor]] = {}
        self.count = 0
        self.inside = False

    def give(self, x: ShardedTensor) -> int:
        """Number a new value."""
        self.count += 1
        number, key = self.count, id(x)
        self.numbers[key] = number
        self.alive[key] = weakref.ref(x, lambda _: self._gone(key))
        self.found.shapes[number] = tuple(x.shape)
        if x.is_floating_point():
            self.found.floating.add(number)
        return number

    def _gone(self, key: int) -> None:
        self.found.ends[self.numbers.pop(key)] = len(self.found.calls) - 1

    def _read(self, x: object) -> object:
        if not isinstance(x, ShardedTensor):
            return x
        if id(x) not in self.numbers:
            self.found.constants[self.give(x)] = x
        return Value(self.numbers[id(x)])

    def __call__(
        self, implementation: Callable[..., Any], func: Func, args: Args, kwargs: Kwargs
    ) -> Any:
        """Run a function of sharded tensors, and keep its call."""
        if self.inside:
            return implementation(func, args, kwargs)
        self.inside = True
        given: Any = args, kwargs
        asked: Any = optree.tree_map(self._read, given, none_is_leaf=True)
        known = set(self.numbers)
        try:
            out = implementation(func, args, kwargs)
        finally:
            self.inside = False
        results = _sharded(out)
        # a result that was there before is the operand itself, or was written to; contiguous()
        # copies where other layouts leave other strides
        kept = writes(func) or getattr(func, "__name__", "") == "contiguous"
        new = [x for x in results if id(x) not in known or kept]
        if new:
            reads = _values((asked,))
            order = {number: i for i, number in enumerate(reads)}
            text = repr(optree.tree_map(
                lambda x: ("read", order[x.number]) if isinstance(x, Value) else _text(x),
                asked, is_leaf=_is_value, none_is_leaf=True,
            ))  # fmt: skip
            key = getattr(func, "__qualname__", ""), str(func), text
            gives = tuple(map(self.give, results))
            call = Call(func, asked[0], asked[1], reads, gives, self.paths.now(), key)
            self.found.calls.append(call)
        return out

    verb = __call__

    def chose(self, *_: object, **__: object) -> None:
        """Ignore which algorithm ran: layouts of a mesh of one rank choose nothing."""


def writes(func: Func) -> bool:
    """Return whether a function writes to its first operand, by its name."""
    name = getattr(func, "__name__", "")
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _is_value(x: object) -> bool:
    return isinstance(x, Value)


def _sharded(tree: Any) -> list[ShardedTensor]:
    leaves = optree.tree_leaves(tree, none_is_leaf=True)
    return [x for x in leaves if isinstance(x, ShardedTensor)]


def _values(tree: Any) -> tuple[int, ...]:
    leaves = optree.tree_leaves(tree, is_leaf=_is_value, none_is_leaf=True)
    return tuple(dict.fromkeys(x.number for x in leaves if isinstance(x, Value)))


def _text(x: object) -> object:
    return ("tensor", id(x)) if isinstance(x, Tensor) else x


def _joined(step: StepCalls, layer: Callable[[str], str]) -> tuple[list[Call], list[int]]:
    """Make one call of a layer's products with weights that read the same value.

    Returns the calls, and for each call of the step the place of the last of them until then.
    """
    readers: dict[tuple[int, str], list[int]] = defaultdict(list)
    for at, call in enumerate(step.calls):
        data = [r for r in call.reads if r not in step.parameters]
        if call.name in ("linear", "addmm") and len(data) == 1:
            readers[data[0], layer(call.module)].append(at)
    made: dict[int, Call | None] = {}
    for places in readers.values():
        several = [step.calls[at] for at in places]
        if len(several) > 1:
            made |= dict.fromkeys(places)
            made[places[0]] = Call(
                Several(tuple(c.func for c in several)),
                tuple((c.args, c.kwargs) for c in several),
                {},
                tuple(dict.fromkeys(r for c in several for r in c.reads)),
                tuple(g for c in several for g in c.gives),
                several[0].module,
                ("several", *(c.key for c in several)),
            )
    calls: list[Call] = []
    places: list[int] = []
    for at, call in enumerate(step.calls):
        one = made.get(at, call)
        calls += [] if one is None else [one]
        places.append(len(calls) - 1)
    return calls, places
