"""AdamW in one pass by the kernel: as torch's, with the master, the half and the scale in passing."""

import pytest
import torch

import shardlib as sl
from shardlib.kernels.active import Backend
from shardlib.kernels.adamw import adamw_, adamw_halves_
from tests.kernels import properties
from tests.kernels.host import built, check_operator, needs_host
from tests.kernels.properties import COUNT, TYPES


@needs_host
def test_kernels_equal_fp64() -> None:
    assert built()
    for seed in range(COUNT):
        properties.adamw(seed)
        if seed < 8:
            properties.halves(seed)


HOW = 1e-2, 0.9, 0.999, 1e-8, 0.1


@pytest.mark.parametrize("backend", ["auto", pytest.param("native", marks=needs_host)])
@pytest.mark.parametrize("dtype", TYPES)
def test_operators_are_torchs(backend: Backend, dtype: torch.dtype) -> None:
    assert backend == "auto" or built()
    torch.manual_seed(0)
    g, p, m, v = (torch.rand(37) for _ in range(4))
    g, scale = g.to(dtype), torch.tensor([2.0])
    out = torch.zeros(37, dtype=dtype if dtype != torch.float32 else torch.bfloat16)
    half, low = sl.optim.zero, None
    from shardlib.optim.zero import halves

    half, low = halves(p)
    with sl.kernels.use(backend):
        check_operator(adamw_, (g, p, m, v, out, scale, *HOW, 3), dtype == torch.float32)
        if dtype != torch.float16:
            check_operator(adamw_halves_, (g, half, low, m, v, None, *HOW, 3))


@needs_host
@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_ten_steps_are_torchs(b2: float) -> None:
    assert built()
    torch.manual_seed(0)
    p = torch.randn(4097)
    q = p.clone().requires_grad_()
    optimizer = torch.optim.AdamW([q], lr=1e-2, betas=(0.9, b2), weight_decay=0.1, foreach=False)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    out = torch.zeros(4097, dtype=torch.bfloat16)
    with sl.kernels.use("native"):
        for t in range(1, 11):
            q.grad = torch.randn(4097)
            optimizer.step()
            adamw_(q.grad * 3, p, m, v, out, torch.tensor([3.0]), 1e-2, 0.9, b2, 1e-8, 0.1, t)
    assert (p - q.detach()).abs().max() < 1e-6 and torch.equal(out, p.bfloat16())


@needs_host
def test_a_master_in_halves_is_a_master() -> None:
    """The same fp32 numbers after every step, bit for bit."""
    assert built()
    from shardlib.optim.zero import halves, joined

    torch.manual_seed(0)
    p = torch.randn(1003)
    high, low = halves(p)
    m, v, m2, v2 = (torch.zeros(1003) for _ in range(4))
    with sl.kernels.use("native"):
        for t in range(1, 6):
            g = torch.randn(1003).bfloat16()
            adamw_(g, p, m, v, None, None, *HOW, t)
            adamw_halves_(g, high, low, m2, v2, None, *HOW, t)
            assert torch.equal(joined(high, low), p) and torch.equal(m, m2) and torch.equal(v, v2)


@needs_host
def test_a_step_does_not_depend_on_where_a_shard_is_cut() -> None:
    assert built()
    torch.manual_seed(0)
    whole = [torch.rand(1000) for _ in range(4)]
    parts = [t.clone() for t in whole]
    with sl.kernels.use("native"):
        adamw_(*whole, None, None, *HOW, 2)
        for a, b in ((0, 3), (3, 500), (500, 501), (501, 1000)):
            adamw_(*(t[a:b] for t in parts), None, None, *HOW, 2)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
