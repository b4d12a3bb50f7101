"""Charts of a pipeline's schedule: a row for each rank, a column for each tick."""

import html
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from shardlib.errors import BadArgument
from shardlib.pipeline.schedules import Action, PipelineSchedule, PipelineTimeline, timeline
from shardlib.seeing.canvas import Picture, Pictured, Pieces, Shown, canvas, colours, tint
from shardlib.seeing.timeline import Span, Timeline

_NUMBERS = {"F": 0, "B": 1, "I": 1, "W": 2}  # of colours


@dataclass(frozen=True, repr=False)
class ScheduleChart(Shown, Pictured):
    """A chart of a schedule in ticks: B takes two, and F, I and W one each.

    A cell names an action, its stage only where a rank has several; ``.`` is an idle tick.

    >>> from shardlib.pipeline.schedules import schedule
    >>> ScheduleChart(schedule("zb", 2, 2))
    zb of 2 ranks, 2 micro-batches: 7 ticks, 14.3 % idle, in flight 2 2
    0  F0 F1 .  I0 W0 I1 W1
    1  .  F0 I0 F1 I1 W0 W1
    """

    schedule: PipelineSchedule

    def cells(self) -> Iterator[list[tuple[Action | None, int]]]:
        """Yield for each rank its actions and pauses in order, with their ticks."""
        line = timeline(self.schedule)
        for row in self.schedule.tables:
            out, at = [], 0
            for a in row:
                begin, end = int(line.begins[a]), int(line.ends[a])
                out += [(None, begin - at), (a, end - begin)]
                at = end
            out.append((None, int(line.seconds) - at))
            yield [cell for cell in out if cell[1]]

    def label(self, action: Action | None) -> str:
        """Return the text of a cell."""
        if action is None:
            return "."
        several = self.schedule.stages > self.schedule.size
        return str(action) if several else f"{action.kind}{action.micro}"

    def title(self) -> str:
        """Return the first line: sizes, ticks, bubble and micro-batches in flight."""
        s, line = self.schedule, timeline(self.schedule)
        return (
            f"{s.name} of {s.size} ranks, {s.micros} micro-batches: {line.seconds:.0f} ticks, "
            f"{line.bubble:.1%} idle, in flight {' '.join(map(str, s.held))}"
        ).replace("%", " %")

    def pieces(self) -> Pieces:
        """Return the text in runs, each with its colour's number or None."""
        s = self.schedule
        width = max(len(self.label(a)) for row in s.tables for a in row)
        out: Pieces = [(self.title(), None)]
        for rank, row in enumerate(self.cells()):
            out.append((f"\n{rank:>{len(str(s.size - 1))}} ", None))
            for a, ticks in row:
                label = self.label(a)
                if a is None:
                    out.append((f" {label:<{width}}" * ticks, None))
                else:
                    fill = "-" if ticks > 1 else " "
                    text = label.ljust(ticks * (width + 1) - 1, fill)
                    out += [(" ", None), (text, _NUMBERS[a.kind])]
        return out

    def __repr__(self) -> str:
        text = "".join(text for text, _ in self.pieces())
        return "\n".join(line.rstrip() for line in text.splitlines())

    def _repr_html_(self) -> str:
        rows = []
        for rank, row in enumerate(self.cells()):
            out = [f"<th>{rank}</th>"]
            for a, ticks in row:
                colour = f"background:{tint(_NUMBERS[a.kind])}" if a else ""
                text = self.label(a) if a else ""
                out.append(f"<td colspan='{ticks}' style='{_CELL};{colour}'>{text}</td>")
            rows.append(f"<tr>{''.join(out)}</tr>")
        caption = f"<caption>{html.escape(self.title())}</caption>"
        return f"<table style='border-collapse:collapse'>{caption}{''.join(rows)}</table>"

    def picture(self) -> Picture:
        """Draw the chart to scale, the later stages of a rank paler; needs matplotlib."""
        s, line = self.schedule, timeline(self.schedule)
        size = (max(4.0, 0.2 * line.seconds), 0.3 * s.size + 0.7)
        figure, axes = canvas("visualize", 1, 1, size, self.title())
        _bars(axes.flat[0], _rows(s, line), s.size, line.seconds, "ticks")
        return Picture(figure, self.title())


