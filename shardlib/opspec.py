"""Table of torch's operators: one record for all operators of which the same facts hold.

Every other part of the library reads here what an operator is: the implementations of ops/, autocast,
the blocks of simulated ranks, the tracking of varying axes, the recorder of waits.  A new operator is
one more name in the table, whose facts are those of ``OpSpec``.

The classes of autocast are those of torch's page "Automatic Mixed Precision".
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import builtin_homes

Func = Callable[..., Any]
"""A function of torch's, as ``__torch_function__`` is given it."""
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

Kind = Literal[
    "pointwise",
    "rows",
    "reduce",
    "along",
    "matrices",
    "copied view",
    "metadata",
    "own",
    "whole",
    "refused",
    "below",
]


@dataclass(frozen=True)
class OpSpec:
    """Facts of torch operators.

    ``names``    "exp" stands for torch.exp, Tensor.exp and torch.nn.functional.exp, as far as they
                 exist; "linalg.inv" for one function of that module.  Names separated by blanks, or
                 lines of names with their signature, as torch's documentation prints it; lines of
                 one name are its overloads.
    ``kind``     "pointwise"    each element of the result depends on the elements of its place in
                                the operands, which broadcast: computed on the blocks as they lie.
                 "rows"         the same, of any number of results, run for one rank after the other.
                 "reduce"       reduces the dimensions that ``dim`` names, or all.
                 "along"        mixes positions of the dimensions that ``dim`` (or ``dims``,
                                ``dimension``) names: those must be whole, all others are rows;
                                names without a signature are implemented by hand.
                 "matrices"     the last two dimensions must be whole, all others are rows.
                 "copied view"  a copy of the view of that name.
                 "metadata"     read from the tensor's wrapper; "shape.__get__" reads a property.
                 "own"          implemented in a file of ops/.
                 "whole"        runs on whole operands.
                 "refused"      acts on memory or on the graph of autograd, not on values.
                 "below"        an operator that torch calls below its functions.
    ``linear``   how a pending sum may pass: "alone" (the only operand), "sum" (every operand pends
                 over the same axes), "scale" (one operand pends, the other is a factor); "" not.
    ``cast``     autocast's class: "lower" to its dtype, "wide" to fp32, "widest" to the widest
                 operand's; followed by " on cpu" or " on accelerator" where it holds there alone.
    ``parts``    whether it is composed of other operators, which autocast casts one by one.
    ``ignores``  the operands of which it reads the size, dtype and device alone: "first", "others".
    ``itself``   predicate of blocks for which it returns its operand.
    ``fill``     the number that, in an operand's padding, changes no element of the result.
    ``draws``    whether it draws random numbers though torch does not tag it so.
    ``waits``    whether the host waits for its result.

    >>> import shardlib as sl
    >>> sl.extend.OpSpec("mine::centred(x, dim)", "along", cast="wide").entries
    {'mine::centred': 'centred(x, dim)'}
    """

    names: str
    kind: Kind
    linear: str = ""
    cast: str = ""
    parts: bool = False
    ignores: str = ""
    itself: Callable[[Tensor], bool] | None = None
    fill: float | None = None
    draws: bool = False
    waits: bool = False

    @property
    def entries(self) -> dict[str, str]:
        """Each name with its signatures, of which there may be none."""
        return lines(self.names) if "(" in self.names else dict.fromkeys(self.names.split(), "")


def lines(text: str) -> dict[str, str]:
    """Map each name in lines of signatures to those of its overloads."""
    found: dict[str, list[str]] = {}
    for line in map(str.strip, text.strip().splitlines()):
        names, _, arguments = line.partition("(")
        for name in names.split():
            bare = re.split(r"\.|::", name)[-1]
            found.setdefault(name, []).append(f"{bare}({arguments}")
    return {name: "\n".join(signatures) for name, signatures in found.items()}


def _each(form: str, names: str) -> str:
    """Write each of some names in a form that they share."""
    return " ".join(map(form.format, names.split()))


