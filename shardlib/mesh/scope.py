"""Ambient settings of a call: one frozen ``Scope`` in one context variable.

A thread or an asyncio task has the scopes that it entered itself (a task also those around its
creation), never those of another.  Two cases need more than a context variable gives:

- A generator has no context of its own.  A ``with`` in its body would stay in force for the caller
  while it is suspended.  Such a scope is kept next to the caller's, with its frame, and is in force
  while that frame runs.  Generators that stand for a ``with`` block of their caller, as those of
  ``contextlib.contextmanager`` and pytest's fixtures, are not treated as generators here.
- Autograd runs backward on threads of its own where a graph is on a GPU.  There, the scope around
  the call of backward applies; settings of the forward (mesh, budgets, algorithms) are kept with
  the graph, see ``bind``.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import ContextDecorator
from contextvars import ContextVar
from inspect import CO_ASYNC_GENERATOR, CO_GENERATOR
from types import FrameType
from typing import Any, Literal, NamedTuple

from shardlib._compat import backward_context
from shardlib.mesh.posted import POSTED, drain

__all__ = ["Entered", "Scope", "bind", "enter", "leave", "scope", "within"]


class Scope(NamedTuple):
    """All ambient settings; each ``with`` makes a new one, and none is ever changed."""

    mesh: Any = None  # a Mesh
    pins: tuple[tuple[str, str], ...] = ()  # (operation, algorithm) of sl.algorithm
    budget: float | None = None  # bytes that may move implicitly: sl.implicit
    saving: float | None = None  # bytes that a product may gather and save: sl.saving
    # plain operands of sharded tensors count as the same on every rank; "verified": they are
    # compared, see sl.constants
    promoting: bool | Literal["verified"] = False
    placed: bool = False  # a module of sl.as_module runs, and its inputs are placed
    generating: bool = False  # its generate runs, and every batch has the layout of its recipe
    differentiated: bool = False  # a function runs whose gradient is taken: grad.py
    # runs a function with the results that a checkpoint kept of this call
    again: Callable[[Callable[[], Any]], Any] | None = None
    draws: Mapping[Any, Any] = {}  # stream of random numbers -> the one that is drawn from instead
    traces: tuple[Any, ...] = ()  # counters of communication
    watcher: Any = None  # called for every function of a sharded tensor: sl.explain
    prefetch: Any = None  # the products of the call that runs
    rehearsal: Any = None  # counts reads of values in a call that is planned
    opened: tuple[Any, ...] = ()  # functions of torch whose Python bodies run
    region: Any = None  # a recompute.Kept, which saves results of products and attention
    casts: tuple[str, Any] | None = None  # (device, function) that torch itself is to cast
    keys: list[int] | None = None  # [how many numbers torch's generator gave for keys]
    norms: dict[Any, Any] | None = None  # norms of gradients computed in this step
    backend: str = "auto"  # kernels that run operations: sl.kernels.use
    reading: tuple[Any, dict[str, int]] | None = None  # (mesh, coordinate whose part is read)
    held: "tuple[_Held, ...]" = ()  # scopes entered in the bodies of generators
    by: Any = None  # the context manager that entered it
    before: "Scope | None" = None  # what it replaced


class _Held(NamedTuple):
    """Scope entered in a generator's body; ``task``: the asyncio task of an asynchronous one."""

    frame: FrameType
    task: Any
    by: Any
    scope: Scope

    def in_force(self) -> bool:
        """Check whether the scope applies: its frame runs, or this task was made while it ran."""
        return self.frame.f_back is not None or (self.task is not None and _task() is not self.task)


_NOTHING = Scope()
_NOW: ContextVar[Scope] = ContextVar("shardlib.scope", default=_NOTHING)


def scope() -> Scope:
    """Return the ambient scope of this call."""
    now = _NOW.get()
    if now.held:
        return _of_generators(now)
    if now is _NOTHING and (caller := backward_context()) is not None:
        now = caller.get(_NOW, now)
        return _of_generators(now) if now.held else now
    return now


