"""Contractions: torch.einsum and the functions that are equal to one einsum equation."""

import math
import operator
import string
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib._compat import any_autocast
from shardlib.dtypes import is_half
from shardlib.ops.declare import by_signature
from shardlib.ops.dims import Labels, rows_call
from shardlib.ops.einsum import contract as _contract
from shardlib.ops.matmul.op import matmul, product_of
from shardlib.ops.signatures import binder
from shardlib.opspec import Args, Func, Kwargs
from shardlib.tensor import ShardedTensor, Unfit, implements, lift

contract = partial(_contract, product_of)
"""Einsum of sharded operands."""


@implements(torch.einsum)
def einsum(func: Func, args: Args, kwargs: Kwargs) -> object:
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str):
        raise Unfit("einsum by lists")
    left, _, right = equation.partition("->")
    if operands and operands[0].dtype == torch.bool and set(left) - {*right, ",", " "}:
        raise Unfit("torch multiplies no matrices of what is true or false")
    return contract(equation, *operands, exact=False)


@implements(Tensor.__rmatmul__)
def rmatmul(func: Func, args: Args, kwargs: Kwargs) -> object:
    if kwargs.keys() - {"other"}:
        raise Unfit("Python's operators know no other names")
    x, y = (*args, *kwargs.values())
    return matmul(torch.matmul, (y, x), {})


def _spelled(line: str, *funcs: Func, need: tuple[int, ...]) -> None:
    bind = binder("f(input, other)\nf(input, vec2)\nf(input, tensor)\nf(x, y)")

    def implementation(func: Func, args: Args, kwargs: Kwargs) -> object:
        x, y = bind(*args, **kwargs).values()
        if (x.ndim, y.ndim) != need or x.dtype != y.dtype:
            raise Unfit("dimensions")
        return contract(line, x, y)

    implements(*funcs)(implementation)


_spelled("i,j->ij", torch.outer, Tensor.outer, torch.ger, Tensor.ger, need=(1, 1))
_spelled("i,i->", torch.inner, Tensor.inner, need=(1, 1))


def _added(line: str, signature: str, *funcs: Func) -> None:
    """Implement input * beta + alpha * product; with beta zero, input's values are ignored."""
    implements(*funcs)(partial(_sum_and_product, line, binder(signature)))


def _sum_and_product(line: str, bind: Func, func: Func, args: Args, kwargs: Kwargs) -> object:
    left, right, result = line.replace("->", ",").split(",")
    c, a, b, beta, alpha = bind(*args, **kwargs).values()
    mesh = next(t.mesh for t in (c, a, b) if isinstance(t, ShardedTensor))
    c, a, b = (lift(t, mesh, func.__name__) for t in (c, a, b))
    if not (a.dtype == b.dtype == c.dtype) or (a.ndim, b.ndim) != (len(left), len(right)):
        raise Unfit("dimensions")
    _check_factors(a.dtype, beta, alpha)
    if c.ndim == 1 and line == "mk,kn->mn" and alpha == beta == 1:
        # rounds once, as torch does
        return F.linear(a, b.mT, c)
    dtype = a.dtype
    if is_half(a):

        def labels(args: Args, kwargs: Kwargs) -> Labels:
            c, a, b = args
            ends = tuple(result[len(result) - c.ndim :])
            return {c.at: ends, a.at: tuple(left), b.at: tuple(right)}

        own = rows_call(func, (c, a, b), {"beta": beta, "alpha": alpha}, labels, free=True)
        if own is not None:
            return own
        # a sum over ranks, rounded with the summand
        a, b, c = a.float(), b.float(), c.float()
    plain = line in ("mk,kn->mn", "bmk,bkn->bmn", "mk,k->m")
    out = torch.matmul(a, b) if plain else contract(line, a, b)
    sizes = zip(reversed(c.shape), reversed(out.shape), strict=False)
    if c.ndim > out.ndim or any(n not in (1, m) for n, m in sizes):
        raise Unfit("the summand does not have the product's shape")
    out = out if alpha == 1 else out * alpha
    if beta != 0:
        out = out + (c if beta == 1 else c * beta)
    return out.to(dtype)


def _check_factors(dtype: torch.dtype, *factors: object) -> None:
    """Refuse factors whose meaning, or rounding, torch decides."""
    if dtype == torch.bool:
        raise Unfit("factors of what is true or false")
    exact = dtype.is_floating_point or dtype.is_complex
    if not exact and any(type(k) is not int for k in factors):
        raise Unfit("torch rounds such factors of integers")
    known = (int, float, complex) if dtype.is_complex else (int, float)
    if any(isinstance(k, bool) or not isinstance(k, known) for k in factors):
        raise Unfit("torch decides what factors of other types mean")


_added("mk,kn->mn", "addmm(input, mat1, mat2, *, beta=1, alpha=1)", torch.addmm, Tensor.addmm)
_added(
    "bmk,bkn->bmn",
    "baddbmm(input, batch1, batch2, *, beta=1, alpha=1)",
    torch.baddbmm,
    Tensor.baddbmm,
)
_added(
    "bmk,bkn->mn", "addbmm(input, batch1, batch2, *, beta=1, alpha=1)", torch.addbmm, Tensor.addbmm
)
_added("mk,k->m", "addmv(input, mat, vec, *, beta=1, alpha=1)", torch.addmv, Tensor.addmv)
_added("i,j->ij", "addr(input, vec1, vec2, *, beta=1, alpha=1)", torch.addr, Tensor.addr)


@by_signature("tensordot(a, b, dims=2)", torch.tensordot)
def tensordot(func: Func, a: Tensor, b: Tensor, dims: Any) -> object:
    if a.dtype == torch.bool:
        raise Unfit("torch multiplies no matrices of what is true or false")
    left, right = _contracted(a, b, dims)
    sizes = [a.shape[d] for d in left]
    if sizes != [b.shape[d] for d in right] or a.dtype != b.dtype:
        # torch broadcasts ones here
        raise Unfit("sizes differ")
    if any_autocast() and a.numel() == b.numel() == math.prod(sizes):
        raise Unfit("torch sums products of elements here, which autocast leaves alone")
    letters = iter(string.ascii_letters)
    p = [next(letters) for _ in range(a.ndim)]
    q = [p[left[right.index(d)]] if d in right else next(letters) for d in range(b.ndim)]
    out = [c for c in p + q if (c in p) != (c in q)]
    return contract(f"{''.join(p)},{''.join(q)}->{''.join(out)}", a, b)


def _contracted(a: Tensor, b: Tensor, dims: Any) -> tuple[list[int], list[int]]:
    """Return the dimensions of each operand that ``dims`` of tensordot contracts."""
    if isinstance(dims, Tensor):
        raise Unfit("dims of a tensor")
    if isinstance(dims, int):
        return list(range(a.ndim - dims, a.ndim)), list(range(dims))
    left, right = ([d] if isinstance(d, int) else list(d) for d in dims)
    return [d % a.ndim for d in left], [d % b.ndim for d in right]


def multi_dot(func: Func, args: Args, kwargs: Kwargs) -> object:
    (tensors,) = (*args, *kwargs.values())
    return reduce(operator.matmul, tensors)


implements(torch.linalg.multi_dot)(multi_dot)
