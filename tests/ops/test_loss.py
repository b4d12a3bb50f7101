"""Losses: every row's where the row lies, then the sum or the mean."""

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl
from tests.ops.cases import LOSS, close, r, run_on_meshes

X, TARGET = r(4, 6), torch.tensor([0, 2, 5, 1])


def test_pending_targets_are_not_read_as_if_they_were_whole() -> None:
    with sl.simulate(x=2, y=2):
        x, target = sl.shard(X, ". ."), sl.reshard(sl.shard(TARGET, "."), ". + sum(x)")
        with pytest.raises(sl.errors.PartialEscape):
            F.cross_entropy(x, target)
        with sl.implicit():
            assert torch.allclose(
                sl.unshard(F.cross_entropy(x, target)), F.cross_entropy(X, TARGET)
            )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_of_whole_numbers_and_half_precision_has_the_dtype_of_torchs(reduction: str) -> None:
    """The exponential of an integer is fp32, and so is a loss that is made of it."""
    n, h = torch.tensor([2, 5], dtype=torch.int32), torch.tensor([0.5, -1.5], dtype=torch.float16)
    calls = [(F.poisson_nll_loss, (n, h)), (F.l1_loss, (n, h)), (F.soft_margin_loss, (h, n))]
    with sl.simulate(x=2):
        for loss, operands in calls:
            got = loss(*[sl.shard(t, "x") for t in operands], reduction=reduction)
            want = loss(*operands, reduction=reduction)
            assert got.dtype == want.dtype
            assert torch.allclose(sl.unshard(got), want, rtol=1e-3)


def test_loss_of_large_logits_is_finite() -> None:
    logits, target = torch.tensor([[1e4, 0.0, -1e4, 5.0]] * 2), torch.tensor([0, 2])
    with sl.simulate(x=2, y=2):
        got = F.cross_entropy(sl.shard(logits, "x y"), sl.shard(target, "x"))
    close(sl.unshard(got), F.cross_entropy(logits, target), 1e-6)


@pytest.mark.parametrize("name", LOSS)
def test_losses_equal_dense(name: str) -> None:
    run_on_meshes(name)
