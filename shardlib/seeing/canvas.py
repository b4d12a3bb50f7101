"""Figures and text that are readable on light and dark pages.

No background, text of middle grey, colours of middle lightness; blocks are translucent.
"""

import html
import io
import os
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from shardlib.errors import BadArgument, Unsupported

# 4 : 1 on white, 5 : 1 on black
INK = "#808080"

# white text is readable on them
PALETTE = (
    "#4c78a8", "#e0883c", "#4f9d5b", "#c8504b", "#8a6bb8", "#9a7b4f", "#c46aa8", "#3f9fb5",
    "#8f9a2f", "#6f7fcf", "#b5772f", "#5f8f7f",
)  # fmt: skip


def colours(count: int, first: int = 0) -> list[str]:
    """Return ``count`` colours of the palette, starting at ``first`` and wrapping around.

    >>> colours(2), colours(1, first=12) == colours(1)
    (['#4c78a8', '#e0883c'], True)
    """
    return [PALETTE[(first + i) % len(PALETTE)] for i in range(count)]


def tint(number: int) -> str:
    """Format the colour of a rank for HTML, light enough for text of any colour on it.

    >>> tint(0)
    'rgba(76,120,168,0.35)'
    """
    (colour,) = colours(1, first=number)
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.35)"


def style() -> dict[str, Any]:
    """Return matplotlib settings for figures that are readable on light and dark pages.

    They set no background and text of middle grey.

    >>> import matplotlib.pyplot as plt, shardlib as sl
    >>> with plt.rc_context(sl.seeing.style()):
    ...     figure, axes = plt.subplots()
    >>> figure.get_facecolor()
    (0.0, 0.0, 0.0, 0.0)
    >>> plt.close(figure)
    """
    from cycler import cycler

    ink = "text.color axes.edgecolor axes.labelcolor axes.titlecolor xtick.color ytick.color"
    found: dict[str, Any] = dict.fromkeys([*ink.split(), "grid.color", "legend.labelcolor"], INK)
    found |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none")
    found["axes.prop_cycle"] = cycler(color=PALETTE)
    found |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    return found | {"font.size": 8, "figure.dpi": 120, "savefig.dpi": 120}


