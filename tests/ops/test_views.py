import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.ops.views import _viewable, view_layout
from shardlib.tensor import promoting
from tests.ops.cases import VIEWS, run_on_meshes
from tests.strategies import examples, placed


def factorings(n: int) -> Any:
    """Random shapes with n elements."""

    @st.composite
    def draw_shape(draw: Any) -> tuple[int, ...]:
        left, out = n, []
        while left > 1 and len(out) < 5:
            divisors = [d for d in range(1, left + 1) if left % d == 0]
            out.append(draw(st.sampled_from(divisors)))
            left //= out[-1]
        return (*out, left) if left > 1 or not out else tuple(out)

    return draw_shape()


@examples(150)
@given(placed(partial=False, most=12, most_elements=500), st.data())
def test_a_view_is_right_or_refused(case: Any, data: Any) -> None:
    layout, shape, mesh = case
    if 0 in shape:
        return
    new = data.draw(factorings(math.prod(shape)))
    out = view_layout(layout, shape, new, mesh)
    if isinstance(out, str):
        return
    x = torch.arange(math.prod(shape)).reshape(shape)
    with sl.simulate(**mesh):
        got = sl.shard(x, layout).reshape(new)
        assert got.sharding == out and got.shape == new
        assert torch.equal(got.raw, sl.shard(x.reshape(new), out).raw)


@examples(80)
@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_a_whole_tensor_takes_every_view(shape: list[int], data: Any) -> None:
    new = data.draw(factorings(math.prod(shape)))
    whole = sl.Layout.parse("...").resolve(len(shape))
    assert view_layout(whole, tuple(shape), new, {"x": 2}) == sl.Layout.parse("...").resolve(
        len(new)
    )


@examples(80)
@given(placed(partial=False, most=12, most_elements=500))
def test_a_view_of_the_same_shape_keeps_the_layout(case: Any) -> None:
    layout, shape, mesh = case
    if 0 not in shape:
        assert view_layout(layout, shape, shape, mesh) == layout


@pytest.mark.parametrize("name", VIEWS)
def test_views_and_joins_equal_dense(name: str) -> None:
    run_on_meshes(name)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("where", [".", "x"])
def test_an_empty_piece_stays_in_the_graph(where: str, count: int) -> None:
    """Torch gives a piece of shape (0,) an empty gradient, not none."""
    empty = torch.zeros(0, dtype=torch.float64).requires_grad_()
    x = torch.randn(4, 6, dtype=torch.float32).requires_grad_()
    with sl.simulate(x=2, y=2):
        pieces = [sl.shard(empty, where), *[sl.shard(x, "y .")] * count]
        out = sl.unshard(torch.cat(pieces, 1))
    expected = torch.cat([empty, *[x] * count], 1)
    assert out.dtype == expected.dtype and torch.equal(out, expected)
    ours = torch.autograd.grad(out.sum(), (empty, x))
    for g, e in zip(ours, torch.autograd.grad(expected.sum(), (empty, x)), strict=True):
        assert g.dtype == e.dtype and torch.equal(g, e)


def test_one_piece_is_joined_as_it_is_beside_pieces_without_elements() -> None:
    """Also along a split dimension: nothing moves."""
    x = torch.randn(4, 6)
    with sl.simulate(x=2, y=2), sl.trace() as t:
        piece, nothing = sl.shard(x, "y ."), sl.shard(torch.zeros(0), ".")
        for pieces in ([piece], [nothing, piece], [torch.zeros(0), piece]):
            with promoting():  # as in a module's call: a cache of keys begins with a plain one
                out = torch.cat(pieces, 0)
            assert str(out.sharding) == "y ." and not t.bytes  # type: ignore[attr-defined]
            assert torch.equal(out.raw, piece.raw)  # type: ignore[attr-defined]


