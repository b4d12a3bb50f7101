"""Sharded tensors: layout records, operator dispatch, gradients, and plain tensors in calls."""

from shardlib.tensor.grad_coalescing import Together, together_of
from shardlib.tensor.gradients import (
    Wide,
    gradient_of,
    gradient_place,
    made_of,
    mapped,
    of_pending,
    real_axes,
    settle,
    shared,
    to_pending,
    total,
    varied_wide,
    vary,
)
from shardlib.tensor.lifting import (
    constants,
    leaf_block,
    lift,
    one_copy,
    promoting,
    refuse_blocks,
    replicated,
    whole_now,
)
from shardlib.tensor.place import Place
from shardlib.tensor.tensor import (
    TABLE,
    Facts,
    ShardedTensor,
    Unfit,
    block_strides,
    blockwise,
    call_error,
    has_padding,
    heard,
    implements,
    is_dense,
    layout_of,
    local_call,
    named_tensors,
    no_implementation,
    no_tensor,
    no_trace,
    no_transform,
    on_shapes,
    partial_escape,
    raw_of,
    refuse_arrays,
    refuse_sums,
    refuse_trace,
    torch_refuses,
    type_or_class,
    typeof,
)
from shardlib.tensor.weight_gradients import WeightGradients
