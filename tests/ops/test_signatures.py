"""Operators declared by their dimensions, bound by torch's names,
and run whole where nothing else is known.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib.ops.signatures import binder
from shardlib.tensor import Unfit
from tests.ops.cases import close, r

X = r(4, 6)
FORMS: dict[str, Callable[[Any], Any]] = {  # spellings that were read wrongly once
    "var, positional": lambda x: x.var(-1, False),
    "var of all": lambda x: x.var(False),
    "std, numpy's names": lambda x: torch.std(x, axis=-1, keepdims=True),
    "sum over no dimension": lambda x: torch.sum(x, dim=[]),
    "flip, varargs": lambda x: x.flip(0, 1),
    "softmax, dtype by position": lambda x: x.softmax(-1, torch.float32).double(),
    "chunk by keyword": lambda x: x.chunk(dim=1, chunks=2)[1],
    "narrow by keyword": lambda x: x.narrow(dim=1, length=2, start=3),
    "movedim": lambda x: x.movedim(source=0, destination=1),
    "cat by keyword": lambda x: torch.cat(dim=1, tensors=[x, x]),
    "gather of fewer": lambda x: x.gather(1, _ids(x)),
    "norm": lambda x: x.norm(),
    "max of two": lambda x: torch.max(x, 1 - x),
    "extreme of all": lambda x: x.max(),
    "topk": lambda x: x.topk(2, 0).values,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "a vector": lambda x: x @ x[0],
    "normalize": lambda x: F.normalize(x, dim=1),
    "setitem": lambda x: _set(x * 1),
    "logsumexp of nothing": lambda x: (x * 0 - float("inf")).logsumexp(-1),
}


def _ids(x: Any) -> Any:
    i = torch.tensor([[0, 2, 5], [1, 1, 3]])
    return sl.shard(i, "...") if isinstance(x, sl.ShardedTensor) else i


def _set(x: Any) -> Any:
    x[1:3, 2] = 7.0
    return x


@pytest.mark.parametrize("layout", ["x y", ". x", "(x y) ."])
@pytest.mark.parametrize("name", FORMS)
def test_every_spelling_means_what_torch_means(name: str, layout: str) -> None:
    f = FORMS[name]
    dense = X.clone().requires_grad_()
    want = f(dense)
    with sl.simulate(x=2, y=1) if "(" in layout else sl.simulate(x=2, y=2), sl.implicit():
        ours = sl.shard(X, layout).requires_grad_()
        got = f(ours)
        assert torch.equal(sl.unshard(got).isinf(), want.isinf())
        if want.isinf().any():
            return
        close(sl.unshard(got).detach(), want.detach(), 1e-6 if "dtype" in name else 1e-12)
        want.sum().backward()
        got.sum().backward()
        close(sl.unshard(ours.grad), dense.grad, 1e-6 if "dtype" in name else 1e-12)


def test_a_signature_binds_every_form() -> None:
    var = binder(
        "var(input, dim: ints = None, *, correction: number = 1)\nvar(input, unbiased: bool)"
    )
    assert (
        var(0, (1,))
        == var(0, dim=(1,))
        == var(0, axis=(1,))
        == {"input": 0, "dim": (1,), "correction": 1}
    )
    assert var(0, False) == {"input": 0, "unbiased": False}
    flip = binder("flip(input, *dims: int)")
    assert flip(0, 1, 2) == flip(0, (1, 2)) == flip(0, dims=(1, 2)) == {"input": 0, "dims": (1, 2)}
    with pytest.raises(Unfit):
        var(0, 1, colour=2)


def test_sizes_may_be_tensors_of_one_element() -> None:
    """As torch takes them, and models of transformers give them: ``torch.div(size, 2)``."""
    two, six = torch.tensor(2), torch.tensor(6)
    x = torch.arange(24.0).reshape(4, 6)
    calls: list[Callable[[Any], Any]] = [
        lambda x: x.view(two, 2, six),
        lambda x: x.reshape((two, -1, six)),
        lambda x: x[None].expand(two, -1, -1),
        lambda x: x.sum_to_size(torch.tensor(1), six),
    ]
    for layout in (". .", "x .", ". y", "x y"):
        for call in calls:
            with sl.simulate(x=2, y=2):
                assert torch.equal(sl.unshard(call(sl.shard(x, layout))), call(x))
