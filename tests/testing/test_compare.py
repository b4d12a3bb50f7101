"""What differs is said to differ, by how much, and what is equal is not."""

import pytest
import torch

import shardlib as sl
from shardlib.testing.compare import alike, close, difference, normal


def test_a_difference_is_relative_and_equal_infinities_have_none() -> None:
    inf, nan = float("inf"), float("nan")
    want = torch.tensor([4.0, inf, nan])
    assert difference(want, want) == 0.0
    assert difference(torch.tensor([3.0, inf, nan]), want) == 0.25
    assert difference(torch.tensor([4.0, inf, 1.0]), want) == inf
    assert difference(torch.tensor([4.0, -inf, nan]), want) == inf
    assert difference(torch.tensor([1, 2]), torch.tensor([1, 4])) == 0.5
    assert difference(torch.zeros(0), torch.zeros(0)) == 0.0
    assert difference(torch.zeros(2), torch.zeros(3)) == inf


def test_a_sharded_tensor_is_compared_whole() -> None:
    x = normal(4, 2, seed=0)
    with sl.simulate(x=2):
        close("the law", sl.shard(x, "x ."), x, 0.0)
        with pytest.raises(AssertionError, match=r"the law: differs from dense by [0-9.]+e[+]00"):
            close("the law", sl.shard(x + 10, "x ."), x, 0.0)
    with pytest.raises(AssertionError, match=r"the law: has the shape \[4, 2\], not \[4\]"):
        close("the law", x, x[:, 0], 0.0)


def test_two_figures_are_named_with_their_law() -> None:
    alike("bytes", 3, 3)
    with pytest.raises(AssertionError, match="bytes: 3 and 4"):
        alike("bytes", 3, 4)
