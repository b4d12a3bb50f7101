"""Files are safetensors, read only where wanted, and whatever a hostile one says is refused."""

import gc
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import shardlib as sl
from shardlib.checkpoint import files
from shardlib.checkpoint.boxes import meet, whole
from shardlib.checkpoint.files import (
    Folder,
    WrittenPart,
    check_chunk,
    fill,
    layout_of_file,
    parsed,
    read_header,
    write_file,
)
from shardlib.checkpoint.folder import MANIFEST
from shardlib.errors import CheckpointError
from shardlib.filesystem import memory
from tests.checkpoint.cases import DTYPES, same, value


def part(name: str, x: torch.Tensor) -> WrittenPart:
    return WrittenPart(name, whole(x.shape), tuple(x.shape), x.dtype, lambda: x)


def opened(path: Path) -> Folder:
    return Folder(os.open(path, os.O_RDONLY))


def saved(path: Path, *parts: WrittenPart) -> dict[str, Any]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return write_file(fd, "f", parts, {"checkpoint": "id"})
    finally:
        os.close(fd)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_file_is_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    x, nothing, one = value((37, 29), dtype), value((0, 3), dtype), value((), dtype)
    said = saved(tmp_path, part("x", x), part("é/0", nothing), part("one", one))
    assert said["bytes"] == (tmp_path / "f").stat().st_size
    with opened(tmp_path) as folder:
        chunks = read_header(folder, "f", said["bytes"], said["crc"])
        for name, like in (("x", x), ("é/0", nothing), ("one", one)):
            out = torch.zeros_like(like)
            fill(out, whole(like.shape), chunks.get(name, whole(like.shape), like.dtype))
            assert same(out, like)
    with safe_open(tmp_path / "f", "pt") as f:
        assert len(f.keys()) == 3  # type: ignore[arg-type]
        if dtype not in (torch.complex128, torch.float8_e5m2fnuz):
            assert same(f.get_tensor("x@0:37,0:29").to(x.device), x)


def test_parts_that_do_not_lie_in_one_stretch_are_written(tmp_path: Path) -> None:
    x = torch.arange(3000.0).reshape(50, 60)
    said = saved(
        tmp_path, part("t", x.T), part("c", x[:, ::2]), part("n", (-x.to(torch.cfloat)).conj())
    )
    with opened(tmp_path) as folder:
        chunks = read_header(folder, "f", said["bytes"], said["crc"])
        for name, like in (("t", x.T), ("c", x[:, ::2]), ("n", -x.to(torch.cfloat))):
            out = torch.zeros(like.shape, dtype=like.dtype)
            assert (
                fill(out, whole(like.shape), chunks.get(name, whole(like.shape), like.dtype))
                == like.numel()
            )
            assert torch.equal(out, like)


@given(data=st.data())
@settings(max_examples=30, suppress_health_check=list(HealthCheck))
def test_any_piece_is_read_and_nothing_beside_its_tiles(data: Any, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("f")
    shape = tuple(data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3)))
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    said = saved(path, part("x", x))
    box, index = [], []
    for n in shape:
        start = data.draw(st.integers(0, n - 1))
        step = data.draw(st.integers(1, 3))
        held = range(start, data.draw(st.integers(start, n)), step)
        box.append(((held.start, held.step, len(held), 0),) if held else ())
        index.append(slice(held.start, held.stop, held.step))
    want = tuple(tuple(type(whole((1,))[0][0])(*r) for r in runs) for runs in box)
    with opened(path) as folder:
        chunk = read_header(folder, "f", said["bytes"], said["crc"]).get(
            "x", whole(x.shape), x.dtype
        )
        out = torch.full(x[tuple(index)].shape, -1.0)
        fill(out, want, chunk)
        assert torch.equal(out, x[tuple(index)]) and meet(want, want) is not None


