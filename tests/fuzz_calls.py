"""Drawn calls over torch's surface, compared with dense: equal, or refused with a ShardError.

A case is drawn from one seed alone: functions from torch.overrides, arguments from torch's declared
schemas or from the samples of its operator database, then a form of the call (positional, keyword,
method, operator, in place, ``out=``, numpy's names), operands (dtypes, empty and size one
dimensions, transposed, plain, repeated), their layouts, and a mesh.  The call is Python text, so a
fault prints a program that repeats it:

    python -m tests.fuzz_calls --count 50000          # what ``make fuzz`` runs
    python -m tests.fuzz_calls --seed 1234            # one case, printed and run
"""

import argparse
import cmath
import copy
import inspect
import itertools
import math
import random
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import optree
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import get_overridable_functions, get_testing_overrides
from torch.testing._internal.common_methods_invocations import op_db

import shardlib as sl
from shardlib.tensor import promoting
from tests.fixes import MODULES, fault, names

# ---------------------------------------------------------------- what a case is


@dataclass
class Operand:
    """A tensor to place, and what the program does with it
    before the call (``v`` is the placed tensor).
    """

    value: Tensor
    layout: str | None  # None: a plain tensor
    prep: str = "v"
    grad: bool = False
    pad: bool = False

    def text(self, name: str) -> str:
        t = self.value
        kind = f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
        place = (
            "plain"
            if self.layout is None
            else repr(self.layout) + (" pad=True" if self.pad else "")
        )
        more = (", requires_grad" if self.grad else "") + (
            f", {self.prep}" if self.prep != "v" else ""
        )
        return f"{name}: {kind} {place}{more}"


@dataclass
class Case:
    seed: int
    name: str  # of the function
    axes: dict[str, int]
    program: str  # assigns r
    operands: dict[str, Operand]
    implicit: bool
    second: bool
    under: str = ""  # a context that the program runs in
    flat: bool = False  # the cotangents are numbers that were expanded
    said: tuple[str, "Outcome"] | None = None  # of torch, to this text

    def text(self) -> str:
        mesh = " ".join(f"{a}={n}" for a, n in self.axes.items())
        lines = [o.text(n) for n, o in self.operands.items()]
        body = self.program.replace("\n", "; ")
        return f"seed {self.seed}: {body}\n    " + "\n    ".join(
            [f"{mesh}{' implicit' * self.implicit} {self.under}".rstrip(), *lines]
        )


@dataclass
class Outcome:
    kind: str  # value, refused (a ShardError) or raised
    error: str = ""
    results: list[Any] = field(default_factory=list)
    grads: list[Any] | str = field(default_factory=list)  # text: the backward's own refusal
    seconds: list[Any] | str = field(default_factory=list)
    moved: float = 0.0
    fix: str = ""  # what is wrong with the fix line of a refusal


# ---------------------------------------------------------------- functions

_HOMES = {
    "torch": (torch, ""),
    "Tensor": (Tensor, ""),
    "F": (F, ""),
    "torch.linalg": (torch.linalg, "linalg_"),
    "torch.fft": (torch.fft, "fft_"),
    "torch.special": (torch.special, "special_"),
}

_RANDOM = frozenset(
    """
    bernoulli multinomial normal poisson rand randn randint randperm rand_like randn_like
    randint_like dropout feature_dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d
    dropout3d native_dropout rrelu gumbel_softmax fractional_max_pool2d fractional_max_pool3d
    fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices cauchy exponential
    geometric log_normal random uniform binomial svd_lowrank pca_lowrank lobpcg
    """.split()
)
_SKIPPED = (
    _RANDOM
    | frozenset(
        """
    backward register_hook register_post_accumulate_grad_hook storage untyped_storage data_ptr
    const_data_ptr set resize resize_as resize_as_sparse share_memory as_strided as_strided_copy
    as_strided_scatter pin_memory to_sparse to_mkldnn numpy module_load apply map map2 is_set_to
    requires_grad retain_grad detach stride storage_offset empty empty_like new_empty
    new_empty_strided empty_permuted empty_quantized empty_strided cuda xpu ipu hpu mtia rename
    rename_ refine_names align_to align_as names unflatten_names has_names is_pinned is_shared
    is_distributed share_memory_ get_device dim_order data is_inference record_stream reinforce
    frombuffer from_file from_numpy asarray as_tensor tensor sparse_dim dense_dim coalesce
    is_coalesced values indices crow_indices col_indices ccol_indices row_indices sparse_mask
    sparse_resize sparse_resize_and_clear smm sspaddmm hspmm sparse_coo_tensor to_dense
    to_padded_tensor qscheme q_scale q_zero_point int_repr quantize_per_tensor quantize_per_channel
    quantize_per_tensor_dynamic quantized_batch_norm quantized_lstm_cell quantized_gru_cell
    batch_norm_update_stats
    choose_qparams_optimized dequantize fake_quantize_per_tensor_affine
    fake_quantize_per_channel_affine fused_moving_avg_obs_fake_quant q_per_channel_scales
    q_per_channel_zero_points q_per_channel_axis is_quantized get_num_threads typename type
    result_type can_cast promote_types is_storage compile vmap cond hash_tensor bfloat16_
    set_printoptions __array__ __array_wrap__ __dlpack__ __dlpack_device__ __deepcopy__
    __reduce_ex__ __setstate__ __format__ __repr__ __len__ __bool__ __int__ __float__ __complex__
    __index__ __long__ __nonzero__ __contains__ __getitem__ __setitem__ tolist item is_same_size
    is_nonzero ctc_loss miopen_batch_norm multi_head_attention_forward lstm gru rnn_tanh rnn_relu
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention cudnn_batch_norm
    batch_norm_gather_stats sym_float sym_int sym_max sym_min sym_not sym_sqrt grouped_mm scaled_mm
    scaled_grouped_mm unique unique_consecutive eig symeig solve lstsq matrix_rank chain_matmul
    has_torch_function linear_cross_entropy sub_ imag real max_unpool1d max_unpool2d max_unpool3d
    embedding_bag nonzero_static narrow_copy slice_inverse kthvalue native_batch_norm
    put
    """.split()
    )
)  # put writes equal positions in no order; native_batch_norm of no statistics and not in training ends torch 2.13's process


def _usable(name: str) -> bool:
    bare = name.strip("_") if name.startswith("__") else name.removesuffix("_")
    private = name.startswith("_") and not name.startswith("__")
    odd = any(
        w in name
        for w in (
            "cudnn",
            "mkldnn",
            "miopen",
            "fbgemm",
            "quantize",
            "sparse",
            "named",
            "cufft",
            "jagged",
        )
    )
    return not (private or odd or bare in _SKIPPED or name in _SKIPPED)


@cache
def functions() -> list[tuple[str, str]]:
    """(home, name) of every function that may be drawn."""
    found = []
    over = get_overridable_functions()
    for home, (where, _) in _HOMES.items():
        names = {f.__name__ for f in over[where]} & set(dir(where))
        if home == "Tensor":  # torch.overrides names some by their wrappers
            names |= {n for n in dir(Tensor) if n.endswith("_") and not n.startswith("_")}
        found += [(home, n) for n in sorted(names) if _usable(n)]
    return found


@dataclass
class Parameter:
    name: str
    type: str  # of a schema: Tensor, int, List[int], ...; "" if unknown
    keyword: bool
    default: Any = inspect.Parameter.empty


