"""A run that a file describes: the demo's losses, and the same after it was killed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl
from examples.corpus import windows
from shardlib.command.config import Config, ConfigError, read
from shardlib.command.explain import explain_run
from shardlib.command.from_config import module_of
from shardlib.command.main import main
from shardlib.command.train import Report, check, start, train
from shardlib.errors import ShardError

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "examples" / "demo.toml"
SMALL = (
    "steps=6 model.ctx=16 model.layers=1 model.embed=16 data.dataset.ctx=16 data.batch=4 log.every=2 checkpoint.every=3"
).split()


def demo(path: Path, *sets: str) -> Config:
    return read(DEMO, [*SMALL, f"checkpoint.path={path}", *sets])


def losses(report: Report) -> list[float]:
    return [report.losses[s] for s in sorted(report.losses)]


def close(a: list[float], b: list[float]) -> bool:
    return len(a) == len(b) and max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the file's run, small, from its start to its end."""
    return losses(start(demo(tmp_path_factory.mktemp("whole")), simulated=True))


@pytest.fixture(scope="module")
def half_way(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """The same run when half of its steps are done; tests go on from copies of its folder."""
    path = tmp_path_factory.mktemp("half")
    return path, start(demo(path, "steps=3"), simulated=True)


def test_the_demos_file_gives_the_demos_losses(whole: list[float]) -> None:
    other: Any = pytest.importorskip("examples.train_gpt", reason="the demo draws with matplotlib")
    asked = "--steps 6 --batch 4 --ctx 16 --layers 1 --embed 16".split()
    alone = other.train_alone(other.parse(asked))
    assert close(whole, alone["losses"])


@pytest.mark.parametrize(
    "other",
    [
        ("layout.recipe=megatron1d", 'mesh={"data" = 2, "x" = 2}'),
        ("layout.recipe=cube3d", 'mesh={"data" = 1, "x" = 2, "y" = 2, "z" = 2}'),
        ("optimizer.zero.stage=2",),
        ("optimizer.zero.stage=3",),
        ('remat={"h.*" = "full"}',),
        ('layout={rules = [["*", "..."]]}', 'mesh={"data" = 4}'),
    ],
)
def test_a_killed_run_goes_on_elsewhere(
    other: tuple[str, ...], whole: list[float], half_way: tuple[Path, Report], tmp_path: Path
) -> None:
    """On another mesh, in another layout, at another stage: the losses are those of the whole run."""
    path, first = half_way
    rest = start(demo(shutil.copytree(path, tmp_path / "part"), *other), simulated=True)
    assert rest.first == 3 and (first.step, rest.step) == (3, 6)
    assert close(losses(first) + losses(rest), whole)


def test_batches_that_are_accumulated_are_one_larger_batch(tmp_path: Path) -> None:
    whole = start(demo(tmp_path / "a", "data.batch=8"), simulated=True)
    for stage in (1, 2):
        sets = ("accumulate=2", f"optimizer.zero.stage={stage}")
        parts = start(demo(tmp_path / str(stage), *sets), simulated=True)
        assert close(losses(parts), losses(whole))


def test_half_precision_and_a_scaled_loss_train(whole: list[float], tmp_path: Path) -> None:
    bf16 = losses(start(demo(tmp_path / "b", "precision.param=bfloat16"), simulated=True))
    scaled = losses(start(demo(tmp_path / "c", "optimizer.loss_scale.start=8.0"), simulated=True))
    assert close(whole, scaled)
    assert bf16 != whole and max(abs(a - b) for a, b in zip(whole, bf16, strict=True)) < 0.05


def test_the_loss_of_a_half_run_is_computed_in_fp32(tmp_path: Path) -> None:
    """Logged numbers are no multiples of bfloat16's steps, 1/32 at a loss of 5."""
    for sets in (("precision.param=bfloat16",), ("precision.param=bfloat16", "accumulate=2")):
        found = losses(start(demo(tmp_path / "-".join(sets), *sets), simulated=True))
        assert sum(x * 128 != round(x * 128) for x in found) >= len(found) - 1
    own = ("precision.param=bfloat16", "loss=tests.command.test_train:half")
    found = start(demo(tmp_path / "own", *own), simulated=True).losses
    assert len(found) == 6


def half(apply: Any, params: Any, batch: Any) -> Any:
    return apply(params, *batch).to(torch.bfloat16)


EVAL = (
    'eval={"every" = 2, "batch" = 4, "dataset" = {"make" = "tests.command.test_train:few", '
    '"name" = "topics", "ctx" = 16}}'
)


def few(name: str, ctx: int, count: int = 7) -> list[Any]:
    """The first rows of a corpus."""
    rows: Any = windows(name, ctx)
    return [rows[i] for i in range(count)]


@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_is_the_mean_over_labels_and_changes_no_step(stage: int, tmp_path: Path) -> None:
    sets = (f"optimizer.zero.stage={stage}", 'mesh={"data" = 2, "x" = 1, "y" = 2}', "log.every=1")
    rows = 'dataset={"make" = "tests.command.test_train:few", "name" = "topics", "ctx" = 16}'
    judged = start(
        demo(tmp_path / "a", *sets, f"eval.{rows}", "eval.every=2", "eval.batch=4"), simulated=True
    )
    plain = start(demo(tmp_path / "b", *sets), simulated=True)
    assert losses(judged) == losses(plain) and list(judged.evaluations) == [2, 4, 6]
    params = sl.load(judged.path)["params"]
    module = module_of(read(DEMO, SMALL)).module
    module.load_state_dict(params, strict=False)
    module.eval()
    ids, labels = (torch.stack(list(x)) for x in zip(*few("topics", 16), strict=True))
    with torch.no_grad():
        want = module(ids, labels).item()
    assert abs(judged.evaluations[6] - want) < 1e-4


RECORDS: list[dict[str, Any]] = []


def test_records_go_to_any_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RECORDS.clear()
    sets = ("log.to=tests.command.test_train:heard", "eval.every=3", EVAL)
    start(demo(tmp_path, *sets, "eval.every=3"), simulated=True)
    assert [r["step"] for r in RECORDS if "loss" in r] == [1, 2, 4, 6]
    assert [r["step"] for r in RECORDS if "eval_loss" in r] == [3, 6]
    assert "eval loss" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"\[log\] to: 'tests.command.test_train' has no 'herd'"):
        check(demo(tmp_path, "log.to=tests.command.test_train:herd"))


