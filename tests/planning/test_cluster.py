"""What joins ranks: as data sheets say, or as it is measured on those that run."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.planning.cluster import CLUSTERS, Cluster, cluster_of, measured


def test_an_axis_has_the_links_of_the_ranks_it_joins() -> None:
    c = replace(CLUSTERS["h100"], node=4)
    assert c.links({"data": 2, "x": 4}) == {"data": c.between, "x": c.inside}
    assert c.links({"x": 8}) == {"x": c.between}


def test_names_and_mistakes() -> None:
    own = Cluster(memory=1.0, flops=1.0)
    assert cluster_of(own) is own and cluster_of("a100").memory == 80e9
    with pytest.raises(sl.errors.BadArgument, match="no cluster 'h10'"):
        cluster_of("h10")


def _found(ranks: int | None) -> Cluster:
    return measured("h100", ranks=ranks)


def _refused() -> str:
    try:
        measured("h100", ranks=3)
    except sl.errors.BadArgument as e:
        return e.fix
    return ""


def test_real_ranks_measure_their_own_links(pool: Any) -> None:
    """All ranks have one answer; what joins nothing here stays what it was."""
    sheet = CLUSTERS["h100"]
    two = pool.run(_found, 2, x=4)
    assert all(c == two[0] for c in two)
    assert two[0].node == 2 and two[0].inside != sheet.inside and two[0].between != sheet.between
    assert two[0].source == "measured between 2 ranks of a node and 2 nodes"
    one = pool.run(_found, 4, x=4)[0]
    assert one.between == sheet.between and one.inside != sheet.inside
    assert one.source.startswith("measured between 4 ranks of a node; between nodes half of")
    assert pool.run(_refused, x=4) == ["sl.planning.measured(ranks=4)"] * 4


def probed() -> Any:
    before = sl.probe(words=1 << 12, repeats=2)
    x, w = sl.shard(torch.ones(8, 8), "x y"), sl.shard(torch.ones(8, 8), "x y")
    return {a: (link.alpha, link.beta) for a, link in before.items()}, sl.why("matmul", x, w).chosen


def test_probing_gives_every_rank_the_same_links(pool: Any) -> None:
    found = pool.run(probed, x=2, y=2)
    assert all(f == found[0] for f in found) and set(found[0][0]) == {"x", "y"}
    assert all(alpha > 0 and beta > 0 for alpha, beta in found[0][0].values())
