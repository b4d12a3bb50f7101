"""Drawings of a tensor's blocks: text in a terminal, HTML in a notebook, a picture in a file."""

import html
import itertools
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload

from torch import Tensor

from shardlib.errors import OutOfRange
from shardlib.layouts import Layout
from shardlib.layouts.dims import joined
from shardlib.mesh import axis_sizes, coordinates
from shardlib.ops.attention.engine import AttentionPlan
from shardlib.pipeline.schedules import PipelineSchedule
from shardlib.planning.plan import Plan
from shardlib.seeing.canvas import INK, Picture, Pieces, Shown, canvas, colours, tint
from shardlib.seeing.frames import Frames, frames
from shardlib.seeing.pipelines import ScheduleChart
from shardlib.seeing.plans import PlanChart
from shardlib.tensor import layout_of, named_tensors, typeof


class PieceCell(NamedTuple):
    """A piece of a tensor: the ranks that hold it, none if it is padding, and their coordinates."""

    ranks: tuple[int, ...]
    label: str
    padding: bool

    @property
    def colour(self) -> int | None:
        """The number of its colour: its first rank's."""
        return None if self.padding or not self.ranks else self.ranks[0]

    def name(self, most: int = 8) -> str:
        """Return its ranks, or that it is padding."""
        return "padding" if self.padding else _names(self.ranks, most)


@dataclass(frozen=True)
class PieceGrid:
    """A partition of two dimensions of a tensor into contiguous pieces.

    ``rows``, ``columns``  (start, stop) of each; one row (0, 1) of a vector.
    ``cells``   per row and column, the piece.
    ``title``   the pieces of the other split dimensions that it belongs to.
    ``cut``     whether more pieces exist than are drawn.
    """

    rows: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int], ...]
    cells: tuple[tuple[PieceCell, ...], ...]
    title: str = ""
    cut: bool = False


class Drawing(Shown, str):
    """A drawing as text; a notebook shows it as a table, ``show()`` prints it in colours."""

    grids: tuple[PieceGrid, ...]
    note: str

    def __new__(cls, drawn: Sequence[PieceGrid], note: str = "") -> "Drawing":
        made = str.__new__(cls, "".join(text for text, _ in _pieces(drawn, note)))
        made.grids, made.note = tuple(drawn), note
        return made

    def __repr__(self) -> str:
        return str(self)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.grids, self.note

    def pieces(self) -> Pieces:
        """Return the drawing as runs of text, each with the number of its colour."""
        return _pieces(self.grids, self.note)

    def _repr_html_(self) -> str:
        out = []
        for grid in self.grids:
            rows = [f"<tr>{''.join(map(_cell, row))}</tr>" for row in grid.cells]
            title = _tagged("caption", grid.title)
            out.append(f"<table style='{_TABLE}'>{title}{''.join(rows)}</table>")
        return f"<div>{''.join(out)}{_tagged('p', self.note)}</div>"


def _tagged(tag: str, text: str) -> str:
    """Put text into an HTML element; nothing without text."""
    return f"<{tag}>{html.escape(text)}</{tag}>" if text else ""


_TABLE = "display:inline-table;margin:4px;border-collapse:collapse"


def _cell(piece: PieceCell) -> str:
    style = f"border:1px solid {INK};padding:6px 10px;text-align:center;color:inherit"
    if piece.colour is not None:
        style = f"background:{tint(piece.colour)};{style}"
    shown = piece.name()
    if not piece.padding:
        shown = f"<b>{shown}</b>"
    return f"<td style='{style}'>{shown}<br><small>{html.escape(piece.label)}</small></td>"


Tensors: TypeAlias = Tensor | Mapping[str, "Tensors"] | Sequence["Tensors"]
Given = TypeVar("Given")


