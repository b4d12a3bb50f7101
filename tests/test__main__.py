"""``python -m shardlib`` is the command."""

import runpy
import sys

import pytest


def test_it_is_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shardlib", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("shardlib", run_name="__main__")
    assert ended.value.code == 0 and "train" in capsys.readouterr().out
