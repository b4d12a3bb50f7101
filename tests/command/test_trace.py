"""A step's timeline, out of a file."""

import json
from pathlib import Path

import pytest

from shardlib.command import trace
from shardlib.command.main import main
from shardlib.seeing import Timeline
from tests.command.test_train import DEMO, SMALL

SETS = [x for s in SMALL for x in ("--set", s)]


def test_a_step_is_written_for_perfetto(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.json"
    assert main(["trace", str(DEMO), *SETS, "--out", str(file)]) == 0
    names = {e["name"] for e in json.loads(file.read_text())["traceEvents"]}
    assert {"gradients", "update", "pbroadcast over y"} <= names and any(
        "linear" in n for n in names
    )
    said = capsys.readouterr().out
    assert "linear" in said and "waits and uploads of the next step: " in said
    assert main(["trace", str(DEMO), *SETS, "--out", "step.txt"]) == 2


def test_a_file_that_no_trace_wrote_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "thesis.json"
    file.write_text("mine")
    assert main(["trace", str(DEMO), *SETS, "--out", str(file)]) == 2
    assert "is not replaced" in capsys.readouterr().err and file.read_text() == "mine"
    monkeypatch.setattr(trace, "trace_run", lambda *_: (Timeline(), []))
    file.unlink()
    for _ in range(2):
        assert main(["trace", str(DEMO), *SETS, "--out", str(file)]) == 0
    assert "traceEvents" in file.read_text()
