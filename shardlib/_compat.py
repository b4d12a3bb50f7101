"""The only file that touches private torch API, or papers over a rename.

Each entry: what it is, the versions it was seen in, and what to do when it goes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardlib.errors import Unsupported

__all__ = [
    "DispatchMode",
    "all_gather_single",
    "attention_op",
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

# The base of contexts that see every aten call.  Seen in 2.11, 2.13 and 2.15 under this underscored
# name; torch's page "Extending PyTorch" documents it.  When it goes: nothing counts allocations, and
# attention's peak memory is not predicted.
DispatchMode: Any = TorchDispatchMode


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


_ATTENTION = {  # op -> the leading names of its arguments
    "_scaled_dot_product_flash_attention_for_cpu": "query key value dropout_p is_causal attn_mask scale",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "grad_out query key value out logsumexp dropout_p "
    "is_causal attn_mask scale",
    "_scaled_dot_product_flash_attention": "query key value dropout_p is_causal return_debug_mask scale",
    "_scaled_dot_product_flash_attention_backward": "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q "
    "max_k dropout_p is_causal philox_seed philox_offset scale",
    "_scaled_dot_product_efficient_attention": "query key value attn_bias compute_log_sumexp dropout_p is_causal scale",
    "_scaled_dot_product_efficient_attention_backward": "grad_out_ query key value attn_bias out logsumexp philox_seed "
    "philox_offset dropout_p grad_input_mask is_causal scale",
    "_scaled_dot_product_cudnn_attention": "query key value attn_bias compute_log_sumexp dropout_p is_causal "
    "return_debug_mask scale",
    "_scaled_dot_product_cudnn_attention_backward": "grad_out query key value out logsumexp philox_seed philox_offset "
    "attn_bias cum_seq_q cum_seq_k max_q max_k dropout_p is_causal scale",
}


def attention_op(name: str) -> Callable[..., Any] | None:
    """One of aten's fused attention ops, which give the log-sum-exp that a ring merges by; None where it changed.

    Seen in 2.11, 2.13 and 2.15 with the arguments in ``_ATTENTION``, which are compared by name.
    When one goes, or its arguments change: the kernel that needs it is not offered, and the math
    block of ops/attention/kernels.py runs.
    """
    op = getattr(torch.ops.aten, name, None)
    if op is None:
        return None
    found = [a.name for a in op.default._schema.arguments]
    return op if found == _ATTENTION[name].split() else None
