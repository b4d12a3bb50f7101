"""The blocks of docs/command.md run as they stand, and what it names exists."""

import itertools
import re
import shlex
from pathlib import Path

import pytest

import shardlib as sl
from shardlib.command.config import read
from shardlib.command.from_config import RECIPES, WRAPPERS
from shardlib.command.main import COMMANDS, main
from shardlib.command.train import check, start
from tests.command.test_train import losses

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "command.md").read_text()
RUNS = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
CONSOLE = [
    line for block in re.findall(r"```console\n(.*?)```", PAGE, re.S) for line in block.splitlines()
]


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_a_file_of_the_page_runs_and_goes_on(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    (tmp_path / "run.toml").write_text(RUNS[number])
    first = start(read("run.toml", ["steps=3"]), simulated=True)
    rest = start(read("run.toml"), simulated=True)
    assert (first.step, rest.first, rest.step) == (3, 3, 6)
    assert len(losses(first) + losses(rest)) == 6 and (tmp_path / "out" / "page.jsonl").exists()


def test_every_command_of_the_page_is_one() -> None:
    said = {
        shlex.split(line, comments=True)[2] for line in CONSOLE if line.startswith("$ shardlib")
    }
    assert said <= set(COMMANDS) and {"train", "plan", "explain", "check", "trace", "ckpt"} <= said


def test_what_goes_wrong_is_said_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUNS[0])
    pairs = [(a, b) for a, b in itertools.pairwise(CONSOLE) if b.startswith("shardlib train: ")]
    assert len(pairs) == 2
    for command, said in pairs:
        assert main(shlex.split(command)[2:]) == 2
        assert capsys.readouterr().err.startswith(said.partition("...")[0])


def test_what_the_page_names_exists() -> None:
    for name in set(re.findall(r"`(?:sl\.)optim\.(\w+)", PAGE)) - {"X"}:
        assert hasattr(sl.optim, name), name
    for name in set(re.findall(r"`sl\.(\w+)", PAGE)) - {"optim"}:
        assert hasattr(sl, name), name
    assert all(hasattr(sl.recipes, r) for r in RECIPES)
    assert all(f".{w}" in PAGE for w in WRAPPERS)


def test_the_demos_file_and_the_pages_are_whole() -> None:
    check(read(ROOT / "examples" / "demo.toml"))
