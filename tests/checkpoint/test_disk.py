"""What is written behind is what was given, and a disk that fails is told."""

import errno
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from shardlib.checkpoint import folder
from shardlib.checkpoint.folder import Behind

BLOCK, PIECE = 1 << 12, 1 << 20
SIZES = [0, 1, BLOCK, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 12345]


def written(path: Path, data: bytes) -> None:
    """In pieces of drawn lengths, from the second block on."""
    fd, rng = os.open(path, os.O_RDWR | os.O_CREAT), random.Random(len(data))
    try:
        with Behind(fd, BLOCK) as behind:
            at = 0
            while at < len(data):
                n = rng.choice([1, 100, 70_000, 2 * PIECE])
                behind.put(memoryview(data)[at : at + n])
                at += n
        os.pwrite(fd, b"h" * BLOCK, 0)
    finally:
        os.close(fd)


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_file_holds_what_was_put(
    tmp_path: Path, size: int, spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_spare", lambda: spare)
    monkeypatch.setattr(folder, "_FLUSH", 2 * PIECE)
    monkeypatch.setattr(folder, "_EARLY", PIECE)
    data = random.Random(size).randbytes(size)
    written(tmp_path / "f", data)
    assert (tmp_path / "f").read_bytes() == b"h" * BLOCK + data
    assert "shardlib write" not in {t.name for t in threading.enumerate()}


def test_a_second_thread_runs_where_each_process_has_a_core_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert folder._spare()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert not folder._spare()


def test_where_no_thread_starts_it_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    data = random.Random(0).randbytes(2 * PIECE + 5)
    written(tmp_path / "f", data)
    assert (tmp_path / "f").read_bytes()[BLOCK:] == data


@pytest.mark.parametrize("which", range(4))
def test_a_disk_that_is_full_is_told_and_the_thread_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    inner, calls = os.pwrite, []

    def pwrite(fd: int, data: Any, at: int) -> int:
        calls.append(at)
        if len(calls) > which:
            raise OSError(errno.ENOSPC, "No space left on device")
        return inner(fd, data[: len(data) // 2 or 1], at)  # short ones too

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left"):
        written(tmp_path / "f", bytes(4 * PIECE + 3))
    assert "shardlib write" not in {t.name for t in threading.enumerate()}


def test_the_caller_is_ahead_by_one_stretch_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_spare", lambda: True)
    inner, go = os.pwrite, threading.Event()
    monkeypatch.setattr(os, "pwrite", lambda *args: go.wait(10) and inner(*args))
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    with Behind(fd, 0) as behind:
        behind.put(memoryview(bytes(PIECE)))  # returns at once
        second = threading.Thread(target=behind.put, args=(memoryview(bytes(PIECE)),))
        second.start()
        second.join(0.2)
        assert second.is_alive(), "it waits for the first"
        go.set()
        second.join()
    assert os.fstat(fd).st_size == 2 * PIECE
    os.close(fd)


def test_one_thread_writes_all_pieces_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_spare", lambda: True)
    inner, writers = os.pwrite, []

    def pwrite(fd: int, data: Any, at: int) -> int:
        writers.append(threading.current_thread())
        return inner(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with open(tmp_path / "f", "wb") as f, Behind(f.fileno(), 0) as behind:
        for _ in range(8):
            behind.put(memoryview(bytes(PIECE)))
    assert len(writers) == 8 and len(set(writers)) == 1


def test_a_disk_that_takes_nothing_ends_the_save_and_reaches_no_later_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_spare", lambda: True)
    goes_on, inner = threading.Event(), os.pwrite

    def pwrite(fd: int, data: Any, at: int) -> int:
        if threading.current_thread().name == "shardlib write":
            goes_on.wait(20.0)
        return inner(fd, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    data = memoryview(bytes(1 << 20))
    with pytest.raises(OSError, match="the disk took nothing for"), Behind(fd, 0, 0.1) as behind:
        behind.put(data)
        thread = behind.thread
        behind.put(data)
    os.close(fd)
    later = os.open(tmp_path / "later", os.O_RDWR | os.O_CREAT)
    goes_on.set()
    assert thread is not None
    thread.join(20.0)
    assert os.fstat(later).st_size == 0 and not thread.is_alive()
    os.close(later)
