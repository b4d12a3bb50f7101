"""Which mesh, and will it fit: at a prompt, in seconds, for models of any size."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardlib.command.main import main

ROOT = Path(__file__).parent.parent.parent
GPT = ["examples.gpt:gpt", "--batch", "16", "--sequence", "64"]


def test_a_plan_names_what_to_write_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "plan.svg"
    assert main(["plan", *GPT, "--ranks", "2,4", "--picture", str(picture)]) == 0
    assert "2 on a=" in picture.read_text()
    said = capsys.readouterr().out
    assert "2 ranks: " in said and "4 ranks: " in said and "[mesh]" in said and "rules = [" in said
    assert max(len(part.splitlines()) for part in said.split(" ranks: ")) <= 40


def test_where_nothing_fits_the_code_is_4(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", *GPT, "--ranks", "2", "--memory", "1MiB", "--pipe", "1", "--microbatches", "1"]
    assert main([*given, "--json"]) == 4
    (found,) = json.loads(capsys.readouterr().out)
    assert not found["fits"] and "the least is" in found["why"]
    assert main(given) == 4
    assert "nothing fits into 1.00 MiB; the least is" in capsys.readouterr().out


def test_a_file_is_planned_with_its_own_batch_loss_and_optimizer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Links are said, and what they are is told."""
    file = str(ROOT / "examples" / "demo.toml")
    given = [file, "--set", "accumulate=4", "--pipe", "1"]
    links = ["--inside", "5e-6,1e9", "--between", "1e-5,1e8", "--node", "2"]
    assert main(["plan", *given, *links, "--ranks", "2", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["peak"] > found["parameters"] + found["state"]
    assert found["links"]["node"] == 2 and found["links"]["source"] == "as given"
    assert found["links"]["between"]["beta"] == pytest.approx(1e-8)
    assert main(["plan", *given, "--ranks", "2", "--microbatches", "4"]) == 0
    said = capsys.readouterr().out
    assert "nothing was measured" in said and "64 x 128 a step" in said
    written = tomllib.loads(said.partition("\nwrite\n")[2].partition("\nlinks:")[0])
    assert written["microbatches"] == 4 and written["data"]["batch"] == 64


def test_what_is_measured_is_a_file_that_plans_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file of this machine as docs/command.md makes it is planned with, too."""
    lab, gloo = str(tmp_path / "lab.toml"), ROOT / "examples" / "gloo.toml"
    given = ["plan", *GPT, "--ranks", "1", "--pipe", "1", "--microbatches", "1", "--json"]
    found = []
    for more in (
        ["--measure", lab, "--memory", "8GiB"],
        ["--cluster", lab],
        ["--cluster", str(gloo)],
    ):
        assert main([*given, *more]) == 0
        found.append(json.loads(capsys.readouterr().out)[0])
    assert found[0] == found[1] != found[2] and found[0]["links"]["source"].startswith("kernels")
    assert found[2]["links"]["source"].startswith("measured between 2 ranks of a node")
    assert str(gloo.relative_to(ROOT)) in (ROOT / "docs" / "command.md").read_text()


def test_a_plan_with_stages_is_a_file_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["--between", "1e-3,6e6", "--inside", "1e-3,6e6", "--node", "1"]
    given = ["plan", "examples.gpt:gpt", "--batch", "64", "--sequence", "64", "--ranks", "4"]
    assert main([*given, *slow, "--pipe", "2"]) == 0
    said = capsys.readouterr().out.partition("\nwrite\n")[2].partition("\nlinks:")[0]
    written = tomllib.loads(said)
    assert written["stages"] == {"axis": "pipe"} and written["mesh"]["pipe"] == 2
    assert written["microbatches"] > 1 and written["data"]["batch"] == 64


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["examples.gpt:gtp", "--ranks", "2"], "did you mean 'gpt'?"),
        (["nowhere", "--ranks", "2"], "no directory"),
        (["examples.gpt:gpt", "--ranks", "2"], "--batch must be given"),
        ([*GPT], "--ranks must be given"),
        ([*GPT, "--ranks", "two"], "a whole number"),
        ([*GPT, "--ranks", "2", "--cluster", "h10"], "did you mean 'h100'?"),
        ([*GPT, "--ranks", "2", "--cluster", "no.toml"], "no.toml: [Errno 2] No such file"),
        ([*GPT, "--ranks", "2", "--measure", "lab.json"], "--measure lab.json: write"),
        ([*GPT, "--ranks", "2", "--pipe", "3"], "2 ranks make no 3 stages"),
        ([*GPT, "--ranks", "2", "--memory", "much"], "--memory: much: write 80GiB"),
        (
            [*GPT, "--ranks", "2", "--inside", "fast"],
            "--inside: fast: seconds per message and bytes per second, as 5e-6,200e9",
        ),
        ([*GPT, "--ranks", "2", "--between", "1e-5,0"], "--between: 1e-5,0: seconds per message"),
        ([*GPT, "--ranks", "2", "--node", "-1"], "1 at least"),
        ([*GPT, "--ranks", "2", "--microbatches", "-2"], "1 at least"),
        ([*GPT, "--ranks", "2", "--picture", "plan.txt"], "write step.png, step.svg or step.pdf"),
    ],
)
def test_what_is_wrong_is_one_line(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *given]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "dtype": "bfloat16",
}  # fmt: skip

MEASURED = """
import sys, time
from shardlib.command.main import script
try:
    script()
except SystemExit as end:
    code = end.code
# the peak of this program alone: what getrusage says begins with that of the process it was forked from
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(code, time.process_time(), int(peak.split()[1]) / 2**20)
"""


def test_a_plan_takes_seconds_and_less_than_a_gibibyte(tmp_path: Path) -> None:
    """Imports included, in processor seconds: other work on the machine does not count."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    given = ["plan", str(tmp_path), "--ranks", "4", "--batch", "64", "--pipe", "1"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *given, "--sequence", "1024"],
        cwd=ROOT, text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    code, seconds, gibibytes = map(float, done.stdout.splitlines()[-1].split())
    assert code == 0 and "rules = [" in done.stdout, done.stderr
    assert gibibytes < 1 and seconds < 90, (seconds, gibibytes)  # 15 on a quiet machine


def test_a_file_with_tiers_is_planned_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """What lies where, loads and seconds; code 4 where the host's budget does not hold it."""
    file = str(ROOT / "examples" / "tiers.toml")
    assert main(["plan", file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    host = found["host"]
    assert found["fits"] and host["state"] == 2 * host["parameters"] == 2 * host["gradients"]
    # two more blocks are the embeddings and the head
    assert found["loads"] == 18 and found["blocks"] == 10
    assert found["seconds"] >= max(found["computing"], found["moving"])
    assert main(["plan", file, "--set", "tiers.host=2MB"]) == 4
    assert "the host may hold 1.91 MiB" in capsys.readouterr().out
    assert main(["plan", file, "--set", "tiers.device=1KB"]) == 2
    assert "the largest block needs" in capsys.readouterr().err


def test_the_example_in_tiers_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROOT / "examples" / "tiers.toml")
    how = ["--simulate", "--set", "steps=2", "--set", "model.layers=2", "--set", "data.batch=2"]
    assert main(["train", file, *how]) == 0
