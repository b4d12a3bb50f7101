"""A checkpoint is described without reading a tensor, and verified by reading every byte."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardlib as sl
from shardlib.errors import CheckpointError
from tests.checkpoint.cases import placed


def test_a_description_has_names_types_places_and_values(tmp_path: Path) -> None:
    with sl.simulate(x=2, y=2):
        tree = placed() | {"plain": torch.ones(3, dtype=torch.bfloat16), "none": None}
        sl.save(tmp_path, {"params": tree}, step=7)
    about = sl.checkpoint.describe(tmp_path)
    assert about.path == str(tmp_path / "step_00000007") and about.step == 7
    assert about.tensors["params/w"] == sl.checkpoint.Saved(
        "F32", (64, 48), "x y", {"x": 2, "y": 2}, 64 * 48 * 4
    )
    assert about.tensors["params/plain"] == sl.checkpoint.Saved("BF16", (3,), "", {}, 6)
    assert about.values == {"params/step": 3, "params/none": None}
    assert about.meshes == [{"x": 2, "y": 2}] and len(about.files) == 4
    text = str(about)
    assert "step 7, 3 tensors, 13.2 KiB in 4 files, x=2 y=2" in text
    assert "params/w" in text and "[64, 48]" in text and "None" in text
    assert sl.checkpoint.describe(about.path) == about
    with pytest.raises(CheckpointError, match="No such file"):
        sl.checkpoint.describe(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"no shardlib\.json"):
        sl.checkpoint.describe(tmp_path.parent)


def test_an_axis_may_have_any_name(tmp_path: Path) -> None:
    """A sharded tensor that is whole on every rank comes back sharded, whatever its axis is called."""
    with sl.simulate(ranks=2):
        sl.save(tmp_path / "c", {"w": sl.shard(torch.ones(4), "."), "plain": torch.ones(2)})
        found = sl.load(tmp_path / "c")
        assert isinstance(found["w"], sl.ShardedTensor)
        assert not isinstance(found["plain"], sl.ShardedTensor)
    assert sl.checkpoint.describe(tmp_path / "c").tensors["w"].mesh == {"ranks": 2}


def test_every_flip_and_cut_of_a_file_is_found(tmp_path: Path) -> None:
    rng = random.Random(3)
    with sl.simulate(x=2, y=2):
        sl.save(tmp_path / "c", placed())
    assert sl.checkpoint.verify(tmp_path / "c").step is None
    files = [p for p in sorted((tmp_path / "c").iterdir()) if p.name != "lock"]
    for i in range(60):
        p = files[i % len(files)]
        kept = p.read_bytes()
        data = bytearray(kept)
        if i % 3 == 2:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        p.write_bytes(data)
        with pytest.raises(CheckpointError, match=p.name):
            sl.checkpoint.verify(tmp_path / "c")
        p.write_bytes(kept)
    for p in files[1:3]:
        p.write_bytes(p.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"rank_00001.*; rank_00002"):
        sl.checkpoint.verify(tmp_path / "c")


def _together(place: str) -> list[Any]:
    rank, out = dist.get_rank(), []
    for step in (1, 2, 3):
        sl.save(place, {"w": sl.shard(torch.full((64, 64), float(step)), "x y")}, step=step)
    out.append(sl.latest(place, verify=True))
    dist.barrier()
    if rank == 0:
        for step, name in ((3, "rank_00002"), (2, "rank_00001")):
            path = Path(place, f"step_{step:08d}", f"{name}.safetensors")
            data = bytearray(path.read_bytes())
            data[-9] ^= 4
            path.write_bytes(data)
    dist.barrier()
    with pytest.warns(UserWarning, match="passed over"):
        out.append(sl.latest(place, verify=True))
    out.append(sl.latest(place))
    try:
        sl.checkpoint.verify(place)
    except CheckpointError as e:
        out.append(e.message)
    return out


def test_ranks_verify_together_and_take_the_newest_that_is_sound(pool: Any, tmp_path: Path) -> None:
    said = pool.run(_together, str(tmp_path), x=2, y=2)
    assert said == [said[0]] * 4
    steps = [s[-1] if s and s[-1].isdigit() else s for s in said[0]]
    assert steps[:3] == ["3", "1", "3"]
    assert "rank_00002.safetensors is damaged" in steps[3] and "'w'" in steps[3]


def test_layers_that_are_alike_are_one_line() -> None:
    """With how many they are; one of another shape or layout has its own."""
    from shardlib.checkpoint.steps import About, Saved

    wide, narrow = (Saved("F32", (n, 2), "x .", {"x": 2}, 8 * n) for n in (4, 2))
    tensors = {f"p/h.{i}.w": narrow if i == 2 else wide for i in range(4)} | {"p/wte": wide}
    lines = str(About("run", 1, tensors, {}, {})).splitlines()[1:]
    assert [line.split()[:3] for line in lines] == [
        ["3", "x", "p/h.*.w"], ["p/h.2.w", "f32", "[2,"], ["p/wte", "f32", "[4,"]
    ]  # fmt: skip
