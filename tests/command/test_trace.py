"""A step's timeline, out of a file."""

import json
from pathlib import Path

import pytest

from shardlib.command import trace
from shardlib.command.main import main
from shardlib.seeing import Timeline
from tests.command.test_train import DEMO, SMALL, STAGED

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


def test_a_step_of_stages_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.svg"
    given = ["trace", str(DEMO), *SETS, "--schedule", str(file), "--json"]
    assert main(given) == 2 and "no table [stages]" in capsys.readouterr().out
    assert main([*given[:-2], "step.json"]) == 2 and "step.png" in capsys.readouterr().err
    stages = [*STAGED, 'stages={"axis" = "pipe"}', "microbatches=2"]
    assert main([*given, *(x for s in stages for x in ("--set", s))]) == 0
    told = json.loads(capsys.readouterr().out)["schedule"]
    assert (told["name"], told["microbatches"]) == ("1f1b", 2)
    assert [s["name"] for s in told["stages"]] == ["wte to h.0", "h.1 to lm_head"]
    assert file.read_text().count("<path") > 8
