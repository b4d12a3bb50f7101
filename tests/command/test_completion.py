"""The script completes what the parsers and the functions' signatures know, in bash itself."""

import shutil
import subprocess

import pytest

from shardlib.command.completion import script
from shardlib.command.keys import listed
from shardlib.command.main import COMMANDS, main

pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="bash is not here")


def completed(*words: str) -> list[str]:
    line = " ".join(f"'{w}'" for w in words)
    text = f"{script()}\nCOMP_WORDS=(shardlib {line}); COMP_CWORD={len(words)}; _shardlib\n"
    text += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.split()


def test_commands_options_choices_and_keys_are_completed() -> None:
    assert completed("") == list(COMMANDS)
    assert completed("tr") == ["train", "trace"]
    assert completed("train", "run.toml", "--si") == ["--simulate"]
    assert completed("ckpt", "from") == ["from-hf"] and completed("ckpt", "--ov") == ["--overwrite"]
    assert "--json" in completed("completion", "--") and completed("completion", "")[-1] == "bash"
    assert completed("train", "run.toml", "--set", "data.ba") == ["data.batch"]
    assert completed("nothing", "--") == []


def test_every_key_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    found = set(completed("train", "--set", ""))
    assert {"steps", "optimizer.lr", "optimizer.zero.stage", "data.text.path"} <= found
    for key in listed():
        assert not key.name.islower() or f".{key.name}" in "".join(f".{n}" for n in found)
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == script() + "\n"