def canvas(
    op: str, rows: int, columns: int, size: tuple[float, float], title: str = ""
) -> tuple[Any, Any]:
    """Make a matplotlib figure of ``size`` inches with a grid of panels, without pyplot's state.

    Raises: Unsupported where matplotlib is missing.

    >>> figure, panels = canvas("draw", 1, 2, (4.0, 2.0))
    >>> panels.shape
    (1, 2)
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise Unsupported(
            "pictures need matplotlib", op=op, fix="pip install 'shardlib[notebooks]'"
        ) from None
    with matplotlib.rc_context(style()):  # type: ignore[arg-type]
        figure = Figure(figsize=size, layout="constrained")
        figure.suptitle(title, fontsize=8.5)
        return figure, figure.subplots(rows, columns, squeeze=False)


def text_table(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Format rows as lines of aligned columns; those whose numbers are in ``right`` end alike.

    >>> text_table([["a", "bytes"], ["weight", "12"]], right=(1,))
    ['a       bytes', 'weight     12']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        texts = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in cells]
        lines.append("  ".join(texts).rstrip())
    return lines


def html_table(rows: Sequence[Sequence[str]], style: str = "text-align:left") -> str:
    """Format rows, of which the first is the heading, as a table for a notebook.

    >>> html_table([["a"]])
    "<table><tr><th style='text-align:left'>a</th></tr></table>"
    """
    out = []
    for i, row in enumerate(rows):
        tag = "td" if i else "th"
        start = f"<{tag} style='{style}'>"
        out.append("".join(f"{start}{html.escape(cell)}</{tag}>" for cell in row))
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in out) + "</table>"


Pieces = list[tuple[str, int | None]]
"""Runs of text, each with the number of its colour or None."""


class Picture:
    """A figure that a notebook shows and ``save`` writes: ``.png``, ``.svg`` or ``.pdf``.

    >>> import torch, shardlib as sl
    >>> with sl.simulate(x=2, y=2):
    ...     picture = sl.seeing.draw({"a": sl.shard(torch.zeros(4, 6), "x y")})
    >>> picture._repr_png_()[:4]
    b'\\x89PNG'
    """

    def __init__(self, figure: Any, title: str) -> None:
        self.figure, self.title = figure, title

    def save(self, file: str | Path) -> None:
        """Write the figure to a file; the suffix chooses the format.

        Raises: BadArgument for another suffix, or where a file is that no ``save`` wrote.
        """
        kind = Path(file).suffix.lower()
        if kind not in _MARKED:
            raise BadArgument(
                f"{str(file)!r} is no .png, .svg or .pdf", op="save", fix="picture.save('new.png')"
            )
        with replacing(file, "picture.save('{}')") as f:
            self.figure.savefig(f, dpi=150, format=kind[1:], metadata={_MARKED[kind]: MARK})

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.figure.savefig(out, format="png", dpi=100)
        return out.getvalue()

    def __repr__(self) -> str:
        return f"Picture({self.title!r})"


class Pictured:
    """A mixin for charts: ``save(file)`` writes their ``picture()``."""

    picture: Callable[[], Picture]

    def save(self, file: str | Path) -> None:
        """Write the picture; needs matplotlib.

        Raises: BadArgument for another suffix than .png, .svg and .pdf, or where a file is that no
                ``save`` wrote.
        """
        self.picture().save(file)


MARK = "written by shardlib"
"""Words near the beginning or the end of every file that ``save`` writes."""

# key of metadata
_MARKED = {".png": "Software", ".svg": "Creator", ".pdf": "Creator"}
_EDGE = 1 << 16  # bytes


def refuse_foreign(file: str | Path, op: str, fix: str) -> None:
    """Refuse to replace a file that no ``save`` wrote; an empty one may be replaced.

    ``fix``  a call that writes elsewhere, with {} for the new name.
    """
    if not os.path.isfile(file):  # absent, or a device
        return
    with open(file, "rb") as f:
        edges = f.read(_EDGE)
        f.seek(max(os.path.getsize(file) - _EDGE, 0))
        edges += f.read()
    if edges and MARK.encode() not in edges:
        raise BadArgument(
            f"{str(file)!r} is a file that shardlib did not write, and is not replaced",
            op=op,
            fix=fix.format("new" + Path(file).suffix),
        )


@contextmanager
def replacing(file: str | Path, fix: str) -> Iterator[BinaryIO]:
    """Open a new file, which takes its place when it is whole.

    Raises: BadArgument where a file is that no ``save`` wrote.
    """
    refuse_foreign(file, "save", fix)
    place = os.path.realpath(file)  # through links
    if os.path.exists(place) and not os.path.isfile(place):
        # a device; or a directory, refused
        with open(place, "wb") as f:
            yield f
        return
    new = os.path.join(os.path.dirname(place), f".{os.path.basename(place)}.tmp-{os.getpid()}")
    try:
        with open(new, "xb") as f:
            yield f
        os.replace(new, place)
    except BaseException:
        Path(new).unlink(missing_ok=True)
        raise


class Shown:
    """A mixin for coloured text: ``show()`` prints it, and ``rich.print`` takes it.

    ``pieces()``  lists (text, number of its colour or None).
    """

    pieces: Callable[[], Pieces]

    def __rich__(self) -> Any:
        from rich.text import Text

        out = Text(no_wrap=True)
        for text, number in self.pieces():
            out.append(text, style="" if number is None else f"white on {colours(1, number)[0]}")
        return out

    def show(self) -> None:
        """Print it: in colours if this is a terminal and rich is installed, else plain.

        >>> import torch, shardlib as sl
        >>> with sl.simulate(x=2):
        ...     sl.visualize(sl.shard(torch.zeros(4), "x")).show()
        +-----+-----+
        | 0   | 1   |
        | x0  | x1  |
        +-----+-----+
        """
        try:
            from rich.console import Console
        except ImportError:
            Console = None
        if Console is None or not sys.stdout.isatty():
            print(str(self))
        else:
            Console().print(self.__rich__(), soft_wrap=True)
