"""``shardlib desync`` prints what ``sl.desync`` finds, as text or as JSON."""

import json
from pathlib import Path

import pytest

from shardlib.command.main import main
from shardlib.desync import desync
from tests.test_desync import write


def test_it_prints_what_the_function_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {0: ["psum", "pmax"], 1: ["psum", "psum"]})
    found = desync(tmp_path)
    assert main(["desync", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == found
    assert main(["desync", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["desync"] == found


def test_no_folder_of_a_job_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["desync", str(tmp_path)]) == 1
    assert "desync: " in capsys.readouterr().err
