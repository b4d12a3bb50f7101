"""The newest whole checkpoint of a run, and which of them stay."""

import os
from pathlib import Path

import pytest
import torch

import shardlib as sl
from shardlib.checkpoint.steps import steps
from shardlib.errors import CheckpointError


def test_the_newest_stay_and_the_newest_whole_one_is_loaded(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert sl.latest(run) is None
    for step in (1, 2, 3):
        saved = sl.save(run, {"a": torch.full((4,), float(step))}, step=step, keep=2)
        assert saved.path == sl.latest(run) == str(run / f"step_{step:08d}")
    assert sorted(os.listdir(run)) == ["step_00000002", "step_00000003"]
    assert sl.load(run)["a"].tolist() == [3.0] * 4
    (run / "step_00000003" / "shardlib.json").write_text("{}\n")
    assert (sl.latest(run) or "").endswith("2")
    assert sl.load(run)["a"].tolist() == [2.0] * 4


def test_only_checkpoints_that_save_made_are_removed(tmp_path: Path) -> None:
    for step in (1, 2):
        sl.save(tmp_path, {"a": 1}, step=step)
    (tmp_path / "step_00000001").rename(tmp_path / "step_00000007")  # not under its own name
    (tmp_path / "step_00000000").mkdir()
    (tmp_path / "step_00000000" / "mine").write_text("x")
    (tmp_path / ".step_00000000.tmp-mine").mkdir()
    sl.save(tmp_path, {"a": 1}, step=9)
    for step in (3, 4):  # of a run that went back: what came later is not its own
        sl.save(tmp_path, {"a": 1}, step=step, keep=1)
    assert [s for s, _ in steps(str(tmp_path))] == [9, 4]
    (tmp_path / "step_00000009").rename(tmp_path / "mine")
    found = sorted(os.listdir(tmp_path))
    assert found == [
        ".step_00000000.tmp-mine",
        "mine",
        "step_00000000",
        "step_00000004",
        "step_00000007",
    ]


def test_a_damaged_step_is_named(tmp_path: Path) -> None:
    sl.save(tmp_path, {"a": torch.ones(4)}, step=1)
    (tmp_path / "step_00000001" / "rank_00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="rank_00000"):
        sl.load(tmp_path)
