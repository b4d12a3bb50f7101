"""Copies of a module's tree, without weights: one per thread that runs a call.

A call sets its tensors in a copy and runs its forward, so threads that call the same ``apply`` need
a copy each.  Backward of a remat region, or a transform of torch.func, runs a part of the call
again, on the same tensors.  ``copy.deepcopy`` and ``pickle`` keep the first copy alone.

A pure function would lose attributes that forward sets: ``reported`` warns of them.
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from shardlib.collectives import checking
from shardlib.layouts import Layout
from shardlib.memory_sharing import writes
from shardlib.mesh import scope
from shardlib.modules.experts import divide
from shardlib.modules.remat import remembering
from shardlib.modules.rules import Named
from shardlib.modules.weightless_copy import Around, skeleton
from shardlib.ops.matmul.prefetch import not_prefetching
from shardlib.tensor import promoting, raw_of


class Copies:
    """Copies of a module's tree, of which a call takes one that no other thread runs on.

    ``module``  the first: its hooks, attributes and training modes count for all.
    """

    def __init__(
        self,
        module: nn.Module,
        buffers: Named,
        layouts: dict[str, Layout],
        remat: Mapping[str, str],
    ) -> None:
        self.module = skeleton(module, buffers)
        # never run: the template of further copies
        self.bare = skeleton(self.module)
        self.layouts, self.remat = layouts, remat
        # submodules that ask the stage that runs whether they are called
        self.units: Sequence[str] = ()
        self.made = [self._copy(self.module)]
        pairs = zip(module.modules(), self.module.modules(), strict=True)
        # the caller's module, its copy, and the training mode that it had at the last call
        self.modes: list[Any] = [[weakref.ref(m), own, m.training] for m, own in pairs]

    def __getstate__(self) -> dict[str, Any]:
        """Keep the first tree; it no longer follows the caller's module."""
        self.follow()
        return {**self.__dict__, "made": [], "modes": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # the tree has its experts and regions of remat
        self.made = [Copy(self.module)]

    def _copy(self, tree: nn.Module) -> "Copy":
        divide(tree, self.layouts)
        remembering(tree, self.remat)
        asking(tree, self.units)
        return Copy(tree)

    def ask(self, units: Sequence[str]) -> None:
        """Have these submodules ask the stage of a pipeline that runs whether they are called."""
        self.units = units
        for copy in self.made:
            asking(copy.module, units)

    def follow(self) -> None:
        """Set the training modes that the caller changed since the last call."""
        for mode in self.modes:
            of, own, known = mode
            module = of()
            if module is not None and module.training is not known:
                own.training = mode[2] = module.training

    @contextmanager
    def taken(self) -> Iterator["Copy"]:
        """Take a copy of the tree for a call, with current training modes."""
        self.follow()
        copy = next((c for c in self.made if c.lock.acquire(blocking=False)), None)
        if copy is None:
            copy = self._copy(skeleton(self.bare))
            # before it is shared, so this cannot fail
            copy.lock.acquire(blocking=False)
            self.made.append(copy)
        try:
            if copy.module is not self.module:
                for mine, first in zip(copy.module.modules(), self.module.modules(), strict=True):
                    mine.training = first.training
            yield copy
        finally:
            copy.lock.release()


class Copy:
    """Tree of modules without weights, for one thread at a time.

    ``state``  the tensors of the call that runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.lock = threading.RLock()
        self.state: Any = None
        # the slots of the module, and the identities by which a change of its tree is noticed
        self.listed: tuple[list[int], list[nn.Module], list[Slot]] = [], [], []

    def run(
        self,
        state: dict[str, Tensor],
        buffers: Named,
        written: dict[str, Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run forward on the tensors of ``state``, which gets the buffers that it assigns.

        ``written``  gets the values before the call of the buffers that forward changed.
        """
        before = {n: (state[n], writes(raw_of(state[n]))) for n in buffers}
        watch = nullcontext() if checking() is None else reported(self.module)
        self.state = state
        try:
            with exchanged(self.slots(), state), watch:
                return self.module(*args, **kwargs)
        finally:
            self.state = None
            for n, (b, version) in before.items():
                if state[n] is not b or writes(raw_of(b)) != version:
                    written[n] = buffers[n]

    def slots(self) -> "list[Slot]":
        """List the slots of the module, which are listed anew only when its tree has changed."""
        known, modules, found = self.listed
        if not known or _identities(modules) != known:
            modules, found = list(self.module.modules()), slots(self.module)
            self.listed = _identities(modules), modules, found
        return found

    def swapped(self, state: Named, written: Named, run: Callable[[], Any]) -> Any:
        """Call ``run()`` again on the tensors of the call with ``state``.

        That call may be the one that runs.

        ``written``  buffers as they were before forward wrote to them; new writes are dropped.
        """
        tensors = {**state, **{n: b.clone() for n, b in written.items()}}
        if self.state is state:
            return swapped(self.module, tensors, run)
        with self.lock:
            return swapped(self.module, tensors, run)


def asking(module: nn.Module, units: Sequence[str]) -> None:
    """Wrap the forwards of units: the stage that runs decides whether each is called."""
    for name in units:
        Around(module.get_submodule(name), "forward", _ask, name)


def _ask(
    module: nn.Module, forward: Callable[..., Any], name: str, /, *args: object, **kwargs: object
) -> Any:
    stage = scope().call.stage
    if stage is None:
        return forward(*args, **kwargs)
    return stage.call(name, module, forward, args, kwargs)


def swapped(module: nn.Module, state: Named, run: Callable[[], Any]) -> Any:
    """Call ``run()`` again on the tensors, ``state``, of an earlier call."""
    with promoting(), not_prefetching(), exchanged(slots(module), dict(state)):
        return run()


# ---------------------------------------------------------------- exchange of tensors


# a dict, its key there, and the first name of the tensor that it holds
Slot = tuple[dict[str, Any], str, str]


def _identities(modules: Sequence[nn.Module]) -> list[int]:
    """List the identities of the tensors and submodules that modules hold."""
    held = [d for m in modules for d in (m._parameters, m._buffers, m._modules)]
    return [id(x) for d in held for x in d.values()]


def slots(module: nn.Module) -> list[Slot]:
    """List each place of a module that holds a tensor."""
    first: dict[int, str] = {}
    found = []
    for path, m in module.named_modules():
        for held in (m._parameters, m._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    name = first.setdefault(id(tensor), f"{path}.{key}".lstrip("."))
                    found.append((held, key, name))
    return found


@contextmanager
def exchanged(found: Sequence[Slot], state: dict[str, Tensor]) -> Iterator[None]:
    """Set these tensors in the slots of a module, by their first names, inside the ``with``.

    Tensors that the module assigns meanwhile are put into ``state``.

    Places are restored in reverse: a submodule registered twice gets its own tensors back.
    """
    places = [(held, key, name) for held, key, name in found if name in state]
    own = [held[key] for held, key, _ in places]
    for held, key, name in places:
        held[key] = state[name]
    try:
        yield
    finally:
        for (held, key, name), tensor in zip(reversed(places), reversed(own), strict=True):
            state[name] = held.get(key, state[name])
            held[key] = tensor


# ---------------------------------------------------------------- attributes that forward changes


@contextmanager
def reported(module: nn.Module) -> Iterator[None]:
    """Warn of attributes that change while a module runs, with the name of the submodule.

    Buffers are not included: ``apply`` returns them.  Detected are attributes that are set,
    tensors that are written to, and lists, dictionaries and sets that grow or shrink.

    >>> from shardlib.modules.copies import reported
    >>> layer = nn.Linear(2, 2)
    >>> with warnings.catch_warnings(record=True) as seen:
    ...     warnings.simplefilter("always")
    ...     with reported(layer):
    ...         layer.calls = 1
    >>> str(seen[0].message).split(":")[0]
    "forward changed attribute 'calls' of the module"
    """
    before = _attributes(module)
    yield
    after = _attributes(module)
    changed = [
        at for at in {**before, **after} if before.get(at, _NONE)[1] != after.get(at, _NONE)[1]
    ]
    if changed:
        path, name = changed[0]
        more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        warnings.warn(
            f"forward changed attribute {name!r} of {path or 'the module'}{more}: what runs again, "
            "or on another rank, need not see it; a buffer is handed on by apply.mutable",
            stacklevel=3,
        )


_OWN = frozenset(vars(nn.Module())) | {"_forward_hooks_called"}


def _attributes(module: nn.Module) -> dict[tuple[str, str], tuple[Any, Any]]:
    """Map (submodule, name) to the value, kept so that its id stays unique, and its content."""
    return {
        (path, name): (value, _content(value))
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in _OWN
    }


_NONE = (None, None)


def _content(value: object) -> tuple[Any, Any]:
    """Return the type and value of a number or text; of others the identity, and size or writes."""
    if isinstance(value, int | float | complex | str | tuple | None):
        return type(value), value
    if isinstance(value, Tensor):
        return id(value), writes(raw_of(value))
    return id(value), len(value) if isinstance(value, list | dict | set) else 0
