"""Operators along the dimensions that an argument names: those must be whole, others are rows."""

from shardlib.ops.declare import Bound, along, declare, last, of_kind, rows, rows_but, where
from shardlib.ops.dims import Labels

of_kind("along", along)


@declare("renorm(input, p, dim, maxnorm)")
def _but_dim(b: Bound) -> Labels:
    """Label every dimension but ``dim`` a row: slices along ``dim`` are normalised as a whole."""
    return rows(b, lambda s: where(None, s.ndim) - where(b["dim"], s.ndim))


@declare("""
    repeat(input, *repeats: int)
    tile(input, *dims: int)
    """)
def _tiled(b: Bound) -> Labels:
    """Label the dimensions that are not repeated rows."""
    x = b["input"]
    counts = tuple(b.get("repeats", b.get("dims", ())))
    counts = (1,) * (x.ndim - len(counts)) + counts
    repeated = [d for d, c in enumerate(counts[len(counts) - x.ndim :]) if c != 1]
    return {x.at: rows_but(repeated, x.ndim)}


@declare("""
    diagonal(input, offset=0, dim1=0, dim2=1)
    linalg.diagonal(A, *, offset=0, dim1=-2, dim2=-1)
    """)
def _two(b: Bound) -> Labels:
    """Label all but two dimensions rows."""
    return rows(b, lambda s: where((b["dim1"], b["dim2"]), s.ndim))


declare("diag_embed(input, offset=0, dim1=-2, dim2=-1)\nview_as_complex(input)")(last(1))


@declare("""
    select_scatter(input, src, dim: int, index)
    slice_scatter(input, src, dim: int = 0, start=None, end=None, step=1)
    """)
def _into(b: Bound) -> Labels:
    """Label all but ``dim`` rows: the input has ``dim`` whole, a selected piece lacks it."""
    x, src = b["input"], b["src"]
    (dim,) = where(b["dim"], x.ndim)
    of_x = rows_but({dim}, x.ndim)
    if src.ndim == x.ndim:
        return {x.at: of_x, src.at: of_x}
    return {x.at: of_x, src.at: (*of_x[:dim], *of_x[dim + 1 :])}
