"""What shares memory in torch shares it here, or a write to it is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardlib as sl
from tests.ops.cases import r

X = r(4, 6)


def test_a_write_that_torch_would_show_elsewhere_is_refused() -> None:
    a = torch.randn(4, 6)
    with sl.simulate(x=2, y=2), sl.implicit():
        x = sl.shard(a, "x y")
        row = x[1]  # gathered for it: a copy, where torch has a view
        for refused in (row, row.view(2, 3), x):
            with pytest.raises(sl.ShardError, match="share memory"):
                refused.mul_(2)
        assert torch.equal(sl.unshard(x), a)
        del row, refused
        assert torch.equal(sl.unshard(x.mul_(2)), a * 2)


def test_a_transposed_view_of_one_row_blocks_is_copied_where_the_whole_would_be() -> None:
    x = r(6, 6)
    for layout in (". x", "x ."):
        with sl.simulate(x=6):
            y = sl.shard(x, layout) * 1
            y.T.flatten().zero_()
            assert torch.equal(sl.unshard(y), x)


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 1}], ids=str)
def test_results_may_be_written_to(mesh: dict[str, int]) -> None:
    index = torch.tensor([3, 0])
    forms: list[Callable[[Any, Any], Any]] = [
        lambda x, i: x.index_select(0, i),
        lambda x, i: x[:, :0].sum(0),
        lambda x, i: x[i, 2:2],
        lambda x, i: x.sum(0),
    ]
    for f in forms:
        want = f(X, index) * 3
        with sl.simulate(**mesh), sl.implicit():
            y = f(sl.shard(X, "x .").requires_grad_(), sl.shard(index, "."))
            y *= 3
            assert torch.allclose(sl.unshard(y), want)


VIEWS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[str, ...], bool]] = {
    "a number in a tensor": (lambda x, i: x[i], (X, torch.tensor(1)), ("x .", "..."), False),
    "a number in a tensor, and a slice": (
        lambda x, i: x[1:, i],
        (X, torch.tensor(1)),
        (". x", "..."),
        False,
    ),
    "another dtype": (
        lambda x: x.view(torch.int64),
        (torch.arange(4).to(torch.bfloat16),),
        ("x",),
        False,
    ),
    "broadcast padding": (
        lambda x, y: torch.broadcast_tensors(x, y)[0],
        (r(3), r(2, 1)),
        ("x", ". ."),
        True,
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_is_a_view_in_torch_is_one_or_is_not_written_to(name: str) -> None:
    f, operands, layouts, pad = VIEWS[name]
    with sl.simulate(x=2), sl.implicit(), torch.no_grad():
        placed = [
            sl.shard(t.clone(), lay, pad=pad and not k).requires_grad_(t.is_floating_point())
            for k, (t, lay) in enumerate(zip(operands, layouts, strict=True))
        ]
        view = f(*placed)
        try:
            placed[0].mul_(3)
        except sl.errors.Unsupported as e:
            assert "share memory" in str(e)
            assert torch.equal(sl.unshard(placed[0]), operands[0])
            assert torch.equal(sl.unshard(view), f(*operands))
        else:
            assert torch.equal(sl.unshard(view), f(operands[0] * 3, *operands[1:]))


def test_a_flat_copy_is_not_what_it_was_made_of() -> None:
    """torch's ravel copies what is not contiguous, also where a view would do."""
    with sl.simulate(x=2), torch.no_grad():
        x = sl.shard(torch.ones(1), ".").requires_grad_()
        flat = x.expand(6).ravel()
        assert not flat.requires_grad
        flat.mul_(3)
        assert torch.equal(sl.unshard(x), torch.ones(1))


def test_a_piece_of_a_split_tensor_keeps_its_strides() -> None:
    """Each block has one row, and ``contiguous`` copies what is not contiguous as a whole."""
    t = torch.arange(4.0).reshape(2, 1, 2)
    with sl.simulate(y=2):
        x = sl.shard(t.clone(), "y . .")
        x.unbind(-1)[0].contiguous().zero_()
        assert torch.equal(sl.unshard(x), t)
