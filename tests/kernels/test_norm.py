"""Norms by kernels: as torch's, wherever rows and columns lie."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from shardlib.kernels.active import Backend
from shardlib.kernels.norm import (
    norm_apply,
    norm_back,
    norm_back_sums,
    norm_columns,
    norm_settle,
    norm_stats,
    row_norm,
)
from tests.kernels.host import built, check_operator, needs_host
from tests.kernels.properties import COUNT, TYPES, norms
from tests.workers import Pool


@needs_host
def test_kernels_equal_fp64() -> None:
    assert built()
    for seed in range(COUNT):
        norms(seed)


@pytest.mark.parametrize("backend", ["auto", pytest.param("native", marks=needs_host)])
@pytest.mark.parametrize("centre", [True, False])
@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
def test_operators_are_torchs(backend: Backend, centre: bool, dtype: torch.dtype) -> None:
    assert backend == "auto" or built()
    torch.manual_seed(0)
    x = torch.randn(5, 33).to(dtype).requires_grad_()
    w, b = torch.randn(33).to(dtype).requires_grad_(), torch.randn(33).to(dtype).requires_grad_()
    shift = b if centre else None
    with sl.kernels.use(backend):
        check_operator(row_norm, (x, w, shift, 1e-5, centre), dtype == torch.float32 and centre)
        y, g = x.detach(), torch.randn(5, 33).to(dtype)
        check_operator(norm_stats, (y, centre))
        parts = norm_stats(y, centre)[None]
        check_operator(norm_settle, (parts, centre, 33, 1e-5))
        mean, scale = norm_settle(parts, centre, 33, 1e-5)
        v = w.detach()
        check_operator(norm_apply, (y, v, None, mean, scale))
        check_operator(norm_back_sums, (y, g, v, mean, scale))
        sums = norm_back_sums(y, g, v, mean, scale)
        check_operator(norm_back, (y, g, v, mean, scale, sums, 33))
        check_operator(norm_columns, (y, g, mean, scale))
        given = [x, w, *([b] if centre else [])]
        out = row_norm(x, w, shift, 1e-5, centre)[0]
        grads = torch.autograd.grad(out, given, g)
    wide = [t.detach().double().requires_grad_() for t in given]
    want = (
        F.layer_norm(wide[0], (33,), *wide[1:])
        if centre
        else F.rms_norm(*wide[:1], (33,), *wide[1:], 1e-5)
    )
    eps = max(2 * torch.finfo(dtype).eps, 4e-7)
    assert torch.allclose(out.double(), want, rtol=eps, atol=eps)
    for got, true in zip(grads, torch.autograd.grad(want, wide, g.double()), strict=True):
        assert torch.allclose(got.double(), true, rtol=eps, atol=4 * eps)


LAYOUTS = {  # layout of the tensor -> of what is normalised, and the shape
    ". y": ("y", (8, 32)),
    "x y": ("y", (8, 32)),
    "x (y z)": ("(y z)", (8, 32)),
    "(x z) .": (".", (8, 32)),
    ". . y": (". y", (4, 8, 16)),
    "x y z": ("y z", (4, 8, 16)),
}


def normed(op: str, layout: str, backend: Backend, dtype: torch.dtype, w_dtype: torch.dtype) -> Any:
    """Value, gradients and what moved, of a norm over the last dimensions (the last two of three)."""
    torch.manual_seed(2)
    of_w, shape = LAYOUTS[layout]
    tail = shape[1:]
    x, g = (torch.randn(shape).to(dtype) for _ in range(2))
    w = (1 + torch.randn(tail) / 4).to(w_dtype)
    b = torch.randn(tail).to(w_dtype)
    a, v, c = (sl.shard(t, at).requires_grad_() for t, at in ((x, layout), (w, of_w), (b, of_w)))
    factors = [v, c] if op == "layer_norm" else [v]
    with sl.kernels.use(backend), sl.trace() as moved:
        out = getattr(F, op)(a, tail, *factors, eps=1e-5)
        grads = torch.autograd.grad(out, [a, *factors], sl.shard(g, sl.layout_of(out)))
    dense = [t.double().requires_grad_() for t in (x, w, b)][: 1 + len(factors)]
    want = getattr(F, op)(dense[0], tail, *dense[1:], eps=1e-5)
    wants = torch.autograd.grad(want, dense, g.double())
    found = [sl.unshard(t.detach()) for t in (out, *grads)]
    return found, [want.detach(), *wants], moved.by_kind()


@needs_host
@pytest.mark.parametrize(
    "dtypes", [(t, t) for t in TYPES] + [(t, TYPES[0]) for t in TYPES[1:]], ids=str
)
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_split_rows_equal_dense(
    op: str, layout: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """And move what the eager formula moves."""
    assert built()
    with sl.simulate(x=2, y=2, z=2):
        got, want, moved = normed(op, layout, "native", *dtypes)
        eager, _, bytes_eager = normed(op, layout, "eager", *dtypes)
    assert moved == bytes_eager
    for a, b, c in zip(got, want, eager, strict=True):
        eps = max(torch.finfo(a.dtype).eps, 1e-6)
        assert a.dtype == c.dtype
        assert torch.allclose(a.double(), b, rtol=eps, atol=4 * eps)


@needs_host
def test_second_derivatives_equal_dense() -> None:
    assert built()
    x, v = torch.randn(4, 8), torch.randn(4, 8)

    def twice(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad(F.rms_norm(a, (8,)).pow(3).sum(), a, create_graph=True)
        return torch.autograd.grad((g * w).sum(), a)[0]

    want = twice(x.clone().requires_grad_(), v)
    with sl.simulate(y=2), sl.kernels.use("native"):
        got = twice(sl.shard(x, ". y").requires_grad_(), sl.shard(v, ". y"))
    assert torch.allclose(sl.unshard(got), want, rtol=1e-4, atol=1e-4)


def on_a_rank(op: str, layout: str) -> Any:
    built()
    return normed(op, layout, "native", torch.bfloat16, torch.float32)[0]


@needs_host
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_real_ranks_give_the_bits_of_simulated_ones(op: str, pool: Pool) -> None:
    with sl.simulate(x=2, y=2):
        want = on_a_rank(op, "x y")
    for got in pool.run(on_a_rank, op, "x y", x=2, y=2):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
