"""What each of torch's operators does to dimensions: the declarations.

map     every dimension is a row; operands broadcast
along   the dimensions that an argument names are whole, all others are rows
last n  the last n dimensions are whole, all others are rows; operands broadcast over them
batch   the first dimension (channels, space: whole); weights whole
text    labels written out: "b . ., o . ., o"
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import builtin_homes
from shardlib.ops.dims import Labels, Unfit, declare, rows_call
from shardlib.ops.reduce import ALONG
from shardlib.ops.signatures import Slot, binder
from shardlib.ops.views import PICKED
from shardlib.ops.whole import on_whole
from shardlib.tensor import TABLE, ShardedTensor, implements, replicated

__all__ = ["KINDS"]

KINDS: dict[str, list[str]] = {}
_HOMES = [torch, Tensor, F, torch.linalg, torch.fft, torch.special, *builtin_homes]


def _slots(value: Any) -> list[Slot]:
    if isinstance(value, Slot):
        return [value]
    if isinstance(value, tuple | list):
        return [s for v in value for s in _slots(v)]
    return [s for v in value.values() for s in _slots(v)] if isinstance(value, dict) else []


def _rows(bound: dict[str, Any], whole: Callable[[Slot], set[int]]) -> Labels:
    """Labels by position from the right, so that operands broadcast; ``whole`` says which dimensions have none."""
    out: Labels = {}
    for s in _slots(bound):
        gone = whole(s)
        out[s.at] = tuple(None if d in gone else d - s.ndim for d in range(s.ndim))
    return out


def _dims(value: Any, ndim: int) -> set[int]:
    if value is None or value == () or value == []:
        return set(range(ndim))
    found = value if isinstance(value, tuple | list) else (value,)
    for d in found:
        if not -max(1, ndim) <= d < max(1, ndim):
            raise IndexError(d)
    return {d % ndim for d in found} if ndim else set()


def _funcs(name: str, title: str = "") -> list[Any]:
    homes = _HOMES
    if "." in name:
        home, _, name = name.rpartition(".")
        homes = [{"linalg": torch.linalg, "fft": torch.fft, "special": torch.special, "F": F, "Tensor": Tensor}[home]]
    found = []
    for home in homes:
        f = getattr(home, name, None)
        if f is not None and callable(f) and f not in TABLE and f not in found:
            found.append(f)
    return found


def _enter(
    kind: str, name: str, signature: str, labels: Callable[[dict[str, Any]], Labels], sums: bool = False
) -> None:
    funcs = _funcs(name)
    if funcs:
        declare(*funcs, signature=signature, labels=labels, sums=sums)
        KINDS.setdefault(kind, []).append(name)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines() if line.strip()]


def _name(line: str) -> tuple[str, str]:
    """(dotted name, signature with a bare name)"""
    name = line.partition("(")[0]
    return name, name.rpartition(".")[2] + line[len(name) :]


# ---------------------------------------------------------------- map

for _n in """
    acosh asinh atanh arccos arccosh arcsin arcsinh arctan arctan2 arctanh absolute addr_ angle clip conj conj_physical
    copysign deg2rad rad2deg digamma erfinv fix float_power fmod frexp gcd lcm heaviside i0 igamma igammac isclose isneginf
    isposinf isreal ldexp lgamma mvlgamma logaddexp2 logit negative nextafter polar complex polygamma positive real imag
    resolve_conj resolve_neg rsub sgn signbit sinc subtract multiply divide greater greater_equal less less_equal not_equal
    bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ __rlshift__ __rrshift__ __rfloordiv__ __rmod__
    threshold hardtanh rrelu chalf cfloat cdouble cbool int short char byte special.airy_ai
    special.bessel_j0 special.bessel_j1 special.bessel_y0 special.bessel_y1 special.entr special.erfcx special.exp2
    special.expit special.expm1 special.gammainc special.gammaincc special.gammaln special.i0 special.i0e special.i1
    special.i1e special.log_ndtr special.ndtr special.ndtri special.modified_bessel_i0 special.modified_bessel_i1
    special.modified_bessel_k0 special.modified_bessel_k1 special.scaled_modified_bessel_k0
    special.scaled_modified_bessel_k1 special.spherical_bessel_j0 special.xlog1py special.zeta special.psi special.logit
    special.sinc special.round special.erf special.erfc special.erfinv special.digamma special.polygamma special.log1p
    special.xlogy special.chebyshev_polynomial_t special.chebyshev_polynomial_u special.chebyshev_polynomial_v
    special.chebyshev_polynomial_w special.hermite_polynomial_h special.hermite_polynomial_he
    special.laguerre_polynomial_l special.legendre_polynomial_p special.shifted_chebyshev_polynomial_t
    special.shifted_chebyshev_polynomial_u special.shifted_chebyshev_polynomial_v special.shifted_chebyshev_polynomial_w
    broadcast_tensors hardshrink isfinite dequantize
