"""The calls cover exactly what the mask allows, once."""

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib.layouts.orders import dealt
from shardlib.ops.attention.kernels import narrowed, pieces
from shardlib.ops.attention.masks import (
    At,
    Causal,
    Documents,
    Full,
    Mask,
    MaskMod,
    Padding,
    Prefix,
    Window,
)
from tests.strategies import examples

AT = At(torch.arange(2), torch.arange(3))


@st.composite
def masks(draw: Any, n: int, keys: int | None = None) -> Mask:
    """A mask for sequences of n queries and as many keys, or ``keys`` of them."""
    m = n if keys is None else keys
    out: Mask = Full()
    kinds = ["causal", "window", "documents", "numbers", "padding", "prefix", "mod"]
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=3, unique=True)):
        if kind == "causal":
            out &= Causal()
        elif kind == "window":
            bound = st.none() | st.integers(0, n)
            out &= Window(draw(bound), draw(bound))
        elif kind == "documents":
            inner = [sorted(draw(st.lists(st.integers(0, size), max_size=4))) for size in (n, m)]
            count = min(map(len, inner))
            q, k = ((0, *b[:count], size) for b, size in zip(inner, (n, m), strict=True))
            out &= Documents(q, None if keys is None else k)
        elif kind == "numbers":
            q, k = (torch.randint(3, (2, size), generator=torch.Generator().manual_seed(draw(st.integers(0, 9))))
                    for size in (n, m))  # fmt: skip
            q, k = (t.sort(1).values if draw(st.booleans()) else t for t in (q, k))
            out &= Documents(q, None if keys is None else k)
        elif kind == "padding":
            out &= Padding(draw(st.lists(st.integers(0, m), min_size=2, max_size=2)))
        elif kind == "prefix":
            out &= Prefix(draw(st.integers(0, m)))
        else:
            out &= MaskMod(lambda b, h, q, k: (q * 7 + k * 3 + b + h) % 5 != 0)
    return out


ORDERS = st.sampled_from(["contiguous", "zigzag", "striped"])


@examples(120)
@given(st.data(), st.integers(1, 150), st.integers(1, 5), ORDERS, ORDERS)
def test_pieces_cover_what_is_allowed_once(
    data: Any, n: int, p: int, q_order: str, k_order: str
) -> None:
    mask = data.draw(masks(n))
    for q, k in itertools.product(dealt(q_order, n, p), dealt(k_order, n, p)):
        lo, hi = (
            sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
            if q_order == "zigzag"
            else (0, n)
        )
        k = narrowed(k, lo, hi)
        at = [
            torch.tensor([i for run in runs for i in run.positions], dtype=torch.int64)
            for runs in (q, k)
        ]
        want = mask.allowed(at[0], at[1], AT)
        want = torch.ones(len(at[0]), len(at[1]), dtype=torch.bool) if want is None else want
        want = want.expand(2, 3, len(at[0]), len(at[1]))
        got = torch.zeros(2, 3, len(at[0]), len(at[1]), dtype=torch.int64)
        for piece in pieces(q, k, mask):
            inside = torch.ones(piece.q1 - piece.q0, piece.k1 - piece.k0, dtype=torch.bool)
            if piece.kind == "causal":
                inside = inside.tril()
            if piece.kind == "masked":
                inside = want[..., piece.q0 : piece.q1, piece.k0 : piece.k1]
            got[..., piece.q0 : piece.q1, piece.k0 : piece.k1] += inside.long()
        assert torch.equal(got, want.long())


def test_zigzag_causal_needs_one_call_for_each_block_that_arrives() -> None:
    for p, n in itertools.product((2, 3, 4, 8), (1, 16)):
        shares = dealt("zigzag", 2 * p * n, p)
        assert all(len(pieces(q, k, Causal())) == 1 for q in shares for k in shares)


def test_striped_causal_needs_one_call_too() -> None:
    shares = dealt("striped", 64, 4)
    assert all(len(pieces(q, k, Causal())) == 1 for q in shares for k in shares)
