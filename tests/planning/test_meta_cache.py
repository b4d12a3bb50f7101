"""What is remembered of an operation's shapes is what torch says of them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from shardlib.memory_tracker import Live
from shardlib.planning.constant_folding import Known
from shardlib.planning.meta_cache import _MADE, on_shapes

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
SHAPES = st.lists(st.integers(1, 4), max_size=3)


@given(SHAPES, DTYPES, DTYPES, st.booleans(), st.sampled_from([2, 2.0, True]))
def test_a_second_time_is_as_the_first(
    shape: list[int], left: torch.dtype, right: torch.dtype, turned: bool, number: Any
) -> None:
    """Size, strides and dtype, also where operands are transposed, or scalars of other types."""
    x, y = meta(*shape, dtype=left), meta(*shape, dtype=right)
    x, y = (x.mT, y.mT) if turned and len(shape) > 1 else (x, y)
    calls = [
        (aten.mul.Tensor, (x, y)),
        (aten.mul.Scalar, (x, number)),
        (aten.cat.default, ([x, y],)),
    ]
    for func, args in calls[: 3 if shape else 2]:
        want = func(*args)
        for _ in range(2):
            got = on_shapes(func, args, {})
            assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
            assert got.is_meta and got.untyped_storage().nbytes() == want.untyped_storage().nbytes()


def test_a_view_shares_its_storage_and_an_update_is_its_operand() -> None:
    x, w = meta(4, 6), meta(4, 6)
    for _ in range(2):
        for func, args in ((aten._unsafe_view.default, (x, [6, 4])), (aten.t.default, (x,))):
            view = on_shapes(func, args, {})
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert on_shapes(aten.add_.Tensor, (x, w), {}) is x


def test_shapes_that_do_not_fit_are_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"broadcast|must match"):
            on_shapes(aten.add.Tensor, (meta(2), meta(3)), {})
        with pytest.raises(RuntimeError, match=r"broadcast|output with shape"):
            on_shapes(aten.add_.Tensor, (meta(2), meta(3, 2)), {})


def test_values_are_never_remembered() -> None:
    one = torch.ones(2)
    assert on_shapes(aten.mul.Tensor, (one, one), {}).tolist() == [1.0, 1.0]
    assert on_shapes(aten.mul.Tensor, (one * 2, one), {}).tolist() == [2.0, 2.0]


def test_a_step_remembered_keeps_as_many_bytes() -> None:
    """Peak and what stays, of forward and backward, the first time and the second."""

    def peaks() -> list[tuple[int, int]]:
        x, w = meta(8, 16).requires_grad_(), meta(16, 16).requires_grad_()
        with Known(), Live(paper=True) as live:
            loss = F.gelu(torch.addmm(x, x, w)).square().sum()
            forward = live.now, live.peak
            grads = torch.autograd.grad(loss, (x, w))
            assert len(grads) == 2
            return [forward, (live.now, live.peak)]

    _MADE.clear()
    first = peaks()
    assert _MADE and peaks() == first


def test_a_context_of_the_users_sees_every_operation() -> None:
    x = meta(4, 4)
    with Known():
        x @ x
    with FlopCounterMode(display=False) as count, Known():
        x @ x
    assert count.get_total_flops() == 2 * 4**3
