"""info() says of each device what serves it and why; the command builds and says it."""

import os
from pathlib import Path

import pytest

import shardlib as sl
from shardlib.kernels.__main__ import main
from tests.kernels.host import built, needs_host


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


@needs_host
def test_the_command_builds_and_says_what_is_active(capsys: pytest.CaptureFixture[str]) -> None:
    assert built()
    assert main(["build", "--host"]) == 0
    out = capsys.readouterr().out
    assert os.path.exists(out.splitlines()[0]) and "built by g++" in out
    assert main(["info"]) == 0


def test_the_command_refuses_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["build", "--arch", "hopper"])
    assert "as in 80,90" in capsys.readouterr().err


def test_the_command_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SHARDLIB_CACHE", str(tmp_path))
    assert main(["build"]) == 1
    assert "nvcc is not on the path" in capsys.readouterr().err