def test_a_view_as_another_dtype_has_no_graph() -> None:
    t = torch.ones(6, 2, dtype=torch.float64, requires_grad=True)
    assert not t.view(torch.complex128).requires_grad
    with sl.simulate(x=3):
        x = sl.shard(t.detach(), "...").requires_grad_()
        for y in (x.view(torch.complex128), x.view(dtype=torch.complex128)):
            assert not y.requires_grad
            assert torch.equal(sl.unshard(y), t.view(torch.complex128))


@pytest.mark.parametrize("layout", ["x", "."])
def test_a_write_with_a_gradient_reaches_the_base_through_a_piece_of_a_view(layout: str) -> None:
    """Also where an axis of one rank splits what is cut, and nothing had a gradient before."""
    t, v = torch.arange(4.0), torch.tensor(2.0)

    def f(t: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        b = t * 1
        b.unsqueeze(0)[:, 0].add_(v)
        return b.sum()

    with sl.simulate(x=1):
        w = sl.shard(v, "").requires_grad_()
        f(sl.shard(t, layout), w).backward()
        assert sl.unshard(w.grad) == 1


def test_a_number_squeezed_is_a_view_and_one_cut_from_a_split_tensor_takes_no_write() -> None:
    with sl.simulate(x=2), sl.implicit():
        b = sl.shard(torch.arange(4.0), "x") * 1
        s = sl.shard(torch.tensor(1.0), "") * 1
        s.squeeze().add_(1)
        assert sl.unshard(s) == 2
        with pytest.raises(sl.errors.Unsupported, match="share memory"):
            b[0].squeeze().add_(1)
        assert torch.equal(sl.unshard(b), torch.arange(4.0))


def test_an_axis_of_one_rank_stays_with_the_dimension_that_has_a_size() -> None:
    """A token at a time: [4, 32] -> [4, 1, 32] -> heads [4, 1, 4, 8], whatever the axis's size."""
    for size in (1, 2):
        layout, mesh = sl.Layout.parse("x y"), {"x": 2, "y": size}
        for old, new in (
            ((4, 32), (4, 1, 32)),
            ((4, 1, 32), (4, 1, 4, 8)),
            ((4, 32), (1, 4, 1, 32)),
        ):
            before = layout if len(old) == 2 else sl.Layout.parse("x . y")
            out = view_layout(before, old, new, mesh)
            assert isinstance(out, sl.Layout)
            at = {a: d for d, token in enumerate(out.resolve(len(new)).dims) for a in token.axes}
            assert new[at["y"]] in (32, 4) and new[at["x"]] == 4, (size, old, new, str(out))


def test_a_view_may_cut_a_whole_dimension_anywhere_behind_a_split_one() -> None:
    """The unsplit positions behind an axis are one digit, also those of several dimensions."""
    x = torch.arange(144.0).reshape(12, 12)
    with sl.simulate(x=2):
        y = sl.shard(x, "x .").view(8, 9, 2)
        assert str(y.sharding) == "x . ." and torch.equal(sl.unshard(y), x.view(8, 9, 2))


def test_a_view_exists_where_torch_has_one() -> None:
    """Drawn sizes, strides and views: by the rule, without a tensor of the whole size."""
    draw, found = random.Random(3), 0
    for _ in range(3000):
        size = [draw.choice([1, 2, 3, 4, 6]) for _ in range(draw.randint(0, 4))]
        stride, gap = [0] * len(size), 1
        for d in draw.sample(range(len(size)), len(size)):
            stride[d] = gap
            gap *= size[d] * draw.choice([1, 1, 1, 2])
        stride = [0 if draw.random() < 0.05 else s for s in stride]
        new, left = [], math.prod(size)
        while left > 1:
            new.append(draw.choice([n for n in range(2, left + 1) if left % n == 0]))
            left //= new[-1]
        new.insert(draw.randint(0, len(new)), 1)
        try:
            torch.empty_strided(size, stride, device="meta").view(new)
            wanted = True
        except RuntimeError:
            wanted = False
        assert _viewable(size, stride, new) == wanted, (size, stride, new)
        found += wanted
    assert 500 < found < 2800