@cache
def signatures(home: str, name: str) -> list[list[Parameter]]:
    """The overloads of a function as torch declares them, without ``out``."""
    prefix = _HOMES[home][1]
    where = _HOMES[home][0]
    lines = []
    for s in torch._C._jit_get_schemas_for_operator(f"aten::{prefix}{name}"):
        found = []
        for a in s.arguments:
            if a.is_out or a.name == "out":
                break
            called = "input" if a.name == "self" else a.name
            default = a.default_value if a.has_default_value() else inspect.Parameter.empty
            found.append(Parameter(called, str(a.type), a.kwarg_only, default))
        else:
            lines.append(found)
    if lines and home != "F":
        return lines
    f: Any = getattr(where, name)
    for maker in (f, get_testing_overrides().get(f)):
        try:
            read = inspect.signature(maker) if maker is not None else None
        except (ValueError, TypeError):
            continue
        if read is None or any(p.kind is p.VAR_POSITIONAL for p in read.parameters.values()):
            continue
        ps = [
            p
            for p in read.parameters.values()
            if p.name not in ("out", "_stacklevel") and p.kind is not p.VAR_KEYWORD
        ]
        return [[Parameter(p.name, _guess(p), p.kind is p.KEYWORD_ONLY, p.default) for p in ps]]
    return lines


_TENSORS = frozenset(
    "input other self x y x1 x2 input1 input2 mat1 mat2 target weight bias A B tensor1 tensor2".split()
)


def _guess(p: inspect.Parameter) -> str:
    if p.annotation is not p.empty:
        text = str(getattr(p.annotation, "__name__", p.annotation))
        for word, kind in (
            ("Tensor", "Tensor"),
            ("bool", "bool"),
            ("int", "int"),
            ("float", "float"),
            ("str", "str"),
        ):
            if word in text:
                return (
                    f"Optional[{kind}]"
                    if "Optional" in str(p.annotation) or p.default is None
                    else kind
                )
    if p.name in _TENSORS:
        return "Tensor" if p.default is p.empty else "Optional[Tensor]"
    kinds = {
        bool: "bool",
        int: "int",
        float: "float",
        str: "str",
        tuple: "List[int]",
        list: "List[int]",
    }
    return kinds.get(type(p.default), "")


# ---------------------------------------------------------------- values

_DTYPES = [(torch.float64, 60), (torch.float32, 8), (torch.int64, 8), (torch.bool, 5), (torch.complex128, 5),
           (torch.float16, 3), (torch.bfloat16, 3), (torch.int32, 3), (torch.uint8, 3),
           (torch.int16, 1), (torch.int8, 1),
           (torch.complex64, 1)]  # fmt: skip
_SIZES = [1, 2, 2, 3, 4, 4, 6, 6, 6, 12]


def values(shape: Any, dtype: torch.dtype, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=g) > 0.5
    if dtype.is_complex or dtype.is_floating_point:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(shape, generator=g, dtype=wide).to(dtype)
    return torch.randint(0 if dtype is torch.uint8 else -5, 6, shape, generator=g).to(dtype)


class Draw:
    """One case's random choices."""

    def __init__(self, seed: int, ranks: int | None = None) -> None:
        self.seed, self.ranks, self.r = seed, ranks, random.Random(seed)
        self.operands: dict[str, Operand] = {}
        # the first operand's shape and tokens
        self.base: tuple[tuple[int, ...], list[str]] | None = None
        self.strided = True  # whether other strides than a contiguous tensor's are
        self.odd = True  # whether NaN, infinities and ties are drawn
        self.regular = False  # whether rows or columns that are one are not: rounding decides then
        self.axes = self._mesh()

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def _mesh(self) -> dict[str, int]:
        if self.ranks == 4:
            sizes: tuple[int, ...] = self.r.choice([(4,), (2, 2), (2, 2)])
        else:
            sizes = self.r.choice(
                [(1,), (2,), (2,), (3,), (4,), (5,), (2, 2), (2, 2), (2, 3), (3, 2), (2, 1), (6,)]
            )
        return dict(zip("xy", sizes, strict=False))

    # ------------------------------------------------------------ layouts

    def tokens(self, shape: tuple[int, ...], pad: bool) -> list[str]:
        out = ["."] * len(shape)
        # as the first operand lies, aligned from the right
        if self.base is not None and self.chance(0.6):
            sizes, tokens = self.base
            for d in range(1, min(len(shape), len(sizes)) + 1):
                if shape[-d] == sizes[-d]:
                    out[-d] = tokens[-d]
            return out
        for axis in self.r.sample(list(self.axes), len(self.axes)):
            if not shape or self.chance(0.25):
                continue
            d = self.r.randrange(len(shape))
            if "(" in out[d] and not out[d].startswith("("):
                continue  # another order already
            inner = out[d].strip("()")
            new = axis if out[d] == "." else f"({inner} {axis})"
            ways = math.prod(self.axes[a] for a in new.strip("()").split() if a in self.axes)
            if shape[d] % ways == 0 or pad:
                out[d] = new
                if not pad and new == axis and self.chance(0.06) and shape[d] % (2 * ways) == 0:
                    out[d] = self.r.choice([f"zigzag({axis})", f"striped({axis})", f"(2 {axis})"])
        return out

    def place(self, shape: tuple[int, ...]) -> tuple[str | None, bool]:
        """A layout (None: plain) and whether to pad."""
        if self.chance(0.08 if self.operands else 0.03):
            return None, False
        pad = self.chance(0.04) and bool(shape)
        tokens = self.tokens(shape, pad)
        if self.base is None:
            self.base = (shape, tokens)
        text = " ".join(tokens)
        free = [a for a in self.axes if a not in text]
        if free and not pad and self.chance(0.07):
            text += f" + sum({self.r.choice(free)})"
        return (text or ("..." if not shape else text)), pad

    # ------------------------------------------------------------ tensors

    def operand(self, value: Tensor, grad: bool | None = None) -> str:
        """A new operand; its name."""
        name = f"a{len(self.operands)}"
        able = value.is_floating_point() or value.is_complex()
        wanted = able and (self.chance(0.75) if grad is None else grad)
        value = value.detach().clone().contiguous().to(torch.get_default_device())
        if able and self.odd and value.numel() and self.chance(0.06):
            value = self._odd(value)
        # torch.gather reads expanded ones as int64
        strided = self.strided and value.dtype not in (torch.int32, torch.complex32)
        prep, value = self._prepared(value) if strided else ("v", value)
        layout, pad = self.place(tuple(value.shape))
        if able and layout is not None and "sum(" in layout:
            value = value + 0.0  # a sum of parts has no negative zero
        self.operands[name] = Operand(value, layout, prep, wanted, pad)
        return name

    def _odd(self, value: Tensor) -> Tensor:
        """The same with ties, or with one NaN or infinity."""
        if self.chance(0.5) and not value.is_complex():
            return value.round()
        at, new = (
            self.r.randrange(value.numel()),
            self.r.choice([math.nan, math.inf, -math.inf, -0.0]),
        )
        value.view(-1)[at] = new
        return value

    def _prepared(self, value: Tensor) -> tuple[str, Tensor]:
        """A program whose result is ``value`` in other strides,
        and the tensor ``v`` that it starts from.
        """
        if value.ndim >= 2 and self.chance(0.12):
            i, j = self.r.sample(range(value.ndim), 2)
            return f"v.transpose({i}, {j})", value.transpose(i, j).contiguous()
        if not value.ndim or self.chance(0.87):
            return "v", value
        d = self.r.randrange(value.ndim)
        n, kind = value.shape[d], self.r.randrange(4)
        if kind == 0 or not n:
            return f"v.flip({d})", value.flip(d)
        if kind == 1 and not (self.regular and d >= value.ndim - 2):  # each position is the first
            sizes = [n if k == d else -1 for k in range(value.ndim)]
            return f"v.expand({sizes})", value.narrow(d, 0, 1).clone()
        if kind < 3:
            more = value.flip(d)
            return f"v.narrow({d}, {n}, {n})", torch.cat([more, value], d)
        twice = value.repeat_interleave(2, d)
        return f"v[{':, ' * d}::2]", twice

    def shape(self, least: int = 0, most: int = 4) -> tuple[int, ...]:
        ndim = self.r.choice([n for n in (0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4) if least <= n <= most])
        sizes = [self.r.choice(_SIZES) for _ in range(ndim)]
        if ndim and self.chance(0.03):
            sizes[self.r.randrange(ndim)] = 0
        while math.prod(sizes) > 600:
            sizes[max(range(ndim), key=lambda d: sizes[d])] = 2
        return tuple(sizes)

    def dtype(self) -> torch.dtype:
        return self.r.choices([d for d, _ in _DTYPES], [w for _, w in _DTYPES])[0]

    def number(self) -> str:
        if self.chance(0.08):
            infinite = ["inf", "-inf", "nan"] * self.odd
            finite = ["1j", "300", "np.float64(1.5)", "np.float32(0.5)", "np.int64(2)"]
            return self.r.choice(infinite + finite)
        return self.r.choice(
            ["2", "3", "-1", "0.5", "1.5", "-2.5", "0", "1", "True", "2.0", "1e-3"]
        )