_CELL = "border:1px solid;padding:1px 4px;text-align:center"


Bars = Mapping[str, Sequence[tuple[Action, float, float]]]
"""Label of a row -> its actions, each with its begin and end."""


@dataclass(frozen=True, repr=False)
class StepChart(Pictured):
    """A recorded step of a pipeline: when each action ran, beside when it would at its mean cost.

    ``schedule``   its table.
    ``predicted``  the table's timeline, in seconds, where each kind of action of a stage takes as
                   long as it took on average, and messages take no time.
    ``measured``   of each rank, its actions; empty where one process ran all stages.
    ``costs``      of each stage, its first and last layer and the mean seconds of each kind.
    """

    schedule: PipelineSchedule
    predicted: PipelineTimeline
    measured: Bars
    costs: Mapping[int, tuple[str, Mapping[str, float]]]

    @property
    def seconds(self) -> float:
        """The measured seconds from the first action's begin to the last one's end; else 0."""
        return max((end for row in self.measured.values() for _, _, end in row), default=0.0)

    @property
    def bubble(self) -> float:
        """The measured idle part of the ranks' time, from 0 to 1."""
        busy = sum(end - begin for row in self.measured.values() for _, begin, end in row)
        return 1 - busy / (len(self.measured) * self.seconds) if self.measured else 0.0

    def titles(self) -> tuple[str, str]:
        """Return what was predicted and what was measured."""
        s, line = self.schedule, self.predicted
        return (
            f"{s.name} of {s.size} ranks, {s.micros} micro-batches, predicted: "
            f"{_figures(line.seconds, line.bubble)}",
            f"measured: {_figures(self.seconds, self.bubble)}",
        )

    def json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            "name": self.schedule.name, "microbatches": self.schedule.micros,
            "seconds": self.seconds, "bubble": self.bubble,
            "predicted": {"seconds": self.predicted.seconds, "bubble": self.predicted.bubble},
            "stages": [{"name": name, "seconds": dict(each)} for name, each in self.costs.values()],
        }  # fmt: skip

    def __repr__(self) -> str:
        lines = list(self.titles()[: 2 if self.measured else 1])
        for stage, (name, each) in self.costs.items():
            took = ", ".join(f"{kind} {1e3 * t:.3g} ms" for kind, t in each.items())
            lines.append(f"stage {stage}   {name}: {took}")
        return "\n".join(lines)

    def picture(self) -> Picture:
        """Draw the predicted step over the measured one; needs matplotlib."""
        rows = [_rows(self.schedule, self.predicted), *[self.measured] * bool(self.measured)]
        size = (9.0, 0.7 * len(rows) + 0.3 * sum(map(len, rows)))
        figure, axes = canvas("visualize", len(rows), 1, size)
        for panel, bars, title in zip(axes.flat, rows, self.titles(), strict=False):
            wide = max(self.seconds, self.predicted.seconds)
            _bars(panel, bars, self.schedule.size, wide, "seconds")
            panel.set_title(title, fontsize=8)
        return Picture(figure, self.titles()[0])


def _refuse_parts(places: Collection[int], ranks: Collection[int]) -> None:
    """Refuse a timeline that lacks places on the axis, or stages."""
    if not places or [*places] != [*range(len(places))] or {*ranks} != {*range(len(ranks))}:
        why = "the timeline has no step of a pipeline with all its stages"
        fix = "line = line.gathered()  # on all ranks, of a step inside `with timeline() as line`"
        raise BadArgument(why, op="step_chart", fix=fix)


