"""The only file that touches private torch API, or papers over a rename.

Each entry: what it is, the versions it was seen in, and what to do when it goes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardlib.errors import Unsupported

__all__ = [
    "all_gather_single",
    "dtensor_handlers",
    "is_strided",
    "no_redistribution",
    "no_torch_function",
    "reduce_scatter_single",
]

# torch 2.13 renames all_gather_into_tensor to all_gather_single and reduce_scatter_tensor to
# reduce_scatter_single (same arguments) and warns on the old names; 2.11 has the old ones only.
# When 2.13 is the oldest supported version: call dist's new names directly.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

# The context in which a subclass's own __torch_function__ is not asked.  Seen in 2.11 and 2.13;
# torch's page "Extending PyTorch" names it.  When it goes: Tensor.__torch_function__'s own body.
no_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass


def dtensor_handlers() -> dict[Any, Callable[..., Any]]:
    """The table that DTensor's dispatcher consults before its own rules.

    Seen in 2.11 and 2.13 as ``DTensor._op_dispatcher._custom_op_handlers``; torch's context
    parallel replaces the dict, so it is looked up at each use.  When it goes:
    ``sl.dtensor_rules`` raises Unsupported, and ``sl.from_dtensor`` remains.
    """
    dispatcher = getattr(DTensor, "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", None)
    if handlers is None:
        raise Unsupported(
            "this torch has no handler table for DTensor",
            op="dtensor_rules",
            fix="sl.from_dtensor(a) @ sl.from_dtensor(b)",
        )
    return handlers


def no_redistribution() -> AbstractContextManager[Any] | None:
    """A context in which DTensor refuses to move data on its own, or None where torch has none.

    Seen in 2.11 and 2.13 as ``torch.distributed.tensor._utils.ExplicitRedistributionContext``.
    When it goes: the DTensor fallback is off and the operation raises NoRule.
    """
    try:
        from torch.distributed.tensor._utils import ExplicitRedistributionContext
    except ImportError:
        return None
    return ExplicitRedistributionContext(strict=True)


def is_strided(placement: Any) -> bool:
    """Whether a placement is DTensor's strided shard, which nests axes against mesh order.

    Seen in 2.11 and 2.13 as ``_StridedShard``, in 2.13 no longer a Shard.  Told by its name, so
    nothing breaks when it goes.
    """
    return type(placement).__name__ == "_StridedShard"
