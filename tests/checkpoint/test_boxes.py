"""Every element is written once, by its holders in equal parts, and boxes meet where they share."""

import itertools
import math
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlib.checkpoint import boxes
from shardlib.checkpoint.boxes import Place, Run
from shardlib.layouts import Layout
from tests.checkpoint.cases import MESHES, layouts


@st.composite
def places(draw: Any, most: int = 13) -> Place:
    mesh = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.integers(0, most), max_size=3)))
    layout = Layout.parse(draw(layouts(len(shape), mesh))).resolve(len(shape))
    parts = layout.local_shape(shape, mesh, pad=True)
    tiled = tuple(
        n * math.prod(mesh[a] for a in d.axes) for n, d in zip(parts, layout.dims, strict=True)
    )
    ranks = math.prod(mesh.values())
    return Place(shape, layout, tiled, tuple(mesh.items()), tuple(range(ranks)))


def positions(box: boxes.Box) -> list[list[int]]:
    return [[r.start + i * r.stride for r in held for i in range(r.length)] for held in box]


@given(places())
def test_a_box_is_what_the_layout_says_without_padding(place: Place) -> None:
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
def test_each_element_is_written_once(place: Place, shared: bool) -> None:
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
    place = Place(shape, Layout.parse("x ."), shape, mesh, tuple(range(6)))
    sizes = [boxes.size(boxes.chunk("w", place, r) or ()) for r in range(6)]
    assert sizes == [100 * 512] * 6
    small = Place((8,), Layout.parse("."), (8,), mesh, tuple(range(6)))
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
            out.append(Run(start, stride if n > 1 else 1, n, at))
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
    a = tuple(Run(2 * i, 1, 1, i) for i in range(200))
    b = tuple(Run(3 * i, 1, 2, 2 * i) for i in reversed(range(130)))
    found = [
        pair
        for s, t in boxes.meet((a,), (b,))[0]
        for pair in zip(range(1000)[s], range(1000)[t], strict=True)
    ]
    mine, theirs = at(a), at(b)
    assert sorted(found) == sorted((mine[p], theirs[p]) for p in mine.keys() & theirs.keys())


@given(st.lists(st.integers(1, 5000), max_size=4), st.sampled_from([1, 2, 4, 8]))
def test_tiles_are_small_and_strips_too(shape: list[int], itemsize: int) -> None:
    parts = boxes.grid(tuple(shape), itemsize)
    assert all(1 <= p <= n for p, n in zip(parts, shape, strict=True))
    tile = math.prod(-(-n // p) for n, p in zip(shape, parts, strict=True)) * itemsize
    assert tile <= boxes.STRIP
    for n, p in zip(shape, parts, strict=True):
        cuts = boxes.cuts(n, p)
        assert [c.start for c in cuts[1:]] == [c.stop for c in cuts[:-1]] and cuts[-1].stop == n
