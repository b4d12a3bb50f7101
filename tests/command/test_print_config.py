"""What is printed is a file that says the same, with every other key in a comment."""

import json
import tomllib
from pathlib import Path

import pytest

from shardlib.command.config import Config, read
from shardlib.command.main import main
from shardlib.command.print_config import printed
from tests.command.test_train import DEMO


@pytest.mark.parametrize(
    "one",
    [
        "steps=3",
        'loss="a \\" b\\u007f"',
        'remat={"h.*" = "full"}',
        "a.b=[1, [inf], {c = true}]",
        "x={}",
    ],
)
def test_what_is_printed_is_read_again_as_the_same(one: str, tmp_path: Path) -> None:
    config = read(DEMO, [one])
    again = tmp_path / "again.toml"
    again.write_text(printed(config))
    assert read(again).tables == config.tables


def test_a_default_is_a_comment_and_is_valid_in_its_table() -> None:
    """Without the mark it is a key that the file may have, unless it is given by leaving it out."""
    text = printed(read(DEMO))
    bare = [s.removeprefix("# ") for s in text.splitlines() if not s.endswith(" =")]
    found = tomllib.loads("\n".join(bare))
    assert found["optimizer"]["weight_decay"] == 0.01 and found["log"]["every"] == 10
    assert found["data"]["shuffle"] is True and found["optimizer"]["zero"]["stage"] == 1
    assert "sequence" not in found["layout"], "of another recipe"


def test_nothing_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sets = ["--set", f"checkpoint.path={tmp_path / 'run'}", "--print-config"]
    assert main(["train", str(DEMO), *sets]) == 0
    assert tomllib.loads(capsys.readouterr().out)["checkpoint"]["path"] == str(tmp_path / "run")
    assert main(["train", str(DEMO), *sets, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["steps"] == 50
    assert main(["train", str(DEMO), *sets, "--set", "steps=many"]) == 2
    assert "must be a whole number" in capsys.readouterr().err
    assert not (tmp_path / "run").exists() and printed(Config({})).startswith("# seed")