def _of_generators(now: Scope) -> Scope:
    """Return the scope of the innermost generator that runs; the caller's if all are suspended."""
    found = [h for h in now.held if h.in_force()]
    if len(found) > 1:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            for h in reversed(found):
                if h.frame is frame:
                    return h.scope
            frame = frame.f_back
    return found[-1].scope if found else now


def _task() -> Any:
    """Return the asyncio task that runs, if any."""
    asyncio = sys.modules.get("asyncio")
    try:
        return asyncio and asyncio.current_task()
    except RuntimeError:
        return None


_STAND_FOR_THEIR_CALLER = frozenset({"contextlib", "_pytest.fixtures", "_pytest.compat"})
"""Modules that drive a generator whose body surrounds other code."""


def _is_generators(frame: FrameType) -> bool:
    if not frame.f_code.co_flags & (CO_GENERATOR | CO_ASYNC_GENERATOR):
        return False
    driver = frame.f_back
    return driver is None or driver.f_globals.get("__name__") not in _STAND_FOR_THEIR_CALLER


def enter(by: Any, **changes: Any) -> None:
    """Set fields of the scope for the caller's caller, a ``with`` body, until ``leave(by)``."""
    now, here, frame = _NOW.get(), scope(), sys._getframe(2)
    inner = here._replace(**changes, held=(), by=by, before=None)
    if _is_generators(frame):
        task = _task() if frame.f_code.co_flags & CO_ASYNC_GENERATOR else None
        _NOW.set(now._replace(held=(*now.held, _Held(frame, task, by, inner))))
    else:
        suspended = tuple(h for h in now.held if not h.in_force())
        _NOW.set(inner._replace(held=suspended, before=now))


def leave(by: Any) -> None:
    """End the latest ``enter(by)``; do nothing if another context entered it."""
    now, frame = _NOW.get(), sys._getframe(2)
    for h in reversed(now.held):
        if h.by is by and h.frame is frame:
            _NOW.set(_without(now, h))
            return
    if now.by is by and not now.held:
        _NOW.set(now.before or _NOTHING)
    else:
        _NOW.set(_unlinked(now, by))


def _without(now: Scope, gone: _Held) -> Scope:
    """Return the scope without ``gone``, here and in the scopes to be restored."""
    before = now.before and _without(now.before, gone)
    return now._replace(held=tuple(h for h in now.held if h is not gone), before=before)


def _unlinked(now: Scope, by: Any) -> Scope:
    """Return the scope without the level of ``by``; scopes entered inside it stay as they are."""
    if now.before is None:
        return now
    if now.by is not by:
        return now._replace(before=_unlinked(now.before, by))
    known = [id(h) for h in now.before.held]
    return now.before._replace(
        held=now.before.held + tuple(h for h in now.held if id(h) not in known)
    )


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
        _NOW.set(scope()._replace(**self.changes, held=(), by=None, before=None))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        _NOW.set(self.before)
        if error is not None and POSTED:
            drain(error)


class bind:
    """Mesh put in scope at low cost, or a whole scope kept for backward.

    A kept scope restores the program's settings (mesh, algorithms, budgets, promotion).  Traces and
    watchers are those of the current scope, and prefetch is off, since the call is a repetition.
    """

    __slots__ = ("before", "given")

    def __init__(self, given: Any) -> None:
        self.given = given

    def __enter__(self) -> Any:
        given, now = self.given, _NOW.get()
        self.before = now
        if type(given) is Scope:
            here = scope()
            _NOW.set(
                given._replace(
                    traces=here.traces, watcher=here.watcher, rehearsal=here.rehearsal,
                    keys=here.keys, prefetch=None, opened=(), held=(), by=None, before=None,
                )
            )  # fmt: skip
        elif now.mesh is not given or now.held:
            outer = scope()
            if outer is _NOTHING:  # the usual case costs a third of the other
                _NOW.set(_new(Scope, (given,) + _NO_MESH))  # noqa: RUF005
            else:
                _NOW.set(_new(Scope, (given, *outer[1:_HELD], (), None, None)))
        return given

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        _NOW.set(self.before)
        if error is not None and POSTED:
            drain(error)


_new = tuple.__new__  # a third of the time of _replace; bind runs on every operator
_HELD = Scope._fields.index("held")
_NO_MESH = _NOTHING[1:]
