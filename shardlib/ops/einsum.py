"""Einsum of sharded operands: its equation names the dimensions, so labels are read from it.

A letter in the result is a row, one that is not is contracted.  Where every letter's split agrees,
blocks are multiplied locally and summed over the axes of the contracted letters.  Otherwise two
operands are reshaped to a matrix product, for which there are more algorithms (SUMMA, ...); if
these refuse, operands are gathered as for any other operator (``sl.implicit``).
"""

import string
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from einops import rearrange

from shardlib.errors import BadArgument, ShardError
from shardlib.ops.dims import Labels, rows_call
from shardlib.opspec import Args, Kwargs
from shardlib.tensor import ShardedTensor, Unfit, typeof


def _parsed(equation: str, ndims: list[int]) -> tuple[list[str], str]:
    """Return the letters of every operand and of the result, ``...`` written out.

    Broadcast dimensions share letters.
    """
    equation = equation.replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if len(terms) != len(ndims):
        raise Unfit("operands")
    widths = [n - len(t.replace("...", "")) for t, n in zip(terms, ndims, strict=True)]
    # 0 where no term has dots, if the operands have the terms' dimensions
    width = max(widths)
    dots = "".join([c for c in string.ascii_letters if c not in equation][:width])
    letters = "".join(terms).replace(".", "")
    if not arrow:
        right = "..." + "".join(c for c in sorted(letters) if letters.count(c) == 1)
    terms = [t.replace("...", dots[width - n :]) for t, n in zip(terms, widths, strict=True)]
    return terms, right.replace("...", dots)


def _labels(terms: list[str]) -> Callable[[Args, Kwargs], Labels]:
    twice = {c for t in terms for c in t if t.count(c) > 1}

    def labels(args: Args, kwargs: Kwargs) -> Labels:
        operands = args[1:]
        return {
            s.at: tuple(None if c in twice else c for c in t)
            for s, t in zip(operands, terms, strict=True)
        }

    return labels


def contract(product: Callable[..., Any], equation: str, *operands: Any, exact: bool = True) -> Any:
    """Compute an einsum of sharded operands; ``product`` multiplies two matrices.

    ``exact``  a letter has one size, as in products; torch.einsum's may be 1 in some operands.
    """
    terms, right = _parsed(equation, [t.ndim for t in operands])
    pairs = zip(terms, operands, strict=True)
    sizes: dict[str, int] = {}
    for c, n in [pair for term, t in pairs for pair in zip(term, t.shape, strict=True)]:
        if exact and c in equation and sizes.setdefault(c, n) != n:
            raise BadArgument(
                f"a size of {n} meets one of {sizes[c]}",
                op=equation,
                operands={"xyzuvw"[i % 6]: typeof(t) for i, t in enumerate(operands)},
            )
    local = ",".join(terms) + "->" + right
    call = partial(rows_call, torch.einsum, (local, *operands), {}, _labels(terms), sums=True)
    if (own := call(free=True)) is not None:
        return own
    try:
        return _as_product(product, terms, right, *operands)
    except (ShardError, Unfit):
        return call()


def _as_product(product: Callable[..., Any], terms: list[str], right: str, *operands: Any) -> Any:
    if len(operands) != 2 or not all(isinstance(t, ShardedTensor) for t in operands):
        raise Unfit("two operands")
    a, b = operands
    p, q = terms
    size = dict(zip(p + q, (*a.shape, *b.shape), strict=True))
    repeated = any(len(set(t)) < len(t) for t in (p, q, right))
    if repeated or [size[c] for c in p + q] != [*a.shape, *b.shape]:
        raise Unfit("broadcast or diagonal")
    both = set(p) & set(q)
    inner = " ".join(c for c in p if c in both - set(right))
    batch, rows, cols = (
        " ".join(c for c in right if c in group) for group in (both, set(p) - both, set(q) - both)
    )
    if {*p, *q} != set(f"{batch}{inner}{rows}{cols}") - {" "} or not inner:
        raise Unfit("a letter in one operand alone")
    x = rearrange(a, f"{' '.join(p)} -> {batch} ({rows}) ({inner})")
    w = rearrange(b, f"{' '.join(q)} -> {batch} ({inner}) ({cols})")
    split = {c: size[c] for c in (*rows.split(), *cols.split())}
    return rearrange(product(x, w), f"{batch} ({rows}) ({cols}) -> {' '.join(right)}", **split)


def product_line(a: int, b: int) -> str:
    """Return the einsum equation of torch.matmul for operands of so many dimensions."""
    line = "...mk,...kn->...mn"
    if a == 1:
        line = line.replace("...mk", "k").replace("m", "")
    if b == 1:
        line = line.replace("...kn", "k").replace("n", "")
    if a <= 2 and b <= 2:
        line = line.replace("...", "")
    return line
