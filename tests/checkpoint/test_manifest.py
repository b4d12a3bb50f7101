"""A checkpoint's files say of each chunk what the manifest's layouts say."""

import json
import os
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardlib as sl
from shardlib.checkpoint import boxes
from shardlib.checkpoint.boxes import SavedPlace
from shardlib.checkpoint.files import Folder
from shardlib.checkpoint.folder import MANIFEST
from shardlib.checkpoint.manifest import Manifest, _holders
from shardlib.errors import CheckpointError
from shardlib.layouts import Layout
from tests.checkpoint.cases import placed
from tests.checkpoint.test_boxes import places


def opened(path: Path) -> Folder:
    return Folder(os.open(path, os.O_RDONLY))


def test_every_file_is_whole_and_holds_what_its_rank_wrote(tmp_path: Path) -> None:
    with sl.simulate(x=2, y=2):
        sl.save(tmp_path / "c", placed(), step=None)
    with opened(tmp_path / "c") as folder:
        manifest = Manifest.of(folder)
        assert manifest.damage(range(4)) == []
        assert folder.bytes_read == 64 * 48 * 4 + 300 * 4
    with opened(tmp_path / "c") as folder:
        assert Manifest.of(folder).damage([1]) == []
        assert folder.bytes_read < 64 * 48 * 4


def touched(path: Path, *keys: str, value: object) -> None:
    """Put something else into the manifest, under a right checksum."""
    said = json.loads((path / MANIFEST).read_bytes().partition(b"\n")[0])
    at = said
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    body = json.dumps(said).encode()
    (path / MANIFEST).write_bytes(body + f"\n{zlib.crc32(body):08x}\n".encode())


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("w", "shape", [10**30, 48]),
        ("w", "shape", [2**62, 2**62]),
        ("w", "tiled", [10**30, 48]),
        ("w", "mesh", [["x", 10**30], ["y", 2]]),
        ("w", "ranks", [10**30] * 4),
        ("step", "", ["float", "0x1p99999"]),
        ("step", "", [["float", "0x1p0"]]),
        ("step", "", ["float", "0x1p0", "0x1p0"]),
        ("step", "", ["number", "0x1p0"]),
    ],
)
def test_numbers_that_no_tensor_has_are_refused(
    tmp_path: Path, key: str, field: str, value: object
) -> None:
    with sl.simulate(x=2, y=2):
        sl.save(tmp_path / "c", placed())
    touched(tmp_path / "c", *(("tensors", key, field) if field else ("values", key)), value=value)
    for call in (sl.checkpoint.verify, sl.checkpoint.describe, sl.load):
        with pytest.raises(CheckpointError, match=r"shardlib\.json"):
            call(tmp_path / "c")


def test_a_layout_that_the_files_do_not_have_is_found(tmp_path: Path) -> None:
    """A manifest under a right checksum whose layout is another one."""
    with sl.simulate(x=2, y=2):
        sl.save(tmp_path / "c", placed())
    touched(tmp_path / "c", "tensors", "w", "layout", value="y x")
    with opened(tmp_path / "c") as folder:
        assert any("another part of 'w'" in w for w in Manifest.of(folder).damage(range(4)))
    with pytest.raises(CheckpointError, match="another part of 'w'"):
        sl.load(tmp_path / "c")


@given(st.data())
def test_holders_of_a_box_are_the_ranks_whose_blocks_meet_it(data: st.DataObject) -> None:
    place = data.draw(places())
    ranks = range(len(place.ranks))
    parts = [st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in place.shape]
    cut = tuple(boxes._run(a, 1, b - a) for a, b in map(data.draw, parts))
    for box in (cut, boxes.held(place, data.draw(st.sampled_from(ranks)))):
        met = tuple(r for r in ranks if all(boxes.meet(boxes.held(place, r), box)))
        assert _holders(place, box) == met


@pytest.mark.parametrize("mesh", [{"x": 4096}, {"x": 64, "y": 64}, {"y": 64, "x": 64}])
def test_of_many_ranks_few_are_asked_for_their_blocks(mesh: dict[str, int]) -> None:
    layout, shape = Layout.parse("x ."), (8192, 16)
    place = SavedPlace(shape, torch.int8, layout, shape, tuple(mesh.items()), tuple(range(4096)))
    box = boxes.held(place, 1365)
    before = boxes.held.cache_info()
    assert 1365 in _holders(place, box)
    after = boxes.held.cache_info()
    assert after.hits + after.misses - before.hits - before.misses <= 2