@pytest.mark.parametrize("shape", [(300, 96), (300, 97), (40, 9, 22), (100_000,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64])
def test_two_flips_of_one_bit_are_found_wherever_they_lie(
    tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Upper bits too, in one column or in one row, read whole or a tile alone."""
    rng, x = random.Random(0), value(shape, dtype)
    said = saved(tmp_path, part("x", x))
    path, row = tmp_path / "f", x[0].nbytes
    good = path.read_bytes()
    begin = said["bytes"] - x.nbytes
    for i in range(24):
        at = rng.randrange(x.nbytes - 8 * row - 4096) if len(shape) > 1 else rng.randrange(9000)
        apart = rng.choice(
            [row * rng.randrange(1, 8), 8, 16, 4096] if len(shape) > 1 else [8, 4096]
        )
        bad = bytearray(good)
        for byte in (at, at + apart):
            bad[begin + byte] ^= 0x80 if i % 3 else 1 << rng.randrange(8)
        path.write_bytes(bad)
        with opened(tmp_path) as folder:
            chunk = read_header(folder, "f", said["bytes"], said["crc"]).get(
                "x", whole(x.shape), x.dtype
            )
            with pytest.raises(ValueError, match="damaged"):
                fill(torch.empty_like(x), whole(shape), chunk)
            with pytest.raises(ValueError, match="damaged"):
                check_chunk(chunk)
            strided = torch.empty(*shape, 2, dtype=dtype)[..., 0]  # is read tile by tile
            with pytest.raises(ValueError, match="damaged"):
                fill(strided, whole(shape), chunk)


# ---------------------------------------------------------------- hostile files


def entry(**fields: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields


HOSTILE: dict[str, Any] = {
    "overlap": {"a": entry(), "b": entry(data_offsets=[4, 12])},
    "hole": {"a": entry(data_offsets=[8, 16])},
    "negative": {"a": entry(data_offsets=[-8, 0])},
    "backwards": {"a": entry(data_offsets=[8, 0])},
    "huge": {"a": entry(shape=[2**62, 2**62], data_offsets=[0, 2**124 * 4])},
    "huge and empty": {"a": entry(shape=[2**62, 0, 7], data_offsets=[0, 8])},
    "negative shape": {"a": entry(shape=[-2, -1])},
    "bool shape": {"a": entry(shape=[True, 2])},
    "float offsets": {"a": entry(data_offsets=[0.0, 8.0])},
    "text offsets": {"a": entry(data_offsets="08")},
    "three offsets": {"a": entry(data_offsets=[0, 4, 8])},
    "no dtype": {"a": {"shape": [2], "data_offsets": [0, 8]}},
    "odd dtype": {"a": entry(dtype=["F32"])},
    "unknown dtype": {"a": entry(dtype="F31")},
    "spare": {"a": entry(shape=[1], data_offsets=[0, 4])},
    "no table": [1, 2],
    "no entry": {"a": 7},
    "metadata of numbers": {"a": entry(), "__metadata__": {"shardlib": 3}},
    "metadata no table": {"a": entry(), "__metadata__": "x"},
}


def write(path: Path, header: bytes, data: bytes = bytes(8)) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path: Path, what: str) -> None:
    write(tmp_path / "f", json.dumps(HOSTILE[what]).encode())
    with opened(tmp_path) as folder, pytest.raises(ValueError, match="f"):
        layout_of_file(folder.file("f"), "f")


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "a": {}}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\xff\xfe",
        b"",
        b"nul",
        b'{"a": NaN',
    ],
    ids=["twice", "deep", "deeper", "no text", "nothing", "cut", "open"],
)
def test_a_header_that_is_no_json_is_refused(tmp_path: Path, text: bytes) -> None:
    write(tmp_path / "f", text)
    began = time.process_time()
    with opened(tmp_path) as folder, pytest.raises(ValueError):
        layout_of_file(folder.file("f"), "f")
    assert time.process_time() - began < 1


@pytest.mark.parametrize("length", [2**63, 2**40, 9, 100])
def test_a_header_longer_than_its_file_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "f").write_bytes(length.to_bytes(8, "little") + b"{}")
    with opened(tmp_path) as folder, pytest.raises(ValueError, match="no whole header"):
        layout_of_file(folder.file("f"), "f")


@pytest.mark.parametrize("name", ["/etc/passwd", "../f", "a/b", "", ".", "..", ".hidden", "a\0b"])
def test_no_file_outside_the_directory_is_opened(tmp_path: Path, name: str) -> None:
    with opened(tmp_path) as folder, pytest.raises(ValueError, match="no file of this directory"):
        folder.file(name)


def test_a_link_is_not_followed_unless_links_are_expected(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"")
    (tmp_path / "f").symlink_to(tmp_path / "target")
    with opened(tmp_path) as folder, pytest.raises(OSError):
        folder.file("f")
    with Folder(os.open(tmp_path, os.O_RDONLY), links=True) as folder:
        folder.file("f")


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with opened(tmp_path) as folder, pytest.raises(ValueError, match="is no file"):
            folder.file(name)
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(CheckpointError, match="is no file"):
        sl.load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex128])
def test_two_errors_do_not_cancel_in_what_is_read_whole(tmp_path: Path, dtype: torch.dtype) -> None:
    """Drawn ones, and those that cancel along a column or a row: one bit, twice."""
    x = value((96, 160), dtype)
    said = saved(tmp_path, part("x", x))
    raw = (tmp_path / "f").read_bytes()
    begin, row = len(raw) - x.nbytes, 160 * x.itemsize
    rng = random.Random(0)
    with opened(tmp_path) as folder:
        chunk = read_header(folder, "f", said["bytes"], said["crc"]).get(
            "x", whole(x.shape), x.dtype
        )
    assert sum(map(len, chunk.cuts)) > 3, "it has tiles"
    for i in range(60):
        at = rng.randrange(row)
        r, q = rng.sample(range(96), 2)
        one, other = [
            (r * row + at, q * row + at),  # one column
            (r * row + at, r * row + at // 8 * 8 ^ 8),  # one row
            (rng.randrange(x.nbytes), rng.randrange(x.nbytes)),
        ][i % 3]
        if one == other or other >= x.nbytes:
            continue
        bit, data = 1 << rng.choice([0, 6, 7]), bytearray(raw)
        data[begin + one] ^= bit
        data[begin + other] ^= bit
        (tmp_path / "f").write_bytes(data)
        with opened(tmp_path) as folder, pytest.raises(ValueError, match="damaged"):
            fill(torch.empty_like(x), whole(x.shape), chunk)


JUNK = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(tree: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value."""
    yield at
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for k, v in items:
        yield from places(v, (*at, k))


def replaced(tree: Any, at: tuple[Any, ...], junk: Any) -> Any:
    if not at:
        return junk
    if isinstance(tree, dict):
        return {k: replaced(v, at[1:], junk) if k == at[0] else v for k, v in tree.items()}
    return [replaced(v, at[1:], junk) if i == at[0] else v for i, v in enumerate(tree)]


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_junk_under_a_right_checksum_is_refused_or_harmless(
    data: Any, tmp_path_factory: Any
) -> None:
    """Whatever stands in a header or index: ValueError, or chunks within the file that fit boxes."""
    path = tmp_path_factory.getbasetemp() / "junk"
    path.mkdir(exist_ok=True)
    (path / "f").unlink(missing_ok=True)
    saved(path, part("x", torch.arange(600.0).reshape(20, 30)), part("y", torch.ones(3)))
    raw = (path / "f").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    index = json.loads(header["__metadata__"]["shardlib"])
    if data.draw(st.booleans()):
        at = data.draw(st.sampled_from(list(places(index))))
        index = replaced(index, at, data.draw(JUNK))
        header["__metadata__"]["shardlib"] = json.dumps(index)
    else:
        at = data.draw(st.sampled_from(list(places(header))))
        header = replaced(header, at, data.draw(JUNK))
    import zlib

    text = json.dumps(header).encode()
    first = len(text).to_bytes(8, "little")
    (path / "f").write_bytes(first + text + raw[end:])
    size = (path / "f").stat().st_size
    with opened(path) as folder:
        try:
            header = read_header(folder, "f", size, zlib.crc32(first + text))
            boxes = {"x": whole((20, 30)), "y": whole((3,))}
            chunks = [header.get(name, box, torch.float32) for name, box in boxes.items()]
        except ValueError:
            return
        for c in chunks:
            assert c.offset >= 0 and c.offset + c.nbytes <= size
            assert torch.Size(c.shape).numel() * c.dtype.itemsize == c.nbytes


def test_numbers_are_not_taken_for_more_than_they_are() -> None:
    with pytest.raises(ValueError):
        parsed("1" * 10_000, "f")  # Python's own limit on digits


@given(st.data())
def test_a_part_of_a_chunk_is_read_as_it_would_be_cut(data: Any) -> None:
    """Whatever the gaps between rows: read together, one by one, or in several goes."""
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4).map(tuple))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    where = []
    for n in shape:
        start = data.draw(st.integers(0, n - 1))
        where.append(slice(start, data.draw(st.integers(start + 1, n))))
    span, near = data.draw(st.sampled_from([8, 20, 64, 1 << 20])), data.draw(st.integers(0, 64))
    with tempfile.TemporaryDirectory() as d, pytest.MonkeyPatch.context() as patch:
        Path(d, "f").write_bytes(b"123" + bytes(memory(x)))
        patch.setattr(files, "_SPAN", span)
        patch.setattr(files, "_NEAR", near)
        with opened(Path(d)) as folder:
            c = files.FileChunk(folder, "f", whole(shape), x.dtype, 3, (), None)
            sizes = [s.stop - s.start for s in where]
            out = (
                torch.zeros([*sizes, 2])[..., 0] if data.draw(st.booleans()) else torch.zeros(sizes)
            )
            assert torch.equal(folder.block(c, where, out), x[tuple(where)])


