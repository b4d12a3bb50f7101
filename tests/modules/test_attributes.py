"""Attributes that forward changes are reported in check mode, with their module."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardlib as sl


class Leaves(nn.Module):
    """Leaves something behind, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.seen: list[Any] = []
        self.total = torch.zeros(3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "number":
            self.calls += 1
        if self.how == "list":
            self.seen.append(1)
        if self.how == "tensor":
            self.total += 1.0
        if self.how == "new":
            self.last = x
        if self.how == "buffer":
            self.count += 1
        if self.how == "same":
            self.calls = 0
        return x * 2


@pytest.mark.parametrize(
    ("how", "name"),
    [("number", "calls"), ("list", "seen"), ("tensor", "total"), ("new", "last")],
)
def test_what_forward_leaves_behind_is_reported(how: str, name: str) -> None:
    model = nn.Sequential(nn.Identity(), Leaves(how))
    with sl.simulate(x=2):
        apply, params = sl.parallelize(model, [])
        apply(params, torch.ones(2))  # unseen outside check mode
        with sl.check(), pytest.warns(UserWarning, match=f"attribute '{name}' of 1") as seen:
            apply(params, torch.ones(2))
        assert len(seen) == 1


@pytest.mark.parametrize("how", ["nothing", "buffer", "same"])
def test_a_pure_forward_is_not_reported(how: str) -> None:
    with sl.simulate(x=2), sl.check(), warnings.catch_warnings():
        warnings.simplefilter("error")
        apply, params = sl.parallelize(nn.Sequential(Leaves(how)), [])
        apply(params, torch.ones(2))
