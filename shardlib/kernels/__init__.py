"""Fused kernels: those compiled from ``cuda/``, apex's, and the eager formula of each.

Every operation is a ``torch.library.custom_op`` (``torch.ops.shardlib``) with a fake, a gradient
where it is differentiable, and an eager formula, which runs on CPUs and wherever no kernel is
built.  The library's operators call the kernels that are available; a user calls nothing.
"""

from shardlib.kernels.active import use
from shardlib.kernels.info import info
from shardlib.kernels.library import build

__all__ = ["build", "info", "use"]
