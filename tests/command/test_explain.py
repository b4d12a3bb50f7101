"""What is explained of a file's run is what the run moves."""

import json

import pytest

from shardlib.command.config import read
from shardlib.command.explain import explain_run
from shardlib.command.main import main
from shardlib.command.train import start
from tests.command.test_train import DEMO, SMALL, STAGED, demo


def test_explained_is_what_a_run_of_the_file_moves(tmp_path) -> None:  # type: ignore[no-untyped-def]
    sets = ("steps=1", 'optimizer={"name" = "sgd", "lr" = 0.1}')
    found = explain_run(read(DEMO, [*SMALL, f"checkpoint.path={tmp_path}", *sets]))
    assert found.bytes == start(demo(tmp_path, *sets), simulated=True).bytes


def test_json_has_a_row_per_operation(capsys: pytest.CaptureFixture[str]) -> None:
    given = [x for s in SMALL for x in ("--set", s)]
    assert main(["explain", str(DEMO), *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"linear", "cross_entropy"} <= {r["op"] for r in found["rows"]}
    assert main(["explain", str(DEMO), *given, "--by", "bytes"]) == 0
    assert "peak" in capsys.readouterr().out


def test_stages_of_a_file_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    sets = [*SMALL, *STAGED, 'stages={"axis" = "pipe"}', "microbatches=2"]
    given = [x for s in sets for x in ("--set", s)]
    assert main(["explain", str(DEMO), *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schedule"] == "1f1b" and found["microbatches"] == 2
    assert main(["explain", str(DEMO), *given]) == 0
    assert "stage 1   h.1" in capsys.readouterr().out
