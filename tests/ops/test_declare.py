"""A table's line is an operator: overloads share a name, labels say which dimensions are whole."""

import pytest
import torch

import shardlib as sl
from shardlib.ops.declare import DECLARED, declare, last, lines, rows, slots, where


def test_lines_that_share_a_name_are_overloads() -> None:
    table = "\n  sort(input, dim: int = -1)\n  linalg.inv(A)\n  sort(input, *, stable)\n"
    assert dict(lines(table)) == {
        "sort": "sort(input, dim: int = -1)\nsort(input, *, stable)",
        "linalg.inv": "inv(A)",
    }


def test_named_dimensions_count_from_either_end_and_nothing_names_all() -> None:
    assert where(-1, 3) == where(2, 3) == where([2], 3) == {2}
    assert where(None, 3) == where((), 3) == {0, 1, 2}


@pytest.mark.parametrize("name", ["cumsum", "linalg.inv"])
def test_functions_and_methods_of_a_name_have_one_declaration(name: str) -> None:
    found = DECLARED[name]
    assert len({id(f) for f in found.functions}) == len(found.functions) >= 1


def test_rows_are_split_and_what_is_named_stays_whole() -> None:
    with sl.simulate(x=2):
        x = sl.shard(torch.arange(8.0).reshape(2, 4), "x .")
        with sl.trace() as t:
            out = torch.cumsum(x, 1)
        assert torch.equal(sl.unshard(out), sl.unshard(x).cumsum(1)) and t.bytes == 0
        with pytest.raises(sl.ShardError):
            torch.cumsum(x, 0)
    assert out.sharding == x.sharding


def test_an_operator_declared_twice_is_an_error() -> None:
    with pytest.raises(Exception, match="sin"):
        declare("sin(input)")(last(1))
    assert slots({"a": 3, "b": [None]}) == [] and rows({}) is not None
