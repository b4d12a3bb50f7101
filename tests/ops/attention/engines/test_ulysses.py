"""Ulysses: tables of its exchange that are remembered cannot be written to."""

from shardlib.layouts.orders import Run, dealt
from shardlib.ops.attention.engines.ulysses import _tables


def test_the_tables_of_a_swap_are_the_caller_s_own() -> None:
    shares = dealt("zigzag", 16, 4)
    inner = ((Run(0, 1, 16),),)
    before = _tables(shares, inner, 4)
    for table in (*before.there, *before.back):
        table.zero_()
    again = _tables(shares, inner, 4)
    assert sorted(again.there[0].tolist()) == list(range(16)) and again.there[0].any()