def heard(row: dict[str, Any]) -> None:
    RECORDS.append(row)


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("eval.every=2",), r"\[eval\]: rows come from one of the tables \[eval.text\]"),
        (("eval.evry=2",), r"\[eval\] evry: unknown key; did you mean 'every'"),
        ((EVAL, "eval.every=-1"), "every=-1: 0 or more"),
        (("export.path=",), 'path="": write a directory'),
        (("export.path=a", "export.tokenizer=b"), "b is no directory of a tokenizer"),
        (
            ("export.path=HERE/note",),
            r"\[export\] path: .* would not be replaced: it is no directory",
        ),
        (("export.path=HERE",), "would not be replaced: it holds 'note', which no"),
        (("export.path=HERE/a", "checkpoint.path=HERE/a/b"), r"\[checkpoint\] path lies in it"),
        (("export.path=HERE/a", "log.jsonl=HERE/a/l"), r"\[log\] jsonl lies in it"),
        (("checkpoint.path=HERE/note",), r"\[checkpoint\] path: .* is no directory"),
        (("log.jsonl=HERE",), r"\[log\] jsonl: .* is a directory: write a file"),
    ],
)
def test_what_cannot_be_evaluated_or_exported_is_refused(
    sets: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """Before a process starts, since a run may take days until it writes."""
    (tmp_path / "note").write_text("mine")
    with pytest.raises(ConfigError, match=said):
        check(demo(tmp_path, *(s.replace("HERE", str(tmp_path)) for s in sets)))


def test_more_batches_for_an_update_than_there_are_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"accumulate: 100000000000000000000 batches of an update"
    ):
        start(demo(tmp_path, "accumulate=100000000000000000000"), simulated=True)


