"""What surrounds a call, kept for code that runs again later: torch.utils.checkpoint recomputes in backward,
when the mesh, ``implicit``, ``saving``, ``algorithm`` and the parameters of ``apply`` are no longer in scope.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from shardlib._compat import intercept_recompute
from shardlib.mesh import _SCOPE, bind
from shardlib.ops.registry import _AMBIENT
from shardlib.random import marks, replayed
from shardlib.tensor import PROMOTING, promoting

__all__ = ["inside"]

Runner = Callable[[Callable[[], Any]], Any]


class _Inside(threading.local):
    runner: Runner | None = None


_INSIDE = _Inside()


@contextmanager
def inside(runner: Runner) -> Iterator[None]:
    """Within it, what is kept for later runs by ``runner(run)``."""
    before, _INSIDE.runner = _INSIDE.runner, runner
    try:
        yield
    finally:
        _INSIDE.runner = before


def kept(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, to be called at any time and on any thread, with what surrounds this moment; draws are repeated."""
    lifts = promoting() if PROMOTING.depth else nullcontext()
    mesh, runner, ambient, at = _SCOPE.mesh, _INSIDE.runner, dict(_AMBIENT.__dict__), marks()

    def again(*args: Any) -> Any:
        before = dict(_AMBIENT.__dict__)
        _AMBIENT.__dict__.clear()
        _AMBIENT.__dict__.update(ambient)
        try:
            with bind(mesh), lifts, replayed(at):  # type: ignore[arg-type]
                if runner is None:
                    return run(*args)
                with inside(runner):
                    return runner(lambda: run(*args))
        finally:
            _AMBIENT.__dict__.clear()
            _AMBIENT.__dict__.update(before)

    return again


intercept_recompute(kept)
