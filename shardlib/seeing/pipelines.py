"""Charts of a pipeline's schedule: a row for each rank, a column for each tick."""

import html
from collections.abc import Iterator
from dataclasses import dataclass

from shardlib.pipeline.schedules import Action, PipelineSchedule, timeline
from shardlib.seeing.canvas import Picture, Pieces, Shown, canvas, colours, tint

_NUMBERS = {"F": 0, "B": 1, "I": 1, "W": 2}  # of colours


@dataclass(frozen=True, repr=False)
class ScheduleChart(Shown):
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
            f"{line.bubble:.1%} idle, in flight {' '.join(map(str, line.in_flight))}"
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

    def __str__(self) -> str:
        text = "".join(text for text, _ in self.pieces())
        return "\n".join(line.rstrip() for line in text.splitlines())

    __repr__ = __str__

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
        s = self.schedule
        ticks = timeline(s).seconds
        size = (max(4.0, 0.2 * ticks), 0.3 * s.size + 0.7)
        figure, axes = canvas("visualize", 1, 1, size, self.title())
        panel = axes.flat[0]
        for rank, row in enumerate(self.cells()):
            at = 0
            for a, wide in row:
                if a is not None:
                    colour = colours(1, _NUMBERS[a.kind])[0]
                    pale = 0.65 if a.stage >= s.size else 1.0
                    panel.barh(rank, wide, 0.9, at, color=colour, alpha=pale, ec="white", lw=0.4)
                    where = (at + wide / 2, rank)
                    look = {"ha": "center", "va": "center", "fontsize": 6, "color": "white"}
                    panel.text(*where, f"{a.kind}{a.micro}", **look)
                at += wide
        panel.set(xlim=(0, ticks), yticks=range(s.size), xlabel="ticks", ylabel="rank")
        panel.invert_yaxis()
        return Picture(figure, self.title())

    def save(self, file: str) -> None:
        """Write the picture; needs matplotlib.

        Raises: BadArgument for another suffix than .png, .svg and .pdf, or where a file is that no
                ``save`` wrote.
        """
        self.picture().save(file)


_CELL = "border:1px solid;padding:1px 4px;text-align:center"
