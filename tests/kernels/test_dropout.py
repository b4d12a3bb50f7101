"""Dropout by the kernel: bit for bit the eager draw, and no mask is kept."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib.kernels.active import Backend
from shardlib.kernels.dropout import dropout
from tests.kernels import properties
from tests.kernels.host import built, check_operator, needs_host
from tests.kernels.properties import COUNT, TYPES
from tests.workers import Pool


@needs_host
def test_kernels_draw_the_eager_bits() -> None:
    assert built()
    for seed in range(COUNT):
        properties.dropout(seed)


@pytest.mark.parametrize("backend", ["auto", pytest.param("native", marks=needs_host)])
@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
def test_operators_are_torchs(backend: Backend, dtype: torch.dtype) -> None:
    assert backend == "auto" or built()
    x = torch.randn(4, 5).to(dtype).requires_grad_()
    where = [20, 3], [10, 0], [None, torch.tensor([0, 2, 4, 1, 3])]
    with sl.kernels.use(backend):
        check_operator(dropout, (x, *where, 7, 0.3), dtype == torch.float32)
        y = dropout(x, *where, 7, 0.3)
        (g,) = torch.autograd.grad(y, x, torch.ones_like(y))
    kept = y != 0
    assert torch.equal(g, kept * torch.tensor(1 / 0.7, dtype=dtype)) and 0 < kept.sum() < 20


LAYOUTS = ["x . y", ". . .", "(x y) . .", ". y x", "x zigzag(y) .", ". striped(x) ."]


def dropped(layout: str, p: float, dtype: torch.dtype, backend: Backend, pad: bool = False) -> Any:
    torch.manual_seed(5)
    x = torch.randn(4, 7 if pad else 8, 18).to(dtype)
    sl.random.seed(9)
    with sl.kernels.use(backend):
        a = sl.shard(x, layout, pad=pad).requires_grad_()
        y = F.dropout(a, p)
        (g,) = torch.autograd.grad(y, a, sl.shard(torch.ones_like(x), layout, pad=pad))
    sl.random.seed(None)
    return sl.unshard(y.detach()), sl.unshard(g)


@needs_host
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_draw_has_the_eager_bits_under_every_layout(
    layout: str, p: float, dtype: torch.dtype
) -> None:
    assert built()
    with sl.simulate(x=1, y=1):
        want = dropped(". . .", p, dtype, "eager")
    with sl.simulate(x=2, y=2):
        got = dropped(layout, p, dtype, "native")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@needs_host
def test_padding_counts_no_position() -> None:
    assert built()
    with sl.simulate(x=2, y=2):
        want, got = (dropped("x y .", 0.5, torch.float32, b, pad=True) for b in ("eager", "native"))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@needs_host
def test_second_derivatives_are_zero_and_the_first_are_kept() -> None:
    assert built()
    with sl.simulate(x=2), sl.kernels.use("native"):
        a = sl.shard(torch.randn(4, 6), "x .").requires_grad_()
        (g,) = torch.autograd.grad(F.dropout(a, 0.5).pow(3).sum(), a, create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), a)
    assert torch.allclose(
        sl.unshard(h), 2 * sl.unshard(g.detach()) / sl.unshard(a.detach()), atol=1e-4
    )


def on_a_rank() -> Any:
    built()
    return dropped("x y .", 0.5, torch.bfloat16, "native")


@needs_host
def test_real_ranks_give_the_bits_of_simulated_ones(pool: Pool) -> None:
    with sl.simulate(x=2, y=2):
        want = on_a_rank()
    for got in pool.run(on_a_rank, x=2, y=2):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
