"""One command: exit codes, JSON, and nothing imported that was not asked for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardlib.command.main import COMMANDS, main
from tests.command.test_train import DEMO, SMALL

ROOT = Path(__file__).parent.parent.parent
SETS = [x for s in (*SMALL, "steps=2") for x in ("--set", s)]


def test_importing_the_library_imports_no_command() -> None:
    code = "import sys, shardlib; assert not [m for m in sys.modules if 'shardlib.command' in m]"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_one_subcommand_imports_no_other() -> None:
    code = (
        "import sys; from shardlib.command.main import main; main(['desync', 'nowhere']);"
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