# ---------------------------------------------------------------- arguments by name and type


@dataclass
class Call:
    """A call before its form is chosen: (name, text, keyword only) per argument."""

    home: str
    name: str
    arguments: list[tuple[str, str, bool]]


class ByName:
    """Arguments for one overload, drawn by their names and types around one shape."""

    def __init__(self, d: Draw, home: str, name: str) -> None:
        self.d, self.name, self.home = d, name, home
        square = home == "torch.linalg" or name in _SQUARE
        d.odd = not square and name.rstrip("_") not in _UNEVEN
        d.strided = not name.startswith("native_") and name != "kron"
        d.regular = square
        self.shape = d.shape(2 if square else _LEAST.get(name, 0))
        if square and d.chance(0.85):
            self.shape = (*self.shape[:-1], self.shape[-2])
        self.dtype = d.dtype()
        self.spd = any(w in name for w in ("cholesky", "eigh", "logdet"))
        self.letters = {c: d.r.choice([1, 2, 3, 4, 6]) for c in "bcijkmno"}
        spec = _LETTERS.get(name)
        self.spec = d.r.choice(spec.split("|")).split() if spec else []
        self.count = 0

    def tensor(self, name: str) -> str:
        d = self.d
        first, self.count = self.count == 0, self.count + 1
        if not first and d.operands and d.chance(0.05):
            return d.r.choice(list(d.operands))
        shape, dtype = self.shape, self.dtype
        if self.count <= len(self.spec):
            shape = tuple(self.letters[c] for c in self.spec[self.count - 1] if c != "_")
            if first:
                self.shape = shape
        elif not first:
            shape = self._related(name)
        if ("ind" in name and "input" not in name) or name in ("repeats", "target_index"):
            dtype = torch.int64
        elif "mask" in name or name == "condition":
            dtype = torch.bool
        elif not first and d.chance(0.1):
            dtype = d.dtype()
        value = values(shape, dtype, d.seed * 31 + self.count)
        if dtype is torch.int64 and "ind" in name and self.shape:
            value = value.abs() % max(1, min(self.shape))
        if (
            self.spd
            and first
            and dtype.is_floating_point | dtype.is_complex
            and value.ndim >= 2
            and dtype.itemsize > 2
        ):
            if value.shape[-1] == value.shape[-2]:
                value = value @ value.mH + 2 * torch.eye(value.shape[-1], dtype=dtype)
        elif first and d.chance(0.3) and not dtype.is_complex and dtype is not torch.bool:
            value = value.abs() + (0.1 if dtype.is_floating_point else 1)
        return d.operand(value)

    def _related(self, name: str) -> tuple[int, ...]:
        d, shape = self.d, self.shape
        if (
            name in ("index", "indices")
            and self.name.startswith(("index", "take", "Tensor.index"))
            and shape
        ):
            return (d.r.choice([1, 2, 3, shape[-1]]),)
        what = d.r.random()
        if what < 0.5:
            return shape
        if what < 0.65:
            return shape[d.r.randrange(len(shape) + 1) :]
        if what < 0.8:
            return tuple(1 if d.chance(0.4) else n for n in shape)
        if what < 0.9:
            return ()
        return d.shape()

    def dim(self) -> str:
        n = len(self.shape)
        return (
            str(self.d.r.randrange(-n, n))
            if n and self.d.chance(0.96)
            else str(self.d.r.choice([0, -1, n]))
        )

    def ints(self, name: str) -> str:
        d, n = self.d, len(self.shape)
        if name.startswith("dim") or name == "axes":
            some = d.r.sample(range(n), d.r.randrange(n + 1)) if n else []
            if (name in ("dims",) and self.name in ("permute", "permute_copy")) or d.chance(0.1):
                some = d.r.sample(range(n), n)
            return str([i - n if d.chance(0.3) else i for i in some])
        if name in ("size", "shape", "sizes"):
            return str(self._size())
        if name in ("repeats", "reps"):
            return str([d.r.choice([1, 2, 3]) for _ in range(n + d.r.randrange(2))])
        if name == "pad":
            return str([d.r.choice([0, 1, 2]) for _ in range(2 * d.r.randrange(1, max(1, n) + 1))])
        if name in ("split_sizes", "split_size") and self.shape:
            k = d.r.randrange(self.shape[0] + 1)
            return str([k, self.shape[0] - k])
        if name == "normalized_shape":
            return str(list(self.shape[d.r.randrange(n + 1) :]))
        return str([d.r.choice([1, 2, 3]) for _ in range(d.r.choice([1, 1, 2, 2, 3]))])

    def _size(self) -> list[int]:
        """A shape of as many elements, or one to broadcast to."""
        d, sizes = self.d, list(self.shape)
        what = d.r.random()
        if what < 0.25 and len(sizes) >= 2:
            k = d.r.randrange(len(sizes) - 1)
            sizes[k : k + 2] = [sizes[k] * sizes[k + 1]]
        elif what < 0.5 and sizes:
            k = d.r.randrange(len(sizes))
            part = d.r.choice([f for f in (1, 2, 3, 4) if sizes[k] % f == 0])
            sizes[k : k + 1] = [part, sizes[k] // part]
        elif what < 0.6:
            sizes = [-1]
        elif what < 0.75:
            sizes = [
                d.r.choice([2, 3]),
                *[d.r.choice([3, 4]) if n == 1 else d.r.choice([n, -1]) for n in sizes],
            ]
        elif what < 0.85 and sizes:
            sizes[d.r.randrange(len(sizes))] = -1
        return sizes

    def value(self, p: Parameter) -> str:
        d, kind, name = self.d, p.type, p.name
        if kind.startswith("Optional["):
            if d.chance(0.15):
                return "None"
            kind = kind[9:-1]
        if name in ("dtype",) or "ScalarType" in kind:
            return str(
                d.r.choice(
                    [torch.float64, torch.float32, torch.int64, torch.complex128, torch.bool]
                )
            )
        if kind == "Tensor":
            return self.tensor(name)
        if kind.startswith("List[") and "Tensor" in kind:
            return "[" + ", ".join(self.tensor(name) for _ in range(d.r.choice([1, 2, 2, 3]))) + "]"
        if name in (
            "dim",
            "dim0",
            "dim1",
            "dim2",
            "axis",
            "dimension",
            "start_dim",
            "end_dim",
            "source",
            "destination",
        ):
            if kind.startswith("List["):
                return self.ints("dim")
            return self.dim()
        if kind == "bool":
            return d.r.choice(["True", "False"])
        if kind.startswith("List[int") or kind.startswith("List[Sym"):
            return self.ints(name)
        if name in _WORDS:
            return repr(d.r.choice(_WORDS[name]))
        if kind == "str":
            return repr(d.r.choice(["mean", "sum", "none"]))
        if name in (
            "k",
            "chunks",
            "sections",
            "n",
            "diagonal",
            "offset",
            "length",
            "split_size",
            "start",
            "end",
            "step",
            "index",
        ):
            return str(d.r.choice([0, 1, 1, 2, 2, 3, -1]))
        if name in ("interpolation_mode", "padding_mode"):
            return str(d.r.choice([0, 1, 2]))  # another, torch does not look at
        if kind in ("int", "SymInt"):
            return str(d.r.choice([0, 1, 2, 3, -1, 4]))
        if kind.startswith("List["):
            return f"[{d.number()}, {d.number()}]"
        if name == "p" or name == "ord":
            return d.r.choice(["1", "2", "3", "inf", "2.0", "0", "-inf", "0.5"])
        return d.number()

    def call(self, parameters: list[Parameter]) -> Call:
        out, gap = [], False  # what follows a default that is left out is given by its name
        for p in parameters:
            if p.default is not inspect.Parameter.empty and (
                p.name
                in (
                    "device",
                    "layout",
                    "pin_memory",
                    "generator",
                    "memory_format",
                    "names",
                    "requires_grad",
                )
                or self.d.chance(0.55)
            ):
                gap = self.d.chance(0.97)
                continue
            out.append((p.name, self.value(p), p.keyword or gap))
        return Call(self.home, self.name, out)


_WORDS = {
    "norm": ["forward", "backward", "ortho"],
    "reduction": ["mean", "sum", "none"],
    "reduce": ["sum", "prod", "mean", "amax", "amin"],
    "rounding_mode": ["floor", "trunc"],
    "interpolation": ["linear", "lower", "nearest"],
    "indexing": ["ij", "xy"],
    "mode": ["constant", "nearest", "reflect", "reduced", "complete"],
    "UPLO": ["L", "U"],
    "approximate": ["none", "tanh"],
    "side": ["left", "right"],
}
_SQUARE = frozenset(
    "det logdet slogdet inverse matrix_exp matrix_power cholesky trace pinverse triu tril adjoint mT".split()
)
# kernels that differ in what NaN and infinity do: a factor of zero hides them, or does not
_UNEVEN = frozenset(
    "softshrink addmm addmv addr addbmm baddbmm median nanmedian mode topk batch_norm lu lu_factor lu_unpack lu_solve cholesky_solve cholesky_inverse geqrf ormqr qr svd grid_sample grid_sampler grid_sampler_2d grid_sampler_3d celu elu selu".split()
)
# which write to ``out=`` as if its elements lay side by side, beyond its memory too
_OUT_DENSE = frozenset("lu_unpack tril triu linear".split())
_LEAST = {
    n: k
    for k, names in {
        1: "topk sort cumsum softmax gather scatter index_select chunk split narrow unbind",
        2: "transpose t mT adjoint diagonal triu tril layer_norm swapaxes",
    }.items()
    for n in names.split()
}
_LETTERS = {
    "mm": "mk kn", "bmm": "bmk bkn", "matmul": "mk kn|bmk bkn|bmk kn|k km|mk k|k k|cbmk bkn|mk bkn",
    "dot": "k k",
    "__matmul__": "mk kn|bmk bkn|bmk kn|mk k", "__rmatmul__": "kn mk|kn bmk", "vdot": "k k",
    "inner": "mk nk|k k|bmk nk",
    "mv": "mk k", "outer": "m n", "ger": "m n", "addmm": "mn mk kn|n mk kn", "addmm_": "mn mk kn",
    "addmv": "m mk k",
    "addmv_": "m mk k", "addr": "mn m n", "addr_": "mn m n", "addbmm": "mn bmk bkn|n bmk bkn",
    "addbmm_": "mn bmk bkn",
    "baddbmm": "bmn bmk bkn|n bmk bkn", "baddbmm_": "bmn bmk bkn",
    "linear": "mk nk n|bmk nk n|k nk n|bmk nk|mk k",
    "bilinear": "mi mj oij o|mi mj oij", "cdist": "bmk bnk|mk nk", "kron": "mn ij|m n",
    "tensordot": "mk kn",
    "cross": "bc bc", "layer_norm": "bmk k k|bmk mk mk|bk k k", "rms_norm": "bmk k|bk k",
    "embedding": "bm nk",
    "multi_dot": "mk kn", "cosine_similarity": "bm bm", "pairwise_distance": "bm bm",
    "solve": "mm mn|bmm bmn",
    "lu_solve": "mn mm m", "cholesky_solve": "mn mm", "batch_norm": "bcm c c c c|bc c c c c",
    "prelu": "bcm c|bcm _",
    "group_norm": "bcm", "instance_norm": "bcm c c c c|bcm", "cov": "mk|mk",
    "trapezoid": "bm m|bm bm", "trapz": "bm m",
    "bucketize": "bm k", "searchsorted": "k bm", "vecdot": "bm bm|m bm", "logaddexp": "bm bm",
}  # fmt: skip


# ---------------------------------------------------------------- samples of the operator database


@cache
def _database() -> list[Any]:
    skip = (
        "masked.",
        "_",
        "torch.ops",
        "jiterator",
        "svd_lowrank",
        "pca_lowrank",
        "sparse",
        "signal.",
    )
    found = []
    for op in op_db:
        last = op.name.rpartition(".")[2]
        dunder = last.startswith("__")
        if (op.name.startswith(skip) and not dunder) or last in _RANDOM | {
            "empty",
            "empty_like",
            "new_empty",
        }:
            continue
        if not dunder and not _usable(last) and last not in _DATABASE_TOO:
            continue
        if torch.float64 in op.supported_dtypes("cpu"):
            found.append(op)
    return found


_DATABASE_TOO = frozenset(
    "scaled_dot_product_attention embedding_bag max_unpool1d max_unpool2d unique "
    "unique_consecutive ctc_loss "
    "native_batch_norm lu_solve real imag max_unpool3d nonzero_static narrow_copy lstsq matrix_rank chain_matmul item".split()
)


@cache
def _samples(at: int) -> list[Any]:
    op = _database()[at]
    torch.manual_seed(0)
    random.seed(0)
    try:
        found = list(
            itertools.islice(op.sample_inputs("cpu", torch.float64, requires_grad=False), 40)
        )
    except Exception:
        return []
    return [
        s
        for s in found
        if all(
            t.numel() <= 3000
            for t in optree.tree_leaves((s.input, s.args, s.kwargs))
            if isinstance(t, Tensor)
        )
    ]  # type: ignore[arg-type]


def _sampled(d: Draw) -> Call | None:
    at = d.r.randrange(len(_database()))
    op, samples = _database()[at], _samples(at)
    if not samples:
        return None
    # whose kernels read memory as if it were contiguous, or ask for it
    d.strided = not op.name.startswith("native_") and op.name != "kron"
    d.odd = (
        not op.name.startswith("linalg")
        and op.name.rpartition(".")[2].rstrip("_") not in _SQUARE | _UNEVEN
    )
    s = d.r.choice(samples)
    if s.kwargs.get("dropout_p"):
        return None
    cast: Any = d.r.choices(
        [None, *[x for x, _ in _DTYPES[1:]]], [80, *[w / 2 for _, w in _DTYPES[1:]]]
    )[0]
    one = d.chance(0.3)  # cast one operand alone

    def text(v: Any) -> str:
        nonlocal cast
        if isinstance(v, Tensor):
            if v.layout != torch.strided or type(v) is not Tensor:
                raise LookupError
            new = (
                v.detach().to(cast) if cast is not None and v.dtype is torch.float64 else v.detach()
            )
            cast = None if one else cast
            return d.operand(new)
        if isinstance(v, torch.Size | list):
            return f"[{', '.join(map(text, v))}]"
        if isinstance(v, tuple):
            return f"({', '.join(map(text, v))}{',' * (len(v) == 1)})"
        if v is Ellipsis:
            return "..."
        if isinstance(v, slice):
            return f"slice({text(v.start)}, {text(v.stop)}, {text(v.step)})"
        if v is None or isinstance(
            v, bool | int | float | complex | str | torch.dtype | torch.memory_format
        ):
            return repr(v)
        raise LookupError

    try:
        args = [text(s.input), *[text(v) for v in s.args]]
        kwargs = [(k, text(v), True) for k, v in s.kwargs.items()]
    except LookupError:
        return None
    home, name = _homed(op.name)
    if not home:
        return None
    names = _names(home, name, len(args))
    return Call(home, name, [(n, t, False) for n, t in zip(names, args, strict=True)] + kwargs)


def _homed(name: str) -> tuple[str, str]:
    head, _, last = name.rpartition(".")
    home = {
        "": "torch",
        "nn.functional": "F",
        "linalg": "torch.linalg",
        "fft": "torch.fft",
        "special": "torch.special",
    }
    where = home.get(head, "")
    if where == "torch" and not hasattr(torch, last):
        where = "Tensor" if hasattr(Tensor, last) else ""
    return (where, last) if where and hasattr(_HOMES[where][0], last) else ("", last)


def _names(home: str, name: str, count: int) -> list[str]:
    lines = [[p.name for p in line if not p.keyword] for line in signatures(home, name)]
    line = next((ns for ns in lines if len(ns) >= count), [])
    return [*line[:count], *[""] * (count - len(line[:count]))]


# ---------------------------------------------------------------- forms

_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "true_divide": "/", "floor_divide": "//",
    "remainder": "%", "pow": "**",
    "matmul": "@", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "eq": "==",
    "ne": "!=", "lt": "<", "le": "<=",
    "gt": ">", "ge": ">=", "__and__": "&", "__or__": "|", "__lshift__": "<<", "__rshift__": ">>",
}  # fmt: skip
_NUMPY = {"dim": "axis", "keepdim": "keepdims", "other": "x2"}


