"""info() says of each device what serves it and why; the command builds and says it."""

from pathlib import Path

import pytest

import shardlib as sl


def test_nothing_built_is_said_with_the_command_that_builds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from shardlib.kernels import library

    monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path))
    library._found.cache_clear()
    try:
        assert "python -m shardlib.kernels build --host" in sl.kernels.info()["cpu"]
        assert sl.kernels.info()["sources"].endswith("cuda")
    finally:
        library._found.cache_clear()
