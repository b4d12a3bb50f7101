"""Rules for layers are as few as their layouts, and match no other layers."""

from fnmatch import fnmatchcase

from hypothesis import given
from hypothesis import strategies as st

from shardlib.planning.layer_rules import patterns


@given(st.sets(st.integers(0, 130), min_size=1) | st.integers(1, 131).map(lambda n: {*range(n)}))
def test_patterns_match_their_numbers_and_no_others(numbers: set[int]) -> None:
    found = patterns(numbers)
    assert numbers == {n for n in range(1200) if any(fnmatchcase(str(n), p) for p in found)}
    # a run of layers is a few lines, whatever their count
    assert len(found) <= 6 or len(numbers) != max(numbers) + 1
