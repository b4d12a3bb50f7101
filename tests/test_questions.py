"""Fourteen questions of an outsider are answered by file names and first lines alone."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "shardlib"

QUESTIONS = [  # (question, words to search for, the file, what is there)
    ("where is Adam's update?", "optimizers adam", "optim/adaptive.py", r"def adam\("),
    ("what happens to the padding in a sum?", "padding sum", "ops/padding.py", r"def filled\("),
    ("which file sends gradients?", "gradients buckets backward", "optim/sink.py", r"class Sink\b"),
    ("how do I add a reduction?", "reductions psum", "ops/reduce.py", r"reduced_layout"),
    ("where is SUMMA's loop?", "summa panel broadcasting", "ops/matmul/summa.py", "for .* in "),
    ("what calls torch.distributed?", "process group", "collectives/backends/dist.py", r"dist\."),
    ("what reads the text of a layout?", "parser layout", "layouts/text.py", r"def read\("),
    ("when is a checkpoint complete?", "saving rename", "checkpoint/writing.py", r"def save\("),
    ("what picks a mesh for my model?", "choice mesh", "planning/plan.py", r"def plan\("),
    ("who draws dropout's numbers?", "random numbers position", "ops/counter_rng.py", "keep_mask"),
    ("what happens when a rank dies?", "failure first cause", "mesh/failures.py", "RankFailed"),
    (
        "where do stages send activations?",
        "messages stages",
        "collectives/point_to_point.py",
        "def send",
    ),
    ("where is 1F1B?", "pipeline schedules", "pipeline/schedules.py", r'register\("1f1b"'),
    ("which torch internals are used?", "private torch", "_compat.py", "torch"),
]


def first_lines() -> dict[str, str]:
    """File -> its name and the first line of its header."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        header = ast.get_docstring(ast.parse(path.read_text())) or ""
        name = str(path.relative_to(PACKAGE))
        found[name] = f"{name} {header.partition(chr(10))[0]}".lower()
    return found


LINES = first_lines()


@pytest.mark.parametrize(
    ("question", "words", "file", "there"), QUESTIONS, ids=[q for q, *_ in QUESTIONS]
)
def test_a_search_for_its_words_finds_the_file_that_answers(
    question: str, words: str, file: str, there: str
) -> None:
    """At most three files, the one that answers among them, and what is asked for is in it."""
    hits = [name for name, line in LINES.items() if all(w in line for w in words.split())]
    assert file in hits and len(hits) <= 3, f"{question} {words!r} finds {hits}"
    assert re.search(there, (PACKAGE / file).read_text())


def test_there_are_fourteen_and_no_file_answers_two() -> None:
    assert len({file for _, _, file, _ in QUESTIONS}) == len(QUESTIONS) == 14
