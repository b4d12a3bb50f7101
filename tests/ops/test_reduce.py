"""Reductions over split dimensions, and what is made of them: sums, variances, softmax."""

import pytest

from tests.ops.cases import REDUCE, run_on_meshes


@pytest.mark.parametrize("name", REDUCE)
def test_reductions_equal_dense(name: str) -> None:
    run_on_meshes(name)