""".split():
    _enter("map", _n, "", lambda b: _rows(b, lambda s: set()))

# ---------------------------------------------------------------- along

for _line in _lines("""
    cumsum(input, dim, *, dtype=None)
    cumprod(input, dim, *, dtype=None)
    cummax(input, dim)
    cummin(input, dim)
    logcumsumexp(input, dim)
    flip(input, *dims: int)
    sort(input, dim: int = -1, descending: bool = False, *, stable=None)
    argsort(input, dim: int = -1, descending: bool = False, *, stable=None)
    msort(input, *, dim=0)
    topk(input, k, dim=-1, largest=True, sorted=True)
    kthvalue(input, k, dim=-1, keepdim=False)
    mode(input, dim=-1, keepdim=False)
    median(input, dim=None, keepdim=False)
    nanmedian(input, dim=None, keepdim=False)
    quantile(input, q: number, dim=None, keepdim=False, *, interpolation='linear')
    nanquantile(input, q: number, dim=None, keepdim=False, *, interpolation='linear')
    argmax(input, dim=None, keepdim=False)
    argmin(input, dim=None, keepdim=False)
    max(input, dim: int, keepdim=False)
    min(input, dim: int, keepdim=False)
    aminmax(input, *, dim=None, keepdim=False)
    prod(input, dim=None, keepdim=False, *, dtype=None)
    nansum(input, dim=None, keepdim=False, *, dtype=None)
    nanmean(input, dim=None, keepdim=False, *, dtype=None)
    count_nonzero(input, dim=None)
    var_mean(input, dim=None, *, correction=1, keepdim=False)
    std_mean(input, dim=None, *, correction=1, keepdim=False)
    softmin(input, dim: int, _stacklevel=3, dtype=None)
    unfold(input, dimension, size, step)
    diff(input, n=1, dim=-1, prepend=None, append=None)
    trapz(y, x=None, *, dim=-1)
    trapezoid(y, x=None, *, dim=-1)
    cumulative_trapezoid(y, x=None, *, dim=-1)
    gradient(input, *, spacing=1, dim=None, edge_order=1)
    glu(input, dim=-1)
    logsumexp(input, dim, keepdim=False)
    special.softmax(input, dim, dtype=None)
    special.log_softmax(input, dim, *, dtype=None)
    renorm(input, p, dim, maxnorm)
    rot90(input, k=1, dims=(0, 1))
    tensor_split(input, indices_or_sections, dim=0)
    diagonal(input, offset=0, dim1=0, dim2=1)
    linalg.diagonal(A, *, offset=0, dim1=-2, dim2=-1)
    diag_embed(input, offset=0, dim1=-2, dim2=-1)
    cross(input, other, dim=-1)
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
"""):
    _full, _sig = _name(_line)

    def _along(b: dict[str, Any], name: str = _full) -> Labels:
        keys = [k for k in ("dim", "dims", "dimension") if k in b]
        if keys:
            value = b[keys[0]]
            if name == "renorm":
                return _rows(b, lambda s: _dims(None, s.ndim) - _dims(value, s.ndim))
            if value is None and b.get("s") is not None:
                value = tuple(range(-len(b["s"]), 0))
            return _rows(b, lambda s: _dims(value, s.ndim))
        if name == "diag_embed":
            return _rows(b, lambda s: {s.ndim - 1})
        return _rows(b, lambda s: _dims((b["dim1"], b["dim2"]), s.ndim))

    if _full in ("max", "min"):
        if not ALONG:
            _bind = binder(_sig)
            ALONG.append(lambda f, a, k, w=_along, bind=_bind: rows_call(f, a, k, lambda *c: w(bind(*c[0], **c[1]))))
        KINDS["along"].append(_full)
        continue
    _enter("along", _full, _sig, _along)

# ---------------------------------------------------------------- the last dimensions

for _n, _line in [
    (int(x[0]), x[1:].strip())
    for x in _lines("""
    2 tril(input, diagonal=0)
    2 triu(input, diagonal=0)
    2 adjoint(input)
    2 linalg.cholesky(input, *, upper=False)
    2 linalg.cholesky_ex(input, *, upper=False, check_errors=False)
    2 linalg.det(A)
    2 linalg.slogdet(A)
    2 linalg.inv(A)
    2 linalg.inv_ex(A, *, check_errors=False)
    2 linalg.eig(A)
    2 linalg.eigh(A, UPLO='L')
    2 linalg.eigvals(A)
    2 linalg.eigvalsh(A, UPLO='L')
    2 linalg.qr(A, mode='reduced')
    2 linalg.svd(A, full_matrices=True, *, driver=None)
    2 linalg.svdvals(A, *, driver=None)
    2 linalg.lu(A, *, pivot=True)
    2 linalg.lu_factor(A, *, pivot=True)
    2 linalg.lu_factor_ex(A, *, pivot=True, check_errors=False)
    2 linalg.ldl_factor(A, *, hermitian=False)
    2 linalg.ldl_factor_ex(A, *, hermitian=False, check_errors=False)
    2 linalg.matrix_exp(A)
    2 linalg.matrix_power(A, n)
    2 linalg.matrix_rank(A, tol=None, hermitian=False, *, atol=None, rtol=None)
    2 trace(input)
    1 linalg.vecdot(x, y, *, dim=-1)
    1 bucketize(input, boundaries, *, out_int32=False, right=False)
    2 lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True)
    2 linalg.pinv(A, rcond=None, hermitian=False, *, atol=None, rtol=None)
    2 linalg.cond(A, p=None)
    2 linalg.matrix_norm(A, ord='fro', dim=(-2, -1), keepdim=False, *, dtype=None)
    2 linalg.solve_triangular(A, B, *, upper, left=True, unitriangular=False)
    2 linalg.householder_product(A, tau)
    2 linalg.lstsq(A, B, rcond=None, *, driver=None)
    2 linalg.lu_solve(LU, pivots, B, *, left=True, adjoint=False)
    2 cholesky(input, upper=False)
    2 cholesky_inverse(input, upper=False)
    2 cholesky_solve(input, input2, upper=False)
    2 det(input)
    2 logdet(input)
    2 slogdet(input)
    2 inverse(input)
    2 pinverse(input, rcond=1e-15)
    2 qr(input, some=True)
    2 svd(input, some=True, compute_uv=True)
    2 matrix_exp(input)
    2 matrix_power(input, n)
    2 geqrf(input)
    2 triangular_solve(b, A, upper=True, transpose=False, unitriangular=False)
    2 lu(input, pivot=True, get_infos=False)
    2 cdist(x1, x2, p=2.0, compute_mode=None)
    1 view_as_complex(input)
    1 linalg.vander(x, *, N=None)
    2 pixel_shuffle(input, upscale_factor)
    1 pairwise_distance(x1, x2, p=2.0, eps=1e-6, keepdim=False)
    1 vdot(input, other)
