"""Draw where a tensor's blocks sit: text in a terminal, a picture in a file."""

import itertools
import math
from typing import Any

from torch import Tensor

from shardlib.errors import Unsupported
from shardlib.layouts import Layout, axis_sizes
from shardlib.mesh import coordinates
from shardlib.tensor import ShardedTensor, layout_of

__all__ = ["draw", "pyplot", "visualize"]


def visualize(x: Any, dims: tuple[int, int] | None = None) -> str:
    """Draw a tensor as text: which ranks hold which block; of ``Frames`` every step.

    ``dims``  the two dimensions to show of more; if None, those that are split, where there are at
              most two.
    Raises: Unsupported where more than two dimensions are split and none were chosen.

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
    """
    if not isinstance(x, Tensor):
        return str(x)
    mesh = axis_sizes(x.mesh) if isinstance(x, ShardedTensor) else axis_sizes(x.device_mesh)  # type: ignore[attr-defined]
    cells = _cells(*_shown(layout_of(x), tuple(x.shape), dims), mesh)
    names = list(mesh)
    rows = []
    for line in cells:
        texts = []
        for ranks in line:
            where = _common([_place(r, mesh) for r in ranks], names)
            texts.append((",".join(map(str, ranks)), where))
        rows.append(texts)
    width = max(len(t) for row in rows for cell in row for t in cell) + 2
    rule = "+" + "+".join("-" * (width + 1) for _ in rows[0]) + "+"
    out = [rule]
    for row in rows:
        for k in range(2):
            out.append("|" + "|".join(f" {cell[k]:<{width}}" for cell in row) + "|")
        out.append(rule)
    return "\n".join(out)


def _place(rank: int, mesh: Any) -> dict[str, int]:
    return coordinates(mesh)[rank]


def _common(places: list[dict[str, int]], names: list[str]) -> str:
    """``x0 y1``, leaving out axes along which the block is copied."""
    same = [n for n in names if len({p[n] for p in places}) == 1]
    return " ".join(f"{n}{places[0][n]}" for n in same)


def _shown(
    layout: Layout, shape: tuple[int, ...], dims: tuple[int, int] | None
) -> tuple[Layout, tuple[int, ...]]:
    """The layout and sizes of the dimensions to show."""
    layout = layout.resolve(len(shape))
    if len(shape) <= 2 and dims is None:
        return layout, shape
    split = [d for d, token in enumerate(layout.dims) if token.is_split]
    if dims is None and len(split) > 2:
        raise Unsupported(
            f"a picture shows two dimensions, and {len(split)} are split",
            op="visualize",
            operands={"layout": str(layout), "shape": list(shape)},
            fix=f"sl.visualize(x, dims={(split[0], split[1])})",
        )
    rest = [d for d in range(len(shape)) if d not in split]
    chosen = sorted((split + rest[::-1])[:2]) if dims is None else [d % len(shape) for d in dims]
    return Layout(tuple(layout.dims[d] for d in chosen)), tuple(shape[d] for d in chosen)


def _cells(layout: Layout, shape: tuple[int, ...], mesh: Any) -> list[list[list[int]]]:
    """Rows and columns of contiguous pieces; each holds the ranks that own it."""
    if len(shape) == 0:
        return [[list(range(math.prod(mesh.values())))]]
    held = [[set(i) for i in layout.indices(shape, mesh, c)] for c in coordinates(mesh)]
    starts = [
        [p for p in range(n) if p == 0 or _border(p, [h[d] for h in held])]
        for d, n in enumerate(shape)
    ]
    rows, cols = starts if len(shape) == 2 else ([None], starts[0])

    def owners(r: int | None, c: int) -> list[int]:
        return [k for k, h in enumerate(held) if c in h[-1] and (r is None or r in h[0])]

    return [[owners(r, c) for c in cols] for r in rows]


def _border(p: int, held: list[set[int]]) -> bool:
    """Whether positions p-1 and p lie apart for some rank."""
    return any((p in h) != (p - 1 in h) for h in held)


def pyplot(op: str) -> Any:
    """matplotlib's pyplot, writing to files alone."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise Unsupported(
            "pictures need matplotlib", op=op, fix="pip install 'shardlib[bench]'"
        ) from None
    return plt


def draw(tensors: dict[str, Tensor], file: str) -> None:
    """Write a picture of several matrices' blocks, coloured by rank.

    Needs matplotlib.

    >>> import tempfile
    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2, y=2), tempfile.TemporaryDirectory() as folder:
    ...     a = sl.shard(torch.zeros(4, 6), "x y")
    ...     draw({"a": a, "a.T": a.T}, f"{folder}/blocks.png")
    """
    plt = pyplot("draw")
    figure, axes = plt.subplots(1, len(tensors), figsize=(3.4 * len(tensors), 3.6), squeeze=False)
    for ax, (name, x) in zip(axes[0], tensors.items(), strict=True):
        mesh = axis_sizes(x.mesh)  # type: ignore[attr-defined]
        cells = _cells(*_shown(layout_of(x), tuple(x.shape), None), mesh)
        count = math.prod(mesh.values())
        shown = [[min(ranks) for ranks in row] for row in cells]
        ax.imshow(
            shown,
            cmap="Pastel1" if count <= 9 else "tab20",
            vmin=0,
            vmax=max(8, count - 1),
            aspect="auto",
        )
        for (i, row), j in itertools.product(enumerate(cells), range(len(cells[0]))):
            ax.text(j, i, ",".join(map(str, row[j])), ha="center", va="center", fontsize=9)
        for i in range(1, len(cells)):
            ax.axhline(i - 0.5, color="white", lw=3)
        for j in range(1, len(cells[0])):
            ax.axvline(j - 0.5, color="white", lw=3)
        ax.set_xticks([]), ax.set_yticks([])
        ax.set_title(f"{name}\n{list(x.shape)}  {layout_of(x)}", fontsize=9)
    figure.suptitle("ranks that hold each block", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    plt.close(figure)
