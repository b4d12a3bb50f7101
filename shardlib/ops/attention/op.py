"""``ring_attention``: check the operands, choose a plan, run its engine; each step has a file."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

from torch import Tensor

from shardlib.layouts import LayoutLike
from shardlib.mesh import scope
from shardlib.ops.attention.case import case_of_values
from shardlib.ops.attention.choose import planned
from shardlib.ops.attention.engine import AttentionPlan, Engine
from shardlib.ops.attention.engines import Canonical
from shardlib.ops.attention.function import Options, attend
from shardlib.ops.attention.masks import Mask, as_mask
from shardlib.ops.attention.operands import attention_case, entered
from shardlib.tensor import ShardedTensor, heard

__all__ = ["attention_plan", "ring_attention"]


Q = TypeVar("Q", bound=Tensor)


@overload
def ring_attention(
    q: Q,
    k: Tensor,
    v: Tensor,
    *,
    layout: LayoutLike | None = None,
    kv_layout: LayoutLike | None = None,
    mask: Mask | Callable[..., Tensor] | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: float | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    algorithm: str | Engine = "auto",
    kernel: str = "auto",
    canonical: bool | int = False,
) -> Q: ...
@overload
def ring_attention(
    q: Q,
    k: Tensor,
    v: Tensor,
    *,
    layout: LayoutLike | None = None,
    kv_layout: LayoutLike | None = None,
    mask: Mask | Callable[..., Tensor] | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: float | None = None,
    scale: float | None = None,
    return_lse: Literal[True],
    algorithm: str | Engine = "auto",
    kernel: str = "auto",
    canonical: bool | int = False,
) -> tuple[Q, Q]: ...
@overload
def ring_attention(
    q: Q,
    k: Tensor,
    v: Tensor,
    *,
    layout: LayoutLike | None = None,
    kv_layout: LayoutLike | None = None,
    mask: Mask | Callable[..., Tensor] | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: float | None = None,
    scale: float | None = None,
    return_lse: bool,
    algorithm: str | Engine = "auto",
    kernel: str = "auto",
    canonical: bool | int = False,
) -> Q | tuple[Q, Q]: ...
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: LayoutLike | None = None,
    kv_layout: LayoutLike | None = None,
    mask: Mask | Callable[..., Tensor] | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    dropout: float | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    algorithm: str | Engine = "auto",
    kernel: str = "auto",
    canonical: bool | int = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend over a sequence that is split over a ring of ranks, as if it were whole.

    Shapes: q [b, h, s, d], k [b, g, t, d], v [b, g, t, e] -> [b, h, s, e]; g divides h (only the g
            heads of keys are sent).  Batch and heads may be split too, alike in all three.
    ``layout``     of the sequence, for local blocks (inside shard_map); sharded tensors have their
                   own.
    ``kv_layout``  that of the keys, if it differs: any order, any length.
    ``mask``       a value in global positions: ``Causal() & Documents(cu_seqlens)``, or your own
                   ``Mask``; or a function (b, h, q, k).
    ``bias``       [.., s, t], added to the scores, or booleans; may be learned.
    ``sink``       [h], a score per head that takes part in the softmax and attends to nothing; may
                   be learned.
    ``dropout``    of the probabilities, drawn by global position: the same for every ring.
    ``scale``      of the scores, 1 / sqrt(d) if None.
    ``return_lse`` also return log-sum-exp of the scores [b, h, s], differentiable.
    ``algorithm``  "auto": the cheapest plan; or a name: ``sl.why("attention", q, k, v)`` lists
                   them; or an engine with its arguments:
                   ``sl.attention.AllGather(heads=1)``.
    ``kernel``     "auto", "math", "cpu", "flash", "efficient", "cudnn".
    ``canonical``  the same bits, out and gradients, for every ring size and layout: everything is
                   gathered and computed in tiles of 64 rows (or of ``canonical`` rows), at twice
                   the work.

    Rows without allowed keys give 0, with gradient 0.
    Moves:  the transfers of the plan: ``sl.planning.attention_plan(...)``.
    Raises: Unsupported where the algorithm does not support the
            mask or an argument; nothing is ignored.
    Source: Li et al., arXiv 2105.13120; Liu et al., arXiv 2310.01889.

    >>> import torch, shardlib as sl
    >>> q = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    >>> with sl.simulate(s=4):
    ...     x = sl.shard(q, sl.Ring("s", dim=2, schedule="zigzag"))
    ...     out = sl.unshard(sl.ring_attention(x, x, x, mask=sl.masks.Causal()))
    >>> dense = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> torch.allclose(out, dense)
    True
    """
    if canonical:
        algorithm = Canonical() if canonical is True else Canonical(int(canonical))
    options = Options(bias, sink, dropout, scale, return_lse, kernel)
    return heard(_attended, ring_attention, q, k, v, layout, kv_layout, mask, algorithm, options)


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: LayoutLike | None,
    kv_layout: LayoutLike | None,
    mask: Mask | Callable[..., Tensor] | None,
    algorithm: str | Engine,
    options: Options,
) -> Any:
    values = entered(q, k, v, layout, kv_layout)
    biased = options.bias is not None
    case = case_of_values(values.q, values.k, values.v, as_mask(mask), biased=biased)
    match = planned(case, algorithm)
    if (watcher := scope().listeners.watcher) is not None:
        watcher.chose(match)
    out, lse = attend(values.q, values.k, values.v, match.run, options)
    leave = values.leave
    if leave is None:
        return (out, lse) if options.return_lse else out
    return (leave(out), leave(lse)) if options.return_lse else leave(out)


def attention_plan(
    q: ShardedTensor,
    k: ShardedTensor,
    v: ShardedTensor,
    mask: Mask | None = None,
    algorithm: str | Engine = "auto",
) -> AttentionPlan:
    """Plan a ``ring_attention`` of these operands: steps, transfers, bytes; nothing runs.

    Use it under ``sl.record`` for a mesh of any size.

    >>> import torch, shardlib as sl
    >>> with sl.record(s=64):
    ...     q = torch.empty(1, 8, 65536, 64, device="meta")
    ...     q = sl.shard(q, sl.Ring("s", dim=2, schedule="zigzag"))
    ...     plan = attention_plan(q, q, q, sl.masks.Causal())
    >>> plan.algorithm, plan.steps
    ('ring', 63)
    """
    return planned(attention_case(q, k, v, mask), algorithm).run
