"""P names axes per dimension as JAX does; what is left out is whole, at any rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl

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