def test_an_end_says_from_where_the_same_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = (*SMALL, f"checkpoint.path={tmp_path}", "log.every=1", "checkpoint.wait=true")
    given = [x for s in sets for x in ("--set", s)]
    for at, said in ((1, "begins anew: nothing was saved yet"), (5, "goes on from ")):
        stop = ["--set", "log.to=tests.command.test_train:stop"]
        STOP[0] = at
        assert main(["train", str(DEMO), "--simulate", *given, *stop]) == 130
        told = capsys.readouterr()
        assert f"interrupted; the same command {said}" in told.err
        assert "every 3 steps in" in told.out and "the same command goes on" in told.out
    assert str(tmp_path / "step_00000003") in told.err
    assert main(["train", str(DEMO), "--simulate", *given]) == 0
    assert "goes on from step 3" in capsys.readouterr().out


STOP = [0]


def stop(row: dict[str, Any]) -> None:
    if row["step"] == STOP[0]:
        raise KeyboardInterrupt


def test_a_run_that_was_done_does_nothing_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(demo(tmp_path, "steps=1"), simulated=True)
    assert start(demo(tmp_path, "steps=1"), simulated=True).losses == {}
    assert "nothing is left to do" in capsys.readouterr().out


def test_a_call_is_the_file(whole: list[float], tmp_path: Path) -> None:
    tables = demo(tmp_path).tables
    alone = {k: v for k, v in tables.items() if k not in ("mesh", "layout", "checkpoint")}
    alone["optimizer"] = {k: v for k, v in tables["optimizer"].items() if k != "zero"}
    import torch.distributed as dist

    report = train(**alone, mesh={"data": 1, "device": "cpu"}, layout={"rules": [["*", "..."]]})
    assert not dist.is_initialized()
    assert close(losses(report), whole)


def test_figures_go_to_a_file_that_a_resumed_run_continues(tmp_path: Path) -> None:
    lines = tmp_path / "log.jsonl"
    more = (f"log.jsonl={lines}", "log.flops=1e9", "log.every=1")
    start(demo(tmp_path / "c", "steps=4", *more), simulated=True)
    start(demo(tmp_path / "c", "steps=6", *more), simulated=True)
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert all(0 < r["mfu"] < 1 and r["bytes"] > 0 and r["tokens_per_second"] > 0 for r in rows)


def test_a_loss_that_is_no_number_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [x for s in SMALL for x in ("--set", s)]
    sets = [
        "--set",
        f"checkpoint.path={tmp_path}",
        "--set",
        "loss=tests.command.test_train:nothing",
    ]
    assert main(["train", str(DEMO), "--simulate", *given, *sets]) == 1
    assert " is nan" in capsys.readouterr().err


def nothing(apply: Any, params: Any, batch: Any) -> Any:
    return apply(params, *batch) * float("nan")


def launched(command: str, tmp_path: Path, *sets: str) -> "subprocess.Popen[str]":
    given = [x for s in (*SMALL, f"checkpoint.path={tmp_path}", *sets) for x in ("--set", s)]
    where = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *command.split(), "train", str(DEMO), "--json", *given],
        cwd=tmp_path, env=where, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def test_killed_under_torchrun_it_resumes(tmp_path: Path) -> None:
    """Every process is killed outright in the middle; the same command then ends the run."""
    axes = ('mesh={"data" = 2, "x" = 1, "y" = 1}', "log.every=1", "checkpoint.every=1")
    axes += ("checkpoint.wait=true",)
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 -m shardlib"
    running = launched(command, tmp_path, *axes, "steps=100000")
    try:
        # a later one will do: old ones are deleted
        assert _until(lambda: any(int(p.name[5:]) >= 4 for p in _steps(tmp_path)), running)
    finally:
        for pid in (running.pid, *children(running.pid)):
            os.kill(pid, signal.SIGKILL)
        running.communicate()
    last = max(int(p.name[5:]) for p in _steps(tmp_path))
    axes = ('mesh={"data" = -1, "x" = 1, "y" = 1}', *axes[1:])  # as many as there are
    done = launched(command, tmp_path, *axes, f"steps={last + 2}")
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0, err
    report = json.loads(out.splitlines()[-1])["done"]
    assert report["first"] in (last - 1, last) and report["step"] == last + 2
    sets = ('mesh={"data" = 1, "x" = 1, "y" = 1}', f"steps={last + 2}")
    whole = start(demo(tmp_path / "whole", *sets), simulated=True)
    assert close([x for _, x in report["losses"]], losses(whole)[report["first"] :])