""")
]:
    _full, _sig = _name(_line)
    if _full in ("pixel_shuffle",):
        continue
    if _full in ("lu_unpack", "linalg.lu_solve", "linalg.householder_product"):

        def _left(b: dict[str, Any], n: int = _n) -> Labels:
            """Operands of other ranks, such as pivots: aligned at their leading dimensions, which must agree."""
            slots = _slots(b)
            lead = slots[0].ndim - n
            if any(s.shape[:lead] != slots[0].shape[:lead] or s.ndim < lead for s in slots):
                raise Unfit("leading dimensions differ")
            return {s.at: tuple(d if d < lead else None for d in range(s.ndim)) for s in slots}

        _enter("last", _full, _sig, _left)
        continue
    _enter("last", _full, _sig, lambda b, n=_n: _rows(b, lambda s: set(range(max(0, s.ndim - n), s.ndim))))

for _line in _lines("""
    view_as_real(input)
"""):
    _full, _sig = _name(_line)
    _enter("map", _full, _sig, lambda b: _rows(b, lambda s: set()))


# ---------------------------------------------------------------- batch: weights whole, space whole


def _lead(n: int, need: int) -> Callable[[dict[str, Any]], Labels]:
    """The first n dimensions of the first operand are rows where it has ``need`` dimensions (else one less)."""

    def labels(b: dict[str, Any]) -> Labels:
        first, *rest = _slots(b)
        lead = n - (need - first.ndim)
        if need and not need - 1 <= first.ndim <= need:
            raise Unfit("dimensions")
        out: Labels = {s.at: (None,) * s.ndim for s in rest}
        out[first.at] = tuple(d if d < lead else None for d in range(first.ndim))
        return out

    return labels


for _k in (1, 2, 3):
    for _line in _lines(f"""
        max_pool{_k}d(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False)
        max_pool{_k}d_with_indices(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False)
        avg_pool{_k}d(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None)
        adaptive_avg_pool{_k}d(input, output_size)
        adaptive_max_pool{_k}d(input, output_size, return_indices=False)
        adaptive_max_pool{_k}d_with_indices(input, output_size, return_indices=False)
        max_unpool{_k}d(input, indices, kernel_size, stride=None, padding=0, output_size=None)
        lp_pool{_k}d(input, norm_type, kernel_size, stride=None, ceil_mode=False)
        replication_pad{_k}d(input, padding)
        reflection_pad{_k}d(input, padding)
    """):
        _full, _sig = _name(_line)
        _enter("space", _full, _sig, _lead(2, _k + 2))
    _names = f"conv{_k}d(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1)"
    _trans = (
        f"conv_transpose{_k}d(input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1)"
    )

    def _conv(b: dict[str, Any], k: int = _k, transposed: bool = False) -> Labels:
        x, w, bias = b["input"], b["weight"], b["bias"]
        filters = "o" if b["groups"] == 1 else None
        out: Labels = {x.at: ("b",) * (x.ndim - k - 1) + (None,) * (k + 1)}
        out[w.at] = ((None, filters) if transposed else (filters, None)) + (None,) * k
        if isinstance(bias, Slot):
            out[bias.at] = (filters,)
        return out

    _enter("text", f"conv{_k}d", _names, _conv)
    _enter("text", f"conv_transpose{_k}d", _trans, lambda b, k=_k: _conv(b, k, True))

for _need, _line in [
    (int(x[0]), x[1:].strip())
    for x in _lines("""
    4 grid_sample(input, grid, mode='bilinear', padding_mode='zeros', align_corners=None)
    4 grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners)
    3 group_norm(input, num_groups, weight=None, bias=None, eps=1e-05, cudnn_enabled=True)
    3 native_group_norm(input, weight, bias, N, C, HxW, group, eps)
    4 im2col(input, kernel_size, dilation, padding, stride)
    3 col2im(input, output_size, kernel_size, dilation, padding, stride)
    3 upsample_nearest1d(input, output_size, scales=None)
    4 upsample_nearest2d(input, output_size, scales_h=None, scales_w=None)
    5 upsample_nearest3d(input, output_size, scales_d=None, scales_h=None, scales_w=None)
    3 upsample_linear1d(input, output_size, align_corners, scales=None)
    4 upsample_bilinear2d(input, output_size, align_corners, scales_h=None, scales_w=None)
    4 upsample_bicubic2d(input, output_size, align_corners, scales_h=None, scales_w=None)
    5 upsample_trilinear3d(input, output_size, align_corners, scales_d=None, scales_h=None, scales_w=None)
    4 pixel_shuffle(input, upscale_factor)
    4 pixel_unshuffle(input, downscale_factor)
    4 channel_shuffle(input, groups)
    4 local_response_norm(input, size, alpha=1e-4, beta=0.75, k=1.0)
    2 bilinear(input1, input2, weight, bias=None)
