"""What surrounds a call, kept for code that runs again later.

torch.utils.checkpoint recomputes in backward, when the mesh, ``implicit``, ``saving``,
``algorithm`` and the parameters of ``apply`` are no longer in scope, or on a thread where they
never were.
"""

from collections.abc import Callable
from typing import Any

from shardlib._compat import intercept_recompute
from shardlib.mesh import bind, scope
from shardlib.random import marks, replayed

__all__: list[str] = []


def kept(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, for any time and any thread, with what surrounds this moment; draws are repeated."""
    here, at = scope(), marks()

    def again(*args: Any) -> Any:
        with bind(here), replayed(at):
            return run(*args) if here.again is None else here.again(lambda: run(*args))

    return again


intercept_recompute(kept)
