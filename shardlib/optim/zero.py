"""ZeRO: any optimizer with its state, its gradients and its parameters split over data axes.

``zero(tx, axis)`` stores the parameters' local blocks, of any tensor-parallel layout, end to end
in flat buckets; each rank along ``axis`` updates its own 1/N of every bucket.  A bucket's part is
itself a ShardedTensor, a vector split over the parameters' axes and ``axis``, so the inner
transforms (clipping too) work on ordinary values.

Per step, with P bytes of parameters on a rank: gradients pending over ``axis`` are
reduce-scattered, (N-1)/N P, and parameters gathered, (N-1)/N P.

Source: Rajbhandari et al., arXiv 1910.02054, sections 5.1 (stage 1, P_os) and 5.2 (stage 2, P_g).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from shardlib.errors import BadArgument, ShardError, Unsupported, axes_text
from shardlib.mesh import axes_of
from shardlib.optim.index import IndexCache, ZeroSettings
from shardlib.optim.precision import Master
from shardlib.optim.sink import summing
from shardlib.optim.stage1_2 import SplitState
from shardlib.optim.stage3 import SplitParameters
from shardlib.optim.tiered import Tiers
from shardlib.optim.tiered_step import TieredParameters
from shardlib.optim.transform import Transform, check_transform


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
    tiers: Tiers | None = None,
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
    ``tiers``         at stage 3: parameters, gradients and state are in host memory, and each block
                      is loaded for its computation, see ``Tiers``.

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
    axes = axes_of(axis)
    how = ZeroSettings(tx, axes, stage, bucket_mb, master, reduce_dtype, gather_dtype, inner, keep)
    _check_stage(how, tiers is not None)
    _check_dtypes(how)
    _refuse(
        tiers is not None and (stage != 3 or keep),
        "memory tiers hold the parts of stage 3, which are loaded and gathered again in backward",
        f"sl.optim.zero(tx, axis={axes_text(axes)}, stage=3, tiers=tiers)",
        Unsupported,
    )
    if stage == 0:
        return tx._replace(sink=partial(summing, cache=IndexCache(how)))
    made: Any = SplitState(how)
    if stage == 3:
        made = SplitParameters(how)
    if tiers is not None:
        made = TieredParameters(how, tiers)
    both = {"sink": made.sink, "shard": made.shard, "eager": getattr(made, "eager", None)}
    return Transform(made.init, made.update, tx.trait, made.donate, heeds=True, **both)


def _refuse(wrong: object, message: str, fix: str, kind: type[ShardError] = ShardError) -> None:
    if wrong:
        raise kind(message, op="zero", fix=fix)


def _check_stage(how: ZeroSettings, tiers: bool) -> None:
    """Refuse axes, stages and transforms."""
    _refuse(
        not how.axes and not tiers,
        "there is no axis to split over",
        'sl.optim.zero(tx, axis="data")',
    )
    stage, call = how.stage, f"sl.optim.zero(tx, axis={axes_text(how.axes)}"
    _refuse(
        type(stage) is not int or not 0 <= stage <= 3,
        f"there is no stage {stage}; 1 splits state, 2 gradients too, 3 parameters too",
        f"{call}, stage=2)",
    )
    _refuse(
        not stage and (how.master or how.gather_dtype or how.reduce_dtype),
        "stage 0 splits nothing, so it has no master and no dtypes of its own",
        f"{call}, stage=0)",
    )
    why = "this transform looks at the tree"
    if how.tx.trait is None:
        why = "nobody said what this transform's update of one element depends on"
    _refuse(
        stage and how.tx.trait in (None, "tree"),
        f"{why}, and zero shows it flat vectors of many parameters",
        f'tx = sl.optim.zero(tx._replace(trait="elementwise"), axis={axes_text(how.axes)})  # if that alone',
        Unsupported,
    )
    _refuse(how.inner in how.axes, f"inner={how.inner!r} is in axis= already", f"{call})")
    most = how.bucket_mb
    _refuse(
        most is not None and not (isinstance(most, int | float) and 0 < most < 2**40),
        f"bucket_mb={most!r}: a bucket has more than 0 MiB",
        'sl.optim.zero(tx, axis="data", bucket_mb=4.0)',
    )


def _check_dtypes(how: ZeroSettings) -> None:
    """Refuse masters, and dtypes in which values are sent."""
    call, narrow = f"sl.optim.zero(tx, axis={axes_text(how.axes)}", how.gather_dtype
    _refuse(
        how.master not in (None, "fp32", "bf16+rem"),
        f"master={how.master!r} is none of 'fp32', 'bf16+rem', None",
        f'{call}, master="fp32")',
    )
    for what, dtype in (("reduce_dtype", how.reduce_dtype), ("gather_dtype", narrow)):
        floats = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        _refuse(
            dtype is not None and not floats,
            f"{what}={dtype!r} is no floating point dtype",
            f"{call}, {what}=torch.bfloat16)",
        )
    _refuse(
        narrow is not None and how.master != "fp32",
        "parameters gathered in another dtype than their own lose what no master keeps",
        f'{call}, master="fp32", gather_dtype={narrow})',
    )
    _refuse(
        narrow is not None and how.stage == 3,
        "the parts of stage 3 are gathered in their own dtype",
        f'{call}, stage=3, master="fp32")  # of bfloat16 parameters',
        Unsupported,
    )