def step_chart(line: Timeline) -> StepChart:
    """Return the chart of the last step of a pipeline in a timeline, of all its ranks.

    Raises: BadArgument where the timeline has no such step, or lacks the ranks of some stages.

    >>> import torch, shardlib as sl; from torch import nn
    >>> with sl.simulate(pipe=2):
    ...     net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    ...     apply, params = sl.parallelize(net, [("*", "...")], stages=sl.Stages("pipe"))
    ...     step = sl.value_and_grad(lambda p, x: apply(p, x).sum(), microbatches=2)
    ...     with sl.seeing.timeline() as line:
    ...         loss, grads = step(params, torch.ones(2, 4))
    >>> chart = sl.seeing.step_chart(line)
    >>> print(sl.visualize(chart.schedule))
    1f1b of 2 ranks, 2 micro-batches: 9 ticks, 33.3 % idle, in flight 2 1
    0  F0 F1 .  .  B0--- .  B1---
    1  .  F0 B0--- F1 B1--- .  .
    """
    rows = _recorded(line)
    places = {place: [a for a, _ in row] for (place, _), row in rows.items()}
    ranks = {a.stage: place for place, row in places.items() for a in row}
    _refuse_parts(places, ranks)
    spans = [one for row in rows.values() for one in row]
    took: dict[int, dict[str, list[float]]] = {s: defaultdict(list) for s in sorted(ranks)}
    for a, s in spans:
        took[a.stage][a.kind].append(s.seconds)
    names = {a.stage: s.module for a, s in spans}
    costs = {s: (names[s], {kind: mean(each) for kind, each in took[s].items()}) for s in took}
    table = PipelineSchedule(
        spans[0][1].type,
        1 + max(a.micro for a, _ in spans),
        tuple(ranks[s] for s in took),
        tuple(map(tuple, places.values())),
    )
    zero = min(s.start for _, s in spans)
    measured: Bars = {
        str(rank): [(a, s.start - zero, s.end - zero) for a, s in row]
        for (_, rank), row in rows.items()
    }
    simulated = len(measured) < len(rows)
    predicted = timeline(table, lambda a: costs[a.stage][1][a.kind])
    return StepChart(table, predicted, {} if simulated else measured, costs)


def _recorded(line: Timeline) -> dict[tuple[int, int], list[tuple[Action, Span]]]:
    """Return (place, rank) -> the actions of the last step in a timeline, as they began."""
    found: dict[tuple[int, int], dict[Action, Span]] = defaultdict(dict)
    for s in line.spans:
        if s.action:
            place, *action = s.action
            found[place, s.rank][Action(*action)] = s
    return {at: sorted(found[at].items(), key=lambda one: one[1].start) for at in sorted(found)}


def _figures(seconds: float, bubble: float) -> str:
    return f"{1e3 * seconds:.4g} ms, {100 * bubble:.1f} % idle"


def _rows(s: PipelineSchedule, line: PipelineTimeline) -> Bars:
    return {
        str(rank): [(a, line.begins[a], line.ends[a]) for a in row]
        for rank, row in enumerate(s.tables)
    }


def _bars(panel: Any, rows: Bars, size: int, wide: float, unit: str) -> None:
    """Draw a row for each rank, in a panel that shows so much time; of ``size`` places."""
    for row, (_, actions) in enumerate(rows.items()):
        for a, begin, end in actions:
            colour = colours(1, _NUMBERS[a.kind])[0]
            pale = 0.65 if a.stage >= size else 1.0
            panel.barh(row, end - begin, 0.9, begin, color=colour, alpha=pale, ec="white", lw=0.4)
            if end - begin > 0.015 * wide:
                look = {"ha": "center", "va": "center", "fontsize": 6, "color": "white"}
                panel.text((begin + end) / 2, row, f"{a.kind}{a.micro}", **look)
    panel.set(xlim=(0, wide), xlabel=unit, ylabel="rank")
    panel.set_yticks(range(len(rows)), [*rows])
    panel.invert_yaxis()
