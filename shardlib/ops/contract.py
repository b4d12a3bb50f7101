"""Products beyond two matrices: einsum and what is spelled by it.

An einsum says itself what it does to dimensions: a letter in the result is a row, one that is not is contracted.
Where every letter's split agrees, blocks are multiplied where they lie and summed over the axes of the contracted
letters.  Where it does not, two operands are brought into the form of a matrix product, whose rules (SUMMA, ...) know
more; if they refuse, operands are gathered as any other's (``sl.implicit``).
"""

import math
import string
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.errors import BadArgument, ShardError
from shardlib.ops.dims import Unfit, rows_call
from shardlib.ops.matmul.choose import product_of
from shardlib.ops.signatures import binder
from shardlib.tensor import ShardedTensor, implements, made_of, typeof

__all__ = ["einsum"]


def _parsed(equation: str, ndims: list[int]) -> tuple[list[str], str]:
    """Letters of every operand and of the result, ``...`` written out (broadcast dimensions share letters)."""
    equation = equation.replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(ndims):
        raise Unfit("operands")
    free = [c for c in string.ascii_letters if c not in equation]
    width = 0
    for term, n in zip(terms, ndims, strict=True):
        if "..." in term:
            width = max(width, n - len(term) + 3)
    dots = "".join(free[:width])
    terms = [
        t.replace("...", dots[width - (n - len(t) + 3) :] if "..." in t else "")
        for t, n in zip(terms, ndims, strict=True)
    ]
    if not arrow:
        once = sorted(c for c in set("".join(terms)) if "".join(terms).count(c) == 1 and c not in dots)
        right = ("..." if dots else "") + "".join(once)
    return terms, right.replace("...", dots)


def _labels(terms: list[str]) -> Any:
    twice = {c for t in terms for c in t if t.count(c) > 1}

    def labels(args: Any, kwargs: Any) -> Any:
        operands = args[1:]
        return {s.at: tuple(None if c in twice else c for c in t) for s, t in zip(operands, terms, strict=True)}

    return labels


def contract(equation: str, *operands: Any) -> Any:
    """An einsum of sharded operands."""
    try:
        terms, right = _parsed(equation, [t.ndim for t in operands])
    except Unfit:
        return torch.einsum(equation, *operands)
    local = ",".join(terms) + "->" + right
    try:
        return rows_call(torch.einsum, (local, *operands), {}, _labels(terms), sums=True, quiet=True)
    except ShardError:
        try:
            return _as_product(terms, right, *operands)
        except (ShardError, Unfit):
            return rows_call(torch.einsum, (local, *operands), {}, _labels(terms), sums=True)


def _as_product(terms: list[str], right: str, *operands: Any) -> Any:
    if len(operands) != 2 or not all(isinstance(t, ShardedTensor) for t in operands):
        raise Unfit("two operands")
    a, b = operands
    p, q = terms
    size = dict(zip(p, a.shape, strict=True)) | dict(zip(q, b.shape, strict=True))
    if any(t.count(c) > 1 for t in (p, q, right) for c in t) or any(
        size[c] != n for t, x in zip(terms, operands, strict=True) for c, n in zip(t, x.shape, strict=True)
    ):
        raise Unfit("broadcast or diagonal")
    batch = [c for c in right if c in p and c in q]
    inner = [c for c in p if c in q and c not in right]
    rows = [c for c in right if c in p and c not in q]
    cols = [c for c in right if c in q and c not in p]
    if set(p) != {*batch, *inner, *rows} or set(q) != {*batch, *inner, *cols} or not inner:
        raise Unfit("a letter in one operand alone")

    x = a.permute(*[p.index(c) for c in (*batch, *rows, *inner)])
    w = b.permute(*[q.index(c) for c in (*batch, *inner, *cols)])
    lead = [size[c] for c in batch]
    x = x.reshape(*lead, math.prod(size[c] for c in rows), math.prod(size[c] for c in inner))
    w = w.reshape(*lead, math.prod(size[c] for c in inner), math.prod(size[c] for c in cols))
    y = product_of(x, w).reshape(*lead, *[size[c] for c in rows], *[size[c] for c in cols])
    have = [*batch, *rows, *cols]
    return y.permute(*[have.index(c) for c in right]) if have else y.reshape(())


