"""Bytes reach a file whole whatever the system takes at once, and a full disk is told."""

import ctypes
import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from shardlib import filesystem
from shardlib.filesystem import allocate, read_all, sealed, unsealed, write_all

MIB, PAGE = 1 << 20, 1 << 12


def test_a_file_has_its_length_before_it_is_written_and_a_full_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(code: int) -> Any:
        def call(*_: Any) -> int:
            ctypes.set_errno(code)
            return -1

        return call

    with open(tmp_path / "f", "wb") as f:
        allocate(f.fileno(), 9 * MIB)
        assert os.fstat(f.fileno()).st_size in (0, 9 * MIB)  # 0 where the disk cannot
        monkeypatch.setattr(filesystem, "_ALLOCATE", refused(errno.EOPNOTSUPP))
        allocate(f.fileno(), 10 * MIB)
        monkeypatch.setattr(filesystem, "_ALLOCATE", refused(errno.ENOSPC))
        with pytest.raises(OSError, match="No space left"):
            allocate(f.fileno(), 10 * MIB)


@pytest.mark.parametrize("unit", [1, PAGE])
@pytest.mark.parametrize("seed", range(8))
def test_short_transfers_are_continued_at_whole_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: int, seed: int
) -> None:
    draw, pwrite, preadv = random.Random(seed), os.pwrite, os.preadv
    data, out, begins = draw.randbytes(9 * PAGE), bytearray(9 * PAGE), []

    def part(n: int) -> int:
        return draw.randint(min(n, PAGE), n)

    def short_write(fd: int, some: memoryview, at: int) -> int:
        begins.append(at)
        return pwrite(fd, some[: part(len(some))], at)

    def short_read(fd: int, some: list[memoryview], at: int) -> int:
        begins.append(at)
        return preadv(fd, [some[0][: part(len(some[0]))]], at)

    monkeypatch.setattr(os, "pwrite", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    with open(tmp_path / "f", "w+b") as f:
        assert write_all(f.fileno(), memoryview(data), PAGE, unit) == 10 * PAGE
        read_all(f.fileno(), memoryview(out), PAGE, "f", unit)
    assert out == data and not [at for at in begins if at % unit]


def test_a_disk_that_takes_nothing_and_a_file_that_ends_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "f", "w+b") as f:
        f.write(bytes(PAGE + 1))
        f.flush()
        for unit, nbytes in ((1, PAGE + 2), (PAGE, 2 * PAGE)):
            with pytest.raises(ValueError, match="f ends before its data does"):
                read_all(f.fileno(), memoryview(bytearray(nbytes)), 0, "f", unit)
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 1)
        with pytest.raises(OSError, match="took no whole page"):
            write_all(f.fileno(), memoryview(bytes(PAGE)), 0, PAGE)


def test_a_sealed_text_is_read_as_it_was_and_one_that_was_touched_is_not() -> None:
    text = sealed(b'{"a": 1}')
    assert unsealed(text, "f") == b'{"a": 1}'
    for i in range(8 * len(text)):
        touched = bytearray(text)
        touched[i // 8] ^= 1 << i % 8
        with pytest.raises(ValueError, match="f is damaged"):
            unsealed(bytes(touched), "f")
