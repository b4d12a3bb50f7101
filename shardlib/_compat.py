"""The only file that touches private torch API, or papers over a rename.

Each entry: what it is, the versions it was seen in, and what to do when it goes.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

__all__ = ["all_gather_single", "reduce_scatter_single"]

# torch 2.13 renames all_gather_into_tensor to all_gather_single and reduce_scatter_tensor to
# reduce_scatter_single (same arguments) and warns on the old names; 2.11 has the old ones only.
# When 2.13 is the oldest supported version: call dist's new names directly.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