def _spelled(d: Draw, call: Call) -> str:
    """The call as text, in one of the forms torch takes."""
    args, name = call.arguments, call.name
    if name in _OPERATORS and len(args) == 2 and d.chance(0.5):
        return f"{args[0][1]} {_OPERATORS[name]} {args[1][1]}"
    method = call.home == "Tensor" or (
        call.home in ("torch", "F")
        and hasattr(Tensor, name)
        and args
        and d.chance(0.4)
        and not args[0][2]
    )
    prefix = f"{call.home}.{name}"
    if method and args:
        name_ = name
        if not name.endswith("_") and hasattr(Tensor, name + "_") and d.chance(0.25):
            name_ = name + "_"
        prefix, args = f"{args[0][1]}.{name_}", args[1:]
    spread = method and args and args[0][1].startswith("[") and len(args) == 1 and d.chance(0.35)
    if spread:
        return f"{prefix}({args[0][1][1:-1]})"
    plain = 0
    while plain < len(args) and not args[plain][2]:
        plain += 1
    named = [n for n, _, _ in args[:plain]]
    # what has no name is positional, and what is before it
    first = next((i for i, n in enumerate(named) if not n), -1)
    style = d.r.random()
    cut = (
        plain
        if style < 0.5
        else d.r.randint(max(0, first + 1), plain)
        if first + 1 <= plain
        else plain
    )
    parts = [t for _, t, _ in args[:cut]]
    words = [(_NUMPY[n] if n in _NUMPY and d.chance(0.12) else n, t) for n, t, _ in args[cut:] if n]
    d.r.shuffle(words)
    return f"{prefix}({', '.join([*parts, *[f'{n}={t}' for n, t in words]])})"


