"""A directory appears whole or not at all, with an exchange of names and without."""

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from shardlib.checkpoint import folder
from shardlib.checkpoint.folder import Work, clean, opened, read_manifest
from shardlib.filesystem import locked


@pytest.fixture(params=[True, False], ids=["exchange", "aside"])
def swaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(folder, "exchange", lambda a, b: False)
    return request.param


def made(target: Path, says: int) -> Work:
    work = Work.make(str(target))
    about = {"format": folder.FORMAT, "id": work.id, "says": says, "files": []}
    folder.write_manifest(work.fd, about)
    return work


def says(target: Path) -> Any:
    fd = opened(str(target))
    try:
        return read_manifest(fd)["says"]
    finally:
        os.close(fd)


def written(target: Path, number: int) -> None:
    work = made(target, number)
    work.commit(True)
    work.close()


def test_the_new_one_takes_the_place_of_the_old(tmp_path: Path, swaps: bool) -> None:
    target = tmp_path / "c"
    for i in range(3):
        written(target, i)
        assert says(target) == i and os.listdir(tmp_path) == ["c"]


def test_who_gives_up_first_is_right(tmp_path: Path, swaps: bool) -> None:
    """A commit after somebody gave up fails; giving up after the commit finds it done."""
    target = tmp_path / "c"
    written(target, 0)
    work = made(target, 1)
    assert not work.committed()
    with pytest.raises(OSError):
        work.commit(True)
    assert not work.committed() and says(target) == 0
    work.close()
    again = made(target, 2)
    again.commit(True)
    assert again.committed() and says(target) == 2
    again.close()
    assert os.listdir(tmp_path) == ["c"]


def test_a_crash_between_two_renames_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "exchange", lambda a, b: False)
    target, rename, calls = tmp_path / "c", os.rename, []

    def dies(a: str, b: str) -> None:
        calls.append((a, b))
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(a, b)

    written(target, 0)
    work = made(target, 1)
    monkeypatch.setattr(os, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        work.commit(True)
    monkeypatch.setattr(os, "rename", rename)
    assert not target.exists() and says(target) == 0  # it stands aside, and is found
    work.close()
    clean(str(tmp_path), "c")
    assert os.listdir(tmp_path) == ["c"] and says(target) == 0


def test_leftovers_go_and_what_is_in_use_stays(tmp_path: Path) -> None:
    target = tmp_path / "c"
    left, used = made(target, 0), made(target, 1)
    left.close()
    (tmp_path / ".c.tmp-notours").mkdir()
    fresh = tmp_path / f".c.tmp-{'0' * 32}"
    fresh.mkdir()  # without a lock: half made or half removed
    old = tmp_path / f".c.gone-{'1' * 32}"
    old.mkdir()
    other = made(tmp_path / "cc", 2)
    other.close()
    with locked(str(tmp_path), fcntl.LOCK_SH):  # somebody is making one just now
        assert clean(str(tmp_path), "c") == [old.name]
    assert sorted(clean(str(tmp_path), "c")) == sorted([f".c.tmp-{left.id}", fresh.name])
    assert used.path in map(str, tmp_path.iterdir())
    used.close()


def test_a_manifest_that_was_touched_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "c"
    written(target, 0)
    path = target / folder.MANIFEST
    for text in ("", "{}", "[1]\n", path.read_text().replace("says", "sais")):
        path.write_text(text)
        with pytest.raises(ValueError, match="damaged"):
            says(target)


def test_a_lock_that_another_save_never_lets_go_ends_a_save(tmp_path: Path) -> None:
    with (
        locked(str(tmp_path), fcntl.LOCK_EX),
        pytest.raises(OSError, match=r"another process held the lock of the directory for 0\.1 s"),
    ):
        Work.make(str(tmp_path / "c"), seconds=0.1)
    assert os.listdir(tmp_path) == []
