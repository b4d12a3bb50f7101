"""An equation's letters are its layout: rows stay split, contracted ones are summed, once."""

import string

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.ops.einsum import product_line

SIZES = {"i": 2, "j": 4, "k": 2, "l": 4}


@settings(max_examples=60, deadline=None)
@given(
    st.permutations("ijkl"),
    st.permutations("ijkl"),
    st.sets(st.sampled_from("ijkl")),
    st.sampled_from("ijkl"),
)
def test_one_split_letter_stays_if_kept_and_is_summed_if_not(
    a: list[str], b: list[str], kept: set[str], split: str
) -> None:
    """Both operands have all letters, and one letter is split in both."""
    result = "".join(sorted(kept))
    equation = f"{''.join(a)},{''.join(b)}->{result}"
    x, y = (torch.arange(64.0).reshape([SIZES[c] for c in term]).sin() for term in (a, b))
    with sl.simulate(x=2):
        given_ = [sl.shard(t, " ".join("x" if c == split else "." for c in term))
                  for t, term in ((x, a), (y, b))]  # fmt: skip
        with sl.trace() as t:
            out = torch.einsum(equation, *given_)
        assert torch.allclose(sl.unshard(out), torch.einsum(equation, x, y), atol=1e-4)
    assert out.sharding.axes == (("x",) if split in kept else ())
    words = 1
    for c in kept:
        words *= SIZES[c]
    # a ring all-reduce over two ranks: each receives as many bytes as the result has, or none
    assert t.bytes == (0 if split in kept else 4 * words)


@given(st.integers(1, 4), st.integers(1, 4))
def test_matmul_has_an_equation_for_any_dimensions(a: int, b: int) -> None:
    x, y = (torch.ones([2] * n) for n in (a, b))
    line = product_line(a, b)
    assert set(line) <= set(string.ascii_letters + ",->.")
    assert torch.equal(torch.einsum(line, x, y), x @ y)