_VIEWS = [
    "{}.T",
    "{}[1:]",
    "{}[..., 1:]",
    "{}.view(-1)",
    "{}.unsqueeze(0)",
    "{}.transpose(0, -1)",
    "{}[0]",
    "{}[:, 0]",
    "{}.detach()",
    "{}.reshape(-1)",
    "{}.flatten()",
    "{}.contiguous()",
    "{}.chunk(2)[1]",
    "{}.unbind(-1)[0]",
    "{}[::2]",
    "{}.diagonal()",
    "{}.squeeze()",
    "{}.movedim(0, -1)",
    "{}[None]",
    "{}.narrow(0, 0, 1)",
    "{}.view_as({})",
    "{}.select(-1, 0)",
    "{}.permute(*range({}.ndim))",
    "{}.real",
    "{}.mT",
    "{}.split(1, -1)[-1]",
    "{}.unflatten(0, (-1, 1))",
]
_CHANGES = [
    "{}.mul_(2)",
    "{}.add_(1)",
    "{}.zero_()",
    "{}.fill_(3)",
    "{}.neg_()",
    "{} *= 3",
    "{}[...] = 5",
    "{}.copy_({} * 2)",
    "{}[0] = 7",
    "{}.clamp_(0, 1)",
    "{}.masked_fill_({} > 0, 2)",
    "{}.exp_()",
    "{}.relu_()",
    "{}[{} > 0] = 1",
    "{}.t_()",
    "{}.add_(a1)",
    "{}.copy_(a1)",
    "{}[1:] = a1",
    "{}.index_fill_(0, torch.tensor([0]), 4)",
    "{}.sub_({}.sum())",
    "F.relu({}, inplace=True)",
    "{}.cumsum_(0)",
    "{}.lerp_({}, 0.5)",
    "{}.sort()[0].zero_()",
    "{}.addcmul_({}, {})",
]


_PYTHON = [
    "len({})",
    "float({}.sum())",
    "bool({}.any())",
    "int({}.sum())",
    "complex({}.sum())",
    "list({})",
    "{}[0].tolist()",
    "{}.sum().item()",
    "2 in {}",
    "-{}",
    "+{}",
    "abs({})",
    "~{}",
    "2 ** {}",
    "2 - {}",
    "2 / {}",
    "2 // {}",
    "2 % {}",
    "2 + {}",
    "2 * {}",
    "1.5 - {}",
    "True + {}",
    "2 & {}",
    "2 | {}",
    "2 ^ {}",
    "2 << {}",
    "2 >> {}",
    "2 < {}",
    "round({}, 1)",
    "sum({})",
    "max({}.flatten())",
    "[v * 2 for v in {}]",
    "{}.T",
    "{}.mT",
    "{}.H",
    "{}.mH",
    "{}.real",
    "{}.imag",
    "{}.shape",
    "{}.ndim",
    "{}.itemsize",
    "{}.nbytes",
    "{}.is_leaf",
    "{}.is_complex()",
    "{}.size(-1)",
    "{}.element_size()",
    "{}.dim()",
    "{}.numel()",
    "np.float64(2) * {}",
    "{} * np.float64(2)",
    "{} + np.int64(2)",
    "copy.copy({})",
    "copy.deepcopy({}.detach())",
    "divmod({}, 3)",
    "{} @ {}",
    "{}.mT @ {}",
    "{} == {}",
    "{} and 1",
    "not {}",
    "f'{{}:.3f}'",
    "torch.tensor(2.0) * {}",
    "{} * torch.tensor(2)",
    "torch.ones(1) + {}",
    "{}.new_tensor([1, 2])",
    "torch.as_tensor({})",
    "torch.is_tensor({})",
    "{}.type(torch.float32)",
    "{}.to({}.dtype)",
    "{}.to('cpu')",
    "{}.cpu()",
    "reversed({})",
    "hash({}) == hash({})",
    "isinstance({}, torch.Tensor)",
    "{}.is_same_size({})",
    "bool({} is {})",
    "{}.dtype",
    "{}.device.type",
    "{}.is_contiguous()",
    "{}.stride(0) >= 0",
    "{}.data",
    "{}.grad",
    "{}.sum().backward()",
    "torch.result_type({}, 1.5)",
    "torch.can_cast({}.dtype, torch.float32)",
    "{}.is_floating_point()",
    "{}.requires_grad",
]
_AUGMENTED = [
    "+= 2",
    "-= 1.5",
    "*= 3",
    "/= 2",
    "//= 2",
    "%= 3",
    "**= 2",
    "&= 3",
    "|= 1",
    "^= 1",
    "<<= 1",
    ">>= 1",
    "@= {}",
    "+= {}",
    "-= {}",
    "*= {}",
    "/= {}",
    "**= {}",
    "+= np.float64(2)",
    "*= torch.tensor(2.0)",
]


