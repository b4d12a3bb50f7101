"""Ambient settings of a call: one frozen ``Scope`` in one context variable.

A thread or an asyncio task has the scopes that it entered itself (a task also those around its
creation), never those of another.  As with torch.no_grad and decimal.localcontext, a ``with`` in
the body of a generator stays in force for the caller while the generator is suspended: Python gives
generators no context of their own (PEP 568 would), and only reading frames on every call could
detect it.

Autograd runs backward on threads of its own where a graph is on a GPU.  There, the scope around the
call of backward applies; settings of the forward (mesh, budgets, algorithms) are kept with the
graph, see ``bind``.
"""

from collections.abc import Callable, Mapping
from contextlib import ContextDecorator
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from shardlib._compat import backward_context
from shardlib.mesh.posted import POSTED, drain


class Policy(NamedTuple):
    """Choices of the user for the operations inside; part of the key of each cached choice."""

    pins: tuple[tuple[str, str], ...] = ()  # (operation, algorithm) of sl.algorithm
    # bytes that may move implicitly: sl.implicit
    budget: float | None = None
    # bytes that a product may gather and save: sl.saving
    saving: float | None = None
    # (device, function) that torch itself is to cast
    casts: tuple[str, Any] | None = None
    # kernels that run operations: sl.kernels.use
    backend: str = "auto"
    # products of weights are recorded so that backward may leave their gradients for later
    split_backward: bool = False


class Listeners(NamedTuple):
    """Objects that are called when something moves or is computed."""

    traces: tuple[Any, ...] = ()  # counters of communication
    # called for every function of a sharded tensor: sl.explain
    watcher: Any = None
    # whether a call is planned, in which how often values are read is not guessed
    rehearsal: bool = False
    # counts a loop's equal steps from one of them: planning/strategies.py
    repeats: Any = None


class CallState(NamedTuple):
    """State of the library's own calls that surround an operation."""

    # plain operands of sharded tensors count as the same on every rank; "verified": they are
    # compared, see sl.constants
    promoting: bool | Literal["verified"] = False
    # a module of sl.as_module runs, and its inputs are placed
    placed: bool = False
    # its generate runs, and every batch has the layout of its recipe
    generating: bool = False
    # a function runs whose gradient is taken: grad.py
    differentiated: bool = False
    # of shard_map, whose tensors are blocks
    body: bool = False
    # runs a function with the results that a checkpoint kept of this call
    again: Callable[[Callable[[], Any]], Any] | None = None
    # the products of the call that runs
    prefetch: Any = None
    # functions of torch whose Python bodies run
    opened: tuple[Any, ...] = ()
    # run of a module's forward on one stage of a pipeline: pipeline/forward.py
    stage: Any = None
    # a recompute.Kept, which saves results of products and attention
    region: Any = None
    # a Reading, which gathers saved weights again: optim/stage3.py
    gathers: Any = None
    # a WeightGradients, in which backward queues gradients of weights
    later: Any = None


class RandomState(NamedTuple):
    """Sources of random numbers."""

    # stream of random numbers -> the one that is drawn from instead
    draws: Mapping[Any, Any] = {}
    keys: list[int] | None = None  # [how many numbers torch's generator gave for keys]


class Scope(NamedTuple):
    """All ambient settings; each ``with`` makes a new one, and none is ever changed.

    Fields of a group are set by their own names, which are unique: ``within(promoting=True)``.
    """

    mesh: Any = None  # a Mesh
    policy: Policy = Policy()
    listeners: Listeners = Listeners()
    call: CallState = CallState()
    random: RandomState = RandomState()
    # (mesh, coordinate whose part is read)
    reading: tuple[Any, dict[str, int]] | None = None
    # norms of gradients computed in this step
    norms: dict[Any, Any] | None = None
    # (the context manager that entered this scope, the scope that it replaced)
    before: "tuple[Any, Scope] | None" = None

    def changed(self, changes: Mapping[str, Any]) -> "Scope":
        """Return the scope with other values of some fields, which may be those of a group."""
        found: list[Any] = [*self]
        for name, value in changes.items():
            at, of_group = _AT[name]
            if of_group is None:
                found[at] = value
            else:
                group = [*found[at]]
                group[of_group] = value
                found[at] = _new(type(found[at]), group)
        return _new(Scope, found)


