"""A chart of a plan has all of its bytes and seconds."""

from pathlib import Path

import pytest

import shardlib as sl
from shardlib.seeing.plans import PlanChart
from tests.planning.test_joint import CLUSTER, GIVEN, Words, loss


@pytest.mark.parametrize("how", [{"ranks": 2, "recipes": ["megatron1d"]}, {"ranks": 4, "pipe": 2}])
def test_parts_add_up_to_the_plan(how: dict, tmp_path: Path) -> None:
    plan = sl.plan(Words(layers=4), GIVEN, cluster=CLUSTER, loss=loss, **how)
    chart = sl.visualize(plan)
    rows = chart.rows()
    assert max(sum(row.holds.values()) for row in rows) == plan.peak
    assert sum(row.ranks for row in rows) == plan.asked.ranks
    for row in rows:
        assert sum(row.takes.values()) == pytest.approx(plan.seconds)
        assert min([*row.holds.values(), *row.takes.values()]) > -1e-9
    several = PlanChart([plan, plan])
    assert len(several.table()) == 1 + 2 * len(rows) and "<table>" in several._repr_html_()
    several.save(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000