@implements(torch.einsum)
def einsum(func: Any, args: Any, kwargs: Any) -> Any:
    equation, *operands = args
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    if not isinstance(equation, str):
        raise TypeError("einsum by lists")
    return contract(equation, *operands)


def _product_line(a: int, b: int) -> str:
    left = "k" if a == 1 else "...mk"
    right = "k" if b == 1 else "...kn"
    out = ("" if a == 1 and b == 1 else "...") + ("m" if a > 1 else "") + ("n" if b > 1 else "")
    if a <= 2 and b <= 2:
        left, right, out = (t.replace("...", "") for t in (left, right, out))
    return f"{left},{right}->{out}"


_MM = binder("""
    matmul(input, other)
    mm(input, mat2)
    mv(input, vec)
    dot(input, tensor)
""")
_NEED = {
    getattr(home, name): need
    for name, need in {"mm": (2, 2), "bmm": (3, 3), "mv": (2, 1), "dot": (1, 1)}.items()
    for home in (torch, Tensor)
}


@implements(
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.mv, Tensor.mv,
    torch.dot, Tensor.dot, torch.linalg.matmul,
)  # fmt: skip
def matmul(func: Any, args: Any, kwargs: Any) -> Any:
    x, w = args if len(args) == 2 and not kwargs else _MM(*args, **kwargs).values()
    left, right = x.shape, w.shape
    if (func in _NEED and (len(left), len(right)) != _NEED[func]) or not (left and right):
        name = func.__name__.strip("_")
        raise TypeError(f"{name} of {len(left)} and {len(right)} dimensions")  # torch says the same on whole tensors
    if 0 in left or 0 in right:
        raise TypeError("an empty product")
    if x.dtype != w.dtype and 1 in (len(left), len(right)):
        raise BadArgument("operands have different dtypes", op=func.__name__.strip("_"),
                          operands={"x": typeof(x), "y": typeof(w)}, fix="x @ y.to(x.dtype)")  # fmt: skip
    if len(left) > 1 and len(right) > 1 and isinstance(x, Tensor) and isinstance(w, Tensor):
        try:
            return product_of(x, w)
        except ShardError as e:
            refusal = e
        if x.ndim == 2 and w.ndim == 2:
            raise refusal
        try:
            return contract(_product_line(x.ndim, w.ndim), x, w)
        except ShardError:
            raise refusal from None
    return contract(_product_line(x.ndim, w.ndim), x, w)


@implements(Tensor.__rmatmul__)
def rmatmul(func: Any, args: Any, kwargs: Any) -> Any:
    return matmul(torch.matmul, (args[1], args[0]), kwargs)


def _spelled(line: str, *funcs: Any, need: tuple[int, ...]) -> None:
    bind = binder("f(input, other)\nf(input, vec2)\nf(input, tensor)\nf(x, y)")

    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        x, y = bind(*args, **kwargs).values()
        if (x.ndim, y.ndim) != need or x.dtype != y.dtype:
            raise TypeError("dimensions")
        return contract(line, x, y)

    implements(*funcs)(rule)


_spelled("i,j->ij", torch.outer, Tensor.outer, torch.ger, Tensor.ger, need=(1, 1))
_spelled("i,i->", torch.inner, Tensor.inner, need=(1, 1))


