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


def test_a_run_of_a_hugging_face_directory_is_proved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text("shardlib " * 20)
    file = tmp_path / "run.toml"
    file.write_text(f"""
steps = 1
mesh = {{x = 2, y = 2}}
model = {{directory = "{tmp_path / "model"}", values = "init"}}
data = {{batch = 4, text = {{path = "{tmp_path / "a.txt"}", context = 8}}}}
layout = {{recipe = "optimus2d"}}
optimizer = {{name = "adamw", lr = 1e-3}}
""")
    assert main(["check", str(file), "--steps", "1"]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "x=2 y=2" in said and "output" in said and "computed in float64 here" in said
