"""Columns move nothing forward, rows one sum; backward is the other way round."""

import pytest
import torch

import shardlib as sl


@pytest.mark.parametrize(
    ("w", "forward", "backward", "out"),
    [
        (". x", 0, 6 * 8 * 4, ". x"),  # columns: dX is summed
        ("x .", 6 * 4 * 4, 0, ". ."),  # rows: Y is summed
        (". .", 0, 0, ". ."),
    ],
)
def test_columns_and_rows_move_what_megatron_says(
    w: str, forward: int, backward: int, out: str
) -> None:
    """A ring all-reduce over p moves 2 (p - 1) / p of a block; p is 2 here."""
    a, b, g = (torch.randn(*s) for s in ((6, 8), (8, 4), (6, 4)))
    with sl.simulate(x=2), sl.algorithm(matmul="oned"):
        x = sl.shard(a, ". x" if w == "x ." else ". .").requires_grad_()
        v = sl.shard(b, w).requires_grad_()
        with sl.trace() as there:
            y = x @ v
        with sl.trace() as back:
            dx, dw = torch.autograd.grad(y, [x, v], sl.shard(g, y.sharding))
    assert y.sharding == sl.Layout.parse(out) and (there.bytes, back.bytes) == (forward, backward)
    assert torch.allclose(sl.unshard(y), a @ b, atol=1e-5)
    assert torch.allclose(sl.unshard(dx), g @ b.T, atol=1e-5)
    assert torch.allclose(sl.unshard(dw), a.T @ g, atol=1e-5)


def test_a_contraction_split_otherwise_in_both_is_not_its_business() -> None:
    with sl.simulate(x=2):
        x, w = sl.shard(torch.zeros(4, 4), ". x"), sl.shard(torch.zeros(4, 4), ". .")
        verdict = dict(sl.why("matmul", x, w).verdicts)["oned"]
    assert isinstance(verdict, str) and "contraction split x in x and . in w" in verdict
