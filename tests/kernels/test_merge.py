"""Attention's parts merged, and its gradients summed, by kernels."""

from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.kernels.active import Backend
from shardlib.kernels.merge import accumulate_, merge_, mergeable
from tests.kernels.host import built, check_operator, needs_host
from tests.kernels.properties import COUNT, TYPES, merges, sums
from tests.workers import Pool

INF = float("inf")


@needs_host
def test_kernels_equal_fp64() -> None:
    assert built()
    for seed in range(COUNT):
        merges(seed)
        sums(seed)


@pytest.mark.parametrize("backend", ["auto", pytest.param("native", marks=needs_host)])
@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
def test_operators_are_torchs(backend: Backend, dtype: torch.dtype) -> None:
    assert backend == "auto" or built()
    torch.manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out, part = torch.randn(2, 3, 8, 4, dtype=wide), torch.randn(2, 3, 5, 4).to(dtype)
    lse, new = torch.randn(2, 3, 8, dtype=wide), torch.randn(2, 3, 5, dtype=wide)
    runs = torch.tensor([[0, 6, 2], [2, 1, 3]])
    with sl.kernels.use(backend):
        check_operator(merge_, (out, lse, part, new, runs), dtype == torch.float32)
        check_operator(merge_, (out[:, :, :5], lse[:, :, :5], part, new, None))
        check_operator(accumulate_, (out[:, :, 2:7], part))


@needs_host
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_runs_go_where_they_say(dtype: torch.dtype) -> None:
    """As the eager formula, rows that saw nothing included, which may hold anything."""
    assert built()
    torch.manual_seed(0)
    out, part = torch.randn(2, 3, 8, 4), torch.randn(2, 3, 5, 4).to(dtype)
    lse, new = torch.randn(2, 3, 8), torch.randn(2, 3, 5)
    lse[0, 1, 6], new[0, 1, 0], new[1, 2, 4] = -INF, -INF, -INF
    part[1, 2, 4], out[0, 1, 6] = float("nan"), float("nan")
    runs = torch.tensor([[0, 6, 2], [2, 1, 3]])
    got = {}
    for backend in ("native", "eager"):
        a, b = out.clone(), lse.clone()
        with sl.kernels.use(backend):
            merge_(a, b, part, new, runs)
        got[backend] = a, b
    for one, two in zip(*got.values(), strict=True):
        assert torch.allclose(one, two, atol=1e-6)
    assert (got["native"][0][0, 1, 6] == 0).all() and got["native"][1][0, 1, 6] == -INF
    assert torch.equal(got["native"][0][:, :, [0, 4, 5]], out[:, :, [0, 4, 5]])


@needs_host
def test_what_the_kernel_does_not_take_is_eager() -> None:
    assert built()
    out, lse = torch.zeros(2, 3, 8, 4), torch.zeros(2, 3, 8)
    with sl.kernels.use("native"):
        assert mergeable(out, lse, out, lse) and mergeable(out[:, :, 2:5], lse[:, :, 2:5], out, lse)
        assert not mergeable(out.double(), lse.double(), out, lse)
        assert not mergeable(out, lse.half(), out, lse)
        assert not mergeable(out.mT, lse, out, lse)
        assert not mergeable(out.half(), lse, out, lse)


def attended(backend: Backend, algorithm: str, dtype: torch.dtype, masked: bool) -> Any:
    """Value and gradients of a ring attention, packed documents or causal."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, h, 24, 8).to(dtype) for h in (4, 2, 2))
    g = torch.randn(2, 4, 24, 8).to(dtype)
    mask: Any = sl.masks.Causal()
    if masked:
        mask = mask & sl.masks.Documents(torch.tensor([0] * 7 + [1] * 9 + [2] * 8))
    layout = sl.Ring("s", 2, "zigzag")
    given = [sl.shard(t, layout).requires_grad_() for t in (q, k, v)]
    with sl.kernels.use(backend):
        out = sl.ring_attention(*given, mask=mask, algorithm=algorithm)
        grads = torch.autograd.grad(out, given, sl.shard(g, layout))
    return [sl.unshard(t.detach()) for t in (out, *grads)]


@needs_host
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("algorithm", ["ring", "pass_q", "allgather"])
def test_attention_equals_the_eager_merge(algorithm: str, dtype: torch.dtype, masked: bool) -> None:
    assert built()
    with sl.simulate(s=3):
        got = attended("native", algorithm, dtype, masked)
        want = attended("eager", algorithm, dtype, masked)
    for a, b in zip(got, want, strict=True):
        eps = torch.finfo(dtype).eps
        assert torch.allclose(a.float(), b.float(), rtol=4 * eps, atol=4e-6 + eps)


@needs_host
def test_attention_calls_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert built()
    from shardlib.kernels import merge

    named = []
    real = merge.call
    monkeypatch.setattr(merge, "call", lambda name, *a: (named.append(name), real(name, *a)))
    with sl.simulate(s=3):
        attended("native", "ring", torch.bfloat16, False)
    assert {"merge", "add"} <= set(named)


def on_a_rank(dtype: torch.dtype) -> Any:
    built()
    return attended("native", "ring", dtype, True)


@needs_host
def test_real_ranks_give_the_bits_of_simulated_ones(pool: Pool) -> None:
    with sl.simulate(s=4):
        want = on_a_rank(torch.bfloat16)
    for got in pool.run(on_a_rank, torch.bfloat16, s=4):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
