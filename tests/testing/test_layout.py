"""A layout of one's own, in a file: whenever it is imported it keeps the laws; wrong ones do not."""

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.layouts import Layout
from shardlib.testing import check_algorithm, check_engine, check_layout, check_mask
from tests.test_extend import BLOCK, LAYOUT, MASK  # as the page writes them
from tests.testing.test_attention import ENGINE

FILES = {
    "algorithm": BLOCK[: BLOCK.index("print(")],
    "engine": ENGINE,
    "mask": MASK[: MASK.index("sl.testing")],
    "layout": LAYOUT[: LAYOUT.index("print(")],
}


@pytest.fixture
def written(untouched: None, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    def imported(name: str) -> Any:
        path = tmp_path / f"{name}.py"
        path.write_text(FILES[name])
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield imported
    if "gather_all" in _engines():
        sl.extend.remove("attention", "gather_all")


def _engines() -> list[str]:
    with sl.simulate(s=2):
        x = sl.shard(torch.ones(1, 2, 4, 2), sl.Ring("s", 2))
        return [name for name, _ in sl.why("attention", x, x, x).verdicts]


FOUND: list[Any] = []


@pytest.mark.parametrize("order", [tuple(FILES), tuple(FILES)[::-1]], ids="-".join)
def test_all_four_of_one_s_own_keep_the_laws_in_either_order(
    written: Callable[[str], Any], order: tuple[str, ...]
) -> None:
    found = {name: written(name) for name in order}
    code = FILES["layout"]
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    family, mask = found["layout"].BlockCyclic("x", "y"), found["mask"].Strided(4)
    results: list[Any] = [
        check_layout(family),
        check_algorithm("matmul", "panel_by_panel", [{"x": 2}]),
    ]
    check_mask(mask, engines=("ring", found["engine"].GatherAll()))
    check_engine(found["engine"].GatherAll(), masks=(mask,))
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with sl.simulate(x=2, y=2), sl.trace() as t:
        a = sl.shard(x, family)
        out = sl.reshard(a.relu(), "x .") @ sl.reshard(a, ". y")
        results += [sl.typeof(a), sl.unshard(out).tolist(), t.bytes, t.messages]
        assert torch.allclose(sl.unshard(out), x.relu() @ x)
    assert len(results[0]) >= 3
    FOUND.append(results)
    assert all(one == FOUND[0] for one in FOUND)


def test_the_page_s_layout_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(LAYOUT, "page", "exec"), {"__name__": "page"})
    assert "(2 x) (2 y): [" in capsys.readouterr().out


@pytest.mark.parametrize(
    "layout",
    [
        "...", ". .", "x ...", "... x", "x y", "(x y) .", "(2 x) (3 y)", "x . + sum(z)", "x y skew a", "x y skew b",
        ". + sum(x)", "zigzag(2 s) ...", "striped(s) x", "documents(s; 0 5 8) ...",
        "runs(s; 0:2 6:8 | 2:6) ...", sl.Ring("s", schedule="zigzag"), sl.Ring(("r", "s"), 0),
        sl.Layout3D("x", "y", "z"), sl.Layout3D("x", "y", "z").weight, sl.Layout25D("x", "y", "d"),
    ],
    ids=str,
)  # fmt: skip
def test_the_library_s_own_layouts_keep_the_laws(layout: sl.LayoutLike) -> None:
    assert check_layout(layout)
    if str(layout).startswith("runs"):
        return  # of two ranks
    with sl.simulate(**dict.fromkeys("rsxyz", 1), d=1):
        assert len(check_layout(layout, seed=1)) <= 2  # the mesh around it, and no other


@dataclass(frozen=True)
class Pairs:
    """Ring order on two axes: pairs of chunks from both ends."""

    outer: str
    inner: str

    @property
    def layout(self) -> Layout:
        return Layout.parse(f"zigzag({self.outer} {self.inner}) ...")


def _on_real_ranks() -> list[list[str]]:
    return [check_layout(Pairs("x", "y")), check_layout("(2 x) y"), check_layout(". x + sum(y)")]


def test_real_ranks_keep_the_laws(pool: Any) -> None:
    found = pool.run(_on_real_ranks, x=2, y=2)
    assert found[0] == found[3] and [len(f) for f in found[0]] == [2, 1, 1]


# ---------------------------------------------------------------- wrong ones


@dataclass(frozen=True, eq=False)
class Sly(Layout):
    """A Layout of another class that passes for one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and str(other) == str(self)

    __hash__ = Layout.__hash__


class Overlapping(Sly):
    """Every rank holds the first rows."""

    def indices(self, shape: Any, mesh: Any, coord: Mapping[str, int]) -> Any:
        return super().indices(shape, mesh, dict.fromkeys(coord, 0))


class Lying(Sly):
    """It says that a block is the whole."""

    def local_shape(self, shape: Any, mesh: Any, *, pad: bool = False) -> tuple[int, ...]:
        return tuple(shape)


class Accepting(Sly):
    """It refuses no size."""

    def check(self, shape: Any, mesh: Any, *, op: str = "layout") -> None:
        pass


class Swapped(Sly):
    """It says that ranks hold each other's rows."""

    def indices(self, shape: Any, mesh: Any, coord: Mapping[str, int]) -> Any:
        return super().indices(shape, mesh, {a: 1 - k for a, k in coord.items()})


@dataclass(frozen=True)
class Given:
    layout: Layout


class Fickle:
    """Another layout whenever it is asked."""

    def __init__(self) -> None:
        self.axes = itertools.cycle("xy")

    @property
    def layout(self) -> Layout:
        return Layout.parse(f"{next(self.axes)} .")


def _of(kind: type[Layout]) -> Given:
    plain = Layout.parse("x .")
    return Given(kind(plain.dims, plain.partial))


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("runs(s; 0:2 | 1:3) .", "fits no mesh: .*holds position 1 twice"),
        ("runs(s; 0:2 | 3:5) .", "fits no mesh: .*holds position 2 by nobody"),
        (_of(Overlapping), r"do not tile the tensor: 2 ranks hold element \[0, 0\], not 1"),
        (_of(Lying), "the shape of the block"),
        (_of(Accepting), "a size that does not divide is accepted|the shape of the block"),
        (_of(Swapped), "what unshard gives back: differs from dense"),
        (Fickle(), "has one layout"),
        ("x y z w", "fits no mesh"),
    ],
    ids=["twice", "nobody", "overlapping", "lying", "accepting", "swapped", "fickle", "too long"],
)
def test_a_wrong_layout_fails(layout: Any, says: str) -> None:
    meshes = [{"s": 2}, {"s": 1}] if isinstance(layout, str) else [{"x": 2, "y": 1}]
    with pytest.raises(AssertionError, match=says):
        check_layout(layout, meshes)


def test_what_moves_and_what_is_foretold_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(Layout.parse("x") >> Layout.parse("."))
    monkeypatch.setattr(kind, "bytes", lambda *_: 1)
    with pytest.raises(AssertionError, match="bytes and messages, counted and foretold"):
        check_layout("x .", [{"x": 2}])


def test_a_recording_mesh_is_refused() -> None:
    with sl.record(x=2), pytest.raises(sl.ShardError, match="holds no values") as e:
        check_layout("x .")
    assert eval(e.value.fix, {"sl": sl})
