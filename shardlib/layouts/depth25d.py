"""2.5D layouts: a plane of 2D blocks times a depth.

Tesseract splits activations over depth and rows, and copies weights over depth.  Solomonik and
Demmel split the contraction over depth instead, so that nothing is copied, and scatter the sum.

Source: Wang et al., arXiv 2105.14500, section 3; Solomonik and Demmel, Euro-Par 2011.
"""

from dataclasses import dataclass

from shardlib.layouts.layout import Layout

__all__ = ["Layout25D"]


@dataclass(frozen=True)
class Layout25D:
    """The layouts of a 2.5D linear layer.

    ``act``, ``weight``  Tesseract: the product of the two has layout ``act`` again.
    ``deep_act``, ``deep_weight``, ``deep_out``  contraction over depth: each depth multiplies its
    share of it on the plane, and the sum over depth is scattered over the rows.

    >>> L = Layout25D("x", "y", "d")
    >>> L.act, L.weight
    (Layout('(d x) ... y'), Layout('x y'))
    >>> L.deep_act, L.deep_weight, L.deep_out
    (Layout('x ... (d y)'), Layout('(d x) y'), Layout('(x d) ... y'))
    """

    rows: str
    cols: str
    depth: str

    @property
    def layout(self) -> Layout:
        """The layout used where one is expected: that of activations."""
        return self.act

    @property
    def act(self) -> Layout:
        return Layout.parse(f"({self.depth} {self.rows}) ... {self.cols}")

    @property
    def weight(self) -> Layout:
        return Layout.parse(f"{self.rows} {self.cols}")

    @property
    def deep_act(self) -> Layout:
        return Layout.parse(f"{self.rows} ... ({self.depth} {self.cols})")

    @property
    def deep_weight(self) -> Layout:
        return Layout.parse(f"({self.depth} {self.rows}) {self.cols}")

    @property
    def deep_out(self) -> Layout:
        return Layout.parse(f"({self.rows} {self.depth}) ... {self.cols}")
