"""Ring attention: whole blocks of keys are sent once round the ring, whatever the mask.

Source: Liu et al., arXiv 2310.01889.
"""

from dataclasses import dataclass

from shardlib.ops.attention.case import AttentionCase
from shardlib.ops.attention.choose import register_engine
from shardlib.ops.attention.chunks import once_round
from shardlib.ops.attention.engine import AttentionPlan
from shardlib.ops.attention.engines.routes import Routes

__all__ = ["OneWay"]


@dataclass(frozen=True)
class OneWay(Routes):
    """Engine that sends each block of keys to every other rank, neighbour by neighbour.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(s=4), sl.trace() as t:
    ...     x = sl.shard(torch.randn(1, 4, 16, 8), sl.Ring("s", dim=2))
    ...     _ = sl.ring_attention(x, x, x, algorithm=sl.attention.OneWay())
    >>> t.by_kind(), t.messages
    ({'ppermute': 3072}, 3)
    """

    name = "ring"

    def plan(self, case: AttentionCase) -> AttentionPlan:
        return AttentionPlan(self, case, once_round(case.p, case.rows))


register_engine(OneWay(), order=0)
