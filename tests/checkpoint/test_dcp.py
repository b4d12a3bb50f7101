"""torch.distributed.checkpoint reads and writes sharded tensors, in its own format and Hugging Face's."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

import shardlib as sl
from shardlib.errors import PartialEscape, Unsupported

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

W = torch.arange(48.0 * 40).reshape(48, 40)
BIG = torch.arange(3 * 40000.0).reshape(3, 40000)
LAYOUTS = ["x y", "(y x) .", "...", ". zigzag(x)", "(3 x) y"]


def tree(layout: str) -> dict[str, Any]:
    return {
        "w": sl.shard(W, layout),
        "odd": sl.shard(torch.arange(7.0), "x", pad=True),
        "big": sl.shard(BIG, ". x"),  # written in parts by those that hold the same
        "step": 3,
    }


def blank(layout: str, other: str) -> dict[str, Any]:
    made = {"w": sl.shard(W * 0, layout), "odd": sl.shard(torch.zeros(7), other, pad=True)}
    return {
        **made,
        "big": sl.shard(BIG * 0, other + " ."[: 2 * (other != "...")], pad=True),
        "step": 0,
    }


def right(found: dict[str, Any]) -> bool:
    same = [("w", W), ("odd", torch.arange(7.0)), ("big", BIG)]
    return found["step"] == 3 and all(torch.equal(sl.unshard(found[n]), x) for n, x in same)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_simulated_ranks_save_and_load(layout: str, tmp_path: Path) -> None:
    with sl.simulate(x=2, y=2):
        dcp.save(tree(layout), checkpoint_id=str(tmp_path / "c"))
    for axes, other in (({"x": 4}, ". x"), ({"x": 2, "y": 3}, "x ."), ({"x": 1}, "...")):
        with sl.simulate(**axes):
            found = blank(other, "x" if other != "..." else "...")
            dcp.load(found, checkpoint_id=str(tmp_path / "c"))
            assert right(found)


def both(path: str) -> list[bool]:
    out = []
    for i, layout in enumerate(LAYOUTS):
        dcp.save(tree(layout), checkpoint_id=f"{path}/{i}")
        found = blank("y x", "y")
        dcp.load(found, checkpoint_id=f"{path}/{i}")
        out.append(right(found))
    plain = {n: x for n, x in tree("x y").items() if n != "step"}
    writer = HuggingFaceStorageWriter(
        path=f"{path}/hf", save_distributed=True, enable_consolidation=True
    )
    dcp.save(plain, storage_writer=writer)
    found = {n: x for n, x in blank(". (x y)", "y").items() if n != "step"}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(f"{path}/hf"))
    out.append(right({**found, "step": 3}))
    dtensors = {"w": sl.dtensor.to_dtensor(sl.shard(W, "x y"))}
    dcp.save(dtensors, checkpoint_id=f"{path}/theirs")
    mine = {"w": sl.shard(W * 0, "zigzag(y) x")}
    dcp.load(mine, checkpoint_id=f"{path}/theirs")
    out.append(torch.equal(sl.unshard(mine["w"]), W))
    dcp.save({"w": sl.shard(W, "zigzag(y) x")}, checkpoint_id=f"{path}/mine")
    theirs = {"w": sl.dtensor.to_dtensor(sl.shard(W * 0, "x y"))}
    dcp.load(theirs, checkpoint_id=f"{path}/mine")
    out.append(torch.equal(theirs["w"].full_tensor(), W))
    return out


def test_processes_save_and_load(pool: Any, tmp_path: Path) -> None:
    assert pool.run(both, str(tmp_path), x=2, y=2) == [[True] * (len(LAYOUTS) + 3)] * 4
    whole = load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors")
    assert torch.equal(whole["w"], W) and torch.equal(whole["odd"], torch.arange(7.0))


def test_its_reader_of_hugging_face_directories_fills_blocks(tmp_path: Path) -> None:
    save_file({"w": W}, tmp_path / "model.safetensors")
    with sl.simulate(x=2, y=2):
        found = {"w": sl.shard(W * 0, "y x")}
        dcp.load(found, storage_reader=HuggingFaceStorageReader(str(tmp_path)))
        assert torch.equal(sl.unshard(found["w"]), W)


def test_what_its_format_cannot_say_is_refused(tmp_path: Path) -> None:
    with sl.simulate(x=2):
        with pytest.raises((Unsupported, dcp.api.CheckpointException), match="without gaps"):
            dcp.save({"w": sl.shard(W, "striped(x) .")}, checkpoint_id=str(tmp_path / "c"))
        with pytest.raises((PartialEscape, dcp.api.CheckpointException)):
            dcp.save({"w": sl.shard(W, "... + sum(x)")}, checkpoint_id=str(tmp_path / "c"))
