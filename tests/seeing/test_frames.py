"""Frames tell who sends which block to whom, and their bytes are those that are counted."""

import itertools
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import shardlib as sl
from shardlib.seeing.frames import _laid, _positions


def routes(frame: Any) -> set[tuple[int, str, tuple[int, ...]]]:
    return {(s.sender, s.block, s.receivers) for s in frame.sent}


def test_summa_sends_the_panels_of_its_owners_along_rows_and_columns() -> None:
    with sl.simulate(x=2, y=2):
        a, b = (sl.shard(torch.zeros(4, 4), "x y") for _ in "ab")
        film = sl.seeing.frames(torch.matmul, a, b)
        assert routes(film[0]) == {
            (0, "A0", (1,)),
            (2, "A2", (3,)),
            (0, "B0", (2,)),
            (1, "B1", (3,)),
        }
        assert routes(film[1]) == {
            (1, "A1", (0,)),
            (3, "A3", (2,)),
            (2, "B2", (0,)),
            (3, "B3", (1,)),
        }
        with sl.trace() as t:
            _ = a @ b
        assert len(film) == 2 and film.bytes == t.bytes
        assert "0 -- A0 -> 1" in str(sl.visualize(film))


def test_cannon_skews_then_shifts_every_block_once() -> None:
    with sl.simulate(x=2, y=2), sl.algorithm(matmul="cannon"):
        a, b = (sl.shard(torch.zeros(4, 4), "x y") for _ in "ab")
        skew, shift = sl.seeing.frames(torch.matmul, a, b).frames
    assert routes(skew) == {(2, "A2", (3,)), (3, "A3", (2,)), (1, "B1", (3,)), (3, "B3", (1,))}
    assert {s.block for s in shift.sent} == {f"{m}{r}" for m in "AB" for r in range(4)}


def test_a_cube_gathers_both_and_scatters_sums() -> None:
    with sl.simulate(x=2, y=2, z=2):
        a, b = sl.shard(torch.zeros(8, 8), "(x y) z"), sl.shard(torch.zeros(8, 8), "(z x) y")
        gathers, sums = sl.seeing.frames(sl.matmul, a, b).frames
    assert {s.block[0] for s in gathers.sent} == {"A", "B"}
    assert {s.block for s in sums.sent} == {"sum"} and sums.what == ("psum_scatter over z",)


def test_keys_and_values_go_round_a_ring_and_results_come_back() -> None:
    with sl.simulate(s=4):
        q, k, v = (sl.shard(torch.zeros(1, 4, 8, 4), ". . s .") for _ in "qkv")
        with sl.algorithm(attention="ring"):
            film = sl.seeing.frames(sl.ring_attention, q, k, v)
        assert len(film) == 3 and routes(film[1]) >= {(1, "B0+C0", (2,)), (0, "B3+C3", (1,))}
        with sl.algorithm(attention="ulysses"):
            film = sl.seeing.frames(sl.ring_attention, q, k, v)
        assert {s.block[0] for s in film[0].sent} == {"A", "B"}
        assert {s.block for s in film[len(film) - 1].sent} == {"result"}


def test_replicas_are_one_block_and_nothing_moves_where_all_is_local() -> None:
    with sl.simulate(x=2, y=2):
        a, b = sl.shard(torch.zeros(4, 4), "x ."), sl.shard(torch.zeros(4, 4), ". y")
        film = sl.seeing.frames(torch.matmul, a, b)
        assert len(film) == 0 and "nothing moves" in str(film)
        film = sl.seeing.frames(sl.unshard, a)
        assert {s.block for s in film[0].sent} == {"A0", "A2"}


@pytest.mark.parametrize(
    ("name", "axes", "steps"),
    [
        ("summa", {"x": 2, "y": 3}, 6),
        ("cannon", {"x": 3, "y": 3}, 3),
        ("ring", {"s": 4}, 3),
        ("ulysses", {"s": 4}, 3),
    ],
)
def test_an_algorithm_is_drawn_by_its_name(name: str, axes: dict[str, int], steps: int) -> None:
    film = sl.seeing.frames(name, **axes)
    assert film.title == name and dict(film.mesh) == axes and len(film) == steps