def test_a_rank_that_is_lost_has_a_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise sl.errors.RankFailed("rank 1 was killed by SIGKILL", op="psum")

    monkeypatch.setattr("shardlib.command.train.launch", lost)
    monkeypatch.setattr("shardlib.command.train.rehearse", lambda config: None)
    assert main(["train", str(DEMO), "--set", f"checkpoint.path={tmp_path}"]) == 3
    assert "psum: rank 1 was killed by SIGKILL" in capsys.readouterr().err


def test_local_processes_take_gpus_where_there_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of a pretended machine, which has so many."""
    asked = []
    monkeypatch.setattr("shardlib.command.train.accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr("shardlib.command.train.rehearse", lambda config: None)
    monkeypatch.setattr(
        "shardlib.command.train.launch", lambda *_, device, **__: [asked.append(device)]
    )
    for count in (1, 2):
        monkeypatch.setattr(torch.accelerator, "device_count", lambda count=count: count)
        start(demo(tmp_path, 'mesh={"data" = 2, "x" = 1, "y" = 1}'))
    assert asked == ["cpu", "cuda"]


def children(pid: int) -> list[int]:
    """The ranks: torchrun starts each in a session of its own."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            after = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(after[1]) == pid:
            found.append(int(file.parent.name))
    return found


def _steps(folder: Path) -> list[Path]:
    return list(folder.glob("step_*"))


def _until(done: Callable[[], bool], running: "subprocess.Popen[str]") -> bool:
    end = time.monotonic() + 120
    while time.monotonic() < end and running.poll() is None:
        if done():
            return True
        time.sleep(0.05)
    return False


def test_local_processes_are_not_started_for_what_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [x for s in (*SMALL, f"checkpoint.path={tmp_path}") for x in ("--set", s)]
    for wrong, said in (
        ("data.batch=7", "[data] batch: dimension 0 of size 7 does not divide"),
        ("mesh.x=64", "256 ranks are more than one machine is given (64)"),
        ('remat={"hh.*" = "full"}', "hh.*"),
        ('layout={"rules" = [["*.weight", "x . y"], ["*", "..."]]}', "[layout]"),
    ):
        assert main(["train", str(DEMO), *given, "--set", wrong]) == 2
        told = capsys.readouterr()
        assert said in told.err and "starting" not in told.out, told.err


def test_local_processes_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], forked: None
) -> None:
    axes = 'mesh={"data" = 2, "x" = 1, "y" = 1}'
    given = [x for s in (*SMALL, f"checkpoint.path={tmp_path}", axes) for x in ("--set", s)]
    assert main(["train", str(DEMO), *given]) == 0
    assert "starting 2 local processes" in capsys.readouterr().out
    resumed = start(demo(tmp_path, "steps=7"), simulated=True)  # which it finds
    whole = start(demo(tmp_path / "whole", "steps=7"), simulated=True)
    assert resumed.first == 6 and close(losses(resumed), losses(whole)[6:])


STAGED = (
    'mesh={"data" = 2, "pipe" = 2}',
    "model.layers=2",
    'layout={"recipe" = "ddp"}',
    "steps=3",
    'optimizer={"name" = "sgd", "lr" = 0.1}',
    "checkpoint.every=1",
)


