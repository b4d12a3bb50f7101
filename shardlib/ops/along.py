"""Operators along the dimensions that an argument names: those must be whole, others are rows."""

from shardlib.ops.declare import Bound, along, declare, last, rows, where
from shardlib.ops.dims import Labels

declare(
    """
    cumsum(input, dim, *, dtype=None)
    cumprod(input, dim, *, dtype=None)
    cummax(input, dim)
    cummin(input, dim)
    logcumsumexp(input, dim)
    flip(input, *dims: int)
    sort(input, dim: int = -1, descending: bool = False, *, stable=None)
    argsort(input, dim: int = -1, descending: bool = False, *, stable=None)
    mode(input, dim=-1, keepdim=False)
    median(input, dim=None, keepdim=False)
    nanmedian(input, dim=None, keepdim=False)
    quantile(input, q: number, dim=None, keepdim=False, *, interpolation='linear')
    nanquantile(input, q: number, dim=None, keepdim=False, *, interpolation='linear')
    softmin(input, dim: int, _stacklevel=3, dtype=None)
    unfold(input, dimension, size, step)
    diff(input, n=1, dim=-1, prepend=None, append=None)
    trapz(y, x=None, *, dim=-1)
    trapezoid(y, x=None, *, dim=-1)
    cumulative_trapezoid(y, x=None, *, dim=-1)
    gradient(input, *, spacing=1, dim=None, edge_order=1)
    glu(input, dim=-1)
    rot90(input, k=1, dims=(0, 1))
    tensor_split(input, indices_or_sections, dim=0)
    linalg.cross(input, other, *, dim=-1)
    cosine_similarity(x1, x2, dim=1, eps=1e-8)
    fft.fft(input, n=None, dim=-1, norm=None)
    fft.ifft(input, n=None, dim=-1, norm=None)
    fft.rfft(input, n=None, dim=-1, norm=None)
    fft.irfft(input, n=None, dim=-1, norm=None)
    fft.hfft(input, n=None, dim=-1, norm=None)
    fft.ihfft(input, n=None, dim=-1, norm=None)
    fft.fft2(input, s=None, dim=(-2, -1), norm=None)
    fft.ifft2(input, s=None, dim=(-2, -1), norm=None)
    fft.rfft2(input, s=None, dim=(-2, -1), norm=None)
    fft.irfft2(input, s=None, dim=(-2, -1), norm=None)
    fft.hfft2(input, s=None, dim=(-2, -1), norm=None)
    fft.ihfft2(input, s=None, dim=(-2, -1), norm=None)
    fft.fftn(input, s=None, dim=None, norm=None)
    fft.ifftn(input, s=None, dim=None, norm=None)
    fft.rfftn(input, s=None, dim=None, norm=None)
    fft.irfftn(input, s=None, dim=None, norm=None)
    fft.hfftn(input, s=None, dim=None, norm=None)
    fft.ihfftn(input, s=None, dim=None, norm=None)
    fft.fftshift(input, dim=None)
    fft.ifftshift(input, dim=None)
    roll(input, shifts, dims=None)
    """,
    along,
)


def _but_dim(b: Bound) -> Labels:
    """Label every dimension but ``dim`` a row: slices along ``dim`` are normalised as a whole."""
    return rows(b, lambda s: where(None, s.ndim) - where(b["dim"], s.ndim))


declare("renorm(input, p, dim, maxnorm)", _but_dim)


def _tiled(b: Bound) -> Labels:
    """Label the dimensions that are not repeated rows."""
    x = b["input"]
    counts = tuple(b.get("repeats", b.get("dims", ())))
    counts = (1,) * (x.ndim - len(counts)) + counts
    return {
        x.at: tuple(d if c == 1 else None for d, c in enumerate(counts[len(counts) - x.ndim :]))
    }


declare(
    """
    repeat(input, *repeats: int)
    tile(input, *dims: int)
    """,
    _tiled,
)


def _two(b: Bound) -> Labels:
    """Label all but two dimensions rows."""
    return rows(b, lambda s: where((b["dim1"], b["dim2"]), s.ndim))


declare(
    """
    diagonal(input, offset=0, dim1=0, dim2=1)
    linalg.diagonal(A, *, offset=0, dim1=-2, dim2=-1)
    """,
    _two,
)
declare("diag_embed(input, offset=0, dim1=-2, dim2=-1)\nview_as_complex(input)", last(1))


def _into(b: Bound) -> Labels:
    """Label all but ``dim`` rows: the input has ``dim`` whole, a selected piece lacks it."""
    x, src = b["input"], b["src"]
    (dim,) = where(b["dim"], x.ndim)
    kept = [d for d in range(x.ndim) if src.ndim == x.ndim or d != dim]
    return {
        x.at: tuple(None if d == dim else d for d in range(x.ndim)),
        src.at: tuple(None if d == dim else d for d in kept),
    }


declare(
    """
    select_scatter(input, src, dim: int, index)
    slice_scatter(input, src, dim: int = 0, start=None, end=None, step=1)
    """,
    _into,
)
