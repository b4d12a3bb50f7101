"""A value that may be missing is asked for once."""

from shardlib.optional import optional_text, unless_none


def test_a_function_is_called_on_values_only() -> None:
    called: list[object] = []
    assert unless_none(called.append, None) is None and called == []
    assert unless_none(pow, 0, 2, mod=5) == 0 and unless_none(bool, "") is False


def test_a_text_without_a_value_is_empty() -> None:
    assert [optional_text("{:,} B", n) for n in (0, None, "", 1000)] == ["", "", "", "1,000 B"]