_INF = float("inf")
# on accelerators alone
_WIDE = {"cast": "wide on accelerator"}
_WIDEST = {"cast": "widest on accelerator"}
_TABLE: dict[Kind, dict[str, dict[str, Any]]] = {
    "pointwise": {
        "neg __neg__ float double half bfloat16 chalf cfloat cdouble": {"linear": "alone"},
        "add sub __add__ __sub__ __radd__ __rsub__": {"linear": "sum"},
        "mul __mul__ __rmul__ div __truediv__ true_divide": {"linear": "scale"},
        """
        floor_divide remainder fmod abs sign exp2 sqrt square sin cos atan tanh sigmoid erf relu
        floor ceil round trunc frac clamp clamp_min clamp_max minimum maximum fmin fmax lerp eq ne lt
        le gt ge logical_and logical_or logical_xor logical_not isnan isinf isfinite bitwise_and
        bitwise_or bitwise_xor bitwise_not masked_fill nan_to_num hypot xlogy logaddexp long int
        short char byte bool __floordiv__ __mod__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__
        __gt__ __ge__ __and__ __or__ __xor__ __rand__ __ror__ __rxor__ gelu silu mish elu selu celu
        leaky_relu relu6 softsign logsigmoid hardtanh hardsigmoid hardswish tanhshrink softshrink
        hardshrink
        """: {},
        """
        pow __pow__ __rpow__ __rtruediv__ exp expm1 log log2 log10 log1p rsqrt reciprocal asin acos
        tan sinh cosh erfc softplus
        """: _WIDE,
        "addcmul addcdiv atan2": _WIDEST,
        "zeros_like ones_like empty_like full_like": {"ignores": "first"},
    },
    "rows": {
        """
        acosh asinh atanh arccos arccosh arcsin arcsinh arctan arctan2 arctanh absolute angle clip
        copysign deg2rad rad2deg digamma fix float_power frexp gcd lcm heaviside i0 igamma igammac
        isclose isneginf isposinf isreal ldexp lgamma mvlgamma logaddexp2 logit negative nextafter
        complex polygamma imag rsub sgn signbit sinc subtract multiply divide greater greater_equal
        less less_equal not_equal bitwise_left_shift bitwise_right_shift __lshift__ __rshift__
        __rlshift__ __rrshift__ __rfloordiv__ __rmod__ threshold broadcast_tensors
        """
        + _each(
            "special.{}",
            """
            airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 entr erfcx exp2 expit gammainc gammaincc
            gammaln i0 i0e i1 i1e log_ndtr ndtr ndtri modified_bessel_i0 modified_bessel_i1
            modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0
            scaled_modified_bessel_k1 spherical_bessel_j0 xlog1py zeta psi logit sinc round erf
            digamma polygamma xlogy chebyshev_polynomial_t chebyshev_polynomial_u
            chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he
            laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t
            shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
            shifted_chebyshev_polynomial_w
            """,
        ): {},
        "polar": {"cast": "wide on cpu"},
        "erfinv special.erfc special.erfinv special.expm1 special.log1p": _WIDE,
        "conj conj_physical real": {"itself": lambda x: not x.is_complex()},
        "positive": {"itself": lambda x: x.dtype is not torch.bool},
        "resolve_conj": {"itself": lambda x: not x.is_conj()},
        "resolve_neg": {"itself": lambda x: not x.is_neg()},
    },
    "reduce": {
        "mean argmax argmin any all var_mean std_mean nansum nanmean aminmax count_nonzero": {},
        "amax max": {"fill": -_INF},
        "amin min": {"fill": _INF},
        "prod": {"cast": "wide", "fill": 1},
        "sum linalg.vector_norm": _WIDE | {"fill": 0},
        "std var norm linalg.norm linalg.matrix_norm": _WIDE,
        "logsumexp special.logsumexp": _WIDE | {"fill": -_INF},
    },
    "along": {
        "softmax special.softmax log_softmax special.log_softmax": _WIDE | {"fill": -_INF},
        """
        cummax cummin logcumsumexp(input, dim)
        flip(input, *dims: int)
        sort argsort(input, dim: int = -1, descending: bool = False, *, stable=None)
        mode(input, dim=-1, keepdim=False)
        median nanmedian(input, dim=None, keepdim=False)
        unfold(input, dimension, size, step)
        diff(input, n=1, dim=-1, prepend=None, append=None)
        trapz trapezoid cumulative_trapezoid(y, x=None, *, dim=-1)
        gradient(input, *, spacing=1, dim=None, edge_order=1)
        glu(input, dim=-1)
        rot90(input, k=1, dims=(0, 1))
        tensor_split(input, indices_or_sections, dim=0)
        fft.hfft fft.ihfft(input, n=None, dim=-1, norm=None)
        fft.fft2 fft.ifft2 fft.rfft2 fft.irfft2 fft.hfft2(input, s=None, dim=(-2, -1), norm=None)
        fft.ihfft2(input, s=None, dim=(-2, -1), norm=None)
        fft.fftn fft.ifftn fft.rfftn fft.irfftn fft.hfftn(input, s=None, dim=None, norm=None)
        fft.ihfftn(input, s=None, dim=None, norm=None)
        fft.fftshift fft.ifftshift(input, dim=None)
        roll(input, shifts, dims=None)
        """: {},
        """
        quantile nanquantile(input, q: number, dim=None, keepdim=False, *, interpolation='linear')
        fft.fft fft.ifft fft.rfft fft.irfft(input, n=None, dim=-1, norm=None)
        """: {"cast": "wide on cpu"},
        """
        cumsum cumprod(input, dim, *, dtype=None)
        softmin(input, dim: int, _stacklevel=3, dtype=None)
        cosine_similarity(x1, x2, dim=1, eps=1e-8)
        """: _WIDE,
        "linalg.cross(input, other, *, dim=-1)": _WIDEST,
    },
    "matrices": {
        """
        tril triu(input, diagonal=0)
        linalg.cholesky_ex(input, *, upper=False, check_errors=False)
        linalg.det linalg.slogdet linalg.inv linalg.eig linalg.eigvals linalg.matrix_exp(A)
        linalg.matrix_sqrth linalg.polar(A)
        linalg.inv_ex(A, *, check_errors=False)
        linalg.eigh linalg.eigvalsh(A, UPLO='L')
        linalg.qr(A, mode='reduced')
        linalg.svd(A, full_matrices=True, *, driver=None)
        linalg.svdvals(A, *, driver=None)
        linalg.lu linalg.lu_factor(A, *, pivot=True)
        linalg.lu_factor_ex(A, *, pivot=True, check_errors=False)
        linalg.ldl_factor(A, *, hermitian=False)
        linalg.ldl_factor_ex(A, *, hermitian=False, check_errors=False)
        linalg.matrix_power(A, n)
        linalg.cond(A, p=None)
        linalg.solve_triangular(A, B, *, upper, left=True, unitriangular=False)
        linalg.lstsq(A, B, rcond=None, *, driver=None)
        cholesky_solve(input, input2, upper=False)
        det logdet slogdet matrix_exp geqrf(input)
        qr(input, some=True)
        svd(input, some=True, compute_uv=True)
        matrix_power(input, n)
        triangular_solve(b, A, upper=True, transpose=False, unitriangular=False)
        lu(input, pivot=True, get_infos=False)
        """: {},
        "cdist(x1, x2, p=2.0, compute_mode=None)": {"cast": "wide"},
        """
        linalg.cholesky(input, *, upper=False)
        trace inverse(input)
        cholesky cholesky_inverse(input, upper=False)
        pinverse(input, rcond=1e-15)
        """: {"cast": "wide on cpu"},
    },
    "copied view": {
        """
        alias_copy diagonal_copy expand_copy narrow_copy permute_copy select_copy split_copy
        split_with_sizes_copy squeeze_copy t_copy transpose_copy unbind_copy unfold_copy
        unsqueeze_copy view_as_complex_copy view_as_real_copy view_copy
        """: {},
    },
    "metadata": {
        """
        size dim numel nelement element_size __len__ __hash__ is_floating_point is_complex is_signed
        """
        + _each(
            "{}.__get__",
            """
            shape dtype device ndim layout itemsize is_sparse is_quantized is_meta is_cuda is_cpu
            is_nested
            """,
        ): {},
    },
    "own": {
        """
        conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d bmm mm baddbmm addmm
        addbmm linear matmul linalg.matmul scaled_dot_product_attention __matmul__ __rmatmul__
        """: {"cast": "lower"},
        "linalg.vecdot": {"cast": "lower on cpu"},
        "linalg.multi_dot mv addmv addr prelu": {"cast": "lower on accelerator"},
        """
        mse_loss cosine_embedding_loss nll_loss hinge_embedding_loss poisson_nll_loss smooth_l1_loss
        cross_entropy l1_loss huber_loss margin_ranking_loss soft_margin_loss triplet_margin_loss
        multi_margin_loss kl_div multilabel_margin_loss binary_cross_entropy_with_logits
        """: {"cast": "wide"},
        "binary_cross_entropy avg_pool3d view_as_complex": {"cast": "wide on cpu"},
        "__rdiv__ dist group_norm layer_norm rms_norm renorm": _WIDE,
        "cat stack": {"cast": "widest"},
        "concat concatenate index_copy": {"cast": "widest on cpu"},
        "bilinear cross dot grid_sample scatter_add vdot": _WIDEST,
        "tensordot": {"cast": "widest on accelerator", "parts": True},
        "einsum inner": {"parts": True},
        "rand_like randn_like randint_like new_zeros new_ones new_empty new_full": {
            "ignores": "first"
        },
        "view_as expand_as reshape_as type_as to": {"ignores": "others"},
        "dropout": {"draws": True},
        "nonzero equal repeat_interleave allclose": {"waits": True},
    },
    "whole": {
        "conv_tbc": {"cast": "lower"},
        "chain_matmul": {"cast": "lower on accelerator"},
        "ctc_loss": {"cast": "wide"},
        "stft": {"cast": "wide on cpu"},
        "normalize pdist": _WIDE,
        "index_put": _WIDEST,
        "rrelu_with_noise pca_lowrank svd_lowrank": {"draws": True},
        "masked_select bincount histc is_nonzero unique_consecutive": {"waits": True},
    },
    "refused": {
        """
        backward data_ptr storage untyped_storage set_ resize_ resize_as_ share_memory_ is_shared
        __dlpack__ numpy __array__ register_hook register_post_accumulate_grad_hook __reduce_ex__
        __deepcopy__ as_strided as_strided_ pin_memory _typed_storage __cuda_array_interface__
        to_sparse to_sparse_coo to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc to_mkldnn
        map_ map2_ apply_ module_load _has_compatible_shallow_copy_type
        """: {},
    },
    "below": {
        "_local_scalar_dense _unique _unique2 unique_dim unique_dim_consecutive": {"waits": True},
    },
}
"""Names of operators, by kind, with the other facts of their record."""

