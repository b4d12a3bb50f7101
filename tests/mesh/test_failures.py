"""A rank that fails is named by every other rank, with what it was about."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardlib.mesh.failures import _ranges, spelled
from tests import faults


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


def test_a_job_that_ends_well_says_nothing() -> None:
    told = faults.play("reordered", 5, 9, check=False)  # nobody is rank 5
    assert [t.kind for t in told] == ["ok"] * 4
    assert len({t.text for t in told}) == 1


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "0"), ([0, 1, 2, 5], "0-2, 5"), ([1, 3, 4], "1, 3-4")]
)
def test_ranks_are_named_in_runs(ranks: list[int], text: str) -> None:
    assert _ranges(ranks) == text


def test_an_operation_is_spelled_with_its_line() -> None:
    entry: Any = (3, "all_gather", ("x", "y"), torch.Size([2]), torch.int64, "train.py:7")
    assert spelled(entry) == "all_gather over ('x', 'y') of int64[2], operation 3, at train.py:7"
