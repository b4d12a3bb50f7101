"""What joins ranks: as data sheets say, or as it is measured on those that run."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


rates = st.floats(1e-300, 1e300)
links = st.builds(sl.planning.Link, st.floats(0, 1e9), rates)
drawn = st.builds(
    Cluster, rates, rates, st.integers(1, 2**20), links, links, st.text(), rates | st.just(math.inf),
    rates, st.floats(0, 1.0),
    st.dictionaries(st.text(), st.dictionaries(st.integers(1, 2**40), rates, min_size=1), max_size=3),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(drawn)
def test_load_inverts_save(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> None:
    path = tmp_path_factory.getbasetemp() / "drawn.toml"
    cluster.save(path)
    assert Cluster.load(path) == cluster


def test_a_plan_takes_a_file_for_a_name(tmp_path: Path) -> None:
    """What is measured prices a plan, and what a file says does as well."""
    own = Cluster(1e9, 1e10, kernels={"matmul float32": {1: 1e6, 64: 1e12}}, call=1e-3)
    path = str(tmp_path / "own.toml")
    own.save(path)
    mlp, x = torch.nn.Linear(8, 64, device="meta"), torch.empty(32, 8)
    plans = [sl.plan(mlp, x, ranks=1, cluster=c) for c in (path, own, replace(own, call=0.0))]
    assert plans[0].seconds == plans[1].seconds > plans[2].seconds + 1e-3
    assert "matmul float32: 0.001 at 1, 1e+03 at 64" in cluster_of(path).told()


WRONG = {
    "memroy = 1": "no key 'memroy'; the nearest is 'memory'",
    "memory = 1": "has no flops",
    "memory = '8XB'": "memory must be bytes, or '80GB', not '8XB'",
    "flops = 0": "flops must be a number above 0, not 0",
    "flops = true": "flops must be a number above 0",
    "bandwidth = 'fast'": "bandwidth must be a number above 0",
    "node = 1.5": "node must be a whole number",
    "source = 3": "source must be a text",
    "call = -1.0": "call must be seconds, 0 at least",
    "inside = {alpha = 1e-6, gamma = 1}": "inside must be a table of alpha, seconds per message",
    "between = {alpha = 1e-6, beta = 0}": "between must be a table of alpha",
    "inside = 3": "inside must be a table of alpha",
    "kernels = {matmul = 3}": "kernels must be a table of kinds",
    "kernels = {matmul = {large = 1e9}}": "kernels must be a table of kinds",
    "memory = = 1": "Invalid value",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_file_is_named_with_its_key(line: str, tmp_path: Path) -> None:
    """And the fix writes one that is right."""
    path = tmp_path / "lab.toml"
    path.write_text(line)
    with pytest.raises(sl.errors.BadArgument) as e:
        cluster_of(str(path))
    assert WRONG[line] in e.value.message and e.value.message.startswith(str(path))
    with pytest.raises(sl.errors.BadArgument, match="is not replaced"):
        exec(e.value.fix, {"sl": sl})
    path.unlink()
    exec(e.value.fix, {"sl": sl})
    assert cluster_of(str(path)) == Cluster(80e9, 4e14)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(sl.errors.BadArgument, match="No such file"):
        sl.plan(torch.nn.Linear(2, 2), torch.empty(2, 2), ranks=1, cluster=f"{tmp_path}/no.toml")


def _found(ranks: int | None) -> Cluster:
    return measured("h100", ranks=ranks, seconds=0.1)


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
    assert all(c == two[0] for c in two) and two[0].kernels["matmul float32"][16] > 0
    assert two[0].node == 2 and two[0].inside != sheet.inside and two[0].between != sheet.between
    assert two[0].source == "measured between 2 ranks of a node and 2 nodes"
    one = pool.run(_found, 4, x=4)[0]
    assert one.between == sheet.between and one.inside != sheet.inside
    assert one.source.startswith("measured between 4 ranks of a node; between nodes half of")
    assert pool.run(_refused, x=4) == ["sl.planning.measured(ranks=4)"] * 4


KNOWN = {"x": sl.planning.Link(3e-4, 2e-9), "y": sl.planning.Link(2e-5, 5e-8)}


def _by_our_clock() -> dict[str, sl.planning.Link]:
    with sl.trace() as t, pytest.MonkeyPatch.context() as patch:
        seconds = lambda e: KNOWN[e.axis].seconds(float(e.bytes), e.messages)  # noqa: E731
        clock = lambda: sum(seconds(e) for e in t.events if e.axis in KNOWN)  # noqa: E731
        patch.setattr("shardlib.planning.cluster.time", SimpleNamespace(perf_counter=clock))
        return sl.probe(words=1 << 10, repeats=1)


def test_links_of_known_speed_are_measured_as_such(pool: Any) -> None:
    """The clock goes on by the seconds that these links give to what moves."""
    for found in pool.run(_by_our_clock, x=2, y=2):
        for axis, link in KNOWN.items():
            assert found[axis].alpha == pytest.approx(link.alpha, rel=0.02)
            assert found[axis].beta == pytest.approx(link.beta, rel=1e-6)


def probed() -> Any:
    before = sl.probe(words=1 << 12, repeats=2)
    x, w = sl.shard(torch.ones(8, 8), "x y"), sl.shard(torch.ones(8, 8), "x y")
    return {a: (link.alpha, link.beta) for a, link in before.items()}, sl.why("matmul", x, w).chosen


def test_probing_gives_every_rank_the_same_links(pool: Any) -> None:
    found = pool.run(probed, x=2, y=2)
    assert all(f == found[0] for f in found) and set(found[0][0]) == {"x", "y"}
    assert all(alpha > 0 and beta > 0 for alpha, beta in found[0][0].values())