OPERATORS: list[OpSpec] = [
    OpSpec(names, kind, **facts) for kind, table in _TABLE.items() for names, facts in table.items()
]
"""All records.  No name stands in two of them."""

_MODULES = {
    "linalg": torch.linalg,
    "fft": torch.fft,
    "special": torch.special,
    "F": F,
    "Tensor": Tensor,
}
_BARE = [torch, Tensor, F, *builtin_homes]


def homes(name: str) -> list[Any]:
    """Return the functions for a name; none if this torch lacks it.

    Those of "mine::f" are torch.library's operator and its overloads.
    """
    if "::" in name:
        library, _, bare = name.partition("::")
        packet = getattr(getattr(torch.ops, library), bare, None)
        return [] if packet is None else [packet, *(getattr(packet, o) for o in packet.overloads())]
    module, _, bare = name.rpartition(".")
    if bare == "__get__":
        return [getattr(Tensor, module).__get__]
    places = [_MODULES[module]] if module else [Tensor] if bare.startswith("__") else _BARE
    found = [getattr(home, bare, None) for home in places]
    return [f for i, f in enumerate(found) if callable(f) and f not in found[:i]]


def names_of(**facts: Any) -> list[str]:
    """List the names of all operators of which these facts hold."""
    found = [s for s in OPERATORS if all(getattr(s, k) == v for k, v in facts.items())]
    return [name for spec in found for name in spec.entries]


