"""2.5D layout: a square plane times a depth.

Activations are split over depth and rows; weights are split on the plane and copied over depth.

Source: Wang et al., arXiv 2105.14500 (Tesseract), section 3.
"""

from dataclasses import dataclass

from shardlib.layouts.base import Layout

__all__ = ["Layout2p5D", "Layout25D"]


@dataclass(frozen=True)
class Layout25D:
    """The layouts of a 2.5D linear layer.

    >>> L = Layout25D("x", "y", "d")
    >>> L.act, L.weight
    (Layout('(d x) ... y'), Layout('x y'))
    """

    rows: str
    cols: str
    depth: str

    @property
    def act(self) -> Layout:
        return Layout.parse(f"({self.depth} {self.rows}) ... {self.cols}")

    @property
    def weight(self) -> Layout:
        return Layout.parse(f"{self.rows} {self.cols}")


Layout2p5D = Layout25D
