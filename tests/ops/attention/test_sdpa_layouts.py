"""Layouts of queries, keys and values that name one mesh axis for several dimensions."""

import pytest
import torch
import torch.nn.functional as F

import shardlib as sl


@pytest.mark.parametrize(
    "layouts", [("y . .", ". y .", ". . y"), ("y . .", ". . y", "x y ."), ("y x .", "x . y", ". y x")]
)
def test_an_axis_that_is_taken_is_refused_or_gathered(layouts: tuple[str, str, str]) -> None:
    torch.manual_seed(0)
    dense = [torch.randn(4, 4, 6, dtype=torch.float64).requires_grad_() for _ in range(3)]
    want = F.scaled_dot_product_attention(*dense)
    want.square().sum().backward()
    with sl.simulate(x=2, y=2):
        ours = [sl.shard(t.detach(), s).requires_grad_() for t, s in zip(dense, layouts, strict=True)]
        with pytest.raises(sl.errors.ImplicitCommunication):
            F.scaled_dot_product_attention(*ours)
        with sl.implicit():
            got = F.scaled_dot_product_attention(*ours)
            got.square().sum().backward()
        torch.testing.assert_close(sl.unshard(got), want)
        for a, b in zip(dense, ours, strict=True):
            assert a.grad is not None and b.grad is not None
            torch.testing.assert_close(sl.unshard(b.grad), a.grad)
