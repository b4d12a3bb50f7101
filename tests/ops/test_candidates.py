"""Along a split dimension only each block's best travel; ties, NaN and gradients as dense."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardlib as sl
from tests.ops.cases import close, r
from tests.workers import Pool

TIED = torch.tensor(
    [[1.0, 3, 3, 2, 3, 0, 1, 1], [5, 4, 3, 2, 1, 0, 5, 5], [2, 2, 2, 2, 2, 2, 2, 2]]
).double()
NAN = torch.where(r(3, 8) > 1, float("nan"), r(3, 8))


def derived() -> bool:
    """Whether torch differentiates aminmax; 2.11 does not."""
    x = torch.ones(1, requires_grad=True)
    try:
        torch.aminmax(x, dim=0).min.sum().backward()
    except RuntimeError:
        return False
    return True


def aminmax(x: Any) -> Any:
    if type(x) is torch.Tensor and not derived():
        return x.amin(1), x.amax(1)
    return tuple(torch.aminmax(x, dim=1))


# function, numbers that travel per row and rank
CASES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "max": (lambda x: tuple(x.max(1)), 2),
    "min, kept": (lambda x: tuple(torch.min(x, dim=-1, keepdim=True)), 2),
    "argmax": (lambda x: x.argmax(1), 2),
    "argmin, kept": (lambda x: x.argmin(1, True), 2),
    "argmax of all": (lambda x: x.argmax(), 2),
    "argmin of all, kept": (lambda x: x.argmin(keepdim=True), 2),
    "amax": (lambda x: x.amax(1), 1),
    "aminmax": (aminmax, 2),
    "norm of infinity": (lambda x: torch.linalg.vector_norm(x, float("inf"), 1), 1),
    "max of all": (lambda x: x.max(), 1),
    "prod": (lambda x: x.prod(1), 1),
}


def check(name: str, dense: torch.Tensor, layout: str) -> Any:
    """Values, dtypes and gradients as dense, nothing gathered; the bytes counted forward."""
    f, _ = CASES[name]
    x = dense.clone().requires_grad_()
    want = f(x)
    ours = sl.shard(dense, layout).requires_grad_()
    with sl.trace() as t:
        got = f(ours)
    for a, b in zip(*((v if isinstance(v, tuple) else (v,)) for v in (got, want)), strict=True):
        assert a.dtype == b.dtype and torch.equal(sl.unshard(a).isnan(), b.isnan())
        close(sl.unshard(a).detach().nan_to_num(), b.detach().nan_to_num())
        if b.requires_grad:
            b.sum().backward(retain_graph=True)
            a.sum().backward(retain_graph=True)
    if x.grad is not None:
        grad = sl.unshard(ours.grad)
        assert torch.equal(grad.isnan(), x.grad.isnan())
        close(grad.nan_to_num(), x.grad.nan_to_num())
    return t.bytes


@pytest.mark.parametrize("layout", [". x", "y x", ". (x y)", ". zigzag(x)", ". striped(x)"])
@pytest.mark.parametrize("name", CASES)
def test_extremes_and_their_places_equal_dense(name: str, layout: str) -> None:
    with sl.simulate(x=2, y=1 if layout == "y x" else 2):
        for dense in (TIED, NAN, r(3, 8)):
            check(name, dense, layout)


@pytest.mark.parametrize("name", CASES)
def test_only_the_best_of_each_block_travel(name: str) -> None:
    many = CASES[name][1]
    rows = 1 if "of all" in name else 3
    with sl.simulate(x=4):
        moved = check(name, r(3, 8), ". x")
    # a pmax, and a psum: how many share the gradient
    if name in ("amax", "aminmax", "norm of infinity", "max of all"):
        assert moved == 2 * many * rows * 8 * 2 * 3 // 4
    else:
        assert moved == many * rows * 8 * 3


@pytest.mark.parametrize("k", [1, 2, 3])
def test_topk_and_kthvalue_exchange_k_of_each_block(k: int) -> None:
    dense = r(3, 16)
    for name, f in {
        "topk": lambda x: tuple(x.topk(k, 1)),
        "least": lambda x: tuple(torch.topk(x, k, largest=False)),
        "kthvalue": lambda x: tuple(x.kthvalue(k, 1)),
    }.items():
        CASES[name] = (f, 2 * k)
        with sl.simulate(x=4):
            assert check(name, dense, ". x") == 2 * k * 3 * 8 * 3, name
        del CASES[name]


def on_ranks() -> list[Any]:
    return [check(name, dense, ". (x y)") for name in CASES for dense in (TIED, NAN)]


def test_real_ranks_agree(pool: Pool) -> None:
    with sl.simulate(x=2, y=2):
        want = on_ranks()
    assert pool.run(on_ranks, x=2, y=2) == [want] * 4
