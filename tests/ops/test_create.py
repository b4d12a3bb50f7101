"""New tensors made from a sharded one: of any shape, and filled as torch fills them."""

from typing import Any

import pytest
import torch

import shardlib as sl


@pytest.mark.parametrize(
    ("shape", "lies"),
    [
        ((4, 6, 3), "data x ."),
        ((4, 5, 8), "data . ."),
        ((3, 6, 8), ". x ."),
        ((4, 6), ". ."),
        ((1, 1, 1), ". . ."),
    ],
)
def test_new_empty_lies_as_the_tensor_where_the_sizes_are_its_own(
    shape: tuple[int, ...], lies: str
) -> None:
    with sl.simulate(data=2, x=2):
        x = sl.shard(torch.zeros(4, 6, 8), "data x .")
        for y in (
            x.new_empty(shape),
            x.new_empty(*shape),
            x.new_empty(size=shape, dtype=torch.float64),
        ):
            assert y.shape == torch.Size(shape) and str(sl.layout_of(y)) == lies
        assert y.dtype == torch.float64 and sl.unshard(y).shape == torch.Size(shape)


def test_what_is_written_to_new_empty_moves_nothing() -> None:
    """Keys in two parts, as latent attention joins them."""
    torch.manual_seed(0)
    a, b = torch.randn(4, 6, 3), torch.randn(4, 1, 2)
    c = torch.randn(4, 6, 5)

    def joined(a: Any, b: Any) -> Any:
        out = a.new_empty(*a.shape[:-1], 5)
        out[..., :3].copy_(a)
        out[..., 3:].copy_(b.expand(-1, 6, -1))
        return out

    wanted = [t.clone().requires_grad_() for t in (a, b)]
    (joined(*wanted) * c).sum().backward()
    with sl.simulate(data=2, x=2):
        mine = [sl.shard(a, "data x .").requires_grad_(), sl.shard(b, "data . .").requires_grad_()]
        with sl.expect_comm():
            out = joined(*mine)
        assert torch.equal(sl.unshard(out), joined(a, b))
        (out * sl.shard(c, "data x .")).sum().backward()
        for x, want in zip(mine, wanted, strict=True):
            assert torch.allclose(sl.unshard(x.grad), want.grad)
