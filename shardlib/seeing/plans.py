"""Charts of plans: what a rank of each kind holds, by kind of bytes, and where its seconds go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardlib.planning.explanation import PipelineExplanation, size
from shardlib.planning.plan import Plan
from shardlib.planning.work import StepWork
from shardlib.seeing.canvas import Picture, Pictured, canvas, html_table, text_table


class RankParts(NamedTuple):
    """Ranks that do the same: bytes by kind at the peak, and seconds of a step by part."""

    name: str
    ranks: int
    holds: Mapping[str, float]
    takes: Mapping[str, float]


@dataclass(frozen=True, repr=False)
class PlanChart(Pictured):
    """A chart of plans: a row for each kind of ranks of each.

    >>> import torch, shardlib as sl
    >>> plan = sl.plan(torch.nn.Linear(64, 64), torch.empty(32, 64), mesh={"a": 2})
    >>> print(sl.visualize(plan))
    ranks     parameters      state  activations  temporaries  computing, ms
    2 on a=2   16.25 KiB  32.50 KiB          4 B    16.26 KiB       0.000118
    """

    plans: Sequence[Plan]

    def rows(self) -> list[RankParts]:
        """List the kinds of ranks: one of a plan, or one for each place of a pipeline's stages."""
        return [row for plan in self.plans for row in _rows(plan)]

    def table(self) -> list[list[str]]:
        """Return the bytes and the seconds of each row as text, below a heading."""
        rows = self.rows()
        kinds, parts = (
            list(dict.fromkeys(k for row in rows for k in getattr(row, what)))
            for what in ("holds", "takes")
        )
        out = [["ranks", *kinds, *(f"{part}, ms" for part in parts)]]
        for row in rows:
            held = [size(row.holds.get(k, 0)) for k in kinds]
            took = [f"{1e3 * row.takes.get(part, 0):.3g}" for part in parts]
            out.append([row.name, *held, *took])
        return out

    def __repr__(self) -> str:
        table = self.table()
        return "\n".join(text_table(table, right=range(1, len(table[0]))))

    def _repr_html_(self) -> str:
        return html_table(self.table())

    def picture(self) -> Picture:
        """Draw the bytes of each row beside the memory, and its seconds; needs matplotlib."""
        rows, plans = self.rows(), self.plans
        title = ", ".join(f"{p.seconds:.3g} s a step of {p.asked.ranks} ranks" for p in plans)
        figure, axes = canvas("visualize", 1, 2, (10.0, 1.4 + 0.35 * len(rows)), title)
        held, took = axes.flat
        room, most = min(p.asked.room for p in plans), max(p.peak for p in plans)
        name, unit = next((n, 2**k) for n, k in _UNITS if most >= 2**k)
        _bars(held, [(row.name, row.holds) for row in rows], unit, f"{name} on one rank")
        _bars(took, [(row.name, row.takes) for row in rows], 1.0, "seconds of a step")
        if room <= 2 * most:
            held.axvline(room / unit, linestyle="--", linewidth=0.8)
        return Picture(figure, title)


_UNITS = (("GiB", 30), ("MiB", 20), ("KiB", 10), ("bytes", 0))


def _rows(plan: Plan) -> list[RankParts]:
    told, ranks = plan.explained, plan.asked.ranks
    name = f"{ranks} on {' '.join(f'{a}={n}' for a, n in plan.mesh.items())}"
    if isinstance(told, PipelineExplanation):
        return _places(plan, told, name)
    rates = plan.asked.cluster.rates(plan.mesh)
    moving = {axes: rates.moving({axes: moved}) for axes, moved in plan.along.items()}
    holds = {
        "parameters": told.parameters, "state": told.state, "activations": told.saved,
        "temporaries": told.transient - told.saved,
    }  # fmt: skip
    if away := told.work.away:
        moving["host memory"] = rates.seconds(StepWork(away=away))
    takes = {"computing": plan.seconds - sum(moving.values())}
    takes |= {f"over {axes}": t for axes, t in moving.items()}
    return [RankParts(name, ranks, holds, takes)]


def _places(plan: Plan, told: PipelineExplanation, name: str) -> list[RankParts]:
    count, found = plan.asked.ranks // len(told.places), []
    for i, (place, busy) in enumerate(zip(told.places, told.line.busy, strict=True)):
        holds = {
            "parameters": place.parameters, "state": place.state, "gradients": place.gradients,
            "activations": place.transient,
        }  # fmt: skip
        behind = plan.seconds - told.seconds + place.seconds
        takes = {"stages": busy, "behind them": behind, "idle": plan.seconds - busy - behind}
        found.append(RankParts(f"{name}, place {i}", count, holds, takes))
    return found


def _bars(
    panel: Any, rows: Sequence[tuple[str, Mapping[str, float]]], unit: float, label: str
) -> None:
    """Draw a bar for each row, of its parts one behind the other."""
    kinds = dict.fromkeys(k for _, parts in rows for k in parts)
    at = [0.0] * len(rows)
    for kind in kinds:
        wide = [parts.get(kind, 0.0) / unit for _, parts in rows]
        panel.barh(range(len(rows)), wide, left=at, height=0.7, label=kind)
        at = [a + w for a, w in zip(at, wide, strict=True)]
    panel.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=7)
    panel.invert_yaxis()
    panel.set_xlabel(label)
    panel.legend(fontsize=6, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
