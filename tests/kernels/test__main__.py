"""``python -m shardlib.kernels`` builds, lists, and says what is missing."""

import os
from pathlib import Path

import pytest

from shardlib.kernels.__main__ import main
from tests.kernels.host import built, needs_host


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
