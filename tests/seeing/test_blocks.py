import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

import shardlib as sl
from shardlib.mesh import coordinates
from shardlib.seeing.blocks import PieceGrid, grids
from tests.strategies import placed


def owners(grid: PieceGrid) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The ranks of each piece, by row and column."""
    return tuple(tuple(c.ranks for c in row) for row in grid.cells)


def test_pictures_show_every_contiguous_piece_and_its_owners() -> None:
    with sl.simulate(x=2, y=2):
        assert sl.visualize(sl.shard(torch.zeros(4), "x")).count("| 0,1") == 1
        fused = sl.visualize(sl.shard(torch.zeros(12, 4), "(3 y) ."))
        assert fused.count("| 0,2") == 3 and fused.count("| 1,3") == 3
        skewed = sl.visualize(sl.shard(torch.zeros(4, 4), "x y skew a")).splitlines()
        assert skewed[1].split() == ["|", "0", "|", "1", "|"] and skewed[4].split() == [
            "|",
            "3",
            "|",
            "2",
            "|",
        ]
        assert "0,1,2,3" in sl.visualize(sl.shard(torch.zeros(()), ""))


def test_more_dimensions_are_shown_by_choosing_two() -> None:
    with sl.simulate(x=2, y=2):
        x = sl.shard(torch.zeros(2, 3, 4, 4), "x . y .")
        assert sl.visualize(x) == sl.visualize(sl.shard(torch.zeros(2, 4), "x y"))
        assert sl.visualize(x, dims=(1, 3)).count("| 0,1,2,3") == 1
        assert sl.visualize(sl.shard(torch.zeros(2, 2, 2), "x ...")).count("| 0,1") == 1


def test_a_cube_is_a_table_for_each_piece_in_front() -> None:
    with sl.simulate(x=2, y=2, z=2):
        cube = sl.shard(torch.zeros(2, 2, 2), "x y z")
        drawn = sl.visualize(cube)
        assert [g.title for g in drawn.grids] == ["[0:1, :, :]", "[1:2, :, :]"]
        assert [owners(g) for g in drawn.grids] == [
            (((0,), (1,)), ((2,), (3,))),
            (((4,), (5,)), ((6,), (7,))),
        ]
        assert sl.visualize(cube, dims=(0, 1)).count("| 0,1 ") == 1
        with pytest.raises(
            sl.errors.OutOfRange, match=r"dimensions \(0, 3\) of a tensor that has 3"
        ):
            sl.visualize(cube, dims=(0, 3))


def test_padding_is_drawn_as_padding() -> None:
    with sl.simulate(x=4):
        drawn = sl.visualize(sl.shard(torch.zeros(5), "x", pad=True))
    (grid,) = drawn.grids
    assert grid.columns == ((0, 2), (2, 4), (4, 5), (5, 6), (6, 8))
    assert owners(grid) == (((0,), (1,), (2,), (2,), (3,)),)
    assert [c.padding for c in grid.cells[0]] == [False, False, False, True, True]
    assert str(drawn).count("padding") == 2


def test_a_pending_sum_is_said() -> None:
    with sl.simulate(x=2, y=2):
        drawn = sl.visualize(sl.shard(torch.ones(4, 4), ". y + sum(x)"))
    assert drawn.endswith("every block is one part of a sum over x")


@given(placed())
def test_every_element_is_drawn_with_the_ranks_that_hold_it(case: Any) -> None:
    layout, shape, mesh = case
    layout = layout.resolve(len(shape)).bare
    with sl.simulate(**mesh):
        x = sl.shard(torch.zeros(shape), layout)
        drawn = grids(x)
        front = [d for d, t in enumerate(layout.dims) if t.is_split][:-2]
        shown = range(len(shape)) if len(shape) <= 2 else None
    if front or shown is None or not shape or not all(shape):
        return
    (grid,) = drawn
    for rank, coord in enumerate(coordinates(mesh)):
        held = [set(i) for i in layout.indices(shape, mesh, coord)]
        for row, line in zip(grid.rows, owners(grid), strict=True):
            for column, ranks in zip(grid.columns, line, strict=True):
                ranges = [range(*p) for p in (row, column) if p is not None][-len(shape) :]
                inside = all(set(r) <= h for r, h in zip(ranges, held, strict=True))
                assert inside == (rank in ranks)


def test_a_notebook_gets_a_table_and_a_terminal_colours(capsys: pytest.CaptureFixture[str]) -> None:
    with sl.simulate(x=2, y=2):
        drawn = sl.visualize(sl.shard(torch.zeros(4, 4), "x y"))
    page = drawn._repr_html_()
    assert page.count("<td") == 4 and "<b>3</b>" in page
    assert repr(drawn) == str(drawn) and pickle.loads(pickle.dumps(drawn)).grids == drawn.grids
    drawn.show()
    assert capsys.readouterr().out == f"{drawn}\n"  # no terminal: plain
    rich = pytest.importorskip("rich.console", reason="colours need rich, which is an extra")
    out = io.StringIO()
    rich.Console(file=out, force_terminal=True, color_system="truecolor").print(drawn)
    assert "\x1b[" in out.getvalue() and "x1 y1" in out.getvalue()


def test_draw_writes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which is an extra")
    with sl.simulate(x=2, y=2):
        tensors = {"w": sl.shard(torch.zeros(12, 4), "(3 y) x")}
        tensors["p"] = sl.shard(torch.zeros(5), "x", pad=True)
        picture = sl.seeing.draw(tensors, str(tmp_path / "w.png"))
    assert (tmp_path / "w.png").stat().st_size > 1000
    assert picture._repr_png_().startswith(b"\x89PNG") and repr(picture) == "Picture('w, p')"


def test_matplotlibs_back_end_stays_as_it_was() -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    matplotlib.use("svg")
    try:
        with sl.simulate(x=2):
            sl.seeing.draw({"w": sl.shard(torch.zeros(4), "x")})
        assert matplotlib.get_backend() == "svg"
    finally:
        matplotlib.use("agg")


def test_of_many_pieces_the_first_are_shown_and_of_many_ranks_the_first_and_last() -> None:
    with sl.record(s=16):
        x = sl.shard(torch.empty(4096, device="meta"), "striped(s)")
        drawn = sl.visualize(x)
    assert len(drawn.grids[0].columns) == 64 and drawn.grids[0].cut
    assert "the first 64 are shown" in drawn
    with sl.record(s=64):
        assert "| 0,1,..,63  |" in sl.visualize(sl.shard(torch.empty(4, device="meta"), "."))


def test_a_tree_is_drawn_tensor_by_tensor_under_their_names() -> None:
    with sl.simulate(x=2):
        w, b = sl.shard(torch.zeros(4, 2), "x ."), sl.shard(torch.zeros(4), ". + sum(x)")
        drawn = sl.visualize({"up": {"w": w}, "b": b, "step": 3})
        assert drawn.splitlines()[0] == "b  f32[4]{sum:x}" and "up.w  f32[4@x, 2]" in drawn
        assert str(sl.visualize(w)) in drawn and "every block of b is one part of a sum" in drawn
        assert "up.w" in drawn._repr_html_()


NOT_TENSORS = [3, 2.5, [1.0, 2.0], {"a": 1}, torch.nn.Linear(2, 2), sl.Layout.parse("x"), object()]


@pytest.mark.parametrize("given", NOT_TENSORS, ids=lambda v: type(v).__name__)
def test_what_is_no_tensor_is_refused_by_name_with_the_line_to_write(given: Any) -> None:
    with sl.simulate(x=2):
        verbs = [sl.visualize, sl.summary]
        verbs += [] if isinstance(given, list | dict) else [sl.typeof, sl.layout_of]
        for verb in verbs:
            with pytest.raises(sl.errors.PlainTensor, match="is no tensor, and no tree") as e:
                verb(given)
            assert type(given).__name__ in e.value.message
            eval(e.value.fix, {"sl": sl, "torch": torch, "x": given})
        if not isinstance(given, dict):
            with pytest.raises(sl.errors.PlainTensor, match="is no tensor"):
                sl.shard(given, "...")
