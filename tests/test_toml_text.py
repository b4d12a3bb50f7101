"""What is written is read back, whatever the keys and texts."""

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from shardlib import toml_text

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, VALUES))
def test_what_is_written_is_read_back(table: dict[str, object]) -> None:
    lines = [f"{toml_text.key(k)} = {toml_text.value(x)}" for k, x in table.items()]
    assert tomllib.loads("\n".join(lines)) == table


def test_tuples_are_lists() -> None:
    assert tomllib.loads(f"v = {toml_text.value((('*', 'x .'),))}")["v"] == [["*", "x ."]]
