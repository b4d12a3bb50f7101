"""ZeRO: any optimizer with its state, its gradients and its parameters split over data axes.

``zero(tx, axis)`` stores the parameters' local blocks, of any tensor-parallel layout, end to end
in flat buckets; each rank along ``axis`` updates its own 1/N of every bucket.  A bucket's part is
itself a ShardedTensor, a vector split over the parameters' axes and ``axis``, so the inner
transforms (clipping too) work on ordinary values.

Per step, with P bytes of parameters on a rank: gradients pending over ``axis`` are
reduce-scattered, (N-1)/N P, and parameters gathered, (N-1)/N P.

Source: Rajbhandari et al., arXiv 1910.02054, sections 5.1 (stage 1, P_os) and 5.2 (stage 2, P_g).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardlib.errors import BadArgument
from shardlib.optim.precision import Master
from shardlib.optim.stage0 import SummedGradients
from shardlib.optim.stage1_2 import SplitState
from shardlib.optim.stage3 import SplitParameters
from shardlib.optim.transform import Transform, check_transform
from shardlib.optim.zero_stage import ZeroSettings

__all__ = ["zero"]


def zero(
    tx: Transform,
    axis: str | Sequence[str],
    stage: int = 1,
    *,
    bucket_mb: float | None = None,
    master: Master | None = None,
    reduce_dtype: torch.dtype | None = None,
    gather_dtype: torch.dtype | None = None,
    inner: str | None = None,
    keep: bool = False,
) -> Transform:
    """Split ``tx``'s state over mesh axes; parameters and gradients keep their layouts.

    ``tx``            any transform except those that need the tree's structure, or have no trait.
    ``axis``          one mesh axis or several, the first of them major.  A parameter's state is
                      split over those axes that do not split the parameter already.
    ``stage``         0: nothing is split: ``value_and_grad(loss, into=tx)`` sums gradients over
                      ``axis`` in buckets while backward runs, and returns them in the parameters'
                      layouts.
                      1: the state is split.
                      2: gradients too: ``value_and_grad(loss, into=tx)`` reduce-scatters each
                      bucket while backward still runs, and keeps only parts.
                      3: parameters too: ``params = tx.shard(params)`` keeps only parts, and
                      ``apply`` and ``value_and_grad`` gather them group by group when they are
                      read.
    ``bucket_mb``     the most MiB in one bucket, unless one parameter has more; None: 25.  At stage
                      2 a small model then has several buckets in transit during backward: on slow
                      links this hides them, on ranks that share cores it costs CPU time.
    ``master``        "fp32": also keep the parameters' parts in fp32; "bf16+rem": only the 16 bits
                      that a bfloat16 parameter lacks of fp32.
    ``reduce_dtype``  in which gradients are sent; None: their own; half precision is summed in
                      fp32.
    ``gather_dtype``  in which parameters are sent; None: their own; a narrower one needs a master.
    ``inner``         a second axis, with faster links: parts are cut over both, and gradients are
                      reduced over ``inner`` first, so that only 1/inner of them is sent over
                      ``axis``.
    ``keep``          at stage 3: keep gathered parameters for backward instead of gathering them
                      again.

    Gradients may be ``+ sum(axis)`` (``value_and_grad(..., pending=axis)``: reduce-scattered here),
    in buckets (``value_and_grad(..., into=tx)``), or already summed (sliced, nothing moves).
    Frozen parameters are in no bucket.  Updates equal ``tx``'s own, bit for bit, given the same
    reduced gradient.
    Raises: Unsupported for transforms that need the tree's structure, and for those without a
    trait.

    >>> import shardlib as sl
    >>> with sl.simulate(data=2, x=2):
    ...     params = {"w": sl.shard(torch.ones(4, 6), "x .")}
    ...     tx = sl.optim.zero(sl.optim.adamw(0.1), axis="data")
    ...     state = tx.init(params)
    ...     updates, state = tx.update(params, state, params)
    >>> sl.typeof(updates["w"]), *(sl.typeof(m) for m in state.mu.values())  # one bucket
    ('f32[4@x, 6]', 'f32[256@(x data)]')
    """
    check_transform(tx, "zero")
    if not isinstance(axis, str | Sequence) or not all(isinstance(a, str) for a in axis):
        raise BadArgument(
            f"axis={axis!r} is no name of a mesh axis, nor several",
            op="zero",
            fix='sl.optim.zero(tx, axis="data")',
        )
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    how = ZeroSettings(tx, axes, stage, bucket_mb, master, reduce_dtype, gather_dtype, inner, keep)
    how.check()
    return _STAGES[stage](how).transform()


_STAGES: tuple[Callable[[ZeroSettings], Any], ...] = (
    SummedGradients,
    SplitState,
    SplitState,
    SplitParameters,
)
