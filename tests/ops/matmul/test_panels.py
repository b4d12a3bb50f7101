"""What the schedules share: panels cut for the links, and products added in fp32."""

import pytest
import torch

import shardlib as sl
from tests.ops.matmul.test_matmul2d import relative


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_fp32_across_panels(dtype: torch.dtype) -> None:
    """One large panel product then many small ones: in half
    precision the small ones would be lost.
    """
    k = 16
    x = torch.ones(4, k, dtype=dtype)
    w = torch.full((k, 4), 0.25, dtype=dtype)
    w[: k // 4] = 64.0
    exact = x.double() @ w.double()
    with sl.simulate(x=4, y=4):
        for rule in ("summa", "cannon"):
            with sl.algorithm(matmul=rule):
                got = sl.unshard(sl.shard(x, "x y") @ sl.shard(w, "x y"))
            assert torch.equal(got, exact.to(dtype)), rule


@pytest.mark.parametrize("rule", ["summa_y", "summa_x", "summa_w"])
@pytest.mark.parametrize("w_text", ["x y", "y x"])
@pytest.mark.parametrize("alpha", [1e-9, 1e-3])
def test_measured_links_cut_panels_into_slices(rule: str, w_text: str, alpha: float) -> None:
    """Where messages are cheap, more of them: the same words, values and gradients."""
    x, w, g = (torch.randn(512, 512, dtype=torch.float64) for _ in range(3))
    x.requires_grad_(), w.requires_grad_()
    (x @ w).backward(g)
    with sl.simulate(x=2, y=2) as mesh, sl.algorithm(matmul=rule):
        a, b = (
            sl.shard(x.detach(), "x y").requires_grad_(),
            sl.shard(w.detach(), w_text).requires_grad_(),
        )
        before = dict(sl.why("matmul", a, b).verdicts)[rule]
        mesh.links.update(x=sl.planning.Link(alpha, 1e-9), y=sl.planning.Link(alpha, 1e-9))
        price = dict(sl.why("matmul", a, b).verdicts)[rule]
        assert isinstance(before, sl.extend.Match) and isinstance(price, sl.extend.Match)
        panels = 2 if alpha < 1e-6 else 1  # 512 / 2 panels / 128
        assert price.cost.bytes == before.cost.bytes and (
            price.cost.messages > before.cost.messages
        ) == (panels > 1)
        with sl.trace() as t:
            c = a @ b
            c.backward(sl.shard(g, c.sharding))
        assert (t.bytes, t.messages) == (price.cost.bytes, price.cost.messages)
        pairs = ((sl.unshard(c), x @ w), (sl.unshard(a.grad), x.grad), (sl.unshard(b.grad), w.grad))
        assert all(relative(mine.detach(), dense.detach()) < 1e-12 for mine, dense in pairs)
