"""Kernels agree with each other and with dense attention, and keep one convention."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib import _compat
from shardlib.layouts import Ring
from shardlib.memory_tracker import Live
from shardlib.ops.attention import kernels
from shardlib.ops.attention.kernels import KERNELS, Block, merge, pick, unfit
from shardlib.ops.attention.masks import Full
from shardlib.testing import dense_attention as attention
from tests.ops.attention.test_op import gap, normal


def blocks(
    m: int = 5, n: int = 7, h: int = 4, g: int = 2, d: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    return normal(2, h, m, d, seed=1), normal(2, g, n, d, seed=2), normal(2, g, n, d, seed=3)


@pytest.mark.parametrize("name", ["math", "cpu"])
@pytest.mark.parametrize("bias", [None, (5, 7), (1, 1, 5, 7), (2, 4, 5, 7)])
def test_a_kernel_equals_dense(name: str, bias: tuple[int, ...] | None) -> None:
    q, k, v = (x.requires_grad_() for x in blocks())
    added = None if bias is None else normal(*bias, seed=4)
    want, want_lse = attention(q, k, v, Full(), added)
    c = normal(*want.shape, seed=5)
    grads = torch.autograd.grad((want * c).sum(), (q, k, v))
    block = Block(*(x.detach() for x in (q, k, v)), False, added, 8**-0.5)
    out, lse = KERNELS[name].forward(block)
    assert gap(out, want.detach()) < 1e-12 and gap(lse, want_lse.detach()) < 1e-12
    assert all(
        gap(a, b) < 1e-12
        for a, b in zip(KERNELS[name].backward(block, c, None, out, lse), grads, strict=False)
    )


@pytest.mark.parametrize("name", ["math", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_that_see_nothing_give_zero_and_minus_infinity(name: str, dtype: torch.dtype) -> None:
    """And a gradient of zero: never NaN."""
    q, k, v = (x.to(dtype) for x in blocks())
    bias = torch.zeros(5, 7, dtype=kernels.acc_dtype(dtype))
    bias[2] = -math.inf
    block = Block(q, k, v, False, bias, 0.3)
    out, lse = KERNELS[name].forward(block)
    assert (
        (out[:, :, 2] == 0).all()
        and (lse[:, :, 2] == -math.inf).all()
        and lse[:, :, 3].isfinite().all()
    )
    grads = KERNELS[name].backward(block, torch.ones_like(out).to(dtype), None, out.to(dtype), lse)
    assert all(x.isfinite().all() for x in grads[:3])
    assert (grads.q[:, :, 2] == 0).all() and (grads.q[:, :, 3] != 0).any()


def test_merging_in_any_order_is_the_softmax_over_all() -> None:
    q, k, v = blocks(n=12)
    want, want_lse = attention(q, k, v, Full())
    for cuts in ((0, 5, 12), (0, 1, 2, 12)):
        parts = [
            KERNELS["cpu"].forward(Block(q, k[:, :, a:b], v[:, :, a:b], False, None, 8**-0.5))
            for a, b in itertools.pairwise(cuts)
        ]
        for order in (parts, parts[::-1]):
            out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -math.inf, dtype=q.dtype)
            for part in order:
                merge(out, lse, *part)
            assert gap(out, want) < 1e-12 and gap(lse, want_lse) < 1e-12


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("biased", [False, True])
def test_cuda_s_kernels_are_called_as_this_torch_declares_them(name: str, biased: bool) -> None:
    """On the meta device: shapes and arguments alone, for machines without a GPU."""
    if biased and name == "flash":
        assert "no mask" in unfit(name, *_cuda(), biased=True, needs_math=False)
        return
    q, k = (torch.empty(2, n, 40, 32, dtype=torch.bfloat16, device="meta") for n in (4, 2))
    bias = torch.empty(40, 40, device="meta") if biased else None
    block = Block(q, k, k, False, bias, 0.1)
    out, lse = KERNELS[name].forward(block)
    grads = KERNELS[name].backward(block, out, None, out, lse)
    assert out.shape == q.shape and lse.shape == q.shape[:-1] and lse.dtype == torch.float32
    assert [x.shape for x in grads[:3]] == [q.shape, k.shape, k.shape]  # type: ignore[union-attr]


def _cuda() -> tuple[Any, Any]:
    class Fake:
        dtype, device, shape = torch.bfloat16, torch.device("cuda"), (2, 4, 40, 32)

    return Fake(), Fake()


def test_a_gpu_gets_flash_and_masks_get_the_efficient_kernel() -> None:
    assert pick(*_cuda(), biased=False, needs_math=False).name == "flash"
    assert pick(*_cuda(), biased=True, needs_math=False).name == "efficient"
    assert pick(*_cuda(), biased=True, needs_math=True).name == "math"


def test_on_paper_a_device_without_kernels_holds_all_scores() -> None:
    """The CPU's kernel stands for those of CUDA, which take no fp64."""
    block = torch.empty(1, 2, 512, 32, device="meta")
    peaks = {}
    for device, dtype, kernel in (
        ("cpu", torch.float64, "cpu"),
        ("cuda", torch.float32, "cpu"),
        ("cuda", torch.float64, "math"),
        ("xpu", torch.float32, "math"),
    ):
        x = block.to(dtype)
        assert pick(x, x, False, False, device).name == kernel, device
        with sl.record(x=2, device=device), Live(paper=True) as live:
            a = sl.shard(x, "...")
            F.scaled_dot_product_attention(a, a, a)
        peaks[device, dtype] = live.peak
    scores = 4 * 2 * 512 * 512
    assert peaks["cuda", torch.float32] < scores < peaks["xpu", torch.float32]
    assert peaks["cpu", torch.float64] < 2 * scores < peaks["cuda", torch.float64]


def test_an_op_that_changed_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments are compared when it is looked up; the math
    block runs instead, with the same result.
    """
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert _compat.attention_op(name) is not None
    monkeypatch.setitem(_compat._ATTENTION, name, "query key value other")
    assert _compat.attention_op(name) is None and _compat.attention_op("_no_such_op") is None
    q, k, v = blocks(8, 8)
    with sl.simulate(s=2):
        xs = [sl.shard(x, Ring("s", 2)) for x in (q, k, v)]
        usual = sl.unshard(sl.ring_attention(*xs))
        monkeypatch.setitem(kernels._PRESENT, "cpu", False)
        assert pick(q, v, False, False).name == "math"
        assert gap(sl.unshard(sl.ring_attention(*xs)), usual) < 1e-12


def test_empty_shards_reach_no_kernel() -> None:
    """The CPU kernel would end the process."""
    q = normal(1, 2, 1, 8, seed=1)
    with sl.simulate(s=4):
        x = sl.shard(q, Ring("s", 2), pad=True).requires_grad_()
        out = sl.ring_attention(x, x, x, mask=sl.masks.Causal())
        out.sum().backward()
        assert gap(sl.unshard(out), q) < 1e-12 and sl.unshard(x.grad).isfinite().all()
