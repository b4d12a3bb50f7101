"""Every notebook runs from its start and says what it said when it was committed.

Cells run here in one process, without a kernel; ``make notebooks`` runs them in one and writes
their outputs.  What is printed must be what the file holds, numbers to four digits.
"""

import ast
import contextlib
import io
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "notebooks"
BOOKS = {p.stem: p for p in sorted(FOLDER.glob("*.ipynb"))}
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def cells(file: Path) -> list[dict[str, Any]]:
    return [c for c in json.loads(file.read_text())["cells"] if c["cell_type"] == "code"]


def run(source: str, names: dict[str, Any]) -> Any:
    """Execute a cell; the value of its last line, where that is an expression."""
    tree = ast.parse(source)
    last = tree.body[-1] if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    body = tree.body[:-1] if last is not None else tree.body
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def kinds_shown(value: Any) -> set[str]:
    """The forms in which a notebook shows a value."""
    if value is None:
        return set()
    kinds = {"text/html": "_repr_html_", "image/png": "_repr_png_"}
    return {"text/plain"} | {k for k, name in kinds.items() if getattr(value, name, lambda: 0)()}


def same(now: str, then: str) -> None:
    """Words alike, numbers to four digits; what is as small as rounding counts as zero."""
    assert NUMBER.sub("#", now).split() == NUMBER.sub("#", then).split()
    for a, b in zip(NUMBER.findall(now), NUMBER.findall(then), strict=True):
        assert math.isclose(float(a), float(b), rel_tol=1e-4, abs_tol=1e-5), (a, b)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What ``plt.show`` was called for; matplotlib's settings are put back."""
    matplotlib = pytest.importorskip("matplotlib", reason="notebooks draw with matplotlib")
    matplotlib.use("Agg")
    plt = pytest.importorskip("matplotlib.pyplot")
    shown: list[int] = []

    def show(*_: object, **__: object) -> None:
        for number in plt.get_fignums():
            plt.figure(number).canvas.draw()
            shown.append(number)
        plt.close("all")

    monkeypatch.setattr(plt, "show", show)
    with plt.rc_context():
        yield shown
    plt.close("all")


def needed(file: Path) -> None:
    if "import transformers" in file.read_text():
        pytest.importorskip("transformers", reason="this notebook runs a model of transformers")


def test_the_notebooks_are_seven() -> None:
    assert [name[:2] for name in BOOKS] == [f"0{i}" for i in range(1, 8)]


@pytest.mark.parametrize("name", BOOKS)
def test_a_notebook_runs_and_says_what_it_said(name: str, figures: list[int]) -> None:
    needed(BOOKS[name])
    names: dict[str, Any] = {"__name__": "__main__"}
    began, first = time.process_time(), math.inf
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        for cell in cells(BOOKS[name]):
            drawn, out = len(figures), io.StringIO()
            with contextlib.redirect_stdout(out):
                value = run("".join(cell["source"]), names)
            said = "".join(
                "".join(o["text"]) for o in cell["outputs"] if o["output_type"] == "stream"
            )
            same(out.getvalue(), said)
            held = [set(o["data"]) for o in cell["outputs"] if "data" in o]
            pictures = sum("image/png" in h for h in held)
            shown = kinds_shown(value)
            assert pictures == len(figures) - drawn + ("image/png" in shown)
            assert not shown or shown in held, (shown, held)
            if out.getvalue() or shown or len(figures) > drawn:
                first = min(first, time.process_time() - began)
    finally:
        torch.random.set_rng_state(state)
    assert first < 10 and time.process_time() - began < 60


@pytest.mark.parametrize("name", BOOKS)
def test_what_is_committed_is_whole_small_and_of_no_machine(name: str) -> None:
    text = BOOKS[name].read_text()
    assert len(text) < 500_000
    code = cells(BOOKS[name])
    assert [c["execution_count"] for c in code] == list(range(1, len(code) + 1))
    outputs = [o for c in code for o in c["outputs"]]
    assert outputs and not [
        o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"
    ]
    assert not re.search(r"""(?<![\w.:/-])/(home|root|work|Users|tmp)/""", text)
    assert not re.search(r"ipykernel_\d", text)


def test_numbers_are_compared_and_so_are_words() -> None:
    same("loss 1.00001 in 3e-12 s", "loss  1.00002 in 9e-16 s")
    for now in ("loss 1.1", "lost 1.0", "loss 1.0 2"):
        with pytest.raises(AssertionError):
            same(now, "loss 1.0")


def test_a_cell_gives_the_value_of_its_last_line() -> None:
    seen: list[Callable[[], int]] = []
    assert run("a = 1\na + 1", {}) == 2 and run("a = 1", {}) is None
    assert run("seen.append(1)", {"seen": seen}) is None and seen == [1]
