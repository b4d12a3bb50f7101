"""Kernel selection for a call: those compiled from ``cuda/``, apex's, or the eager formula.

"auto", the default, takes compiled kernels on GPUs where they are found, and the eager formula
everywhere else, always on CPUs.  The test has two steps, so that a call on a CPU costs nothing:

    if not x.is_cpu or active.cpu:  # no call: an attribute of the tensor, one of this module
        if native(x, w): ...
"""

import threading
from typing import Literal

from torch import Tensor

from shardlib.errors import BadArgument
from shardlib.kernels.library import CODES, library
from shardlib.mesh.scope import enter, leave, scope

Backend = Literal["auto", "native", "apex", "eager"]
_LOCK = threading.Lock()
_NAMES = ("auto", "native", "apex", "eager")

cpu = 0
"""Number of ``use`` contexts open in this process; at 0, operations on CPUs skip the lookup."""


def checked(backend: str, op: str) -> str:
    """Return the name of a backend; refuse an unknown name."""
    if backend not in _NAMES:
        raise BadArgument(
            f"backend={backend!r} is none of {', '.join(map(repr, _NAMES))}",
            op=op,
            fix="sl.kernels.use('auto')",
        )
    return backend


class use:
    """A context manager that chooses the kernels of the operations inside it.

    ``backend``  "auto"; "native": those compiled from ``cuda/``, on CPUs too where
                 ``build("host")`` made them; "apex": NVIDIA's apex where it has the operation, else
                 as "auto"; "eager": torch's own operations.
    Calls without such a kernel (dtype, device, nothing built) run eagerly; ``info`` has the reason.
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

    def __exit__(self, *_: object) -> None:
        global cpu
        with _LOCK:
            cpu -= 1
        leave(self)


def chosen(backend: str = "auto") -> str:
    """Return the backend of a call: its own, or that of the enclosing ``use``."""
    return scope().policy.backend if backend == "auto" else backend


def serving(x: Tensor) -> bool:
    """Return whether kernels are compiled for the device of ``x`` and enabled."""
    backend = scope().policy.backend
    if backend == "eager" or (x.is_cpu and backend != "native"):
        return False
    return library(x.device) is not None


def native(*tensors: Tensor | None) -> bool:
    """Return whether compiled kernels take these tensors: fp32 or half, on such a device."""
    given = [t for t in tensors if t is not None]
    return all(t.dtype in CODES for t in given) and serving(given[0])
