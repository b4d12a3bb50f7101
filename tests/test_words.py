"""A word has one meaning: class names, and the first words of docstrings."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
TREES = {p.relative_to(ROOT): ast.parse(p.read_text()) for p in (ROOT / "shardlib").rglob("*.py")}
ELSEWHERE = {
    "contextlib.py",
    "functools.py",
    "threading.py",
    "script.py",
    "train.py",
}  # of Python, and of users


def test_a_class_name_has_one_meaning() -> None:
    defined = defaultdict(list)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(f"{path}:{node.lineno}")
    assert not {name: places for name, places in defined.items() if len(places) > 1}


def test_no_docstring_begins_with_what_who_or_of() -> None:
    wrong = [
        f"{path}:{getattr(node, 'lineno', 1)}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and re.match(r"(What|Who|Whose|Of|Whoever)\b", ast.get_docstring(node) or "")
    ]
    assert not wrong


def test_a_file_that_is_named_exists() -> None:
    """Docstrings, comments and pages name files."""
    texts = [*(ROOT / "shardlib").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    there = {
        p.name
        for p in ROOT.rglob("*.py")
        if not any(part[0] == "." for part in p.relative_to(ROOT).parts)
    }
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in texts
        for name in re.findall(r"(?<![\w.*{}])[a-z]\w*\.py\b", path.read_text())
        if name not in there | ELSEWHERE
    }
    assert not missing
