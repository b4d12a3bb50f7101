"""A chart has a row for each rank and a column for each tick of the schedule's timeline."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardlib as sl
from shardlib.pipeline.schedules import Action, schedule, timeline
from shardlib.seeing import Timeline

CASES = [
    ("gpipe", 2, 12, 2),
    ("1f1b", 4, 8, 1),
    ("zb", 3, 4, 1),
    ("zbv", 2, 5, 2),
    ("zb", 11, 11, 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_action_stands_in_the_column_of_its_tick(case: tuple[str, int, int, int]) -> None:
    s = schedule(*case)
    line, (title, *rows) = timeline(s), str(sl.visualize(s)).splitlines()
    assert f"{line.seconds:.0f} ticks, {100 * line.bubble:.1f} % idle" in title
    labels = {str(a) if s.stages > s.size else f"{a.kind}{a.micro}" for a in line.begins}
    width, first = max(map(len, labels)) + 1, len(str(s.size - 1)) + 2
    for rank, row in enumerate(rows):
        assert int(row[: first - 1]) == rank
        found = {}
        for cell in re.finditer(r"(\w[\w.]*)(-*)", row[first:]):
            begin, ragged = divmod(cell.start(), width)
            ticks = -(-len(cell[0]) // width)
            assert not ragged and (cell[2] == "" or len(cell[0]) == ticks * width - 1)
            found[cell[1]] = begin, begin + ticks
        assert len(found) == len(s.tables[rank])
        for a in s.tables[rank]:
            label = str(a) if s.stages > s.size else f"{a.kind}{a.micro}"
            assert found[label] == (line.begins[a], line.ends[a])
        assert row[first:].split().count(".") == line.seconds - line.busy[rank]


def test_a_notebook_shows_as_many_columns_as_ticks() -> None:
    s = schedule("interleaved", 2, 4, 2)
    table = sl.visualize(s)._repr_html_()
    for row in table.split("<tr>")[1:]:
        assert sum(map(int, re.findall(r"colspan='(\d)'", row))) == timeline(s).seconds


def test_a_picture_is_written(tmp_path: Path) -> None:
    chart = sl.visualize(schedule("zbv", 2, 3))
    chart.save(tmp_path / "zbv.svg")
    assert (tmp_path / "zbv.svg").read_text().count("<path") > 36
    assert sl.visualize(chart) is chart


def _recorded(steps: int = 1) -> Timeline:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    how = sl.Stages("pipe", schedule="zbv")
    apply, params = sl.parallelize(net, [("*", "...")], inputs={"input": "data ."}, stages=how)
    step = sl.value_and_grad(lambda p, x: apply(p, x).square().mean(), microbatches=3)
    x = sl.shard(torch.randn(12, 4), "data .")
    with sl.seeing.timeline() as line:
        for _ in range(steps):
            step(params, x)
    return line.gathered()


def test_a_recorded_step_has_each_action_on_its_rank_after_what_it_needs(pool: Any) -> None:
    line = pool.run(_recorded, pipe=2, data=2)[0]
    chart, table = sl.seeing.step_chart(line), schedule("zbv", 2, 3)
    assert chart.schedule == table and len(chart.measured) == 4
    ends: list[dict[Action, tuple[float, float]]] = [{}, {}]
    for rank, row in chart.measured.items():
        place, copy = divmod(int(rank), 2)
        assert tuple(a for a, _, _ in row) == table.tables[place]
        times = [t for _, *both in row for t in both]
        assert times == sorted(times)
        ends[copy] |= {a: (begin, end) for a, begin, end in row}
    for actions in ends:
        for a, (begin, _) in actions.items():
            if a.kind == "F" and a.stage:
                # it is sent before its action's end; clocks of processes of one machine
                assert begin > actions[a._replace(stage=a.stage - 1)][0] - 1e-3
    busy = [sum(end - begin for _, begin, end in row) for row in chart.measured.values()]
    assert sum(busy) / 2 == pytest.approx(sum(chart.predicted.busy))
    assert chart.seconds == max(end for row in chart.measured.values() for *_, end in row)
    assert f"measured: {1e3 * chart.seconds:.4g} ms" in str(chart) and "W " in str(chart)


def test_the_last_step_of_simulated_ranks_is_predicted_alone(tmp_path: Path) -> None:
    with sl.simulate(pipe=2, data=2):
        line = _recorded(steps=2)
    chart = sl.seeing.step_chart(line)
    assert chart.schedule == schedule("zbv", 2, 3) and not chart.measured
    assert chart.json()["predicted"]["seconds"] == chart.predicted.seconds > 0
    line.save(tmp_path / "step.json")
    assert str(sl.seeing.step_chart(Timeline.read(tmp_path / "step.json"))) == str(chart)
    chart.save(tmp_path / "step.svg")
    assert (tmp_path / "step.svg").read_text().count("<path") > 36
    lone = Timeline([s for s in line.spans if s.action[:1] != [0]], line.ranks)
    with pytest.raises(sl.errors.BadArgument, match="all its stages"):
        sl.seeing.step_chart(lone)
