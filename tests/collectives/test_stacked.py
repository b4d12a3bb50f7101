"""A torch function on Stacked is that function once per rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib.collectives import Stacked, unwrap, wrap

RANKS = 3


def r(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(RANKS, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def i(top: int, *shape: int) -> Tensor:
    return torch.randint(top, (RANKS, *shape), generator=torch.Generator().manual_seed(5))


def addmm(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    out = c.clone()
    return out.addmm_(a, b)


CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "matmul": (lambda a, b: a @ b, [r(4, 5), r(5, 2)]),
    "matmul rows": (lambda a, b: a @ b, [r(2, 4, 5), r(5, 2)]),
    "matmul batched": (torch.matmul, [r(2, 4, 5), r(2, 5, 3)]),
    "matvec": (torch.matmul, [r(4, 5), r(5)]),
    "linear": (F.linear, [r(2, 4, 5), r(3, 5), r(3)]),
    "addmm_": (addmm, [r(4, 3), r(4, 5), r(5, 3)]),
    "broadcast": (lambda a, b: a * b + 1, [r(2, 4, 5), r(5)]),
    "plain": (lambda a: a + torch.arange(5.0), [r(4, 5)]),
    "where": (lambda a, b: torch.where(a > b, a, 2 * b), [r(4, 5), r(4, 5, seed=1)]),
    "gather": (lambda a, b: a.gather(1, b), [r(4, 5), i(5, 4, 2)]),
    "gather last": (lambda a, b: a.gather(-1, b.unsqueeze(-1)), [r(4, 5), i(5, 4)]),
    "scatter_add": (lambda a, b, c: torch.scatter_add(a, 1, b, c), [r(4, 5), i(5, 4, 2), r(4, 2)]),
    "index_select": (lambda a, b: a.index_select(0, b), [r(4, 5), i(4, 3)]),
    "index_add": (lambda a, b, c: torch.index_add(a, 0, b, c), [r(4, 5), i(4, 3), r(3, 5)]),
    "embedding": (lambda b, a: F.embedding(b, a), [i(4, 2, 3), r(4, 5)]),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [r(2, 2, 4, 3, seed=s) for s in range(3)]),
    "gelu": (F.gelu, [r(4, 5)]),
    "softmax": (lambda a: F.softmax(a, dim=0), [r(4, 5)]),
    "layer_norm": (lambda a, w: F.layer_norm(a, (5,), w), [r(4, 5), r(5)]),
    "masked_fill": (lambda a: a.masked_fill(a > 0, 3.0), [r(4, 5)]),
    "cumsum": (lambda a: a.cumsum(0), [r(4, 5)]),
    "topk": (lambda a: a.topk(2, dim=0)[0], [r(4, 5)]),
    "sort": (lambda a: a.sort(0)[0], [r(4, 5)]),
    "index none": (lambda a: a[:, None, 1:], [r(4, 5)]),
    "index int": (lambda a: a[1, ..., 2], [r(4, 5, 3)]),
    "index tensor": (lambda a, b: a[b], [r(4, 5), i(4, 3)]),
    "chunk": (lambda a: a.chunk(2, 0)[1], [r(4, 5)]),
    "split": (lambda a: a.split([2, 3], dim=1)[1], [r(4, 5)]),
    "narrow": (lambda a: a.narrow(1, 2, 3), [r(4, 5)]),
    "cat": (lambda a, b: torch.cat([a, b], 1), [r(4, 5), r(4, 2)]),
    "stack": (lambda a, b: torch.stack([a, b], 1), [r(4, 5), r(4, 5, seed=2)]),
    "sum": (lambda a: a.sum(0, keepdim=True) + a.sum(), [r(4, 5)]),
    "amax": (lambda a: a.amax((0, 1)), [r(4, 5)]),
    "prod": (lambda a: a.prod(0), [r(4, 5)]),
    "permute": (lambda a: a.permute(2, 0, 1), [r(4, 5, 3)]),
    "transpose": (lambda a: a.transpose(0, -1).T, [r(4, 5)]),
    "reshape": (lambda a: a.reshape(2, -1, 5).flatten(1), [r(4, 5)]),
    "view": (lambda a: a.view(20), [r(4, 5)]),
    "squeeze": (lambda a: a.unsqueeze(1).squeeze(1).unsqueeze(-1), [r(4, 5)]),
    "expand": (lambda a: a.unsqueeze(0).expand(3, 4, 5), [r(4, 5)]),
    "unbind": (lambda a: a.unbind(1)[2], [r(4, 5)]),
    "diagonal": (lambda a: a.diagonal(), [r(4, 5)]),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ki", a, b), [r(4, 5), r(5, 2)]),
    "norm": (lambda a: torch.linalg.vector_norm(a, dim=1), [r(4, 5)]),
    "cast": (lambda a: a.float().to(torch.float64), [r(4, 5)]),
    "new_zeros": (lambda a: a.new_zeros(2, 3) + a[:2, :3], [r(4, 5)]),
    "one_hot": (lambda b: F.one_hot(b, 4) * 1.0, [i(4, 3)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_functions_run_once_per_rank(name: str) -> None:
    f, tensors = CASES[name]
    want = torch.stack([f(*[t[k] for t in tensors]) for k in range(RANKS)])
    with sl.simulate(x=RANKS) as m:
        got = f(*[wrap(t, m) for t in tensors])
    assert isinstance(got, Stacked) and got.shape == want.shape[1:]
    torch.testing.assert_close(unwrap(got), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [n for n, (_, ts) in CASES.items() if ts[0].is_floating_point()])
def test_gradients_run_once_per_rank(name: str) -> None:
    f, tensors = CASES[name]
    a, b = tensors[0].clone().requires_grad_(), tensors[0].clone().requires_grad_()
    with sl.simulate(x=RANKS) as m:
        unwrap(f(wrap(a, m), *[wrap(t, m) for t in tensors[1:]])).sum().backward()
    torch.stack([f(b[k], *[t[k] for t in tensors[1:]]) for k in range(RANKS)]).sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


def test_equal_ranks_print_as_one_block_and_have_a_value() -> None:
    with sl.simulate(x=2) as m:
        same, other = wrap(torch.ones(2), m), wrap(torch.tensor([1.0, 2.0]), m)
        assert repr(wrap(torch.ones(2, 1), m)) == "tensor([1.])"
        assert same.item() == 1.0
        assert repr(other) == "x=0: tensor(1.)\nx=1: tensor(2.)"
        with pytest.raises(sl.ShardError, match="one side of a branch"):
            bool(other > 1)