""")
]:
    _full, _sig = _name(_line)

    def _batch(b: dict[str, Any]) -> Labels:
        first, *rest = _slots(b)
        out: Labels = {s.at: (None,) * s.ndim for s in rest}
        out[first.at] = ("b",) + (None,) * (first.ndim - 1)
        for s in rest:
            if s is b.get("grid") or s is b.get("input2"):
                out[s.at] = ("b",) + (None,) * (s.ndim - 1)
        return out

    _enter("batch", _full, _sig, _batch)


# ---------------------------------------------------------------- index


def _at_dim(b: dict[str, Any], *same: str) -> Labels:
    """Operands of one rank, whole along ``dim``; sizes of rows must agree (torch allows smaller indices)."""
    x = b["input"]
    (dim,) = _dims(b["dim"], x.ndim) if x.ndim else (0,)
    out: Labels = {}
    for s in _slots(b):
        if s.ndim != x.ndim:
            raise Unfit("dimensions")
        out[s.at] = tuple(None if d == dim or s.shape[d] != x.shape[d] else d for d in range(s.ndim))
    for d in range(x.ndim):
        if any(s.shape[d] != x.shape[d] for s in _slots(b)) and d != dim:
            for s in _slots(b):
                out[s.at] = tuple(None if e == d else v for e, v in enumerate(out[s.at]))
    return out


def _index_dim(b: dict[str, Any]) -> Labels:
    x, index = b["input"], b["index"]
    (dim,) = _dims(b["dim"], x.ndim) if x.ndim else (0,)
    out: Labels = {s.at: tuple(None if d == dim else d for d in range(s.ndim)) for s in _slots(b) if s is not index}
    out[index.at] = (None,) * index.ndim
    if "source" not in b and isinstance(index, Slot) and index.ndim == 1:
        out[index.at] = ("i",)
    return out


for _line in _lines("""
    gather(input, dim, index, *, sparse_grad=False)
    take_along_dim(input, index, dim: int)
    scatter_add(input, dim, index, src)
    scatter(input, dim, index, src, *, reduce=None)
    scatter_reduce(input, dim, index, src, reduce, *, include_self=True)
