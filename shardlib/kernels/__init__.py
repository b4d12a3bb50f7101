"""Fused kernels: those compiled from ``cuda/``, apex's, and the eager formula of each.

Every operation is a ``torch.library.custom_op`` (``torch.ops.shardlib``) with a fake, a gradient
where it can have one, and its eager formula, which is what runs on CPUs and wherever nothing is
built.  The library's operators use them where they are: nothing has to be called.
"""

from shardlib.kernels.active import use
from shardlib.kernels.info import info
from shardlib.kernels.library import build

__all__ = ["build", "info", "use"]
