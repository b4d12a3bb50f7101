"""Named layouts are spellings of layouts: blocks of rows, of columns, of a plane, of a cube."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
def test_blocks_are_consecutive_rows_major_axis_first(x: int, y: int, n: int, more: int) -> None:
    whole = torch.arange(x * y * n * 2**more).reshape(x * y * n, *[2] * more)
    with sl.simulate(x=x, y=y):
        blocks = sl.shard(whole, sl.Row("x", "y")).raw
    assert torch.equal(blocks.reshape(-1, *whole.shape[1:]), whole)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
def test_blocks_are_consecutive_columns_major_axis_first(x: int, y: int, n: int, more: int) -> None:
    whole = torch.arange(x * y * n * 2**more).reshape(*[2] * more, x * y * n)
    with sl.simulate(x=x, y=y):
        blocks = sl.shard(whole, sl.Col("x", "y")).raw
    assert torch.equal(torch.cat(list(blocks), -1), whole)


def test_a_vector_is_split_alike_by_row_and_by_col() -> None:
    assert sl.Row("x").resolve(1) == sl.Col("x").resolve(1)
    assert sl.Col("x").resolve(2) == sl.Row("x").resolve(2).T


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([(), (2,), (2, 1)]))
def test_rank_r_c_holds_block_r_c(rows: int, cols: int, inner: tuple[int, ...]) -> None:
    whole = torch.arange(2 * rows * 3 * cols * max(inner, default=1))
    whole = whole.reshape(2 * rows, *inner, 3 * cols)
    with sl.simulate(x=rows, y=cols):
        blocks = sl.shard(whole, sl.Layout2D("x", "y")).raw
    for r in range(rows):
        for c in range(cols):
            here = whole[2 * r : 2 * r + 2, ..., 3 * c : 3 * c + 3]
            assert torch.equal(blocks[r * cols + c], here)


def test_products_of_blocks_stay_blocks() -> None:
    plane = sl.Layout2D("x", "y")
    with sl.simulate(x=2, y=2):
        a, b = (sl.shard(torch.randn(4, 4), plane) for _ in range(2))
        assert (a @ b).sharding == plane.resolve(2)


def test_skewed_blocks_are_cannons() -> None:
    """Row r of A is turned left by r places, column c of B up by c, so that blocks match."""
    whole = torch.arange(4).reshape(2, 2)
    with sl.simulate(x=2, y=2):
        a, b = (sl.shard(whole, sl.Layout2D("x", "y", skew=s)).raw.flatten() for s in "ab")
    assert a.tolist() == [0, 1, 3, 2] and b.tolist() == [0, 3, 2, 1]


axes = st.permutations("xyz").flatmap(
    lambda names: st.tuples(
        st.sampled_from([None, names[0]]), st.sampled_from([None, names[1], (names[1], names[2])])
    )
)


@given(axes, st.integers(2, 4))
def test_each_entry_splits_its_dimension_and_none_leaves_it_whole(given_axes, ndim) -> None:  # type: ignore[no-untyped-def]
    dims = sl.P(*given_axes).resolve(ndim).dims
    for dim, entry in zip(dims, (*given_axes, None, None), strict=False):
        wanted = () if entry is None else (entry,) if isinstance(entry, str) else entry
        assert dim.axes == wanted
    assert len(dims) == ndim


@pytest.mark.parametrize("wrong", [(1,), (["x"],), ("x", 2.0)])
def test_other_entries_are_refused_with_a_line_that_runs(wrong: tuple[object, ...]) -> None:
    with pytest.raises(sl.errors.LayoutSyntax, match="a mesh axis, a tuple of them, or None") as e:
        sl.P(*wrong)  # type: ignore[arg-type]
    assert eval(e.value.fix, {"sl": sl}) == sl.Layout.parse("x . ...")


@given(st.integers(0, 3), st.integers(1, 4))
def test_every_rank_holds_the_whole(ndim: int, ranks: int) -> None:
    whole = torch.randn([2] * ndim)
    with sl.simulate(x=ranks):
        held = sl.shard(whole, sl.Replicated())
        assert all(torch.equal(block, whole) for block in held.raw)
    assert not held.sharding.axes and not held.sharding.partial


@given(st.integers(1, 4))
def test_the_value_of_a_partial_is_the_sum_of_its_blocks(ranks: int) -> None:
    with sl.simulate(x=ranks):
        x = sl.from_local(sl.shard(torch.arange(2.0 * ranks), "x").local, sl.Partial("x"))
        assert torch.equal(sl.unshard(x), x.raw.sum(0))


DEEP = sl.Layout25D("x", "y", "d")
PLANES = {"x": 2, "y": 2, "d": 2}


def test_activations_come_back_in_their_own_layout() -> None:
    with sl.simulate(**PLANES):
        x = sl.shard(torch.randn(8, 8, dtype=torch.float64), DEEP.act)
        w = sl.shard(torch.randn(8, 8, dtype=torch.float64), DEEP.weight)
        y = x @ w
        assert torch.allclose(sl.unshard(y), sl.unshard(x) @ sl.unshard(w))
    assert y.sharding == DEEP.act.resolve(2)


@pytest.mark.parametrize(
    ("layout", "copies"),
    [
        (DEEP.act, 1),
        (DEEP.weight, 2),
        (DEEP.deep_act, 1),
        (DEEP.deep_weight, 1),
        (DEEP.deep_out, 1),
    ],
)
def test_only_tesseracts_weights_are_copied(layout: sl.Layout, copies: int) -> None:
    block = layout.resolve(2).local_shape((8, 8), PLANES)
    assert math.prod(block) * math.prod(PLANES.values()) == copies * 64


def test_a_contraction_over_depth_is_scattered_over_the_rows() -> None:
    with sl.simulate(**PLANES):
        x = sl.shard(torch.randn(8, 8, dtype=torch.float64), DEEP.deep_act)
        w = sl.shard(torch.randn(8, 8, dtype=torch.float64), DEEP.deep_weight)
        y = sl.matmul(x, w, out=DEEP.deep_out)
        assert torch.allclose(sl.unshard(y), sl.unshard(x) @ sl.unshard(w))


CUBE = sl.Layout3D("x", "y", "z")
EIGHT = {"x": 2, "y": 2, "z": 2}


def test_no_element_is_held_twice() -> None:
    for layout in (CUBE.act, CUBE.weight, CUBE.out):
        assert math.prod(layout.resolve(2).local_shape((8, 8), EIGHT)) * 8 == 64


def test_an_output_is_the_next_layers_input_with_y_and_z_swapped() -> None:
    after = sl.Layout3D("x", "z", "y")
    assert after.act == CUBE.out and after.out == CUBE.act
    with sl.simulate(**EIGHT):
        x = sl.shard(torch.randn(8, 8, dtype=torch.float64), CUBE.act)
        w, v = (sl.shard(torch.randn(8, 8).double(), m.weight) for m in (CUBE, after))
        wide = x @ w
        back = wide @ v
        assert torch.allclose(sl.unshard(back), sl.unshard(x) @ sl.unshard(w) @ sl.unshard(v))
    assert wide.sharding == CUBE.out.resolve(2) and back.sharding == CUBE.act.resolve(2)
