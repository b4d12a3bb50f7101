"""Which kernels serve a call: those compiled from ``cuda/``, apex's, or the eager formula.

"auto", the default, takes the compiled kernels on GPUs where they are found, and the eager formula
everywhere else: on CPUs always.  An operation asks in two steps, so that a CPU pays for none of it:

    if not x.is_cpu or active.cpu:  # no call: an attribute of the tensor, one of this module
        if native(x, w): ...
"""

import threading
from types import TracebackType
from typing import Literal

from torch import Tensor

from shardlib.errors import BadArgument
from shardlib.kernels.library import CODES, library
from shardlib.mesh.scope import enter, leave, scope

__all__ = ["Backend", "checked", "chosen", "native", "serving", "use"]

Backend = Literal["auto", "native", "apex", "eager"]
_LOCK = threading.Lock()
_NAMES = ("auto", "native", "apex", "eager")

cpu = 0
"""How many ``use`` are open in this process; while none is, operations on CPUs ask nothing."""


def checked(backend: str, op: str) -> str:
    """Return the name of a backend; refuse a name that is none."""
    if backend not in _NAMES:
        raise BadArgument(
            f"backend={backend!r} is none of {', '.join(map(repr, _NAMES))}",
            op=op,
            fix="sl.kernels.use('auto')",
        )
    return backend


class use:
    """A ``with`` that chooses the kernels of the operations inside it.

    ``backend``  "auto"; "native": those compiled from ``cuda/``, on CPUs too where
                 ``build("host")`` made them; "apex": NVIDIA's apex where it has the operation, else
                 as "auto"; "eager": torch's own operations.
    What has no such kernel (a dtype, a device, nothing built) runs eagerly; ``info`` says why.
    Raises: BadArgument for another name.

    >>> import torch, shardlib as sl; import torch.nn.functional as F
    >>> with sl.simulate(x=2), sl.kernels.use("eager"):
    ...     y = F.rms_norm(sl.shard(torch.ones(2, 4), ". x"), (4,))
    >>> sl.unshard(y)[0]
    tensor([1., 1., 1., 1.])
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = checked(backend, "kernels.use")

    def __enter__(self) -> None:
        global cpu
        enter(self, backend=self.backend)
        with _LOCK:
            cpu += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global cpu
        with _LOCK:
            cpu -= 1
        leave(self)


def chosen(backend: str = "auto") -> str:
    """Return the name of a call's backend: its own, or that of the ``with`` around it."""
    return scope().backend if backend == "auto" else backend


def serving(x: Tensor) -> bool:
    """Say whether there are compiled kernels for the device of ``x``, and they are wanted."""
    backend = scope().backend
    if backend == "eager" or (x.is_cpu and backend != "native"):
        return False
    return library(x.device) is not None


def native(*tensors: Tensor | None) -> bool:
    """Say whether compiled kernels compute with these tensors: fp32 or halves, where they serve."""
    given = [t for t in tensors if t is not None]
    return all(t.dtype in CODES for t in given) and serving(given[0])
