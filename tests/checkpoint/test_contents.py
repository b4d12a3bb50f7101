"""A directory is replaced or removed where nothing but a saver's own stands in it, else refused."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from shardlib import filesystem
from shardlib.checkpoint import folder
from shardlib.checkpoint.folder import occupied, remove, strangers
from shardlib.errors import CheckpointError
from tests.checkpoint.targets import TARGETS, Case, drawn, on_ranks, run


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_that_stands_at_a_target_is_lost(target: str) -> None:
    assert not run(Case("save", target, 3))


@pytest.mark.parametrize("case", drawn(12, seed=2), ids=str)
def test_no_writer_loses_what_stands_there(case: Case) -> None:
    assert not run(case)


def test_no_writer_on_real_ranks_loses_what_stands_there(pool: Any) -> None:
    for case, wrong in pool.run(on_ranks, drawn(16, seed=3), x=2, y=2)[0]:
        assert not wrong, case


def test_an_old_step_with_a_file_of_its_users_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        sl.save(run, {"a": step}, step=step)
    (run / "step_00000001" / "best.txt").write_text("mine")
    with pytest.warns(UserWarning, match=r"step_00000001 stays: 'best.txt'"):
        sl.save(run, {"a": 3}, step=3, keep=1)
    assert sorted(os.listdir(run)) == ["step_00000001", "step_00000003"]
    assert sl.load(run / "step_00000001") == {"a": 1}


def test_an_old_step_that_is_a_link_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"
    sl.save(run, {"a": 1}, step=1)
    (run / "step_00000001").rename(tmp_path / "archive")
    (run / "step_00000001").symlink_to(tmp_path / "archive")
    with pytest.warns(UserWarning, match="'a link'"):
        sl.save(run, {"a": 2}, step=2, keep=1)
    assert (run / "step_00000001").is_symlink() and sl.load(tmp_path / "archive") == {"a": 1}


def test_a_work_directory_is_a_savers_as_a_whole_and_no_other(tmp_path: Path) -> None:
    made = folder.Work.make(str(tmp_path / "c"))
    made.close()
    work = tmp_path / made.name
    (work / "half.safetensors").write_text("x")
    assert strangers(str(work)) == []
    other = tmp_path / f".c.tmp-{'0' * 32}"
    work.rename(other)  # the id in its lock is not that of its name
    assert strangers(str(other)) == ["half.safetensors", "lock"]
    assert not remove(str(other)) and other.exists()
    other.rename(work)
    assert remove(str(work)) and os.listdir(tmp_path) == []


def test_what_stands_there_is_named_with_a_line_that_runs(tmp_path: Path) -> None:
    sl.save(tmp_path / "run", {"a": 1}, step=1)
    with pytest.raises(CheckpointError, match="holds 'step_00000001/'") as e:
        sl.save(tmp_path / "run", {"a": 1})
    assert e.value.fix == "sl.save(path, tree, step=100)"
    with pytest.raises(CheckpointError, match="the path is empty"):
        sl.save("", {"a": 1}, step=1)
    assert occupied(str(tmp_path / "nothing")) == ""


def test_what_is_put_there_while_it_is_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target is free when a save begins, and is not when it would be replaced."""
    write = folder.Work.commit

    def late(self: Any, overwrite: bool) -> str:
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "thesis").write_text("mine")
        return write(self, overwrite)

    monkeypatch.setattr(folder.Work, "commit", late)
    with pytest.raises(CheckpointError, match="thesis"):
        sl.save(tmp_path / "c", {"a": 1})
    assert os.listdir(tmp_path) == ["c"] and os.listdir(tmp_path / "c") == ["thesis"]


def unconfirmed(path: str) -> list[str]:
    """Save twice; the second time the disk does not confirm the name."""

    def fails(parent: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), parent)

    out = []
    for k, flush in ((1, folder.fsync_folder), (2, fails), (3, folder.fsync_folder)):
        before, folder.fsync_folder = folder.fsync_folder, flush
        try:
            sl.save(path, {"w": sl.shard(torch.full((4,), float(k)), "x")})
            out.append("")
        except CheckpointError as e:
            out.append(e.message)
        finally:
            folder.fsync_folder = before
        out.append(str(sl.load(path, mesh=None)["w"].raw.flatten()[0].item()))
        if dist.is_initialized():
            dist.barrier()
    return out


def told(path: Path, out: list[str]) -> None:
    assert out[:2] == ["", "1.0"] and out[3:] == ["2.0", "", "3.0"]
    assert "is written and stands there, but the disk did not confirm" in out[2]
    assert "Input/output error" in out[2]
    assert os.listdir(path) == ["c"]  # the save after it cleans what this one left


def test_a_name_that_the_disk_did_not_confirm_is_reported(tmp_path: Path) -> None:
    with sl.simulate(x=2):
        told(tmp_path, unconfirmed(str(tmp_path / "c")))


def test_a_name_that_the_disk_did_not_confirm_is_reported_on_all_ranks(
    pool: Any, tmp_path: Path
) -> None:
    for out in pool.run(unconfirmed, str(tmp_path / "c"), x=2, y=2):
        told(tmp_path, out)


def test_the_directories_above_are_flushed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed, flush = [], folder.fsync_folder
    for module in (folder, filesystem):
        monkeypatch.setattr(module, "fsync_folder", lambda p: (flushed.append(p), flush(p)))
    sl.save(tmp_path / "a" / "b" / "c", {"a": 1})
    assert flushed == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]
