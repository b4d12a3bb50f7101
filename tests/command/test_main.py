"""One command: exit codes, JSON, and nothing imported that was not asked for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardlib.command.main import COMMANDS, main
from tests.command.test_train import DEMO, SMALL

ROOT = Path(__file__).parent.parent.parent
SETS = [x for s in (*SMALL, "steps=2") for x in ("--set", s)]


def test_a_process_imports_no_more_than_it_is_for() -> None:
    """The library imports no command, and no module of DTensor, which takes longer than itself;
    and a subcommand imports no other."""
    code = (
        "import sys, shardlib; assert 'torch.distributed.tensor' not in sys.modules;"
        "assert not [m for m in sys.modules if 'shardlib.command' in m];"
        "from shardlib.command.main import main; main(['desync', 'nowhere']);"
        "assert not [m for m in sys.modules if m.startswith('shardlib.command.') "
        "and m.rpartition('.')[2] not in ('main', 'desync', 'config')], sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert command in capsys.readouterr().out


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["train", str(DEMO), "--simulate", *SETS, "--set", f"checkpoint.path={tmp_path}"]
    assert main(run) == 0
    assert main([*run, "--set", "data.bacth=1"]) == 2
    assert main(["trian"]) == 2 and main([]) == 2
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    assert main(["ckpt", "ls", str(tmp_path / "no")]) == 2
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["ckpt", "verify", str(empty)]) == 1
    said = capsys.readouterr().err
    assert "did you mean 'batch'?" in said and "no such file" in said and "empty holds no" in said


def test_json_is_json_of_errors_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["train", str(DEMO), "--simulate", *SETS, "--set", f"checkpoint.path={tmp_path}"]
    assert main([*run, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["step"] for r in rows[:-1]] == [1, 2] and rows[-1]["done"]["step"] == 2
    assert main([*run, "--json", "--set", "stepz=1"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["code"] == 2 and "did you mean 'steps'?" in found["error"]


GPT = ["examples.gpt:gpt", "--batch", "16", "--sequence", "64", "--ranks", "2"]
NOWHERE = "/nowhere/at/all"
MISTAKES: dict[str, list[list[str]]] = {  # what is no run: arguments of every command but train
    "check": [
        [], [str(DEMO), "more"], ["no.toml"], ["examples.gpt:gtp"], ["nomodule:f"], [str(DEMO), "--steps", "-1"],
        [str(DEMO), "--steps", "x"], [str(DEMO), "--set", "mesh.y=3"], [str(DEMO), "--set", "optimizer.nme=1"],
        [str(DEMO), "--set", "mesh.data=-1"], [str(DEMO), "--set", "data.batch=3"],
    ],
    "trace": [
        [], ["no.toml"], [str(DEMO), "--step", "0"], [str(DEMO), "--by", "size"], [str(DEMO), "--out", "x.gif"],
        [str(DEMO), "--set", "mesh.data=-1"], [str(DEMO), "--set", "mesh.y=3"], [str(DEMO), "--set", "log.every=0"],
    ],
    "explain": [
        [], ["no.toml"], [str(DEMO), "--by", "size"], [str(DEMO), "--set", "mesh.y=3"], [str(DEMO), "--set", "a..b=3"],
        [str(DEMO), "--set", "mesh"], [str(DEMO), "--set", "=3"], [str(DEMO), "--set", "steps=-1"],
        [str(DEMO), "--set", "data.bacth=1"],
    ],
    "plan": [
        [], ["nowhere"], [str(ROOT / "docs")], ["no.toml"], ["examples.gpt:", "--ranks", "2"], [":gpt", "--ranks", "2"],
        ["examples.corpus:load", "--ranks", "2"], [str(DEMO), "--set", "data.bacth=3"],
        [str(DEMO), "--set", "accumulate=-2"], [str(DEMO), "--set", "mehs=1"], [str(DEMO), "--set", "mesh=3"],
        *([*GPT, f"--{key}", value] for key in ("ranks", "batch", "sequence", "microbatches", "node", "pipe")
          for value in ("-1", "x", "1.5", "9" * 22)),
        *([*GPT, "--memory", v] for v in ("0", "-5", "nan", "inf", "5XiB")),
        *([*GPT, "--inside", v] for v in ("1", "a,b", "nan,1", "1,nan", "0,0", "1,2,3")),
        [*GPT, "--between", "1e-5,inf"], [*GPT, "--cluster", "x"], [*GPT, "--pipe", "0"],
    ],
    "ckpt": [
        [], ["lss", "x"], ["ls"], ["ls", NOWHERE], ["reshard", "docs", "o"],
        *(["reshard", "docs", "o", "--mesh", m] for m in ("", "x", "x=", "x=0", "x=-1", "x=1.5", "x=2,x=2", "x=2;y=2")),
        ["reshard", "docs", "o", "--mesh", "x=2", "--rule", "a"],
    ],
    "keys": [["optimzer"], ["a", "b"]],
    "desync": [[]],
}  # fmt: skip


@pytest.mark.parametrize("command", MISTAKES)
def test_each_wrong_argument_is_one_line(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as JSON one object."""
    monkeypatch.chdir(ROOT)
    for given in MISTAKES[command]:
        assert main([command, *given]) == 2, given
        said = capsys.readouterr().err
        assert said.startswith("shardlib") and said.count("\n") == 1, said
    for given in MISTAKES[command][:2]:
        assert main([command, *given, "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["code"] == 2


def test_what_a_model_raises_is_one_line_and_a_traceback_where_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["train", str(DEMO), "--simulate", *SETS, "--set", f"checkpoint.path={tmp_path}"]
    run += ["--set", f"loss={__name__}:raises"]
    assert main(run) == 1
    said = capsys.readouterr().err
    assert "KeyError: 'nothing' (test_main.py:" in said and said.count("\n") == 1
    assert main([*run, "--traceback"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def raises(apply: object, params: object, batch: object) -> None:
    raise KeyError("nothing")


def test_of_a_ranks_traceback_its_end_is_told() -> None:
    from shardlib.command.main import _without_frames
    from shardlib.errors import ShardError

    text = (
        'rank 1 failed:\nTraceback (most recent call last):\n  File "mine.py", line 3, in f\n'
        '    raise E\n  File "/x/torch/y.py", line 9, in g\n    pass\nmine.E: so it is\n'
    )
    said = _without_frames(ShardError(text, op="launch"))
    assert said.startswith("launch: rank 1 failed: mine.E: so it is (mine.py:3)")


@pytest.mark.parametrize(
    "given", [["check", "--steps", "1"], ["trace"], ["explain"], ["plan", "--ranks", "8"]]
)
def test_lines_fit_a_terminal_of_100_columns(
    given: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    small = [x for s in SMALL if "data.batch" not in s for x in ("--set", s)]
    assert main([given[0], str(DEMO), *given[1:], *small, "--set", "data.batch=4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100, max(lines, key=len)


CALLS = """
from shardlib.command.main import main
print([main(given) for given in (["keys", "log"], ["train", "no.toml"], ["--help"])])
"""


def test_what_a_solver_writes_to_stdout_is_not_in_the_answer() -> None:
    code = """
import os, sys, types
from shardlib.command import main

def run(given):
    os.write(1, b"from C++\\n")
    print("{}")
    return 0

main._module = lambda name: types.SimpleNamespace(add=lambda parser: None, main=run)
sys.argv = ["shardlib", "plan", "--json"]
main.script()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "{}\n")
    assert "from C++" in done.stderr


def test_an_empty_rank_is_no_rank_and_docstrings_may_be_missing() -> None:
    where = {**os.environ, "RANK": "", "WORLD_SIZE": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-OO", "-c", CALLS]
    done = subprocess.run(command, cwd=ROOT, env=where, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("[0, 2, 0]\n") and "Traceback" not in done.stderr, done.stderr