@overload
def visualize(x: str | AttentionPlan, /, dims: None = None, **axes: int) -> Frames: ...
@overload
def visualize(x: PipelineSchedule, /, dims: None = None) -> ScheduleChart: ...
@overload
def visualize(x: Plan, /, dims: None = None) -> PlanChart: ...
@overload
def visualize(x: Tensors, /, dims: tuple[int, int] | None = None) -> Drawing: ...
@overload
def visualize(x: Given, /, dims: None = None) -> Given: ...
def visualize(x: object, /, dims: tuple[int, int] | None = None, **axes: int) -> object:
    """Draw a tensor: the ranks that hold each block; for an algorithm or a plan, every step.

    An algorithm is given by its name and the sizes of a mesh, ``sl.visualize("cannon", x=3, y=3)``;
    a plan is that of an attention; a schedule is that of a pipeline, with a row for each rank and a
    column for each tick; of a ``sl.plan`` the bytes and seconds of its ranks are drawn, by kind;
    results of ``sl.seeing.frames`` and the like are returned as they are.  A notebook shows the
    result as a table, ``.show()`` prints it in colours if rich is installed.
    For more than two split dimensions there is a table for each piece of the leading ones; for a
    tree of tensors, the drawing of each under its name.

    ``dims``  the two dimensions to draw; if None, the last two that are split.
    Raises: OutOfRange for dimensions that the tensor does not have; PlainTensor for an object that
    is neither a tensor nor drawable.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     print(sl.visualize(sl.shard(torch.zeros(4, 6), "x y")))
    +--------+--------+
    | 0      | 1      |
    | x0 y0  | x0 y1  |
    +--------+--------+
    | 2      | 3      |
    | x1 y0  | x1 y1  |
    +--------+--------+
    >>> with sl.record(s=4):
    ...     q = sl.shard(torch.empty(1, 4, 16, 8, device="meta"), sl.Ring("s", dim=2))
    ...     plan = sl.planning.attention_plan(q, q, q, sl.masks.Causal(), "ring")
    >>> len(sl.visualize(plan)), sl.visualize("ring", s=4)[0].sent[0].block
    (3, 'B0+C0')
    >>> print(sl.visualize(sl.planning.schedule("1f1b", 2, 3)))
    1f1b of 2 ranks, 3 micro-batches: 12 ticks, 25.0 % idle, in flight 2 1
    0  F0 F1 .  .  B0--- F2 B1--- .  B2---
    1  .  F0 B0--- F1 B1--- F2 B2--- .  .
    """
    if isinstance(x, str | AttentionPlan):
        return frames(x, **axes)
    if isinstance(x, PipelineSchedule):
        return ScheduleChart(x)
    if isinstance(x, Plan):
        return PlanChart((x,))
    if not isinstance(x, Tensor) and hasattr(x, "_repr_html_"):
        return x
    drawn, notes = [], {}
    for name, one in named_tensors(x, "visualize").items():
        if pending := layout_of(one).partial:
            blocks = f"block of {name}" if name else "block"
            notes[f"every {blocks} is one part of a sum over {' '.join(pending)}"] = True
        title = f"{name}  {typeof(one)} " if name else ""
        drawn += [replace(g, title=f"{title}{g.title}".rstrip()) for g in grids(one, dims)]
    if any(g.cut for g in drawn):
        notes[f"of more than {_MOST} pieces along a dimension the first {_MOST} are shown"] = True
    return Drawing(drawn, "; ".join(notes))


def grids(x: Tensor, dims: tuple[int, int] | None = None) -> list[PieceGrid]:
    """Cut a tensor into its contiguous pieces; see ``visualize``."""
    mesh = axis_sizes(getattr(x, "mesh", None) or x.device_mesh)  # type: ignore[attr-defined]
    stored = tuple(getattr(x, "padded_shape", x.shape))
    layout, true = layout_of(x).resolve(len(stored)), tuple(x.shape)
    front, shown = _shown(layout) if dims is None else ([], _asked(x, dims))
    whole = _cut(layout, stored, true, mesh)
    pieces = [some[:_MOST] for some in whole]
    cut = any(len(whole[d]) > _MOST for d in (*front, *shown))
    every = frozenset(range(math.prod(mesh.values())))
    one = [_Interval(0, 1, every)]
    # one row of a vector
    down, across = ([one, one] + [pieces[d] for d in shown])[-2:]
    # where the padding begins; a scalar has none
    rows, columns = [*(true[d] for d in shown[:1] + shown[-1:]), 1, 1][:2]
    out = []
    for chosen in itertools.product(*(pieces[d] for d in front)):
        above = every.intersection(*(piece.ranks for piece in chosen))
        cells = tuple(_row_of(row, across, above, (rows, columns), mesh) for row in down)
        ends = _ends(down), _ends(across)
        out.append(PieceGrid(*ends, cells, _place(len(true), front, chosen), cut))
    return out


