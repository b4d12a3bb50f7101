"""One file for a notebook, ``python`` and ``torchrun``: its mesh, its number, what it prints."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardlib as sl
from shardlib.errors import MeshError
from tests.torchrun import ROOT, torchrun

JOB = """
import torch, shardlib as sl
with sl.auto_mesh(x=2, y=-1, device="cpu") as mesh:
    x = sl.shard(torch.arange(8.0), "x")
    total = sl.unshard(x).sum().item()
    assert mesh.kind == "stacked" or sl.make_mesh(x=2, y=1, device="cpu").sizes == mesh.sizes
    a = sl.shard(torch.eye(4), "x .") @ sl.shard(torch.ones(4, 4), ". .")
    assert sl.unshard(a).sum().item() == 16.0
    sl.rank0_print("kind", mesh.kind, mesh, "total", total)
    if sl.process_index() == 0:
        print("once")
    print("every")
"""


@pytest.mark.parametrize(("ranks", "kind"), [(0, "stacked x=2 y=1"), (2, "dist x=2 y=1")])
def test_one_file_runs_in_one_process_and_under_a_launcher(
    tmp_path: Path, ranks: int, kind: str
) -> None:
    (script := tmp_path / "job.py").write_text(JOB)
    if ranks:
        ranks_printed, errors = torchrun(ranks, script)
        printed = "".join(ranks_printed)
    else:
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        done = subprocess.run(
            [sys.executable, script], env={**env, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        printed, errors = done.stdout, done.stderr
    assert printed.count(f"kind {kind} total 28.0") == printed.count("once") == 1, errors
    assert printed.count("every") == max(1, ranks)


def test_real_ranks_have_their_numbers_and_print_once(pool: Any) -> None:
    assert pool.run(_said, x=2, y=2) == [
        (0, "a-1.0!", (2, 2)), (1, "", (2, 2)), (2, "", (2, 2)), (3, "", (2, 2)),
    ]  # fmt: skip


def _said() -> tuple[int, str, tuple[int, ...]]:
    out = io.StringIO()
    sl.rank0_print("a", 1.0, sep="-", end="!", file=out)
    return sl.process_index(), out.getvalue(), sl.auto_mesh(x=2, y=-1, device="cpu").sizes


HALF = [
    {"RANK": ""},
    {"RANK": "0"},
    {"WORLD_SIZE": "2"},
    {"RANK": "2", "WORLD_SIZE": "2"},
    {"RANK": "one", "WORLD_SIZE": "2"},
    {"RANK": "-1", "WORLD_SIZE": "2"},
    {"RANK": "0", "WORLD_SIZE": ""},
]


@pytest.mark.parametrize("env", HALF, ids=str)
def test_half_a_launchers_environment_is_refused(env: Any, monkeypatch: Any) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, text in env.items():
        monkeypatch.setenv(name, text)
    for call in (
        lambda: sl.auto_mesh(x=2),
        lambda: sl.make_mesh(x=1),
        sl.process_index,
        lambda: sl.rank0_print("x"),
        sl.planning.measured,
    ):
        with pytest.raises(MeshError, match="a launcher sets RANK and WORLD_SIZE, and here") as e:
            call()
        assert all(name in e.value.message for name in env) and "torchrun" in e.value.fix


def test_a_launcher_that_gives_no_rank_is_named(monkeypatch: Any) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(MeshError, match="srun started 4 processes"):
        sl.auto_mesh(x=4)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert sl.auto_mesh(x=4).kind == "stacked"


def test_a_rank_that_knows_no_meeting_place_is_refused(monkeypatch: Any) -> None:
    for name, text in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "here"}.items():
        monkeypatch.setenv(name, text)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(MeshError, match="MASTER_PORT is not set"):
        sl.auto_mesh(x=1)


MISTAKES = [
    (lambda: sl.auto_mesh(x=2, device="tpu"), "device='tpu' is none of .*: cpu"),
    (lambda: sl.make_mesh(x=1, device="tpu"), "device='tpu' is none of .*: cpu"),
    (lambda: sl.launch(sl.axis_index, "x", x=1, device="tpu"), "device='tpu' is none of .*: cpu"),
    (lambda: sl.auto_mesh(x=-1, y=-1), "only one axis can be inferred"),
    (lambda: sl.auto_mesh(), "no axis at all"),
    (lambda: sl.auto_mesh(2, 2), "axes are named"),
    (lambda: sl.auto_mesh(x=0), "positive integers"),
    (lambda: sl.auto_mesh(x=True), "positive integers"),
    (lambda: sl.auto_mesh(x=2, timeout=-1.0), "timeout=-1.0 is no time"),
]


@pytest.mark.parametrize(("call", "says"), MISTAKES, ids=[m[1] for m in MISTAKES])
def test_a_mistake_in_a_mesh_is_refused_with_the_line_to_write(call: Any, says: str) -> None:
    with pytest.raises(MeshError, match=says) as e:
        call()
    fn = 'sl.launch(sl.axis_index, "x"'
    fix = e.value.fix.replace("make_mesh", "auto_mesh").replace("sl.launch(fn, *args", fn)
    assert eval(fix, {"sl": sl})