_NOTHING = Scope()
# a third of the time of _replace; bind runs on every operator
_new = tuple.__new__
# name of a field -> its place in the scope, or that of its group and its place there
_AT: Mapping[str, tuple[int, int | None]] = {n: (i, None) for i, n in enumerate(Scope._fields)} | {
    n: (at, i)
    for at, group in enumerate(_NOTHING)
    for i, n in enumerate(getattr(group, "_fields", ()))
}
_NOW: ContextVar[Scope] = ContextVar("shardlib.scope", default=_NOTHING)


# reads the scope inside ``bind`` by one call of C, where ``scope()`` would be one of Python
bound_scope: Callable[[], Scope] = _NOW.get


def scope() -> Scope:
    """Return the ambient scope of this call."""
    now = _NOW.get()
    if now is _NOTHING and (caller := backward_context()) is not None:
        return caller.get(_NOW, now)
    return now


def enter(by: Any, **changes: Any) -> None:
    """Set fields of the scope until ``leave(by)``."""
    _NOW.set(scope().changed(changes | {"before": (by, _NOW.get())}))


def leave(by: Any) -> None:
    """End the latest ``enter(by)``; do nothing if another context entered it."""
    _NOW.set(_unlinked(_NOW.get(), by))


def _unlinked(now: Scope, by: Any) -> Scope:
    """Return the scope without the level of ``by``; scopes entered inside it stay as they are."""
    if now.before is None:
        return now
    entered, outer = now.before
    return outer if entered is by else now._replace(before=(entered, _unlinked(outer, by)))


class Entered(ContextDecorator):
    """Base of the public context managers: ``changes`` of the scope while one is open."""

    def changes(self, now: Scope) -> dict[str, Any]:
        raise NotImplementedError

    def __enter__(self) -> Any:
        enter(self, **self.changes(scope()))

    def __exit__(self, *_: object) -> None:
        leave(self)


class within:
    """Changes of the scope for the library's own code, where enter and exit are always nested.

    ``with within(promoting=True):`` is an example.
    """

    __slots__ = ("before", "changes")

    def __init__(self, **changes: Any) -> None:
        self.changes = changes

    def __enter__(self) -> None:
        self.before = _NOW.get()
        _NOW.set(scope().changed(self.changes | {"before": None}))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        _NOW.set(self.before)
        if error is not None and POSTED:
            drain(error)


class bind(within):
    """Mesh put in scope at low cost, or a whole scope kept for backward.

    A kept scope restores the program's settings (mesh, algorithms, budgets, promotion).  Traces and
    watchers are those of the current scope, and prefetch is off, since the call is a repetition.
    """

    __slots__ = ("given",)

    def __init__(self, given: Any) -> None:
        self.given = given

    def __enter__(self) -> Any:
        given, now = self.given, _NOW.get()
        self.before = now
        if type(given) is Scope:
            here = scope()
            _NOW.set(
                given._replace(
                    listeners=here.listeners,
                    call=given.call._replace(prefetch=None, opened=()),
                    random=given.random._replace(keys=here.random.keys),
                    before=None,
                )
            )
        elif now.mesh is not given:
            outer = scope() if now is _NOTHING else now
            if outer is _NOTHING:
                # the usual case costs a third of the other
                _NOW.set(_new(Scope, (given,) + _NO_MESH))  # noqa: RUF005
            else:
                _NOW.set(_new(Scope, (given, *outer[1:-1], None)))
        return given


_NO_MESH = _NOTHING[1:]
