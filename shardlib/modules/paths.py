"""Module paths: the name of the submodule whose forward runs, tracked by global forward hooks."""

import sys
import threading
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

_FROM = "_shardlib_module"
"""Attribute of an error: the submodule in which it was raised."""


class Paths:
    """Tracker of forward calls; ``now()`` is the name of the submodule that runs.

    Names are those of ``named_modules`` of the outermost module that was called, "" for that module
    or outside of any; a region that is recomputed in backward keeps its name.  Hooks are
    registered only while it is open.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    >>> seen = []
    >>> handle = net[1][0].register_forward_pre_hook(lambda *_: seen.append(paths.now()))
    >>> with Paths() as paths:
    ...     _ = net(torch.ones(1, 2))
    >>> seen, paths.now()
    (['1.0'], '')
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        # kept alive, so that their ids stay unique
        self.roots: list[nn.Module] = []
        self.here = threading.local()
        self.hooks: list[Any] = []

    def __enter__(self) -> "Paths":
        self.hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()
        self.here = threading.local()

    def now(self) -> str:
        """Return the name of the submodule whose forward runs in this thread."""
        stack = self._stack()
        return stack[-1] if stack else ""

    def where(self, error: BaseException) -> str:
        """Return the name of the innermost submodule in which an error was raised."""
        return error.__dict__.get(_FROM, "")

    def _stack(self) -> list[str]:
        if not hasattr(self.here, "stack"):
            self.here.stack = []
        return self.here.stack

    def _enter(self, module: nn.Module, _: object) -> None:
        stack = self._stack()
        if id(module) not in self.names:
            above = []
            if stack:
                above = [stack[-1], type(module).__name__]
            self.roots.append(module)
            for name, child in module.named_modules():
                self.names.setdefault(id(child), ".".join(filter(None, [*above, name])))
        stack.append(self.names[id(module)])

    def _leave(self, *_: object) -> None:
        if stack := self._stack():
            # torch runs this hook while an error propagates
            error = sys.exc_info()[1]
            if error is not None:
                # stored on the error: a reference here would keep its frames
                error.__dict__.setdefault(_FROM, stack[-1])
            stack.pop()
