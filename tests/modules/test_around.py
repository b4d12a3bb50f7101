"""A method that is surrounded belongs to the module that has it, in every copy."""

import copy
import inspect
import pickle
from typing import Any

import torch
from torch import nn

from shardlib.modules.around import Around
from shardlib.modules.weightless_copy import copied, skeleton


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, input: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.inner(input) * scale


def shifted(module: nn.Module, forward: Any, by: float, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs) + by


def test_a_copy_of_the_module_has_its_own() -> None:
    """By deepcopy, pickle and the copy of a tree; two around one method, each in its turn."""
    m, x = Twice(), torch.ones(1, 2)
    Around(m, "forward", shifted, 1.0)
    Around(m, "forward", shifted, 10.0)
    Around(m.inner, "forward", shifted, 100.0)
    want = m(x, scale=2.0)
    swap = {id(p): nn.Parameter(p.detach().clone()) for p in m.parameters()}
    for again in (copy.deepcopy(m), pickle.loads(pickle.dumps(m)), copied(m, swap)[id(m)]):
        assert torch.equal(again(x, scale=2.0), want)
        with torch.no_grad():
            for p in again.parameters():
                p.zero_()
        assert torch.equal(again(x), torch.full((1, 2), 111.0))
        assert torch.equal(m(x, scale=2.0), want)
    assert not any(p.is_meta for p in m.parameters())
    assert all(p.is_meta for p in skeleton(m).parameters())


def test_its_signature_is_the_methods() -> None:
    m = Twice()
    before = inspect.signature(m.forward)
    Around(m, "forward", shifted, 1.0)
    Around(m, "forward", shifted, 1.0)
    assert inspect.signature(m.forward) == before
