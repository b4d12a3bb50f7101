"""A checkpoint's files say of each chunk what the manifest's layouts say."""

import json
import os
import zlib
from pathlib import Path

import pytest

import shardlib as sl
from shardlib.checkpoint.files import Folder
from shardlib.checkpoint.folder import MANIFEST
from shardlib.checkpoint.manifest import Manifest
from shardlib.errors import CheckpointError
from tests.checkpoint.cases import placed


def opened(path: Path) -> Folder:
    return Folder(os.open(path, os.O_RDONLY))


def test_every_file_is_whole_and_holds_what_its_rank_wrote(tmp_path: Path) -> None:
    with sl.simulate(x=2, y=2):
        sl.save(tmp_path / "c", placed(), step=None)
    with opened(tmp_path / "c") as folder:
        manifest = Manifest.of(folder)
        assert manifest.damage(folder, range(4)) == []
        assert folder.bytes_read == 64 * 48 * 4 + 300 * 4
    with opened(tmp_path / "c") as folder:
        assert Manifest.of(folder).damage(folder, [1]) == []
        assert folder.bytes_read < 64 * 48 * 4


def test_a_layout_that_the_files_do_not_have_is_found(tmp_path: Path) -> None:
    """A manifest under a right checksum whose layout is another one."""
    with sl.simulate(x=2, y=2):
        sl.save(tmp_path / "c", placed())
    path = tmp_path / "c" / MANIFEST
    said = json.loads(path.read_bytes().partition(b"\n")[0])
    said["tensors"]["w"]["layout"] = "y x"
    body = json.dumps(said).encode()
    path.write_bytes(body + f"\n{zlib.crc32(body):08x}\n".encode())
    with opened(tmp_path / "c") as folder:
        assert any("another part of 'w'" in w for w in Manifest.of(folder).damage(folder, range(4)))
    with pytest.raises(CheckpointError, match="another part of 'w'"):
        sl.load(tmp_path / "c")