"""):
    _full, _sig = _name(_line)
    _enter("index", _full, _sig, _at_dim)
for _line in _lines("""
    index_select(input, dim, index)
    index_add(input, dim, index, source, *, alpha=1)
    index_copy(input, dim, index, source)
    index_reduce(input, dim, index, source, reduce, *, include_self=True)
    index_fill(input, dim, index, value: number)
"""):
    _full, _sig = _name(_line)
    _enter("index", _full, _sig, _index_dim)


def _indexed(b: dict[str, Any]) -> Labels:
    """x[...]: dimensions taken whole are rows, and so are those of the indices."""
    x, index = b["input"], b["index"]
    index = index if isinstance(index, tuple) else (index,)
    named = sum(i is not None and i is not Ellipsis for i in index)
    if any(isinstance(i, list) for i in index) or index.count(None) + named != len(index) - (Ellipsis in index):
        raise Unfit("lists")
    fill = (slice(None),) * (x.ndim - named)
    at = next((k for k, i in enumerate(index) if i is Ellipsis), len(index))
    index = (*index[:at], *fill, *index[at + 1 :])
    mine: list[Any] = []
    out: Labels = {}
    for i in index:
        if i is None:
            continue
        mine.append(len(mine) if isinstance(i, slice) and i == slice(None) else None)
        if isinstance(i, Slot):
            out[i.at] = tuple(("i", d - i.ndim) for d in range(i.ndim))
    out[x.at] = tuple(mine)
    return out


def _pick(x: Any, index: Any) -> Any:
    mesh = x.mesh

    def here(i: Any) -> Any:
        i = torch.as_tensor(i) if isinstance(i, list) else i
        return replicated(i, mesh) if isinstance(i, Tensor) and not isinstance(i, ShardedTensor) else i

    index = tuple(here(i) for i in index) if isinstance(index, tuple) else here(index)
    several = sum(isinstance(i, Tensor) for i in index) if isinstance(index, tuple) else 1
    masks = [
        i
        for i in (index if isinstance(index, tuple) else (index,))
        if isinstance(i, Tensor) and not i.dtype.is_floating_point and i.dtype == torch.bool
    ]
    if masks or several > 1:
        return on_whole(Tensor.__getitem__, (x, index), {}, None)
    return rows_call(Tensor.__getitem__, (x, index), {}, lambda a, k: _indexed({"input": a[0], "index": a[1]}))


PICKED.append(_pick)


# ---------------------------------------------------------------- creation

for _line in _lines("""
    repeat(input, *repeats: int)
    tile(input, *dims: int)
