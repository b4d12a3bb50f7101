"""Every rank measures the same links."""

from typing import Any

import torch

import shardlib as sl


def probed() -> Any:
    before = sl.probe(words=1 << 12, repeats=2)
    x, w = sl.shard(torch.ones(8, 8), "x y"), sl.shard(torch.ones(8, 8), "x y")
    return {a: (link.alpha, link.beta) for a, link in before.items()}, sl.why("matmul", x, w).chosen


def test_probing_gives_every_rank_the_same_links(pool: Any) -> None:
    found = pool.run(probed, x=2, y=2)
    assert all(f == found[0] for f in found) and set(found[0][0]) == {"x", "y"}
    assert all(alpha > 0 and beta > 0 for alpha, beta in found[0][0].values())
