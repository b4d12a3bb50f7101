"""Figures and text that read well on a light page and on a dark one.

No background, ink of middle grey, colours of middle lightness; blocks are tinted, so that the page
shines through.
"""

import sys
from collections.abc import Callable
from typing import Any

from shardlib.errors import Unsupported

__all__ = ["INK", "PALETTE", "Shown", "canvas", "coloured", "colours", "tint"]

INK = "#808080"  # 4 : 1 on white, 5 : 1 on black

PALETTE = (  # white text on them can be read
    "#4c78a8", "#e0883c", "#4f9d5b", "#c8504b", "#8a6bb8", "#9a7b4f", "#c46aa8", "#3f9fb5",
    "#8f9a2f", "#6f7fcf", "#b5772f", "#5f8f7f",
)  # fmt: skip


def colours(count: int, first: int = 0) -> list[str]:
    """Give ``count`` colours, from the ``first`` of the palette on and round.

    >>> colours(2), colours(1, first=12) == colours(1)
    (['#4c78a8', '#e0883c'], True)
    """
    return [PALETTE[(first + i) % len(PALETTE)] for i in range(count)]


def tint(number: int) -> str:
    """Write the colour of a rank as a page's style, light enough for text of any colour on it.

    >>> tint(0)
    'rgba(76,120,168,0.35)'
    """
    (colour,) = colours(1, first=number)
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.35)"


def canvas(op: str, rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """Make a matplotlib figure and its grid of panels, inches ``size``; pyplot is left alone.

    Raises: Unsupported where matplotlib is missing.

    >>> figure, panels = canvas("draw", 1, 2, (4.0, 2.0))
    >>> panels.shape
    (1, 2)
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Unsupported(
            "pictures need matplotlib", op=op, fix="pip install 'shardlib[notebooks]'"
        ) from None
    figure = Figure(figsize=size, layout="constrained")
    figure.patch.set_alpha(0.0)
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel in panels.flat:
        panel.set_facecolor("none")
        panel.tick_params(colors=INK)
        panel.xaxis.label.set_color(INK)
        panel.yaxis.label.set_color(INK)
        for spine in panel.spines.values():
            spine.set_color(INK)
    return figure, panels


def coloured(pieces: list[tuple[str, int | None]]) -> Any:
    """Make rich's text of (text, number of its colour or None); needs rich.

    Raises: Unsupported where rich is missing.
    """
    try:
        from rich.text import Text
    except ImportError:
        raise Unsupported("coloured text needs rich", op="show", fix="pip install rich") from None
    out = Text(no_wrap=True)
    for text, number in pieces:
        out.append(text, style="" if number is None else f"white on {colours(1, number)[0]}")
    return out


class Shown:
    """What can be shown in colours: ``show()`` it in a terminal, or give it to ``rich.print``."""

    pieces: Callable[[], list[tuple[str, int | None]]]

    def __rich__(self) -> Any:
        return coloured(self.pieces())

    def show(self) -> None:
        """Print it: in colours where this is a terminal and rich is there, else plain.

        >>> import torch, shardlib as sl
        >>> with sl.simulate(x=2):
        ...     sl.visualize(sl.shard(torch.zeros(4), "x")).show()
        +----+----+
        | 0  | 1  |
        | x0 | x1 |
        +----+----+
        """
        try:
            from rich.console import Console
        except ImportError:
            Console = None
        if Console is None or not sys.stdout.isatty():
            print(str(self))
        else:
            Console().print(self.__rich__(), soft_wrap=True)
