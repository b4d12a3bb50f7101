"""Tests of pipelines know the built-in schedules, and their own until they end."""

import pytest

from shardlib.pipeline import schedules

# taken when tests are collected, before an example of a docstring or of a page registers its own
BUILT_IN = dict(schedules._MAKERS)


@pytest.fixture(autouse=True)
def built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the schedules that examples registered in this process."""
    monkeypatch.setattr(schedules, "_MAKERS", dict(BUILT_IN))
