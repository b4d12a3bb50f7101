"""No column is left out that a program may need."""

from hypothesis import given
from hypothesis import strategies as st

from shardlib.planning.columns import undominated
from shardlib.planning.program import Column

figure = st.integers(0, 3).map(float)
drawn = st.builds(
    Column, st.just(0), st.just(0), st.just(0), figure, figure, figure, figure, figure
)


@given(st.lists(drawn, min_size=1, max_size=8))
def test_of_each_column_one_is_kept_that_takes_no_more(columns: list[Column]) -> None:
    def takes(c: Column) -> tuple[float, ...]:
        return c.seconds, c.kept, c.gradients, c.saved, c.most

    found = undominated(columns)
    for c in columns:
        assert any(all(a <= b for a, b in zip(takes(d), takes(c), strict=True)) for d in found)
    # and none beside one that takes as little
    assert len({takes(c) for c in found}) == len(found)