def _added(line: str, signature: str, *funcs: Any) -> None:
    """input * beta + alpha * product; beta of zero ignores what input holds."""
    bind = binder(signature)

    def rule(func: Any, args: Any, kwargs: Any) -> Any:
        c, a, b, beta, alpha = bind(*args, **kwargs).values()
        if not (a.dtype == b.dtype == c.dtype) or [a.ndim, b.ndim] != [len(t) for t in line.split("->")[0].split(",")]:
            raise TypeError("dimensions")
        exact = a.dtype.is_floating_point or a.dtype.is_complex
        if not exact and not (type(beta) is type(alpha) is int):
            raise TypeError("torch rounds such factors of integers")
        out = torch.matmul(a, b) if line in ("mk,kn->mn", "bmk,bkn->bmn", "mk,k->m") else contract(line, a, b)
        out = out if alpha == 1 else out * alpha
        if beta == 0:
            return out
        return out + (c if beta == 1 else c * beta)

    implements(*funcs)(rule)


_added("mk,kn->mn", "addmm(input, mat1, mat2, *, beta=1, alpha=1)", torch.addmm, Tensor.addmm)
_added("bmk,bkn->bmn", "baddbmm(input, batch1, batch2, *, beta=1, alpha=1)", torch.baddbmm, Tensor.baddbmm)
_added("bmk,bkn->mn", "addbmm(input, batch1, batch2, *, beta=1, alpha=1)", torch.addbmm, Tensor.addbmm)
_added("mk,k->m", "addmv(input, mat, vec, *, beta=1, alpha=1)", torch.addmv, Tensor.addmv)
_added("i,j->ij", "addr(input, vec1, vec2, *, beta=1, alpha=1)", torch.addr, Tensor.addr)


@implements(torch.tensordot)
def tensordot(func: Any, args: Any, kwargs: Any) -> Any:
    a, b, dims = _TENSORDOT(*args, **kwargs).values()
    if isinstance(dims, int):
        left, right = list(range(a.ndim - dims, a.ndim)), list(range(dims))
    elif isinstance(dims, Tensor):
        raise TypeError("dims of a tensor")
    else:
        left, right = ([d] if isinstance(d, int) else list(d) for d in dims)
        left, right = [d % a.ndim for d in left], [d % b.ndim for d in right]
    if any(a.shape[i] != b.shape[j] for i, j in zip(left, right, strict=True)) or a.dtype != b.dtype:
        raise TypeError("sizes differ")  # torch broadcasts ones here
    letters = iter(string.ascii_letters)
    p = [next(letters) for _ in range(a.ndim)]
    q = [p[left[right.index(d)]] if d in right else next(letters) for d in range(b.ndim)]
    out = [c for d, c in enumerate(p) if d not in left] + [c for d, c in enumerate(q) if d not in right]
    return contract(f"{''.join(p)},{''.join(q)}->{''.join(out)}", a, b)


_TENSORDOT = binder("tensordot(a, b, dims=2)")


def multi_dot(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = args[0]
    out = tensors[0]
    for t in tensors[1:]:
        out = out @ t
    return out


implements(torch.linalg.multi_dot)(multi_dot)

_LINEAR = binder("linear(input, weight, bias=None)")


def _turned(w: ShardedTensor) -> Any:
    """w.mT, made once."""
    found, key = made_of(w), ("mT", w.yields)
    if key not in found:
        found[key] = w.mT
    return found[key]


@implements(F.linear)
def linear(func: Any, args: Any, kwargs: Any) -> Any:
    """x @ w.T + b; w is stored (out, in)."""
    x, w, bias = args if len(args) == 3 and not kwargs else _LINEAR(*args, **kwargs).values()
    if w.ndim != 2:
        raise TypeError("a weight has two dimensions")
    if bias is not None and bias.dtype != x.dtype:
        raise BadArgument("the bias has another dtype than the tensor", op="linear",
                          operands={"x": typeof(x), "bias": typeof(bias)})  # fmt: skip
    if x.ndim < 2:
        out = contract("...k,ok->...o", x, w)
        return out if bias is None else out + bias
    wide = _turned(w) if type(w) is ShardedTensor else w.mT
    if isinstance(bias, ShardedTensor) and not bias.sharding.partial:
        return product_of(x, wide, bias=bias)
    out = product_of(x, wide)
    return out if bias is None else out + bias  # type: ignore[return-value]
