"""A result is kept by kind and key, within a bound and under the algorithms it was made for."""

from shardlib.mesh import GROUPS, Memo


def test_a_result_is_made_once_for_each_kind_and_key() -> None:
    memo, made = Memo(), []
    for kind in ("a", "b", "a", "b"):
        memo(kind, (1, 2), lambda kind=kind: made.append(kind))  # None is a result too
    assert made == ["a", "b"]


def test_a_full_table_begins_anew() -> None:
    memo = Memo()
    for i in range(4):
        assert memo("square", i, lambda i=i: i * i, most=3) == i * i
    assert memo["square"] == {3: 9}


def test_a_key_that_cannot_be_hashed_keeps_nothing() -> None:
    memo = Memo()
    assert memo("sum", [1], lambda: 1) == 1 and memo("sum", [1], lambda: 2) == 2
    assert not memo["sum"]


def test_an_algorithm_registered_later_voids_all_but_process_groups() -> None:
    memo = Memo()
    memo("choice", "x", lambda: "old")
    group = memo[GROUPS]["x",] = object()
    Memo.version += 1
    assert memo("choice", "x", lambda: "new") == "new"
    assert memo[GROUPS]["x",] is group
