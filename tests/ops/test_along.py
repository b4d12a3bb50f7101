"""Functions along a dimension that is whole: all others are rows."""

import pytest

from tests.ops.cases import ALONG, run_on_meshes


@pytest.mark.parametrize("name", ALONG)
def test_functions_along_whole_dimensions_equal_dense(name: str) -> None:
    run_on_meshes(name)
