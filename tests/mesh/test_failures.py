"""A rank that fails is named by every other rank, with what it was about."""

import errno
import json
import os
import pickle
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.mesh import failures
from shardlib.mesh.failures import _ranges, spelled
from tests import faults
from tests.restarts import steps
from tests.torchrun import ROOT, torchrun


@pytest.mark.parametrize(
    ("fault", "who"), [("raise", 1), ("killed", 3), ("exit", 0), ("asleep", 2)]
)
def test_every_rank_says_who_failed_first(
    fault: str, who: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDLIB_TRACES", str(tmp_path))
    told = faults.play(fault, who, 1, check=False)
    assert faults.wrong(fault, who, told, check=False) == []
    others = [t.text for r, t in enumerate(told) if r != who]
    assert all("waits in psum over" in text and "at faults.py:" in text for text in others)
    written = sorted(tmp_path.glob("rank_*.json"))
    assert len(written) >= 3
    for path in written:
        found = json.loads(path.read_text())
        assert found["world"] == 4 and 0 < len(found["operations"]) <= 200
        assert found["operations"][-1][1] == "psum"


def test_last_operations_are_not_written_over_what_another_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rank_0.json"
    for text, kept in (("mine", True), ('{"rank": 0, "world": 2}', False)):
        file.write_text(text)
        job: Any = SimpleNamespace(wrote=False, rank=0, world=1, folder=tmp_path)
        failures.JobProcesses.write(job)
        assert (file.read_text() == text) is kept
    assert "did not write it" in capsys.readouterr().err


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_without_the_store_the_first_rank_that_looks_says_why(
    order: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 ends soon after the store: later ranks find its process gone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    alive = SimpleNamespace(state=lambda: "runs")
    gone = SimpleNamespace(state=lambda: "gone")
    for name, states, said in (
        ("closed", (None, alive, gone), "the store of the job is gone"),
        ("killed", (gone, gone, gone), "rank 0 died: its process is gone"),
    ):
        jobs: dict[int, Any] = {
            r: SimpleNamespace(first="", rank=r, name=f"{name}{order}", _known={0: state})
            for r, state in enumerate(states)
            if r or name == "closed"
        }
        told = [failures.JobProcesses._without_store(jobs[r]) for r in order if r in jobs]
        assert len(set(told)) == 1
        assert (name == "closed" and order[0] == 2) or told[0].startswith(said)
        assert len(list(tmp_path.glob(f"shardlib-{name}{order}/*"))) == 1


def test_a_rank_whose_transfer_failed_is_not_said_to_be_elsewhere() -> None:
    """The watching thread answered the roll while the main thread reported its own transfer."""
    answers: list[Any] = []

    def put(key: str, value: Any) -> None:
        if key == "at/0":
            if not answers:
                answers.append(None)
                failures.JobProcesses._answer(job)
            answers.append(value)

    job: Any = SimpleNamespace(
        rank=0, calls=[], members={}, _waits={}, _main=threading.main_thread(), first="a cause",
        _set=put, _has=lambda key: False, _first=lambda: "a cause", write=lambda: None,
        _error=lambda *_: None, fail=lambda: None, call_roll=lambda: None,
    )  # fmt: skip
    failures.JobProcesses.lost(job, None, "psum over 'x'", [0, 1])
    assert answers == [None, *[["waits", "psum over 'x'", [0, 1]]] * 2]


def test_a_rank_that_gloo_aborts_is_not_blamed() -> None:
    told = faults.play("long", 1, 1, check=False)
    ended = [r for r, t in enumerate(told) if t.kind == "gone"]
    assert len(ended) == 1 and ended != [1]
    assert faults.wrong("long", 1, told, check=False) == []
    for r in {0, 1, 2, 3} - set(ended):
        assert f"rank {ended[0]} was ended by SIGABRT" in told[r].text
        assert "fault is often of another rank" in told[r].text


def test_a_job_that_ends_well_says_nothing() -> None:
    told = faults.play("reordered", 5, 9, check=False)  # nobody is rank 5
    assert [t.kind for t in told] == ["ok"] * 4
    assert len({t.text for t in told}) == 1


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([0], "rank 0"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([1, 3, 4], "ranks 1, 3-4")],
)
def test_ranks_are_named_in_runs(ranks: list[int], text: str) -> None:
    assert _ranges(ranks) == text


def test_an_operation_is_spelled_with_its_line() -> None:
    entry: Any = (3, "all_gather", ("x", "y"), torch.Size([2]), torch.int64, "train.py:7")
    assert spelled(entry) == "all_gather over ('x', 'y') of int64[2], operation 3, at train.py:7"


def test_a_process_forked_from_a_rank_is_none(pool: Any) -> None:
    for said, came in pool.run(_forks, x=2, y=2):
        assert said == ["MeshError"] * 4
        assert "forked from a rank sent it a sharded tensor" in came


def _forks() -> tuple[list[str], str]:
    """What a worker of a DataLoader meets that shards, and one that hands on what is sharded."""
    mine = sl.shard(torch.ones(4), "x")
    reads, writes = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads
        child = os.fork()
    if not child:
        said = []
        calls = [
            lambda: sl.shard(torch.ones(4), "x"),
            lambda: sl.psum(torch.ones(4), "x"),
            lambda: mine * 2 + sl.unshard(mine),
            lambda: sl.reshard(mine, "y"),
        ]
        for call in calls:
            try:
                call()
            except Exception as e:
                said.append(type(e).__name__)
        os.write(writes, pickle.dumps((said, pickle.dumps(mine))))
        os._exit(0)
    os.waitpid(child, 0)
    said, sent = pickle.loads(os.read(reads, 1 << 16))
    try:
        pickle.loads(sent)
    except sl.ShardError as e:
        came = str(e)
    assert sl.psum(torch.ones(1), "x").item() == 2.0  # the rank itself goes on
    return said, came


def _uninterrupted() -> float:
    w = torch.arange(16.0)
    for _ in range(20):
        w = w * 0.9 + 0.2 * w.mean().item()
    return w.sum().item()


def test_a_job_goes_on_from_the_newest_checkpoint_that_verifies(tmp_path: Path) -> None:
    """After torchrun's restart, and then on fewer ranks, where the newest is damaged."""
    options, env = "--standalone --max-restarts 1", {"GLOO_SOCKET_IFNAME": "lo"}
    program = ROOT / "tests" / "restarts.py", str(tmp_path)
    printed, errors = torchrun(2, *program, options=options, env=env)
    ended = [text.split()[1:] for text in printed if text.startswith("ended")]
    assert [begun for begun, _ in ended] == ["8"] * 2, errors[-2000:]
    assert [float(w) for _, w in ended] == pytest.approx([_uninterrupted()] * 2, rel=1e-6)
    path = tmp_path / "step_00000020" / "rank_00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    said = "step_00000020 is passed over: rank_00001.safetensors is damaged"
    with sl.simulate(x=1), pytest.warns(UserWarning, match=said):
        begun, w = steps(str(tmp_path))
    assert begun == 19 and w == pytest.approx(_uninterrupted(), rel=1e-6)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.EACCES])
def test_a_file_that_cannot_be_opened_is_not_the_end_of_a_process(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = failures._Process.own()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    theirs = failures._Process(mine.host, ended.pid, failures._stat(ended.pid)[1])
    ended.wait()

    def refused(*_: Any, **__: Any) -> str:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "read_text", refused)
    monkeypatch.setattr(failures, "_host", lambda: mine.host)
    assert mine.state() == "runs" and theirs.state() == "gone"


@pytest.mark.parametrize(
    ("fault", "place", "who", "check"),
    [
        ("killed", "in draw", 3, False),
        ("seeds", "after draw", 1, False),
        ("killed", "before mesh", 2, False),
        ("raise", "in save", 0, True),
        ("killed", "in async", 2, False),
        ("store", "before check", 1, False),
        ("terminated", "in check", 0, True),
    ],
)
def test_all_ranks_end_with_one_first_cause(
    fault: str, place: str, who: int, check: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few of those that ``make faults`` draws."""
    monkeypatch.setenv("SHARDLIB_TRACES", str(tmp_path))
    told = faults.play(fault, who, place, check=check)
    assert faults.unlike(fault, who, place, told) == []
