"""A checkpoint made from another is the one that the other mesh would have written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardlib as sl
from shardlib.errors import BadArgument, CheckpointError
from tests.checkpoint.cases import placed, tree


def held(path: Path) -> list[tuple[str, bytes]]:
    """Names and bytes of the files, without the id that each checkpoint has."""
    out = []
    for p in sorted(path.glob("*.safetensors")):
        data = p.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        header["__metadata__"].pop("checkpoint")
        out.append((p.name, json.dumps(header).encode() + data[8 + len(header) :][-100:]))
    return out


@pytest.mark.parametrize("pad", [False, True])
def test_resharding_writes_what_the_mesh_would_have(tmp_path: Path, pad: bool) -> None:
    size = 5 if pad else 4
    with sl.simulate(x=2, y=2):
        sl.save(tmp_path / "a", placed() | {"f": 2.5})
    sl.checkpoint.reshard(
        tmp_path / "a", tmp_path / "b", {"z": size}, layouts=[("w", ". z"), ("v", "z")], pad=pad
    )
    with sl.simulate(z=size):
        t = tree()
        like = {"w": sl.shard(t["w"], ". z", pad=pad), "v": sl.shard(t["v"], "z", pad=pad)}
        like |= {"f": 2.5, "step": 3}
        sl.save(tmp_path / "c", like)
        found = sl.load(tmp_path / "b", like)
        assert torch.equal(found["w"].raw, like["w"].raw) and found["f"] == 2.5
    assert held(tmp_path / "b") == held(tmp_path / "c")
    sl.checkpoint.verify(tmp_path / "b")


def test_plain_tensors_are_shared_among_the_ranks(tmp_path: Path) -> None:
    tree = {"big": torch.randn(400, 300), "n": torch.arange(5)}
    sl.save(tmp_path / "a", tree)
    sl.checkpoint.reshard(tmp_path / "a", tmp_path / "b", {"x": 4})
    sizes = [p.stat().st_size for p in (tmp_path / "b").glob("*.safetensors")]
    assert len(sizes) == 4 and min(sizes) > 120_000
    found = sl.load(tmp_path / "b")
    assert all(torch.equal(found[n], x.cpu()) for n, x in tree.items())


def test_a_step_stays_a_step(tmp_path: Path) -> None:
    with sl.simulate(x=2):
        sl.save(tmp_path / "a", {"w": sl.shard(torch.arange(4.0), "x")}, step=12)
    sl.checkpoint.reshard(tmp_path / "a", tmp_path / "b" / "step_00000012", {"x": 4})
    assert (sl.latest(tmp_path / "b") or "").endswith("step_00000012")
    with pytest.raises(CheckpointError, match="overwrite=False"):
        sl.checkpoint.reshard(tmp_path / "a", tmp_path / "b" / "step_00000012", {"x": 4})


def test_what_cannot_be_done_leaves_nothing(tmp_path: Path) -> None:
    with sl.simulate(x=2):
        sl.save(tmp_path / "a", {"w": sl.shard(torch.arange(4.0), "x")})
    with pytest.raises(CheckpointError, match="does not divide"):
        sl.checkpoint.reshard(tmp_path / "a", tmp_path / "b", {"x": 3})
    with pytest.raises(CheckpointError, match="'y'"):
        sl.checkpoint.reshard(tmp_path / "a", tmp_path / "b", {"x": 2}, layouts="y")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_what_is_damaged_is_not_passed_on(tmp_path: Path) -> None:
    with sl.simulate(x=2):
        sl.save(tmp_path / "a", {"w": sl.shard(torch.arange(4.0), "x")})
    path = tmp_path / "a" / "rank_00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank_00001.*damaged"):
        sl.checkpoint.reshard(tmp_path / "a", tmp_path / "b", {"x": 4})
    with pytest.raises(CheckpointError, match=r"rank_00001.*damaged"):
        sl.checkpoint.to_hf(tmp_path / "a", tmp_path / "b")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_hugging_face_and_back(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    weights: dict[str, Any] = {f"l.{i}.w": torch.randn(6, 4, generator=g) for i in range(5)}
    weights["scale"] = torch.ones((), dtype=torch.bfloat16)
    (tmp_path / "in").mkdir()
    save_file(weights, tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "config.json").write_text('{"model_type": "x"}')
    rules = [("l.*", "x y")]
    sl.checkpoint.from_hf(
        tmp_path / "in", tmp_path / "run", {"x": 2, "y": 2}, layouts=rules, subtree="params", step=0
    )
    with sl.simulate(x=2, y=2):
        found = sl.load(tmp_path / "run")["params"]
        assert sl.typeof(found["l.0.w"]) == "f32[6@x, 4@y]"
    found = sl.load(tmp_path / "run")["params"]
    assert found.keys() == weights.keys()
    assert all(
        torch.equal(found[n], w.cpu()) and found[n].dtype == w.dtype for n, w in weights.items()
    )
    sl.checkpoint.to_hf(
        tmp_path / "run",
        tmp_path / "out",
        subtree="params",
        names=lambda n: f"model.{n}",
        config=tmp_path / "in",
        max_bytes=250,
    )
    files = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert "config.json" in files and "model.safetensors.index.json" in files
    assert "model.safetensors" not in files
    again = {}
    for p in (tmp_path / "out").glob("*.safetensors"):
        again |= load_file(p)
    assert again.keys() == {f"model.{n}" for n in weights}
    assert all(torch.equal(again[f"model.{n}"], w.cpu()) for n, w in weights.items())
    with pytest.raises(CheckpointError, match=r"no tensor under 'param'.*'params'"):
        sl.checkpoint.to_hf(tmp_path / "run", tmp_path / "no", subtree="param")
    with pytest.raises(BadArgument, match="lie on a mesh"):
        sl.checkpoint.from_hf(tmp_path / "in", tmp_path / "no", layouts=rules)
    assert not (tmp_path / "no").exists()