def test_a_name_that_no_algorithm_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(sl.errors.NoImplementation, match="no algorithm 'suma' on x=2 y=2") as e:
        sl.seeing.frames("suma", x=2, y=2)
    assert "summa" in e.value.operands["algorithms"] and "ring" in e.value.operands["algorithms"]
    with pytest.raises(sl.errors.NoImplementation, match="'cannon' takes nothing"):
        sl.seeing.frames("cannon", x=2)
    with pytest.raises(sl.ShardError, match="was given none"):
        sl.seeing.frames("cannon")


def test_a_notebook_gets_a_drawing_of_each_step() -> None:
    film = sl.seeing.frames("cannon", x=2, y=2)
    page = film._repr_html_()
    assert page.count("<svg") == len(film) and page.count("<circle") == 4 * len(film)
    assert all(ElementTree.fromstring(svg) is not None for svg in re.findall("<svg.*?</svg>", page))
    assert page.count(">A3</text>") == 2 and sl.visualize(film) is film
    assert "nothing moves" in sl.seeing.frames(torch.neg, *operand())._repr_html_()
    pytest.importorskip("rich", reason="colours need rich, which is an extra")
    assert film.__rich__().plain == str(film)


def operand() -> tuple[Any]:
    with sl.simulate(x=2):
        return (sl.shard(torch.ones(4), "x"),)


def test_frames_are_taken_of_simulated_ranks() -> None:
    with pytest.raises(sl.ShardError, match="simulated ranks") as caught:
        sl.seeing.frames(torch.matmul, torch.zeros(2, 2), torch.zeros(2, 2))
    assert "sl.simulate(x=2, y=2)" in caught.value.fix


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which is an extra")
    with sl.simulate(d=2, x=2, y=2):
        a, b = sl.shard(torch.zeros(8, 8), "(d x) y"), sl.shard(torch.zeros(8, 8), "x y")
        sl.seeing.frames(torch.matmul, a, b).save(str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 5000


def test_a_name_of_both_is_attentions_unless_it_is_said() -> None:
    assert sl.seeing.frames("ring", s=4)[0].sent[0].block == "B0+C0"
    assert sl.visualize("matmul ring", s=4)[0].sent[0].block in ("A0", "B0")
    with pytest.raises(sl.errors.NoImplementation):
        sl.seeing.frames("matmul ulysses", s=4)


@pytest.mark.parametrize("schedule", ["zigzag", "contiguous"])
def test_the_plan_of_an_attention_is_drawn_on_its_ring(schedule: str) -> None:
    with sl.record(data=8, s=4):
        q = sl.shard(
            torch.empty(8, 4, 32, 64, device="meta"),
            "data . " + {"zigzag": "zigzag(s) ."}.get(schedule, "s ."),
        )
        plan = sl.planning.attention_plan(q, q, q, sl.masks.Causal(), "ring")
        long = sl.shard(torch.empty(1, 4, 8192, 64, device="meta"), sl.Ring("s", 2))
        refused = sl.planning.attention_plan(long, long, long)
    film = sl.visualize(plan)
    assert len(film) == plan.steps == 3 and dict(film.mesh) == {"s": 4}
    assert film.title == "AttentionPlan(ring of 4 ranks, 3 steps)"
    with pytest.raises(sl.errors.Unsupported, match="8192 positions") as e:
        sl.visualize(refused)
    assert e.value.fix.startswith("sl.seeing.frames(")


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("summa", {"x": 2, "y": 3}), ("cannon", {"x": 3, "y": 3}), ("ring", {"s": 4}),
        ("ulysses", {"s": 4}), ("matmul ring", {"x": 4}), ("3d", {"x": 2, "y": 2, "z": 2}),
    ],
)  # fmt: skip
def test_no_label_lies_on_another_or_on_a_rank(name: str, axes: dict[str, int]) -> None:
    if name == "3d":
        with sl.simulate(**axes):
            lies = sl.Layout3D(*axes)
            a, b = (sl.shard(torch.zeros(8, 8), w) for w in (lies.act, lies.weight))
            film = sl.seeing.frames(torch.matmul, a, b)
    else:
        film = sl.seeing.frames(name, **axes)
    at = _positions(film.mesh)
    for frame in film.frames:
        boxes = [(x, y, 0.035 * len(a.label) + 0.03, 0.08) for a, (x, y) in _laid(frame, at)[0]]
        boxes += [(x, y, 0.13, 0.13) for x, y in at]
        for (x, y, w, h), (u, v, r, g) in itertools.combinations(boxes, 2):
            assert abs(x - u) >= w + r or abs(y - v) >= h + g, (film.title, frame.what)
