"""Named layouts: rows, columns, blocks of a plane, 2.5D and 3D; each is a spelling of ``Layout``."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from shardlib.errors import LayoutSyntax
from shardlib.layouts.dims import Dim
from shardlib.layouts.layout import Layout, taken
from shardlib.mesh import Axes, Axis


def Replicated() -> Layout:
    """Keep the whole tensor on every rank.

    >>> Replicated()
    Layout('...')
    """
    return Layout(ellipsis=0)


def Partial(*axes: str) -> Layout:
    """Mark the value as the pending sum of the blocks over ``axes``.

    >>> Partial("x")
    Layout('... + sum(x)')
    """
    return Layout(partial=axes, ellipsis=0)


def Row(*axes: str) -> Layout:
    """Split the first dimension of the tensor as stored.

    >>> Row("x"), Row("d", "x")
    (Layout('x ...'), Layout('(d x) ...'))
    """
    return Layout((Dim(axes),), ellipsis=1)


def Col(*axes: str) -> Layout:
    """Split the last dimension of the tensor as stored.

    >>> Col("y")
    Layout('... y')
    """
    return Layout((Dim(axes),), ellipsis=0)


def P(*dims: Axis | None) -> Layout:
    """Name the mesh axes that split each dimension, as JAX's PartitionSpec does.

    Dimensions that are left out are not split.  A plain tuple of these is also accepted as the
    layout of one tensor; for a tuple of tensors it is one layout for each.
    Raises: LayoutSyntax, AxisReused.

    >>> P("x", None), P(("x", "y")), P()
    (Layout('x . ...'), Layout('(x y) ...'), Layout('...'))
    """
    found = taken(dims) if all(isinstance(d, str | tuple | None) for d in dims) else None
    if found is None:
        why = f"{dims!r}: each dimension has a mesh axis, a tuple of them, or None"
        raise LayoutSyntax(why, op="P", fix="sl.P('x', None)")
    return found


def Layout2D(rows: str, cols: str, *, skew: str = "") -> Layout:
    """Split the first dimension over mesh axis ``rows``, the last over ``cols``.

    The plane need not be square.  Source: Xu et al., arXiv 2104.05343, section 3.

    ``skew="a"`` or ``"b"``: stored as Cannon's left or right operand, already aligned: rank
    (i, j) holds block (i, i+j) or (i+j, j).

    >>> Layout2D("x", "y")
    Layout('x ... y')
    >>> Layout2D("x", "y").local_shape((8, 5, 6), {"x": 4, "y": 2})
    (2, 5, 3)
    """
    return Layout.parse(f"{rows} {cols} skew {skew}" if skew else f"{rows} ... {cols}")


@dataclass(frozen=True)
class Layout25D:
    """The layouts of a 2.5D linear layer, on a plane of 2D blocks times a depth.

    Tesseract splits activations over depth and rows, and copies weights over depth.  Solomonik and
    Demmel split the contraction over depth instead, so that nothing is copied, and scatter the sum.

    ``act``, ``weight``  Tesseract: the product of the two has layout ``act`` again.
    ``deep_act``, ``deep_weight``, ``deep_out``  contraction over depth: each depth multiplies its
    share of it on the plane, and the sum over depth is scattered over the rows.

    Source: Wang et al., arXiv 2105.14500, section 3; Solomonik and Demmel, Euro-Par 2011.

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


@dataclass(frozen=True)
class Layout3D:
    """The layouts of a 3D linear layer; its output is the next layer's input with y, z swapped.

    Every matrix is balanced over a cube of ranks.
    Source: Bian et al., arXiv 2105.14450, section 3; Agarwal et al. 1995.

    >>> L = Layout3D("x", "y", "z")
    >>> L.act, L.weight, L.out
    (Layout('(x y) ... z'), Layout('(z x) y'), Layout('(x z) ... y'))
    """

    x: str
    y: str
    z: str

    @property
    def layout(self) -> Layout:
        """The layout used where one is expected: that of activations."""
        return self.act

    @property
    def act(self) -> Layout:
        return Layout.parse(f"({self.x} {self.y}) ... {self.z}")

    @property
    def weight(self) -> Layout:
        return Layout.parse(f"({self.z} {self.x}) {self.y}")

    @property
    def out(self) -> Layout:
        return Layout3D(self.x, self.z, self.y).act


def split_ways(names: Axes) -> Iterator[tuple[str, str]]:
    """List every way to split two dimensions, each over none, one or two axes.

    >>> list(split_ways(("x",)))
    [('x', '.'), ('.', 'x'), ('.', '.')]
    """
    pairs = [f"({a} {b})" for a, b in itertools.permutations(names, 2)]
    tokens = [*names, *pairs, "."]
    for p, q in itertools.product(tokens, repeat=2):
        if not set(p.strip("()").split()) & set(q.strip("()").split()) - {"."}:
            yield p, q
