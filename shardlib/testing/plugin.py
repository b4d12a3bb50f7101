"""A pytest fixture: ``sharded`` compares a model on several meshes with one device.

In a ``conftest.py``: ``pytest_plugins = ["shardlib.testing.plugin"]``.  Then

    def test_my_model(sharded):
        sharded(MyModel(), sl.recipes.megatron1d, batch)
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from shardlib.checking.proof import Proof, check_model

__all__ = ["MESHES", "sharded"]

MESHES: tuple[Mapping[str, int], ...] = (
    {"data": 1, "x": 2, "y": 1},
    {"data": 2, "x": 1, "y": 1},
    {"data": 2, "x": 2, "y": 2},
)
"""The default meshes for the comparison."""


@pytest.fixture
def sharded() -> Callable[..., Proof]:
    """Return ``sl.check_model`` on MESHES: ``sharded(module, rules, batch, meshes=..., ...)``."""

    def prove(
        module: Any,
        rules: Any,
        batch: Any,
        meshes: Sequence[Mapping[str, int]] | Mapping[str, int] = MESHES,
        **options: Any,
    ) -> Proof:
        return check_model(module, rules, meshes, batch, **options)

    return prove