def test_stages_of_a_file_train_as_one_process_does(tmp_path: Path) -> None:
    one = start(demo(tmp_path / "one", *STAGED, "mesh.pipe=1", "mesh.data=1"), simulated=True)
    how = ('stages={"axis" = "pipe", "schedule" = "zb"}', "microbatches=2")
    two = start(demo(tmp_path / "two", *STAGED, *how, 'eval={"every" = 3}', EVAL), simulated=True)
    assert close(losses(one), losses(two))
    assert two.evaluations[3] > 0


def test_stages_of_a_file_keep_to_a_memory_by_its_data(tmp_path: Path) -> None:
    """The error has the least memory of a cut, with which the same file is cut."""
    sets = *STAGED, "model.layers=4", "microbatches=2", 'stages={"axis" = "pipe", "memory" = 1}'
    with pytest.raises(ConfigError) as e:
        start(demo(tmp_path, *sets), simulated=True)
    assert "[stages]: every cut holds more than 1 B" in str(e.value)
    (least,) = re.findall(r"the least is ([\d,]+) B", str(e.value))
    enough = f"stages.memory={least.replace(',', '')}"
    assert start(demo(tmp_path, *sets, enough), simulated=True).step == 3


EVAL = 'eval.text={"path" = "README.md", "context" = 16}'


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (['stages={"axis" = "pip"}'], "[stages]: unknown axis 'pip'"),
        (['stages={"axis" = "pipe", "schedule" = "1f1"}'], "[stages]: unknown schedule '1f1'"),
        (
            ['stages={"axis" = "pipe", "cuts" = 2}'],
            "[stages] cuts: unknown key; did you mean 'cut'",
        ),
        (['stages={"axis" = "pipe", "per_rank" = "2"}'], "[stages] per_rank: must be"),
        (["microbatches=0"], "microbatches: 1 at least"),
    ],
)
def test_errors_of_stages_name_their_table(tmp_path: Path, sets: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as e:
        config = demo(tmp_path, *STAGED, *sets)
        check(config)
        start(config, simulated=True)
    assert said in str(e.value)


TIERS = (
    'mesh={"data" = 2, "x" = 1, "y" = 1}',
    'layout={"recipe" = "ddp"}',
    'optimizer.zero={"axis" = "data", "stage" = 3}',
)


def test_a_file_with_tiers_trains_as_one_in_memory(tmp_path: Path) -> None:
    """To the bit, and goes on from its checkpoint."""
    want = start(demo(tmp_path / "a", *TIERS), simulated=True)
    how = 'tiers={"device" = "200KB", "host" = "1MB", "depth" = 1}'
    start(demo(tmp_path / "b", *TIERS, how, "steps=3"), simulated=True)
    found = start(demo(tmp_path / "b", *TIERS, how), simulated=True)
    assert found.first == 3 and losses(found) == losses(want)[3:]
    said = explain_run(demo(tmp_path, *TIERS, how)).tiers
    assert said is not None and said.host["state"] == 2 * said.host["parameters"]


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (['tiers={"devise" = "1MB"}'], "[tiers] devise: unknown key; did you mean 'device'"),
        (['tiers={"device" = true}'], "[tiers] device: must be a number or text, not true"),
        (['tiers={"depth" = -1}'], "[tiers] depth: depth=-1 is no number of uses"),
        (['tiers={"device" = "8 bananas"}'], "[tiers] device: device='8 bananas' is no"),
        (['tiers={"update" = "disk"}'], "[tiers] update: must be"),
        (["tiers={}", "optimizer.zero.stage=2"], "[tiers]: blocks are loaded as stage 3"),
        (['tiers={"device" = 1}'], "[tiers]: the largest block needs"),
    ],
)
def test_errors_of_tiers_name_their_table(tmp_path: Path, sets: list[str], said: str) -> None:
    with pytest.raises((ConfigError, ShardError)) as e:
        config = demo(tmp_path, *TIERS, *sets)
        check(config)
        start(config, simulated=True)
    assert said in str(e.value)