def _shown(layout: Layout) -> tuple[list[int], list[int]]:
    """Return the dimensions with a grid for each piece, and the two that a grid shows."""
    split = [d for d, token in enumerate(layout.dims) if token.is_split]
    rest = [d for d, token in enumerate(layout.dims) if not token.is_split]
    return split[:-2], sorted((split[-2:] + rest[::-1])[:2])


def _asked(x: Tensor, dims: tuple[int, int]) -> list[int]:
    """Return the dimensions that a caller asks for.  Raises: OutOfRange."""
    if min(dims, default=0) < -x.ndim or max(dims, default=-1) >= x.ndim:
        raise OutOfRange(
            f"dimensions {dims} of a tensor that has {x.ndim}",
            op="visualize",
            operands={"tensor": typeof(x)},
            fix="sl.visualize(x)",
        )
    return [d % x.ndim for d in dims]


# the most pieces of a dimension that are drawn
_MOST = 64


@dataclass(frozen=True)
class _Interval:
    """Positions start:stop of a dimension, and the ranks that hold them."""

    start: int
    stop: int
    ranks: frozenset[int]


def _row_of(
    row: _Interval,
    across: Sequence[_Interval],
    above: frozenset[int],
    ends: tuple[int, int],
    mesh: Mapping[str, int],
) -> tuple[PieceCell, ...]:
    """Return the cells of a row: the ranks that hold them, and whether they are padding."""
    out = []
    for column in across:
        held = tuple(sorted(above & column.ranks & row.ranks))
        padding = row.start >= ends[0] or column.start >= ends[1]
        out.append(PieceCell(held, _common(held, mesh), padding))
    return tuple(out)


def _ends(pieces: Sequence[_Interval]) -> tuple[tuple[int, int], ...]:
    return tuple((piece.start, piece.stop) for piece in pieces)


def _place(ndim: int, front: Sequence[int], chosen: Sequence[_Interval]) -> str:
    """Write the part of a tensor that pieces of its other dimensions choose; "" for all of it."""
    where = [":"] * ndim
    for d, piece in zip(front, chosen, strict=True):
        where[d] = f"{piece.start}:{piece.stop}"
    return f"[{', '.join(where)}]" if front else ""


def _cut(
    layout: Layout, stored: tuple[int, ...], true: tuple[int, ...], mesh: Mapping[str, int]
) -> list[list[_Interval]]:
    """Cut each dimension where a rank's positions begin or end, and where padding begins."""
    held = [layout.indices(stored, mesh, c) for c in coordinates(mesh)]
    out = []
    for d, n in enumerate(stored):
        runs = [(rank, *run) for rank, h in enumerate(held) for run in _runs(h[d])]
        # between two borders a piece has the same owners everywhere
        borders = sorted({0, n, true[d], *(p for _, *run in runs for p in run)})
        owners = defaultdict(set)
        for rank, start, stop in runs:
            for p in borders[bisect_left(borders, start) : bisect_left(borders, stop)]:
                owners[p].add(rank)
        out.append(
            [_Interval(a, b, frozenset(owners[a])) for a, b in itertools.pairwise(borders)]
            or [_Interval(0, n, frozenset(range(len(held))))]
        )
    return out


