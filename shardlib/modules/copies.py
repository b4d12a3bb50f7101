"""Copies of a module's tree, without weights: one per thread that runs a call.

A call sets its tensors in a copy and runs its forward, so threads that call the same ``apply`` need
a copy each.  Backward of a remat region, or a transform of torch.func, runs a part of the call
again, on the same tensors.  ``copy.deepcopy`` and ``pickle`` keep the first copy alone.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from shardlib.collectives import checking
from shardlib.layouts import Layout
from shardlib.modules.attributes import reported
from shardlib.modules.experts import divided, standing_in
from shardlib.modules.remat import remembering, version_of
from shardlib.modules.weightless_copy import exchanged, skeleton
from shardlib.ops.matmul.prefetch import not_prefetching
from shardlib.tensor import promoting

__all__ = ["Copies", "Copy", "swapped"]


class Copies:
    """Copies of a module's tree, of which a call takes one that no other thread runs on.

    ``module``  the first: its hooks, attributes and training modes count for all.
    """

    def __init__(
        self,
        module: nn.Module,
        buffers: Mapping[str, Tensor],
        layouts: dict[str, Layout],
        remat: Mapping[str, str],
    ) -> None:
        self.module = skeleton(module, buffers)
        self.bare = skeleton(self.module)  # never run: the template of further copies
        self.layouts, self.remat = layouts, remat
        self.made = [Copy(self.module, layouts, remat)]
        self.modes = [
            TrainingMode(m, own)
            for m, own in zip(module.modules(), self.module.modules(), strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Keep the first tree; it no longer follows the caller's module."""
        self._follow()
        return {**self.__dict__, "made": [], "modes": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.made = [Copy(self.module, self.layouts, {})]  # its regions of remat are in the tree

    def _follow(self) -> None:
        for mode in self.modes:
            mode.follow()

    @contextmanager
    def taken(self) -> Iterator["Copy"]:
        """Take a copy of the tree for a call, with current training modes."""
        self._follow()
        copy = next((c for c in self.made if c.lock.acquire(blocking=False)), None)
        if copy is None:
            copy = Copy(skeleton(self.bare), self.layouts, self.remat)
            copy.lock.acquire(blocking=False)  # before it is shared, so this cannot fail
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

    ``stacks``  its modules of experts that are split.
    ``state``   the tensors of the call that runs.
    """

    def __init__(
        self, module: nn.Module, layouts: dict[str, Layout], remat: Mapping[str, str]
    ) -> None:
        self.module, self.stacks = module, divided(module, layouts)
        self.lock = threading.RLock()
        self.state: Any = None
        remembering(module, remat)

    def run(
        self,
        state: dict[str, Tensor],
        buffers: Mapping[str, Tensor],
        written: dict[str, Tensor],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run forward on the tensors of ``state``, which gets the buffers that it assigns.

        ``written``  gets the values before the call of the buffers that forward changed.
        """
        before = {n: (state[n], version_of(state[n])) for n in buffers}
        watch = nullcontext() if checking() is None else reported(self.module)
        self.state = state
        try:
            with exchanged(self.module, state), watch:
                return self.module(*args, **kwargs)
        finally:
            self.state = None
            for n, (b, version) in before.items():
                if state[n] is not b or version_of(b) != version:
                    written[n] = buffers[n]

    def swapped(
        self, state: Mapping[str, Tensor], written: Mapping[str, Tensor], run: Callable[[], Any]
    ) -> Any:
        """Call ``run()`` again on the tensors of the call with ``state``.

        That call may be the one that runs.

        ``written``  buffers as they were before forward wrote to them; new writes are dropped.
        """
        tensors = {**state, **{n: b.clone() for n, b in written.items()}}
        if self.state is state:
            return swapped(self.module, tensors, self.stacks, run)
        with self.lock:
            return swapped(self.module, tensors, self.stacks, run)


class TrainingMode:
    """Training mode of the caller's module, which its copy follows."""

    def __init__(self, module: nn.Module, copy: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.copy = copy
        self.known = module.training

    def follow(self) -> None:
        """Set the copy to the mode if the caller changed it since the last call."""
        module = self.module()
        if module is not None and module.training is not self.known:
            self.copy.training = self.known = module.training


def swapped(
    module: nn.Module,
    state: Mapping[str, Tensor],
    stacks: Sequence[nn.Module],
    run: Callable[[], Any],
) -> Any:
    """Call ``run()`` again on the tensors, ``state``, of an earlier call."""
    with promoting(), not_prefetching(), standing_in(stacks), exchanged(module, dict(state)):
        return run()
