from pathlib import Path

import pytest
import torch

import shardlib as sl


def test_pictures_show_every_contiguous_piece_and_its_owners() -> None:
    with sl.simulate(x=2, y=2):
        assert sl.visualize(sl.shard(torch.zeros(4), "x")).count("| 0,1") == 1
        fused = sl.visualize(sl.shard(torch.zeros(12, 4), "(3 y) ."))
        assert fused.count("| 0,2") == 3 and fused.count("| 1,3") == 3
        skewed = sl.visualize(sl.shard(torch.zeros(4, 4), "x y skew a")).splitlines()
        assert skewed[1].split() == ["|", "0", "|", "1", "|"] and skewed[4].split() == [
            "|",
            "3",
            "|",
            "2",
            "|",
        ]
        assert "0,1,2,3" in sl.visualize(sl.shard(torch.zeros(()), ""))


def test_more_dimensions_are_shown_by_choosing_two() -> None:
    with sl.simulate(x=2, y=2):
        x = sl.shard(torch.zeros(2, 3, 4, 4), "x . y .")
        assert sl.visualize(x) == sl.visualize(sl.shard(torch.zeros(2, 4), "x y"))
        assert sl.visualize(x, dims=(1, 3)).count("| 0,1,2,3") == 1
        assert sl.visualize(sl.shard(torch.zeros(2, 2, 2), "x ...")).count("| 0,1") == 1
    with sl.simulate(x=2, y=2, z=2):
        cube = sl.shard(torch.zeros(2, 2, 2), "x y z")
        with pytest.raises(sl.ShardError, match="3 are split") as caught:
            sl.visualize(cube)
        assert caught.value.fix == "sl.visualize(x, dims=(0, 1))"
        assert sl.visualize(cube, dims=(0, 1)).count("| 0,1 ") == 1


def test_draw_writes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which is an extra")
    with sl.simulate(x=2, y=2):
        sl.seeing.draw({"w": sl.shard(torch.zeros(12, 4), "(3 y) x")}, str(tmp_path / "w.png"))
    assert (tmp_path / "w.png").stat().st_size > 1000
