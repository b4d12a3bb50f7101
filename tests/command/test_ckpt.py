"""Checkpoints at a prompt: what they hold, whether they are whole, and others made of them."""

import json
from pathlib import Path

import pytest
import torch

import shardlib as sl
from shardlib.command.main import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    with sl.simulate(x=2):
        params = {"w": sl.shard(torch.randn(8, 4), "x ."), "b": sl.shard(torch.randn(4), ".")}
        for step in (1, 2):
            sl.save(tmp_path / "run", {"params": params, "step": step}, step=step)
    return tmp_path / "run"


def test_ls_lists_steps_and_what_the_newest_holds(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "ls", str(run)]) == 0
    said = capsys.readouterr().out
    assert "step        1" in said and "step        2" in said and "params/w" in said
    assert main(["ckpt", "ls", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == [2, 1] and found["tensors"]["params/w"]["shape"] == [8, 4]


def test_verify_finds_a_byte_that_was_changed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "verify", str(run)]) == 0
    assert "every byte is as it was written" in capsys.readouterr().out
    file = run / "step_00000002" / "rank_00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["ckpt", "verify", str(run)]) == 1
    assert "rank_00001.safetensors is damaged" in capsys.readouterr().err


def test_reshard_writes_what_another_mesh_would_have(run: Path, tmp_path: Path) -> None:
    to = tmp_path / "other"
    given = ["ckpt", "reshard", str(run), str(to), "--mesh", "x=2,y=2"]
    assert main([*given, "--rule", "*.w=x y"]) == 0
    assert len(list(to.rglob("rank_*"))) == 4
    before, after = sl.load(run)["params"], sl.load(to)["params"]
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert main([*given, "--overwrite"]) == 0 and main([*given[:-1], "x=two"]) == 2
    assert main([*given, "--rule", "nothing"]) == 2


def test_to_and_from_hugging_face_are_inverse(run: Path, tmp_path: Path) -> None:
    there, back, config = tmp_path / "hf", tmp_path / "back", tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text('{"dtype": "float64"}')
    assert main(["ckpt", "to-hf", str(run), str(there)]) == 2  # what nobody could load
    assert not there.exists()
    assert main(["ckpt", "to-hf", str(run), str(there), "--config", str(config)]) == 0
    assert (there / "model.safetensors").exists()
    assert json.loads((there / "config.json").read_text()) == {"dtype": "float32"}
    assert main(["ckpt", "from-hf", str(there), str(back)]) == 0
    before, after = sl.load(run)["params"], sl.load(back)["params"]
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)
