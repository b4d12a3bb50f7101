"""A chart has a row for each rank and a column for each tick of the schedule's timeline."""

import re
from pathlib import Path

import pytest

import shardlib as sl
from shardlib.pipeline.schedules import schedule, timeline

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