"""):
    _full, _sig = _name(_line)

    def _tiled(b: dict[str, Any]) -> Labels:
        x = b["input"]
        counts = tuple(b["repeats"] if "repeats" in b else b["dims"])
        counts = (1,) * (x.ndim - len(counts)) + counts
        tail = counts[len(counts) - x.ndim :]
        return {x.at: tuple(d if c == 1 else None for d, c in enumerate(tail))}

    _enter("along", _full, _sig, _tiled)


# ---------------------------------------------------------------- of their own


def _instances(b: dict[str, Any]) -> Labels:
    x, stats = b["input"], [b["running_mean"], b["running_var"]]
    if any(isinstance(s, Slot) for s in stats):
        raise Unfit("running statistics of instances are means over the batch")
    out: Labels = {x.at: ("b", "c") + (None,) * (x.ndim - 2)}
    return out | {s.at: ("c",) for s in (b["weight"], b["bias"]) if isinstance(s, Slot)}


_enter("text", "instance_norm", "instance_norm(input, weight=None, bias=None, running_mean=None, running_var=None, "
       "use_input_stats=True, momentum=0.1, eps=1e-05, cudnn_enabled=True)", _instances)  # fmt: skip


def _prelu(b: dict[str, Any]) -> Labels:
    x, w = b["input"], b["weight"]
    several = w.ndim and w.shape[0] > 1
    return {x.at: tuple("c" if d == 1 and several else d for d in range(x.ndim)),
            w.at: ("c",) if several else (None,) * w.ndim}  # fmt: skip


_enter("text", "prelu", "prelu(input, weight)", _prelu)


def _recurrent(b: dict[str, Any]) -> Labels:
    x = b["input"]
    if x.ndim != 3 or (b["dropout"] and b["train"]):
        raise Unfit("no batch, or dropout")
    out: Labels = {s.at: (None,) * s.ndim for s in _slots(b["params"])}
    out |= {s.at: (None, "b", None) for s in _slots(b["hx"])}
    out[x.at] = ("b", None, None) if b["batch_first"] else (None, "b", None)
    return out


for _n in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    _enter("text", _n, f"{_n}(input, hx, params: tensors, has_biases, num_layers, dropout, train, bidirectional, "
           "batch_first)", _recurrent)  # fmt: skip

_enter("text", "meshgrid", "meshgrid(*tensors: tensor, indexing=None)",
       lambda b: {s.at: (k,) * s.ndim for k, s in enumerate(_slots(b["tensors"]))})  # fmt: skip
_enter("text", "outer", "outer(input, vec2)", lambda b: {b["input"].at: ("i",), b["vec2"].at: ("j",)})


def _solve(b: dict[str, Any]) -> Labels:
    A, B = b["A"], b["B"]
    vector = B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1])
    out: Labels = {A.at: tuple(d - A.ndim + 2 if d < A.ndim - 2 else None for d in range(A.ndim))}
    tail = 1 if vector else 2
    out[B.at] = tuple(d - B.ndim + tail if d < B.ndim - tail else None for d in range(B.ndim))
    return out


_enter("text", "linalg.solve", "solve(A, B, *, left=True)", _solve)
_enter("text", "linalg.solve_ex", "solve_ex(A, B, *, left=True, check_errors=False)", _solve)
_enter("text", "isin", "isin(elements, test_elements, *, assume_unique=False, invert=False)",
       lambda b: {b["elements"].at: tuple(range(b["elements"].ndim)),
                  b["test_elements"].at: (None,) * b["test_elements"].ndim})  # fmt: skip
_enter("batch", "pixel_shuffle", "pixel_shuffle(input, upscale_factor)",
       lambda b: {b["input"].at: tuple(d if d < b["input"].ndim - 3 else None for d in range(b["input"].ndim))})  # fmt: skip
_enter("batch", "pixel_unshuffle", "pixel_unshuffle(input, downscale_factor)",
       lambda b: {b["input"].at: tuple(d if d < b["input"].ndim - 3 else None for d in range(b["input"].ndim))})  # fmt: skip


# ---------------------------------------------------------------- spelled by others


def _spell(body: Callable[..., Any], signature: str, *names: str) -> None:
    bind = binder(signature)
    for name in names:
        for f in _funcs(name):
            implements(f)(lambda func, args, kwargs, body=body: body(**bind(*args, **kwargs)))
        KINDS.setdefault("spelled", []).append(name)


def _stacked(dim: int, least: Callable[..., Any]) -> Callable[..., Any]:
    def body(tensors: Any) -> Any:
        tensors = [least(t) for t in tensors]
        return torch.cat(tensors, 0 if dim == 1 and tensors[0].ndim == 1 else dim)

    return body


_spell(_stacked(1, lambda t: t.reshape(1) if t.ndim == 0 else t), "hstack(tensors)", "hstack")
_spell(_stacked(0, lambda t: t.reshape(1, -1) if t.ndim < 2 else t), "vstack(tensors)", "vstack", "row_stack")
_spell(_stacked(2, lambda t: t.reshape(1, -1, 1) if t.ndim < 2 else t.unsqueeze(-1) if t.ndim == 2 else t),
       "dstack(tensors)", "dstack")  # fmt: skip
_spell(lambda tensors: torch.cat([t.reshape(-1, 1) if t.ndim < 2 else t for t in tensors], 1), "column_stack(tensors)",
       "column_stack")  # fmt: skip
_spell(lambda input: input.reshape(-1), "ravel(input)", "ravel")
_spell(lambda input: input.flip(1), "fliplr(input)", "fliplr")
_spell(lambda input: input.flip(0), "flipud(input)", "flipud")
_spell(lambda input, other, p: torch.linalg.vector_norm(input - other, p), "dist(input, other, p=2)", "dist")
_spell(lambda input, value: torch.full_like(input, value), "fill(input, value: number)", "fill")


# ---------------------------------------------------------------- create


def _new(func: Any, args: Any, kwargs: Any) -> Any:
    """Nothing of the tensor is read but its dtype and device: the result is whole."""
    x = args[0]
    return replicated(func(x.raw.new_empty(0), *args[1:], **kwargs), x.mesh)


for _n in "new_zeros new_ones new_full new_empty new_tensor".split():
    implements(getattr(Tensor, _n))(_new)
    KINDS.setdefault("create", []).append(_n)