def _python(d: Draw) -> tuple[str, str]:
    """What Python's own syntax and protocols ask of a tensor."""
    a = d.operand(values(d.shape(), d.dtype(), d.seed))
    if d.chance(0.35):
        b = (
            d.operand(values(d.operands[a].value.shape, d.dtype(), d.seed + 1))
            if d.chance(0.5)
            else a
        )
        change = d.r.choice(_AUGMENTED)
        return f"b {change}", f"b = {a} * 1\nc = b\nb {change.replace('{}', b)}\nr = (b, c)"
    asked = d.r.choice(_PYTHON)
    return asked, f"r = {asked.replace('{}', a)}"


def _aliased(d: Draw) -> tuple[str, str]:
    """Views of a tensor, then an in-place operation on the last."""
    a = d.operand(
        values(
            d.shape(1),
            d.r.choice([torch.float64, torch.float64, torch.float64, torch.int64]),
            d.seed,
        )
    )
    if d.chance(0.4):
        d.operand(values(d.operands[a].value.shape[d.r.randrange(2) :], torch.float64, d.seed + 1))
    lines, last = [f"b = {a} * 1"], "b"
    for k in range(d.r.choice([1, 1, 2])):
        lines.append(f"v{k} = {d.r.choice(_VIEWS).replace('{}', last)}")
        last = f"v{k}"
    change = d.r.choice(_CHANGES if "a1" in d.operands else [c for c in _CHANGES if "a1" not in c])
    lines += [change.replace("{}", last), f"r = (b, {last})"]
    return "views then " + change.replace("{}", "v"), "\n".join(lines)


def _indexed(d: Draw) -> tuple[str, str]:
    """Reading or writing by an index."""
    shape = d.shape(1)
    a = d.operand(values(shape, d.dtype(), d.seed))
    parts, advanced = [], 0
    for n in shape[: d.r.randrange(1, len(shape) + 1)]:
        kind = d.r.random()
        if kind < 0.15:
            parts.append(str(d.r.randrange(-max(1, n), max(1, n))))
        elif kind < 0.5:
            lo, hi = sorted((d.r.randrange(-n - 1, n + 1), d.r.randrange(0, n + 2)))
            parts.append(
                f"{d.r.choice(['', lo])}:{d.r.choice(['', hi])}{d.r.choice(['', '', ':2'])}"
            )
        elif kind < 0.6:
            parts.append("None")
            parts.append(":")
        elif kind < 0.75:
            i = values(
                (d.r.choice([1, 2, 3]),) if d.chance(0.7) else (),
                torch.int64,
                d.seed + 5 + advanced,
            ) % max(1, n)
            parts.append(d.operand(i))
            advanced += 1
        elif kind < 0.85:
            parts.append(str([d.r.randrange(max(1, n)) for _ in range(2)]))
        elif kind < 0.92:
            parts.append(d.operand(values((n,), torch.bool, d.seed + 9)))
        else:
            parts.append(":")
    if d.chance(0.15) and len(parts) < len(shape):
        parts.insert(0, "...")
    where = ", ".join(parts)
    if d.chance(0.55):
        return "Tensor.__getitem__", f"r = {a}[{where}]"
    given = (
        d.number()
        if d.chance(0.5)
        else d.operand(
            values(d.shape(0, 1) if d.chance(0.7) else shape[-1:], torch.float64, d.seed + 3)
        )
    )
    return (
        "Tensor.__setitem__",
        f"r = {a} * 1\nr[{where}] {d.r.choice(['=', '=', '+=', '*='])} {given}",
    )


def draw(seed: int, ranks: int | None = None) -> Case:
    """The case of this seed; ``ranks`` 4: on a mesh of four."""
    for attempt in itertools.count():
        d = Draw(seed * 1009 + attempt, ranks)
        case = _drawn(d)
        if case is None:
            continue
        case.seed = seed
        if "histogramdd" in case.name:  # it gives back the very edges it was given, graph and all
            case.under = ""
        if case.name.rpartition(".")[2] in (
            "median",
            "nanmedian",
        ):  # torch's reads itself overwritten
            for o in case.operands.values():
                if "expand" in o.prep:
                    o.value, o.prep = eval(o.prep, {"v": o.value}).clone(), "v"
        # calls that torch refuses are drawn too, but few
        keep = random.Random(seed).random() < 0.12 or attempt > 60
        if keep or dense(case).kind == "value":
            return _with_out(d, case)
    raise AssertionError


def _drawn(d: Draw) -> Case | None:
    what = d.r.random()
    if what < 0.10:
        name, program = _aliased(d)
    elif what < 0.17:
        name, program = _indexed(d)
    elif what < 0.21:
        name, program = _python(d)
    else:
        if what < 0.58:
            call = _sampled(d)
        else:
            home, f = d.r.choice(functions())
            lines = signatures(home, f)
            call = ByName(d, home, f).call(d.r.choice(lines)) if lines else None
        if call is None or not d.operands:
            return None
        name, text = f"{call.home}.{call.name}", _spelled(d, call)
        head = text.partition("(")[0]
        # in place: not on a leaf
        if head.endswith("_") and not head.endswith("__") and head[:1] == "a":
            first = head.partition(".")[0]
            program = f"b = {first} * 1\nr = b{text[len(first) :]}\nr = (r, b)"
            # to torch these have no gradient, and leave the one of what they overwrite
            if ".logical_" in head:
                d.operands[first].grad = False
            name = f"Tensor.{head.partition('.')[2]}"
        else:
            program = f"r = {text}"
    if all(o.layout is None for o in d.operands.values()) or len(d.operands) > 9:
        return None
    under = d.r.choices(["", *_UNDER], [90, *[10 / len(_UNDER)] * len(_UNDER)])[0]
    return Case(
        d.seed,
        name,
        d.axes,
        program,
        d.operands,
        d.chance(0.6),
        d.chance(0.15),
        under,
        d.chance(0.1),
    )


_UNDER = [
    "torch.no_grad()",
    "torch.inference_mode()",
    "torch.autocast('cpu', torch.bfloat16)",
    "torch.enable_grad()",
]


def _with_out(d: Draw, case: Case) -> Case:
    """A share of the calls that return tensors write them to ``out=``."""
    if (
        "__" in case.name
        or not case.program.endswith(")")
        or "\n" in case.program
        or not d.chance(0.06)
    ):
        return case
    tracked = [o for o in case.operands.values() if o.grad]
    found = dense(case)
    count = len(found.results) - len(case.operands)
    wanted = found.results[:count]
    if (
        found.kind != "value"
        or not 1 <= count <= 3
        or not all(isinstance(t, Tensor) for t in wanted)
    ):
        return case
    outs = []
    for t in wanted:
        dtype = d.dtype() if d.chance(0.1) else t.dtype
        outs.append(name := d.operand(torch.zeros_like(t, dtype=dtype), grad=False))
        # some kernels write to one element for many, and some past the end of what is strided
        if "expand" in d.operands[name].prep or case.name.rpartition(".")[2] in _OUT_DENSE:
            d.operands[name].value, d.operands[name].prep = torch.zeros_like(t, dtype=dtype), "v"
    for o in tracked:
        o.grad = False
    before = case.program
    given = outs[0] if count == 1 else f"({', '.join(outs)})"
    case.program = f"{case.program[:-1]}, out={given})"
    # which is not what the call gives: triu of transposed out=, ihfft2, seen in torch 2.13
    written = dense(case)
    if written.kind == "value" and _differ(written.results[:count], wanted):
        case.program = before
    return case


# ---------------------------------------------------------------- running a case


