"""Halo attention: ranks send only the rows within the neighbours' windows, for any ring size."""

from dataclasses import dataclass

from shardlib.ops.attention.case import AttentionCase
from shardlib.ops.attention.choose import register_engine
from shardlib.ops.attention.engine import AttentionPlan
from shardlib.ops.attention.engines.both_ways import both_ways
from shardlib.ops.attention.engines.routes import Routes

__all__ = ["Halo"]


@dataclass(frozen=True)
class Halo(Routes):
    """Engine with the routes of BothWays, refused if one of them goes all round the ring.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(s=4), sl.trace() as t:
    ...     x = sl.shard(torch.randn(1, 4, 16, 8), sl.Ring("s", dim=2))
    ...     mask = sl.masks.Causal() & sl.masks.Window(4)
    ...     _ = sl.ring_attention(x, x, x, mask=mask, algorithm=sl.attention.Halo())
    >>> t.by_kind(), t.messages
    ({'ppermute': 768}, 1)
    """

    name = "halo"

    def plan(self, case: AttentionCase) -> AttentionPlan | str:
        p, chunks = case.p, both_ways(case.q_runs, case.k_runs, case.mask, case.rows)
        everywhere = [None not in chunk.at[-1] and len(chunk.at) >= p // 2 for chunk in chunks]
        if p > 2 and any(everywhere):
            return (
                "a halo needs a mask that ends near the diagonal, and neighbours that hold "
                "neighbouring positions"
            )
        return AttentionPlan(self, case, chunks)


register_engine(Halo(), order=2)
