"""Double ring: keys are sent round inner rings; one hop in ``inner`` crosses to the next ring.

Source: Gu et al., LoongTrain, arXiv 2406.18485, section 4.
"""

import math
from dataclasses import dataclass

from shardlib.ops.attention.case import AttentionCase
from shardlib.ops.attention.choose import register_engine
from shardlib.ops.attention.chunks import once_round
from shardlib.ops.attention.engine import AttentionPlan
from shardlib.ops.attention.engines.routes import Routes

__all__ = ["DoubleRing"]


@dataclass(frozen=True)
class DoubleRing(Routes):
    """Engine that sends keys round rings of ``inner`` ranks, then on to the next ring.

    ``inner``  None: at most sqrt(p).

    >>> import torch, shardlib as sl
    >>> with sl.simulate(s=4), sl.trace() as t:
    ...     x = sl.shard(torch.randn(1, 4, 16, 8), sl.Ring("s", dim=2))
    ...     _ = sl.ring_attention(x, x, x, algorithm=sl.attention.DoubleRing(inner=2))
    >>> t.by_kind(), t.messages
    ({'ppermute': 3072}, 3)
    """

    inner: int | None = None

    name = "double_ring"

    def plan(self, case: AttentionCase) -> AttentionPlan | str:
        p, inner = case.p, self.inner
        if inner is None:
            inner = max((i for i in range(2, math.isqrt(p) + 1) if p % i == 0), default=0)
            if not inner:
                return f"a ring of {p} has no rings within"
        if inner < 1 or p % inner:
            better = next(i for i in range(max(1, min(inner, p)), 0, -1) if p % i == 0)
            return f"an inner ring of {inner} does not divide a ring of {p}; one of {better} does"
        return AttentionPlan(
            DoubleRing(inner), case, once_round(p, case.rows, inner), note=f"of {inner}"
        )


register_engine(DoubleRing(), order=3)