def _run(case: Case, placed: dict[str, Any], whole: Any, cotangent: Any) -> Outcome:
    """The program on ``placed``; ``whole`` turns a result into a plain tensor."""
    scope: dict[str, Any] = {
        "torch": torch,
        "F": F,
        "inf": math.inf,
        "nan": math.nan,
        "np": np,
        "copy": copy,
    }
    leaves = [placed[n] for n, o in case.operands.items() if o.grad]
    for n, o in case.operands.items():
        scope[n] = eval(o.prep, {"v": placed[n]})
    with eval(case.under, scope) if case.under else nullcontext():
        exec(case.program, scope)
    found = optree.tree_leaves(scope["r"], none_is_leaf=True)  # type: ignore[arg-type]
    outcome = Outcome("value", results=[whole(x) for x in found])
    outs = [x for x in found if isinstance(x, Tensor) and x.requires_grad and x.numel()]
    outcome.results += [whole(placed[n].detach()) for n in case.operands]
    if not leaves:
        return outcome
    if not outs:  # a constant has no gradient, which is as good as one of zeros
        outcome.grads, outcome.seconds = [None] * len(leaves), [None] * len(leaves) * case.second
        return outcome
    grads = torch.autograd.grad(
        outs,
        leaves,
        [cotangent(x, k, case.flat) for k, x in enumerate(outs)],
        create_graph=case.second,
        allow_unused=True,
    )
    outcome.grads = [None if g is None else whole(g.detach()) for g in grads]
    outcome.seconds = [None] * len(leaves) * case.second
    again = [g for g in grads if g is not None and g.requires_grad and g.numel()]
    if case.second and again:
        seconds = torch.autograd.grad(
            again,
            leaves,
            [cotangent(g, 9 + k, case.flat) for k, g in enumerate(again)],
            allow_unused=True,
        )
        outcome.seconds = [None if g is None else whole(g) for g in seconds]
    return outcome


def _cotangent(x: Tensor, k: int, flat: bool) -> Tensor:
    return (
        values((), x.dtype, 77 + k).expand(x.shape)
        if flat
        else values(tuple(x.shape), x.dtype, 77 + k)
    )


def dense(case: Case) -> Outcome:
    """What torch says."""
    if case.said is None or case.said[0] != case.text():
        case.said = case.text(), _dense(case)
    return case.said[1]


def _dense(case: Case) -> Outcome:
    placed = {n: o.value.clone().requires_grad_(o.grad) for n, o in case.operands.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # torch.manual_seed formats the stack, for each device
        torch.default_generator.manual_seed(0)
        try:
            return _run(case, placed, _copied, _cotangent)
        except Exception as e:
            return Outcome("raised", f"{type(e).__name__}: {e}")


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def _whole(x: Any) -> Any:
    if not isinstance(x, sl.ShardedTensor):
        return _copied(x)
    full = sl.unshard(x.detach())
    if not (x.is_padded or x.sharding.partial) and x.mesh.kind == "stacked":
        again = sl.shard(full, x.sharding)
        # of what was rounded to complex64 on its way the ranks' kernels differ in the last place
        assert again.raw.dtype == x.raw.dtype and _alike(x.raw.detach(), again.raw, 1e-6) == "", (
            "the ranks hold different copies"
        )
    return full.detach().clone()


def _sharded_cotangent(x: Tensor, k: int, flat: bool) -> Tensor:
    c = _cotangent(x, k, flat)
    if not isinstance(x, sl.ShardedTensor):
        return c
    bare = str(x.sharding).split(" + ")[0]
    new = sl.shard(c, bare, pad=x.is_padded)
    if flat and new.numel():  # as sum's backward hands it on: strides of nothing
        new.raw = new.raw.flatten()[0].expand(new.raw.shape)
    return new


def ours(case: Case) -> Outcome:
    """What sharded tensors say, on the mesh in scope."""
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)
        placed: dict[str, Any] = {}
        try:
            for n, o in case.operands.items():
                v = o.value.clone()
                placed[n] = (
                    v if o.layout is None else sl.shard(v, o.layout, pad=o.pad)
                ).requires_grad_(o.grad)
        except sl.ShardError as e:  # a layout that this shape cannot have
            return Outcome("refused", f"placing: {e}")
        if case.implicit:
            stack.enter_context(sl.implicit())
        if any(o.layout is None for o in case.operands.values()):
            stack.enter_context(promoting())
        trace = stack.enter_context(sl.trace())
        try:
            outcome = _run(case, placed, _whole, _sharded_cotangent)
        except sl.ShardError as e:
            outcome = Outcome(
                "refused", f"{type(e).__name__}: {e}", fix=_fix_fault(e, placed, case)
            )
        except Exception as e:
            outcome = Outcome("raised", _where(e))
        outcome.moved = trace.bytes
        return outcome


def _fix_fault(e: sl.ShardError, placed: dict[str, Any], case: Case) -> str:
    """Run the fix with the operands it names, where their types
    tell which they are; what is wrong with it.
    """
    if why := fault(e.fix):
        return f"{e.fix}: {why}"
    free = names(e.fix)
    if any(o.prep != "v" for o in case.operands.values()):
        return ""  # what was placed is not what was given
    texts = {n: sl.typeof(t) for n, t in placed.items()}
    scope: dict[str, Any] = dict(MODULES)
    for label in free:
        owners = [
            n
            for n, text in texts.items()
            if text == e.operands.get(label, e.operands.get("tensor"))
        ]
        if len(owners) != 1:
            return ""
        scope[label] = placed[owners[0]].detach()
    if not free or "..." in e.fix.replace("'...'", ""):
        return ""
    try:
        with eval(case.under, scope) if case.under else nullcontext(), torch.no_grad():
            exec(e.fix, scope)
    except Exception as again:
        return f"{e.fix}: {type(again).__name__}: {str(again)[:200]}"
    return ""


def _where(e: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(e.__traceback__) if "/shardlib/" in f.filename]
    at = (
        f" at {frames[-1].filename.rpartition('/shardlib/')[2]}:{frames[-1].lineno} "
        f"{frames[-1].name}"
        if frames
        else ""
    )
    return f"{type(e).__name__}: {str(e)[:300]}{at}"


# ---------------------------------------------------------------- comparing

_TOLERANCE = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 2e-4, torch.complex64: 2e-4,
              torch.float16: 4e-2, torch.bfloat16: 1e-1, torch.complex32: 4e-2}  # fmt: skip


def _alike(got: Tensor, want: Tensor, least: float = 0.0, vague: bool = False) -> str:
    """What is wrong; ``vague``: NaN and infinity are one."""
    if got.dtype != want.dtype:
        return f"dtype {got.dtype} for {want.dtype}"
    if got.shape != want.shape:
        return f"shape {list(got.shape)} for {list(want.shape)}"
    if not want.numel():
        return ""
    if want.dtype not in _TOLERANCE:
        return "" if torch.equal(got, want) else "values differ"
    wide = torch.complex128 if want.dtype.is_complex else torch.float64
    a, b = got.resolve_conj().to(wide), want.resolve_conj().to(wide)
    # NaN and infinity are one: torch's own kernels differ in which part has which
    if b.is_complex():
        a, b = (
            torch.view_as_real(t.where(t.isfinite(), complex(math.nan, math.nan))) for t in (a, b)
        )
    finite = b[b.isfinite()]
    scale = max(1.0, float(finite.abs().max()) if finite.numel() else 1.0)
    if vague:
        a, b = (t.where(t.isfinite(), math.nan) for t in (a, b))
    if torch.allclose(
        a, b, rtol=0, atol=max(least, _TOLERANCE[want.dtype]) * scale, equal_nan=True
    ):
        return ""
    odd = (a.isnan() != b.isnan()).any() or (a.isinf() != b.isinf()).any()
    return (
        "nan or inf differ"
        if odd
        else f"values differ by {float((a - b).abs().nan_to_num().max()):.2g}"
    )


def _differ(got: list[Any], want: list[Any], least: float = 0.0, vague: bool = False) -> str:
    if len(got) != len(want):
        return f"{len(got)} results for {len(want)}"
    for a, b in zip(got, want, strict=True):
        if isinstance(b, Tensor) != isinstance(a, Tensor):
            found = b if a is None else a
            alone = a is None or b is None
            if alone and (not torch.count_nonzero(found) or (vague and found.isnan().all())):
                continue  # no gradient, and one of zeros, or of a value that is NaN
            return f"{type(a).__name__} for {type(b).__name__}"
        if isinstance(b, Tensor):
            if why := _alike(a, b, least if vague else 0.0, vague):
                return why
        elif type(a) is not type(b) or not (a == b or (a != a and b != b)):
            numbers = isinstance(a, int | float | complex) and type(a) is type(b)
            if not (numbers and cmath.isclose(a, b, rel_tol=max(least, 1e-9))):
                return f"{a!r} for {b!r}"
    return ""


