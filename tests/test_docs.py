"""The site is built without a warning, holds every public name, and what its pages name exists."""

import ast
import html
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import shardlib as sl
from tests.test_pages import named

ROOT = Path(__file__).parent.parent
COMING = (ROOT / "docs" / "coming_from.md").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(package) is None:
            pytest.skip("the site is built with mkdocs-material: pip install 'shardlib[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def page(site: Path, name: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", (site / name).read_text()))


def test_every_public_name_has_its_place_in_the_reference(site: Path) -> None:
    for module in ("sl", *(n for n in sl.__all__ if isinstance(getattr(sl, n), types.ModuleType))):
        found = sl if module == "sl" else getattr(sl, module)
        text = (site / "reference" / f"{module}.html").read_text()
        for name in found.__all__:
            if not isinstance(getattr(found, name), types.ModuleType):
                assert re.search(rf'<h2 id="{found.__name__}.{name}"', text), (module, name)
    assert "Shapes" in page(site, "reference/sl.html")


def test_every_error_has_its_cause_an_example_and_what_it_says(site: Path) -> None:
    text = page(site, "errors.html")
    for name in sl.errors.__all__:
        kind = getattr(sl.errors, name)
        assert inspect.cleandoc(kind.__doc__).splitlines()[0] in text, name
    assert "sl.shard(x, 'x', pad=True)" in text and "UnevenSplit: shard: dimension 0" in text


def test_notebooks_are_pages_with_their_pictures(site: Path) -> None:
    for book in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = (site / "notebooks" / f"{book.stem}.html").read_text()
        pictures = book.read_text().count('"image/png":')
        assert text.count("data:image/png;base64") == pictures


def calls() -> list[ast.Call]:
    """Calls of the library in the tables, as far as they are Python."""
    found = []
    for code in re.findall(r"`([^`]+)`", COMING):
        try:
            tree = ast.parse(code.replace("(..., ", "(0, "))
        except SyntaxError:
            continue
        found += [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return [c for c in found if ast.unparse(c.func).startswith("sl.")]


def test_the_arguments_that_the_tables_name_exist() -> None:
    assert len(calls()) > 25
    for call in calls():
        takes = inspect.signature(named(ast.unparse(call.func))).parameters
        free = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        for word in call.keywords:
            assert free or word.arg in takes, ast.unparse(call)


def test_rows_about_layouts_and_local_code_say_what_happens() -> None:
    """What a row gives for JAX's and DTensor's words is what those words give here."""
    x = torch.arange(16.0).reshape(4, 4)
    with sl.simulate(x=2, y=2) as mesh:
        for jax, ours in (
            (sl.P("x", None), "x ."),
            (("x", None), "x ."),
            (sl.P(("x", "y")), "(x y) ..."),
            (sl.P(), "..."),
            ([Shard(0), Replicate()], "x ..."),
            ([Replicate(), Shard(1)], ". y"),
            ([Replicate(), Partial()], "... + sum(y)"),
        ):
            assert sl.layout_of(sl.shard(x, jax)) == sl.layout_of(sl.shard(x, ours))
        a = sl.shard(x, "x ...")
        assert sl.typeof(sl.constrain(a, "x y")) == sl.typeof(sl.reshard(a, "x y"))
        assert torch.equal(sl.unshard(a), x) and a.local.ranks.shape == (4, 2, 4)  # type: ignore[attr-defined]
        assert "| 0,1" in sl.visualize(a) and sl.typeof(a) == "f32[4@x, 4]"
        block = sl.from_local(lambda: x[:2, :2], "x y")
        assert sl.typeof(block) == "f32[4@x, 4@y]"

        @sl.shard_map(in_layouts="x ...", out_layouts=())
        def total(v: torch.Tensor) -> torch.Tensor:
            return sl.psum(v.sum(), "x")

        assert sl.unshard(total(a)).item() == x.sum().item()
        with sl.constants():
            assert torch.equal(sl.unshard(a * torch.arange(4.0)), x * torch.arange(4.0))
        _, g = sl.value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": a})
        assert sl.typeof(g) == {"w": "f32[4@x, 4]"} and mesh.size == 4
        with sl.expect_comm(psum=1):
            a.sum()
    assert sl.auto_mesh(x=2, y=4).kind == "stacked" and sl.process_index() == 0


def test_what_the_forge_runs_is_what_make_runs() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    runs = re.findall(r"- run: (.*)", text)
    targets = {
        *re.findall(r"make (\w+)", text),
        *re.search(r"target: \[(.*)\]", text)[1].split(", "),
    }
    assert all(r.startswith("make ") for r in runs)
    assert all(f"\n{t}:" in makefile for t in targets - {"runs"})
    for version in re.findall(r"torch==([\d.]+)", text):
        assert version.split(".")[:2] >= ["2", "11"]