def functions_of(kind: Kind) -> list[Any]:
    """List the functions of all operators of a kind."""
    return [f for name in names_of(kind=kind) for f in homes(name)]


@cache
def records() -> dict[Any, OpSpec]:
    """Map each function of the table to its record."""
    return {f: spec for spec in OPERATORS for name in spec.entries for f in homes(name)}


def writes(name: str) -> bool:
    """Check by its name whether a function writes to its first operand."""
    if name.startswith("__i"):
        return hasattr(Tensor, f"__{name[3:]}")
    if name.startswith("__"):
        return name == "__setitem__"
    return name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES


_NO_WRITES = {"requires_grad_", "detach_", "retain_grad_", "share_memory_", "rename_"}


def draws(func: Func, args: Args, kwargs: Kwargs) -> bool:
    """Check whether a call draws random numbers: torch tags its function nondeterministic_seeded."""
    name = getattr(func, "__name__", "")
    if name in _DRAWS:
        return True
    if name == "scaled_dot_product_attention":
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    # arguments (.., has_biases, num_layers, dropout, train, ..): dropout draws in training only
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        flags = [i for i, a in enumerate(args) if isinstance(a, bool)]
        return bool(flags and args[flags[0] + 2] and args[flags[0] + 3])
    packet = getattr(torch.ops.aten, name, None) if name and not name.startswith("__") else None
    if packet is None:
        return False
    tags = [getattr(packet, o).tags for o in packet.overloads()[:3]]
    return any(torch.Tag.nondeterministic_seeded in t for t in tags)


_DRAWS = frozenset(names_of(draws=True))