_LIMITS = (
    "Could this error message be improved",
    "INTERNAL ASSERT",
    "is a view and is being modified inplace",
    "has been modified by an inplace operation",  # where ours holds what it needs apart
    "does not support automatic differentiation for outputs with complex dtype",
    "element 0 of tensors does not require grad",  # it says otherwise when it is asked
    "Expected a proper Tensor but got None (or an undefined Tensor",  # dist of order 0
    "Autograd not support dtype",
    "view size is not compatible with input tensor's size and stride",  # of a whole, in its memory
    "output with shape [] doesn't match the broadcast shape",  # logsumexp of no dimension
    "not implemented for 'BFloat16'",  # a loss that has no kernel for it is computed in fp32
)
"""What torch says where it fails, though nothing is wrong with the call."""

_UNDERIVED = (
    # a kernel that torch chooses by strides, and that has no second derivative
    "_scaled_dot_product_flash_attention_for_cpu_backward is not implemented",
    "not implemented for 'ComplexHalf'",
    "not implemented for 'Bool'",  # inner of what does not lie in one run is, and else is not
    "derivative for aten::floor_divide",  # torch leaves it out where a view is written to
    "self.stride(-1) must be 1 to view",  # of a block, in its memory
    "element 0 of tensors does not require grad",
    "Could this error message be improved",
    "does not support automatic differentiation for outputs with complex dtype",
)
"""What torch says of blocks where nothing is wrong either."""


def judge(got: Outcome, want: Outcome, name: str = "", pending: bool = False) -> str:
    """What is wrong, as "kind: detail"; nothing if equal or refused.

    ``pending``  operands are sums of parts, and infinity times a part of zero is NaN.
    """
    if got.kind == "refused":
        return f"fix: {got.fix}" if got.fix and want.kind == "value" else ""
    if got.kind == "raised":
        known = want.kind == "raised" or any(text in got.error for text in _UNDERIVED)
        return "" if known else f"crash: {got.error}"
    if want.kind == "raised":
        if any(text in want.error for text in _LIMITS):
            return ""
        return f"accepts: torch raises {want.error.splitlines()[0][:200]}"
    if "topk" in name and want.results[0].dtype not in (torch.float64, torch.float32):
        # which of equals, torch leaves open
        got, want = (
            replace(o, results=[o.results[0], *o.results[2:]], grads=[], seconds=[])
            for o in (got, want)
        )
    # a gradient has passed through the least exact of the operands and results
    least = max(
        (_TOLERANCE.get(t.dtype, 0.0) for t in want.results if isinstance(t, Tensor)), default=0.0
    )
    for what in ("results", "grads", "seconds"):
        found: tuple[Any, Any] = getattr(got, what), getattr(want, what)
        if why := _differ(
            *found, least, what != "results" or "_mean" in name or "_loss" in name or pending
        ):
            return f"{what}: {why}"
    return ""


def check(case: Case) -> tuple[str, Outcome]:
    """Run one case on simulated ranks, alone; what is wrong."""
    with sl.simulate(**case.axes):
        return _checked(case)


@cache
def _mesh(axes: tuple[tuple[str, int], ...]) -> sl.Mesh:
    return sl.simulate(**dict(axes))


def check_after_others(case: Case) -> tuple[str, Outcome]:
    """The same where other cases ran before, and this one too: what was remembered of other calls
    answers none.
    """
    with _mesh(tuple(case.axes.items())):
        wrong, got = _checked(case)
        if not wrong:
            wrong, got = _checked(case)
    if not wrong:
        return wrong, got
    alone, got = check(case)
    return alone or f"after others: {wrong}", got


def _checked(case: Case) -> tuple[str, Outcome]:
    want, got = dense(case), ours(case)
    pending = any("sum(" in (o.layout or "") for o in case.operands.values())
    wrong = judge(got, want, case.name, pending)
    given = case.operands.values()
    if any(text in case.name for text in _NAN_BY_PLACE) and (
        "nan" in case.program or any(not o.value.isfinite().all() for o in given)
    ):
        return "", got
    if "prod" in case.name and any(not o.value.isfinite().all() for o in given):
        # with a zero anywhere torch multiplies the others, else it divides by what may be infinite
        return ("" if wrong.startswith("grads") else wrong), got
    if "slogdet" in case.name and any("expand" in o.prep for o in given):
        return "", got  # the sign of a matrix whose rows are equal is rounding alone
    if "batch_norm" in case.name and any(o.prep != "v" for o in given):
        # torch 2.13 reads channels that do not lie in one run by wrong strides on its way back
        return ("" if wrong.startswith("grads") else wrong), got
    if "differ" in wrong and _as_exact(case, got, want):
        wrong = ""
    return wrong, got


_NAN_BY_PLACE = ("relu6", "hardtanh", "hardswish", "logit", "_polynomial_")
"""Functions of torch whose kernels answer NaN by where in memory it lies, or by what lay there."""

_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex32: torch.complex128,
}


def _as_exact(case: Case, got: Outcome, want: Outcome) -> bool:
    """Say whether half precision alone explains a difference: the
    call in fp64 is as near to ours as to torch's.
    """
    if not any(o.value.dtype in _WIDE for o in case.operands.values()):
        return False
    wide = copy.deepcopy(case)
    for o in wide.operands.values():
        o.value = o.value.to(_WIDE.get(o.value.dtype, o.value.dtype))
    exact = dense(wide)
    for what in ("results", "grads", "seconds"):
        found = [getattr(o, what) for o in (got, want, exact)]
        if len({len(values) for values in found}) > 1:
            return False
        for ours, torchs, best in zip(*found, strict=True):
            if not all(isinstance(t, Tensor) and t.shape == best.shape for t in (ours, torchs)):
                continue
            if not (best.is_floating_point() or best.is_complex()):
                if not torch.equal(ours, torchs):
                    return False
                continue
            far = [
                float((t.to(best.dtype) - best).abs().nan_to_num(math.inf).max())
                if t.numel()
                else 0.0
                for t in (ours, torchs)
            ]
            least = _TOLERANCE.get(torchs.dtype, 0.0) * max(
                1.0, float(best.abs().max()) if best.numel() else 1.0
            )
            if not far[0] <= far[1] + least:
                return False
    return True


def hunt(seeds: Any, seconds: float = math.inf) -> Iterator[tuple[Case, str, Outcome]]:
    """Each case and what is wrong with it ("" if nothing)."""
    until = time.monotonic() + seconds
    for seed in seeds:
        if time.monotonic() > until:
            return
        case = draw(seed)
        yield case, *check_after_others(case)


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--count", type=int, default=2000)
    p.add_argument("--start", type=int, default=0)
    p.add_argument("--seed", type=int)
    a = p.parse_args()
    torch.set_num_threads(1)
    if a.seed is not None:
        case = draw(a.seed)
        print(case.text())
        wrong, got = check(case)
        print(f"dense  {dense(case)}\nours   {got}\n{wrong or 'nothing wrong'}")
        return bool(wrong)
    found: dict[tuple[str, str], int] = {}
    kinds: dict[str, int] = {}
    ran: set[str] = set()
    start = time.monotonic()
    for case, wrong, got in hunt(range(a.start, a.start + a.count)):
        ran.add(case.name)
        kinds[got.kind] = kinds.get(got.kind, 0) + 1
        if wrong:
            key = (case.name, wrong.partition(":")[0])
            if key not in found:
                print(f"[{key[1]}] {case.name}\n  {case.text()}\n    -> {wrong}", flush=True)
            found[key] = found.get(key, 0) + 1
    print(
        f"{a.count} calls of {len(ran)} functions in {time.monotonic() - start:.0f} s: {kinds}; "
        f"{len(found)} faults",
        file=sys.stderr,
    )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