def _cut_while_read(path: str) -> str:
    """Load onto another layout while the file shrinks after the first tiles were read."""
    file, compare, done = Path(path, "rank_00000.safetensors"), files._compare, []

    def cut(*args: Any) -> None:
        compare(*args)
        done.append(os.truncate(file, 4096))

    files._compare = cut
    try:
        with sl.simulate(x=2):
            sl.load(path, layouts=". x")
    except sl.ShardError as e:
        return f"{len(done)} {e.message}"
    finally:
        files._compare = compare
    return "read"


def _cut_on_ranks(path: str) -> str:
    return _cut_while_read(f"{path}/{dist.get_rank()}")


def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_no_signal(
    pool: Any, tmp_path: Path
) -> None:
    w = torch.randn(2048, 1024)
    for r in range(5):
        sl.save(tmp_path / str(r), {"w": w})
    said = pool.run(_cut_on_ranks, str(tmp_path), x=2, y=2)
    assert said == [_cut_while_read(str(tmp_path / "4"))] * 4
    assert "rank_00000.safetensors" in said[0] and "('w')" in said[0]


def test_a_header_of_many_tensors_is_read_while_nothing_is_collected(tmp_path: Path) -> None:
    """The collector would walk all that was read again and again."""
    many = {f"w{i}": entry(shape=[1], data_offsets=[4 * i, 4 * i + 4]) for i in range(20_000)}
    write(tmp_path / "f", json.dumps(many).encode(), bytes(80_000))
    runs: list[Any] = []
    gc.callbacks.append(lambda phase, info: runs.append(info))
    try:
        with opened(tmp_path) as folder:
            layout_of_file(folder.file("f"), "f")
    finally:
        gc.callbacks.pop()
    assert len(runs) <= 2 and gc.isenabled()
