"""``sl.launch``: results by rank, and what is said where a rank fails."""

import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.errors import MeshError, NoMesh


def test_launch_returns_by_rank_and_raises_the_first_error() -> None:
    assert sl.launch(_rank_of, 10, x=2) == [10, 11]
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


def test_launch_returns_results_by_rank() -> None:
    got = sl.launch(_everywhere, 0.5, a=2, b=2, c=2, timeout=120)
    assert [rank for rank, *_ in got] == list(range(8))
    assert [c["a"] * 4 + c["b"] * 2 + c["c"] for _, c, *_ in got] == list(range(8))
    assert all(total == 0.5 * math.comb(8, 2) for *_, total, _ in got)
    assert all(threads == max(1, (os.cpu_count() or 1) // 8) for *_, threads in got)
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


def test_launch_tells_an_error_that_cannot_be_read_back() -> None:
    with pytest.raises(sl.ShardError, match=r"rank 1 failed(.|\n)*Odd: 1 and 2"):
        sl.launch(_fails, "odd", x=2, timeout=120)


def test_launch_notices_a_rank_that_died() -> None:
    with pytest.raises(sl.ShardError, match="rank 1 was ended by SIGKILL"):
        sl.launch(_fails, "killed", x=2, timeout=120)


def test_launch_gives_up_in_time_and_leaves_no_process() -> None:
    before = time.monotonic()
    with pytest.raises(sl.ShardError, match="no result after 8 s") as caught:
        sl.launch(_fails, "late", x=2, timeout=8)
    assert time.monotonic() - before < 30
    assert caught.value.fix
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    if children.exists():  # Linux
        names = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children.read_text().split()]
        assert not [n for n in names if "spawn_main" in n]


def test_launch_refuses_what_cannot_travel() -> None:
    with pytest.raises(sl.ShardError, match="pickled") as caught:
        sl.launch(lambda: 1, x=2)
    assert "module" in caught.value.fix
    with pytest.raises(MeshError, match="positive integers"):
        sl.launch(_rank_of, 10, x=0)
