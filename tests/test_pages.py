"""Every block of README.md and docs/ can be pasted at a prompt, and runs; every claim names its proof.

``tests/pages.toml`` names, for each paragraph, item and row of a page, the tests that hold its
sentences, by the words that it begins with.
"""

import ast
import code
import re
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import shardlib as sl

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(p.relative_to(ROOT).as_posix() for p in ROOT.glob("docs/*.md"))]
PROOFS = tomllib.loads((ROOT / "tests" / "pages.toml").read_text())
FENCED = re.compile(r"```.*?```", re.S)
BLOCKS = [
    (page, number, block)
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    )
]
ELSEWHERE = "docs/writing_an_algorithm.md"  # registers: tests/test_extend.py runs it and cleans up


class Prompt(code.InteractiveConsole):
    """Read lines as Python's prompt does, where an empty line ends a body, and raise what they raise."""

    def showsyntaxerror(self, *_: object, **__: object) -> None:
        raise sys.exc_info()[1] or SyntaxError()

    showtraceback = showsyntaxerror


@pytest.mark.parametrize(
    ("page", "number", "block"), BLOCKS, ids=[f"{page}-{n}" for page, n, _ in BLOCKS]
)
def test_a_block_pastes_at_a_prompt_and_prints(
    page: str, number: int, block: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if ".png" in block or ".pdf" in block:
        pytest.importorskip("matplotlib", reason="the block draws with matplotlib, an extra")
    prompt = Prompt()
    if page == ELSEWHERE:
        prompt.runcode = lambda _: None  # type: ignore[method-assign]
    for line in [*block.split("\n"), ""]:
        prompt.push(line)
    assert page == ELSEWHERE or capsys.readouterr().out.strip()


def named(dotted: str) -> Any:
    """Return what ``sl.optim.adamw`` names."""
    value: Any = sl
    for part in dotted.split(".")[1:]:
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    names = set(re.findall(r"(?<![.\w])sl(?:\.[A-Za-z_]\w*)+", text)) - {
        "sl.X",
        "sl.optim.X",
        "sl.recipes.X",
    }
    names |= {f"sl.{name}" for name in re.findall(r"`(optim\.\w+)", text)}
    for name in names:
        named(name)


def claims(page: str) -> list[str]:
    """Return the paragraphs, list items and table rows of a page, each on one line, without marks."""
    found: list[str] = []
    for part in re.split(r"\n\s*\n", FENCED.sub("\n\n", (ROOT / page).read_text())):
        if part.lstrip().startswith("|"):
            found += [r for r in part.strip().split("\n")[1:] if not re.fullmatch(r"[|\s-]+", r)]
        elif part.strip() and not part.lstrip().startswith("#"):
            found += re.split(r"\n(?=- |\d+\. )", part.strip())
    return [re.sub(r"^([|-] |\d+\. )+", "", " ".join(c.split())) for c in found]


@cache
def defined(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


def test_every_page_has_its_proofs() -> None:
    """Three have others: figures and tables of papers their command, words of the glossary their home."""
    # test_readme.py, test_papers.py, test_architecture.py
    own = {"docs/measurements.md", "docs/papers.md", "docs/glossary.md"}
    assert set(PAGES) - set(PROOFS) == own


@pytest.mark.parametrize("page", PROOFS)
def test_every_claim_of_a_page_names_its_proof(page: str) -> None:
    left = dict(PROOFS[page])
    for claim in claims(page):
        start = next((s for s in left if claim.startswith(s)), None)
        assert start is not None, f"{page}: name the tests of {claim!r} in tests/pages.toml"
        left.pop(start)
    assert not left, f"{page} has no claim that begins so: {list(left)}"


@pytest.mark.parametrize("page", PROOFS)
def test_every_proof_is_a_test_or_a_command(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for start, proofs in PROOFS[page].items():
        for proof in proofs.split():
            file, _, test = proof.partition("::")
            if proof.startswith("make:"):
                assert f"\n{proof.removeprefix('make:')}:" in makefile, (page, start, proof)
            else:
                assert (ROOT / file).exists(), (page, start, proof)
                assert not test or test in defined(file), (page, start, proof)
