"""2D block layout: first and last dimension split over the two axes of a mesh plane.

Source: Xu et al., arXiv 2104.05343, section 3.  The plane need not be square.
"""

from shardlib.layouts.layout import Layout

__all__ = ["Layout2D"]


def Layout2D(rows: str, cols: str, *, skew: str = "") -> Layout:
    """Split the first dimension over mesh axis ``rows``, the last over ``cols``.

    ``skew="a"`` or ``"b"``: stored as Cannon's left or right operand, already aligned: rank
    (i, j) holds block (i, i+j) or (i+j, j).

    >>> Layout2D("x", "y")
    Layout('x ... y')
    >>> Layout2D("x", "y").local_shape((8, 5, 6), {"x": 4, "y": 2})
    (2, 5, 3)
    """
    return Layout.parse(f"{rows} {cols} skew {skew}" if skew else f"{rows} ... {cols}")
