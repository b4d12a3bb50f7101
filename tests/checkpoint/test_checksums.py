"""A chunk's checksums are the same however it is looked at, and change with every bit."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib.checkpoint.boxes import (
    ChunkChecksums,
    checksum,
    grid,
    outline,
    stretches,
    sums_of,
    whole,
)
from shardlib.filesystem import memory
from tests.checkpoint.cases import DTYPES, value


def sums(shape: tuple[int, ...], dtype: torch.dtype) -> ChunkChecksums:
    return sums_of(shape, grid(whole(shape), shape, dtype.itemsize), dtype)


def of(x: torch.Tensor) -> tuple[list[int], list[int]]:
    """Those of a chunk's tiles, and of its strips."""
    s, tiles, own = sums(tuple(x.shape), x.dtype), [], []
    for i, (where, _) in enumerate(s.strips):
        some, strip = s.of_strip(x[where].contiguous(), i)
        tiles += some
        own += strip
    assert len(tiles) == s.tiles and len(tiles) + len(own) == s.count
    return tiles, own


SHAPES = [
    (600, 128),
    (600, 131),
    (40, 9, 22),
    (5, 300, 64),
    (3, 1100, 1100),
    (70_000,),
    (50_000, 32),
    (40_000, 48),  # pieces that do not end where numbers of rows begin anew
    (33_000, 192),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whoever_reads_a_strip_finds_what_was_written(shape: Any, dtype: torch.dtype) -> None:
    x = value(shape, dtype)
    s, (tiles, own) = sums(shape, dtype), of(x)
    found = []
    for i, (where, _) in enumerate(s.strips):
        strip, out = x[where].contiguous(), torch.zeros_like(x[where]).contiguous()
        source, into, at = memory(strip), memory(out), 0

        def read(piece: Any, source: Any = source, into: Any = into) -> None:
            nonlocal at
            assert piece.nbytes <= len(into) - at
            into[at : at + piece.nbytes] = source[at : at + piece.nbytes]
            at += piece.nbytes

        found += s.whole(out, i, read)
        assert at == strip.nbytes and torch.equal(out, strip)
    assert found == (tiles if s.flat else own)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_tiles_side_by_side_have_the_sums_that_they_have_alone(data: Any) -> None:
    """Whatever group of neighbours is read, and however its memory is laid out."""
    shape = data.draw(st.sampled_from(SHAPES[:4]))
    x = value(shape, data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.complex64])))
    s, (tiles, _) = sums(shape, x.dtype), of(x)
    cuts = [stretches(n, c) for n, c in zip(shape, s.cuts, strict=True)]
    first = [data.draw(st.integers(0, len(c) - 1)) for c in cuts]
    last = [data.draw(st.integers(a + 1, len(c))) for a, c in zip(first, cuts, strict=True)]
    group = [c[a:b] for a, b, c in zip(first, last, cuts, strict=True)]
    where = tuple(slice(c[0].start, c[-1].stop) for c in group)
    lengths = [[c.stop - c.start for c in some] for some in group]
    numbers = itertools.product(*(range(a, b) for a, b in zip(first, last, strict=True)))
    counts = [len(c) for c in cuts]
    expected = [
        tiles[sum(i * math.prod(counts[d + 1 :]) for d, i in enumerate(at))] for at in numbers
    ]
    assert s.of_tiles(x[where], lengths, where) == expected
    assert s.of_tiles(x[where].clone(), lengths, where) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(600, 128), (600, 131), (40, 9, 22), (70_000,)], ids=str)
def test_every_bit_changes_one_tile_and_its_strip(shape: Any, dtype: torch.dtype) -> None:
    rng, x = random.Random(0), value(shape, dtype).contiguous()
    tiles, own = of(x)
    data = memory(x)
    for i in range(40):
        at = rng.randrange(len(data))
        bit = 1 << (i % 8)
        data[at] ^= bit
        other, others = of(x)
        data[at] ^= bit
        assert sum(a != b for a, b in zip(tiles, other, strict=True)) == 1
        assert sum(a != b for a, b in zip(own, others, strict=True)) == bool(own)


@pytest.mark.parametrize("apart", [1, 7, 64, 16_384, 32_767])
def test_the_sign_of_two_rows_never_cancels(apart: int) -> None:
    """Nor any other bit, flipped up, down or both; rows apart as far as a strip is high."""
    x = torch.zeros(33_000, 32)
    s = sums((33_000, 32), x.dtype)
    assert s.joined
    rng, bits = random.Random(apart), x.view(torch.int32)
    for bit in (0, 14, 15, 16, 30, 31):
        for up in ((0, 0), (1, 0), (1, 1)):
            row, lane = rng.randrange(33_000 - apart), rng.randrange(32)
            flip = torch.tensor(1).bitwise_left_shift(bit).to(torch.int32)
            bits[row, lane], bits[row + apart, lane] = flip * up[0], flip * up[1]
            before = of(x)
            bits[row, lane] ^= flip
            bits[row + apart, lane] ^= flip
            after = of(x)
            bits[row, lane] = bits[row + apart, lane] = 0
            assert before[0] != after[0]
            i = next(
                i for i, (where, _) in enumerate(s.strips) if where[0].start <= row < where[0].stop
            )
            assert before[1][i] != after[1][i]


def test_a_stretch_is_looked_at_as_it_is_read() -> None:
    data = random.Random(0).randbytes(3_000_001)
    out = memoryview(bytearray(len(data)))
    at = 0

    def read(piece: memoryview) -> None:
        nonlocal at
        piece[:] = data[at : at + len(piece)]
        at += len(piece)

    assert checksum(out, read) == checksum(memoryview(bytearray(data)))
    assert out == data


@pytest.mark.parametrize("nbytes", [0, 7, 32_767, 32_768, 300_001])
def test_an_outline_changes_with_every_bit_and_with_what_changes_places(nbytes: int) -> None:
    rng = random.Random(nbytes)
    data = memoryview(bytearray(rng.randbytes(nbytes)))
    before = outline(data)
    for _ in range(40 if nbytes else 0):
        at, bit = rng.randrange(nbytes), 1 << rng.randrange(8)
        data[at] ^= bit
        assert outline(data) != before
        data[at] ^= bit
    for a, b in [rng.sample(range(nbytes // 256), 2) for _ in range(20)] if nbytes > 512 else []:
        one, two = (slice(256 * i, 256 * i + 256) for i in (a, b))
        data[one], data[two] = bytes(data[two]), bytes(data[one])
        assert outline(data) != before
        data[one], data[two] = bytes(data[two]), bytes(data[one])
    assert outline(data) == before
