"""A few of the kills that ``make kills`` draws by the dozen."""

import pytest

from tests.checkpoint.kill import Case, run

CASES = [
    Case((), 0),
    Case((0,), 9),
    Case((0,), 24, "aside"),
    Case((3,), 5),
    Case((0, 1, 2, 3), 7, "step"),
    Case((0,), 27, "later"),
    Case((2,), 3, "stages"),
    Case((), 0, "stages", "after exchange 1"),
    Case((), 0, "place", "after exchange 1"),
    Case((), 0, "aside", "after rename 1"),
    Case((), 0, "step", "after unlink 1"),
    Case((), 0, "later", "after fsync 2"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_kill_loses_nothing_and_nobody_is_told_wrong(case: Case) -> None:
    wrong, _ = run(case)
    assert not wrong
