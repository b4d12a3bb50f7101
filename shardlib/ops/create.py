"""New tensors made from a sharded one: nothing of it is read but dtype, device and mesh, so the result is whole."""

from typing import Any

from torch import Tensor

from shardlib.ops.declare import Bound, declare, slots
from shardlib.ops.dims import Labels
from shardlib.tensor import implements, replicated


@implements(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor)
def new(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    return replicated(func(x.raw.new_empty(0), *args[1:], **kwargs), x.mesh)


def _grid(b: Bound) -> Labels:
    """Each operand has a dimension of the result to itself."""
    return {s.at: (k,) * s.ndim for k, s in enumerate(slots(b["tensors"]))}


declare("meshgrid(*tensors: tensor, indexing=None)", _grid)
