"""Every element is written once, by its holders in equal parts, and boxes meet where they share."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib.checkpoint import boxes
from shardlib.checkpoint.boxes import BlockRun, SavedPlace
from shardlib.layouts import Layout
from tests.checkpoint.cases import MESHES, layouts


@st.composite
def places(draw: Any, most: int = 13) -> SavedPlace:
    mesh = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.integers(0, most), max_size=3)))
    layout = Layout.parse(draw(layouts(len(shape), mesh))).resolve(len(shape))
    parts = layout.local_shape(shape, mesh, pad=True)
    tiled = tuple(
        n * math.prod(mesh[a] for a in d.axes) for n, d in zip(parts, layout.dims, strict=True)
    )
    ranks = math.prod(mesh.values())
    axes = tuple(mesh.items())
    return SavedPlace(shape, torch.float32, layout, tiled, axes, tuple(range(ranks)))


def positions(box: boxes.Box) -> list[list[int]]:
    return [[r.start + i * r.stride for r in held for i in range(r.length)] for held in box]


@given(places())
def test_a_box_is_what_the_layout_says_without_padding(place: SavedPlace) -> None:
    sizes = dict(place.mesh)
    for rank, coord in enumerate(itertools.product(*(range(n) for n in sizes.values()))):
        index = place.layout.indices(place.tiled, sizes, dict(zip(sizes, coord, strict=True)))
        box = boxes.held(place, rank)
        assert positions(box) == [
            [p for p in held if p < n] for held, n in zip(index, place.shape, strict=True)
        ]
        for held, every in zip(box, index, strict=True):
            for r in held:
                assert list(every)[r.at : r.at + r.length] == list(
                    range(r.start, r.last + 1, r.stride)
                )


@given(places(), st.booleans())
def test_each_element_is_written_once(place: SavedPlace, shared: bool) -> None:
    small = boxes._SMALL
    boxes._SMALL = 0 if shared else small
    try:
        written = torch.zeros(place.shape, dtype=torch.int64)
        chunks = [boxes.chunk("w", place, r) for r in range(len(place.ranks))]
        for box in chunks:
            if box is not None and boxes.size(box):
                index = [torch.tensor(p) for p in positions(box)]
                written[torch.meshgrid(*index, indexing="ij") if index else ()] += 1
        assert (written == 1).all()
        if not math.prod(place.shape):  # an empty tensor stands in one file
            assert sum(c is not None for c in chunks) == 1
    finally:
        boxes._SMALL = small


def test_holders_write_equal_parts() -> None:
    shape, mesh = (600, 512), (("d", 3), ("x", 2))
    place = SavedPlace(shape, torch.int8, Layout.parse("x ."), shape, mesh, tuple(range(6)))
    sizes = [boxes.size(boxes.chunk("w", place, r) or ()) for r in range(6)]
    assert sizes == [100 * 512] * 6
    small = SavedPlace((8,), torch.int8, Layout.parse("."), (8,), mesh, tuple(range(6)))
    owners = {
        next(r for r in range(6) if boxes.chunk(f"b{i}", small, r) is not None) for i in range(60)
    }
    assert owners == set(range(6))  # small ones go to all ranks in turn


@st.composite
def helds(draw: Any) -> boxes.Held:
    """Runs of distinct positions in any order, each somewhere in the block."""
    free, out, at = set(range(60)), [], 0
    for _ in range(draw(st.integers(0, 5))):
        start, stride = draw(st.integers(0, 59)), draw(st.integers(1, 7))
        taken = list(itertools.takewhile(free.__contains__, range(start, 60, stride)))
        n = draw(st.integers(0, len(taken)))
        if n:
            out.append(BlockRun(start, stride if n > 1 else 1, n, at))
            free -= set(taken[:n])
            at += n + draw(st.integers(0, 2))
    return tuple(out)


def at(held: boxes.Held) -> dict[int, int]:
    return {r.start + i * r.stride: r.at + i for r in held for i in range(r.length)}


@given(helds(), helds())
def test_boxes_meet_where_they_share(a: boxes.Held, b: boxes.Held) -> None:
    """Also where there are many runs, which are searched and not tried one by one."""
    found = []
    for s, t in boxes.meet((a,), (b,))[0]:
        found += list(zip(range(100)[s], range(100)[t], strict=True))
    mine, theirs = at(a), at(b)
    assert sorted(found) == sorted((mine[p], theirs[p]) for p in mine.keys() & theirs.keys())


def test_many_runs_meet_too() -> None:
    a = tuple(BlockRun(2 * i, 1, 1, i) for i in range(200))
    b = tuple(BlockRun(3 * i, 1, 2, 2 * i) for i in reversed(range(130)))
    found = [
        pair
        for s, t in boxes.meet((a,), (b,))[0]
        for pair in zip(range(1000)[s], range(1000)[t], strict=True)
    ]
    mine, theirs = at(a), at(b)
    assert sorted(found) == sorted((mine[p], theirs[p]) for p in mine.keys() & theirs.keys())


@given(st.lists(st.integers(1, 5000), max_size=4), st.sampled_from([1, 2, 4, 8]))
def test_tiles_are_small_and_strips_too(shape: list[int], itemsize: int) -> None:
    cuts = boxes.grid(boxes.whole(shape), tuple(shape), itemsize)
    parts = [boxes.stretches(n, c) for n, c in zip(shape, cuts, strict=True)]
    for n, some in zip(shape, parts, strict=True):
        assert some[0].start == 0 and some[-1].stop == n
        assert all(a.stop == b.start and a.start < a.stop for a, b in itertools.pairwise(some))
    tile = math.prod(max(c.stop - c.start for c in some) for some in parts) * itemsize
    assert tile <= boxes.STRIP
    assert math.prod(map(len, parts)) <= max(4, 2 * math.prod(shape) * itemsize / 1024)
    if shape:
        d = boxes.along(shape, itemsize)
        assert all(len(parts[i]) == shape[i] for i in range(d))


@pytest.mark.parametrize("n", [1024, 1000, 769, 50257])
@pytest.mark.parametrize("saved", ["x", "(x y)", ". x", "zigzag(x)", "(3 x)"])
def test_tiles_end_where_blocks_of_other_meshes_end(n: int, saved: str) -> None:
    """Padded blocks too: the borders of a rank's block are borders of the tiles they meet."""
    shape = (n, 512) if not saved.startswith(".") else (512, n)
    mesh = (("x", 2), ("y", 2))
    layout = Layout.parse(f"{saved} ." if len(saved.split()) < 2 or "(" in saved else saved)
    tiled = (-(-n // 12) * 12, 512) if shape[0] == n else (512, -(-n // 12) * 12)
    place = SavedPlace(shape, torch.float32, layout, tiled, mesh, (0, 1, 2, 3))
    box = boxes.chunk("w", place, 1)
    assert box is not None
    d = 0 if shape[0] == n else 1
    cuts, at = boxes.grid(box, shape, 4)[d], 0
    local = {}
    for r in box[d]:
        local |= {r.start + i * r.stride: at + i for i in range(r.length)}
        at += r.length
    for ranks in (2, 3, 4, 6, 8):
        for border in range(-(-n // ranks), n, -(-n // ranks)):
            if border in local and border - 1 in local and local[border]:
                assert local[border] in cuts, (ranks, border)
