"""Where the ranks of a failed job first parted, from what they wrote."""

import json
from pathlib import Path

import pytest

import shardlib as sl
from shardlib.command.main import main
from shardlib.desync import desync


def write(folder: Path, ranks: dict[int, list[str]], begun: int = 1, world: int = 0) -> None:
    for rank, names in ranks.items():
        done = [[begun + i, n, ["x"], [4], "float32", "a.py:3"] for i, n in enumerate(names)]
        said = {"rank": rank, "world": world or len(ranks), "operations": done}
        (folder / f"rank_{rank}.json").write_text(json.dumps(said))


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    same = ["psum"] * 5
    write(tmp_path, {0: same, 1: same, 2: [*same[:3], "pmax", "psum"], 3: same[:3]}, 41, world=6)
    found = desync(tmp_path)
    assert "4 of 6 ranks" in found and "nothing of ranks 4, 5" in found
    assert "operation 43 is the last that all have in common" in found
    assert "operation 44 differs:" in found
    assert "  ranks 0, 1  psum over x of float32[4] at a.py:3" in found
    assert "  rank 2      pmax over x" in found and "  rank 3      stopped before" in found


def test_ranks_that_did_the_same_say_so(tmp_path: Path) -> None:
    write(tmp_path, {0: ["psum", "pmax"], 1: ["psum", "pmax"]})
    assert desync(tmp_path).endswith("all did the same up to operation 2")


def test_a_rank_that_remembers_less_is_compared_where_both_remember(tmp_path: Path) -> None:
    write(tmp_path, {0: ["psum"] * 200, 1: ["psum"] * 200}, 1)
    write(tmp_path, {1: ["psum"] * 200}, 5, world=2)
    assert "not all came to operation 201" in desync(tmp_path)


def test_what_is_no_record_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(sl.ShardError, match="no rank_"):
        desync(tmp_path)
    for text in ("", "[]", "{}", '{"rank": 0, "world": 1, "operations": [3]}', "\\ud800"):
        (tmp_path / "rank_0.json").write_text(text)
        with pytest.raises(sl.ShardError, match="not what a rank writes"):
            desync(tmp_path)
    assert main(["desync", str(tmp_path)]) == 1
    assert "desync: " in capsys.readouterr().err


def test_the_commands_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {0: ["psum"], 1: ["psum"]})
    assert main(["desync", str(tmp_path)]) == 0
    assert "all did the same" in capsys.readouterr().out
    assert main(["check", "tests.checking.test_proof:case"]) == 0
    assert "data=2 x=2" in capsys.readouterr().out
