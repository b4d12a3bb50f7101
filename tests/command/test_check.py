"""The dense proof of what a file describes."""

import json
from pathlib import Path

import pytest

from shardlib.command.main import main
from tests.command.test_train import DEMO, SMALL

SETS = [x for s in SMALL if "data.batch" not in s for x in ("--set", s)]


def test_the_demos_model_is_the_model_on_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(DEMO), *SETS, "--set", "data.batch=4", "--steps", "1"]) == 0
    assert "data=2 x=2 y=2" in capsys.readouterr().out


def test_a_case_is_proved_and_a_difference_is_a_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "tests.checking.test_proof:case", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["errors"]
    assert main(["check", "tests.checking.test_proof:cas"]) == 2
    assert "did you mean 'case'?" in capsys.readouterr().err
    assert main(["check", str(Path("nowhere.toml"))]) == 2