def _runs(positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """List (start, stop) of the gapless runs among the positions, in ascending order."""
    if isinstance(positions, range) and positions.step == 1:
        return joined([(positions.start, positions.stop)])
    return joined((p, p + 1) for p in sorted(positions))


def _names(ranks: Sequence[int], most: int = 8) -> str:
    """Format rank numbers; of more than ``most``, the first two and the last.

    >>> _names([0, 2]), _names(range(64))
    ('0,2', '0,1,..,63')
    """
    shown = [*map(str, ranks)]
    if len(shown) > most:
        shown[2:-1] = [".."]
    return ",".join(shown)


def _common(ranks: Sequence[int], mesh: Mapping[str, int]) -> str:
    """Format the mesh coordinates as ``x0 y1``, without axes along which the block is copied."""
    every = coordinates(mesh)
    places = [every[r] for r in ranks]
    same = [n for n in mesh if len({p[n] for p in places}) == 1]
    return " ".join(f"{n}{places[0][n]}" for n in same)


def _pieces(drawn: Sequence[PieceGrid], note: str) -> Pieces:
    """Return the drawing as runs of text, each with its colour's number or None."""
    out: Pieces = []
    for grid in drawn:
        if grid.title:
            out.append((f"{grid.title}\n", None))
        out += [*_table(grid), ("\n", None)]
    del out[-1:]
    if note:
        out.append((f"\n{note}", None))
    return out


def _table(grid: PieceGrid) -> Iterator[tuple[str, int | None]]:
    """Yield a grid as runs of text: two lines per row of pieces, between rules."""
    width = max(len(t) for row in grid.cells for c in row for t in (c.name(), c.label)) + 2
    rule = "+" + "+".join("-" * (width + 1) for _ in grid.columns) + "+"
    yield rule, None
    for row in grid.cells:
        for line in ([c.name() for c in row], [c.label for c in row]):
            yield "\n|", None
            for text, piece in zip(line, row, strict=True):
                yield f" {text:<{width}}", piece.colour
                yield "|", None
        yield f"\n{rule}", None


def draw(tensors: Mapping[str, Tensor], file: str | None = None) -> Picture:
    """Draw several tensors' blocks, coloured by the first rank that holds each.

    Sizes are to scale, padding is hatched; for more than two split dimensions there is a panel for
    each piece of the leading ones.  A notebook shows the picture; ``file`` also writes it.  Needs
    matplotlib.
    Raises: BadArgument where a file is that no ``save`` wrote.

    >>> import tempfile
    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2, y=2), tempfile.TemporaryDirectory() as folder:
    ...     a = sl.shard(torch.zeros(4, 6), "x y")
    ...     draw({"a": a, "a.T": a.T}, f"{folder}/blocks.png")
    Picture('a, a.T')
    """
    panels = [(name, x, grid) for name, x in tensors.items() for grid in grids(x)]
    columns = min(5, max(1, len(panels)))
    rows = -(-len(panels) // columns)
    size, title = (2.4 * columns, 2.3 * max(1, rows)), "ranks that hold each block"
    figure, axes = canvas("draw", max(1, rows), columns, size, title)
    for ax in axes.flat:
        ax.set_axis_off()
    for ax, (name, x, grid) in zip(axes.flat, panels, strict=False):
        _panel(ax, grid)
        title = " ".join(part for part in (name, grid.title) if part)
        ax.set_title(f"{title}\n{typeof(x)}", fontsize=8, color=INK)
    picture = Picture(figure, ", ".join(tensors))
    if file is not None:
        picture.save(file)
    return picture


def _panel(ax: Any, grid: PieceGrid) -> None:
    from matplotlib.patches import Rectangle

    wide, tall = grid.columns[-1][1] or 1, grid.rows[-1][1] or 1
    for (top, bottom), cells in zip(grid.rows, grid.cells, strict=True):
        for (left, right), piece in zip(grid.columns, cells, strict=True):
            width, height = (right - left) / wide, (bottom - top) / tall
            x, y = left / wide, top / tall
            look: dict[str, Any] = {"facecolor": "none"}
            if piece.colour is not None:
                look = {"facecolor": colours(1, piece.colour)[0]}
            if piece.padding:
                look["hatch"] = "///"
            ax.add_patch(Rectangle((x, y), width, height, edgecolor=INK, lw=0.8, **look))
            if not piece.padding:
                _write(ax, piece, (x + width / 2, y + height / 2), width, height)
    ax.set_xlim(-0.01, 1.01)
    ax.set_ylim(1.02, -0.02)


def _write(
    ax: Any, piece: PieceCell, middle: tuple[float, float], width: float, height: float
) -> None:
    """Write a piece's ranks and coordinates where they fit."""
    text = piece.name(4)
    # smaller in a thin band, down to a readable size
    size = min(7.5, 100 * height)
    if width <= 0.03 * len(text) or size <= 4:
        return
    if piece.label and height > 0.2 and width > 0.03 * len(piece.label):
        text = f"{text}\n{piece.label}"
    ax.text(*middle, text, ha="center", va="center", fontsize=size, color="white")
