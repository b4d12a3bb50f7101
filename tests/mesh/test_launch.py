"""``sl.launch``: results by rank, and what is said where a rank fails."""

import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.errors import MeshError, NoMesh, RankFailed
from shardlib.mesh.launch import _refuse_failed

MODULE = sys.modules["shardlib.mesh.launch"]  # sl.mesh.launch is the function


def test_launch_raises_the_first_error(forked: None) -> None:
    with pytest.raises(sl.ShardError, match=r"rank 1 failed[\s\S]*ZeroDivisionError") as caught:
        sl.launch(_fails_on_one, x=2, timeout=60)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def _rank_of(base: int) -> int:
    return base + sl.axis_index("x")


def _fails_on_one() -> float:
    if sl.axis_index("x") == 1:
        return 1 / 0
    return float(sl.psum(torch.ones(1), "x"))


def _everywhere(scale: float) -> Any:
    mesh = sl.current_mesh()
    rank = sl.axis_index(mesh.names)
    return (
        rank,
        mesh.coord,
        scale * sl.psum(torch.tensor(float(rank)), mesh.names),
        torch.get_num_threads(),
    )


def test_launch_returns_results_by_rank(forked: None) -> None:
    got = sl.launch(_everywhere, 0.5, a=2, b=1, c=2, timeout=120)
    assert [rank for rank, *_ in got] == list(range(4))
    assert [c["a"] * 2 + c["b"] * 2 + c["c"] for _, c, *_ in got] == list(range(4))
    assert all(total == 0.5 * math.comb(4, 2) for *_, total, _ in got)
    assert all(threads == max(1, (os.cpu_count() or 1) // 4) for *_, threads in got)
    with pytest.raises(NoMesh):
        sl.current_mesh()


class Odd(Exception):
    """Pickles, and cannot be read back."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def _fails(how: str) -> None:
    if sl.axis_index("x") == 1:
        if how == "odd":
            raise Odd(1, 2)
        if how == "killed":
            os.kill(os.getpid(), 9)
    if how == "late":
        time.sleep(600)
    sl.psum(torch.ones(1), "x")  # would wait for rank 1


def test_launch_tells_an_error_that_cannot_be_read_back(forked: None) -> None:
    with pytest.raises(sl.ShardError, match=r"rank 1 failed(.|\n)*Odd: 1 and 2"):
        sl.launch(_fails, "odd", x=2, timeout=120)


def test_launch_notices_a_rank_that_died(forked: None) -> None:
    with pytest.raises(sl.ShardError, match="rank 1 was ended by SIGKILL"):
        sl.launch(_fails, "killed", x=2, timeout=120)


def test_a_rank_that_gloo_aborts_is_not_blamed_and_a_killed_one_is(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 was ended by SIGABRT: gloo ends") as aborted:
        _refuse_failed(tmp_path, [None, -6, 1], {"x": 3}, None)
    assert "check" in str(aborted.value.fix)
    with pytest.raises(RankFailed, match="rank 2 was ended by SIGKILL"):
        _refuse_failed(tmp_path, [-6, None, -9], {"x": 3}, None)


def test_launch_times_silence_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "_SLACK", 2.0)  # of this process: 6 seconds in all
    before = time.monotonic()
    with pytest.raises(RankFailed, match="no rank did anything") as caught:
        sl.launch(_fails, "late", x=2, timeout=4)
    assert (
        time.monotonic() - before < 300
    )  # processes start slowly on a busy machine; the sleep is 600
    assert "test_launch.py" in caught.value.operands["rank 1"]  # where it sleeps
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    if children.exists():  # Linux
        names = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children.read_text().split()]
        assert not [n for n in names if "spawn_main" in n]


def _steps(seconds: float) -> tuple[float, list[str]]:
    until, total = time.monotonic() + seconds, torch.zeros(1)
    while sl.pmax(torch.tensor(float(time.monotonic() < until)), "x"):
        total = sl.psum(torch.ones(1), "x")
        time.sleep(0.2)
    sl.psum(torch.ones(1 << 16), "x")
    return float(total), _listening()


def _listening() -> list[str]:
    """The addresses on which this process listens."""
    found = []
    for table in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")):
        lines = (
            [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []
        )
        inodes = {line[9]: line[1] for line in lines if line[3] == "0A"}
        for fd in Path("/proc/self/fd").iterdir() if lines else ():
            with contextlib.suppress(OSError):
                inode = os.readlink(fd).removeprefix("socket:[").removesuffix("]")
                found += [inodes[inode]] if inode in inodes else []
    return found


def test_a_run_that_works_takes_its_time_and_listens_on_the_loopback_alone(
    forked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "_SLACK", 0.0)
    for total, addresses in sl.launch(
        _steps, 7.0, x=2, timeout=6
    ):  # the run is longer, no silence is
        assert total == 2.0
        assert addresses or not Path("/proc/net/tcp").exists()
        assert all(a.split(":")[0].endswith(("0100007F", "01000000")) for a in addresses)


def _leaves(how: str) -> None:
    sl.psum(torch.ones(1), "x")
    if sl.axis_index("x") == 1:
        if how == "exit":
            sys.exit(0)
        if how == "at once":
            os._exit(0)
    sl.psum(torch.ones(1), "x")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", r"rank 1 failed:\nit left by SystemExit\(0\), at test_launch.py"),
        ("at once", "rank 1 left with exit code 0 before its function returned"),
    ],
)
def test_launch_names_the_rank_that_left(how: str, said: str, forked: None) -> None:
    with pytest.raises(sl.ShardError, match=said):
        sl.launch(_leaves, how, x=2, timeout=20)


UNGUARDED = """
import torch, shardlib as sl
def f():
    return float(sl.psum(torch.ones(1), "x"))
sl.launch(f, x=2)
"""


def test_launch_says_that_the_guard_is_missing(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1
    assert 'the call stands outside `if __name__ == "__main__":`' in done.stderr[-600:]


def test_launch_refuses_what_cannot_travel() -> None:
    with pytest.raises(sl.ShardError, match="pickled") as caught:
        sl.launch(lambda: 1, x=2)
    assert "module" in caught.value.fix
    with pytest.raises(MeshError, match="positive integers"):
        sl.launch(_rank_of, 10, x=0)
