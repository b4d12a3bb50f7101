"""Laws of the table of torch's operators: complete, without contradictions, and the only one."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.opspec import OPERATORS, homes, names_of, writes
from shardlib.tensor import TABLE

PACKAGE = Path(__file__).parent.parent / "shardlib"
ALL = [name for spec in OPERATORS for name in spec.entries]


def test_no_name_stands_in_two_records() -> None:
    assert [name for name, count in Counter(ALL).items() if count > 1] == []


@pytest.mark.parametrize(
    "kind", ["pointwise", "rows", "reduce", "along", "matrices", "copied view", "own"]
)
def test_an_operator_of_a_kind_that_runs_on_blocks_is_implemented(kind: str) -> None:
    assert [n for n in names_of(kind=kind) if homes(n) and not set(homes(n)) & TABLE.keys()] == []


def test_an_operator_that_runs_on_whole_operands_has_no_implementation() -> None:
    assert [n for n in names_of(kind="whole") if set(homes(n)) & TABLE.keys()] == []


def test_a_function_of_torch_has_every_name() -> None:
    """But for names that a later or an earlier torch has."""
    missing = [n for n in ALL if not homes(n) and not hasattr(torch.ops.aten, n)]
    later = {"linalg.matrix_sqrth", "linalg.polar"}
    assert set(missing) <= later | {"__cuda_array_interface__"}  # a property


def tagged(tag: str, name: str) -> bool:
    """Whether torch tags an overload of aten's operator of this name."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = (
        [getattr(packet, o) for o in packet.overloads()] if hasattr(packet, "overloads") else []
    )
    return any(tag in {t.name for t in f.tags} for f in overloads)


@pytest.mark.parametrize("kind", ["pointwise", "reduce"])
def test_a_kind_agrees_with_torch_s_tags(kind: str) -> None:
    """What torch tags so is of this kind, or of rows, whose names are run for each rank."""
    tag = {"pointwise": "pointwise", "reduce": "reduction"}[kind]
    mine = {n.replace(".", "_") for k in (kind, "rows") for n in names_of(kind=k)}
    mine |= {"max", "min", "equal"}  # one overload is elementwise; a comparison of all elements
    assert [n for n in ALL if n not in mine and tagged(tag, n)] == []


@pytest.mark.parametrize(
    ("name", "want"),
    [
        *[("add_", True), ("__iadd__", True), ("__setitem__", True), ("add", False)],
        *[("__int__", False), ("__invert__", False), ("__init__", False), ("detach_", False)],
    ],
)
def test_what_a_function_writes_is_known_by_its_name(name: str, want: bool) -> None:
    assert writes(name) == want


@cache
def torchs() -> frozenset[str]:
    """The names of torch's functions, aten's among them."""
    modules = (torch, Tensor, F, torch.linalg, torch.fft, torch.special)
    found = {n for m in modules for n in dir(m) if callable(getattr(m, n, None))}
    return frozenset(n for n in found | set(dir(torch.ops.aten)) if not n.startswith("__"))


def literals(tree: ast.AST) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, words) of every string of names or signatures, and of every list of strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            signatures = re.findall(r"^\s*([\w.]+)\(.*\)$", node.value, re.MULTILINE)
            prose = re.search(r"[.,:;!?]\s", node.value)
            yield node.lineno, signatures or ([] if prose else re.findall(r"[\w.]+", node.value))
        elif isinstance(node, ast.Dict | ast.Set | ast.List | ast.Tuple):
            each = node.keys if isinstance(node, ast.Dict) else node.elts
            values = [e.value for e in each if isinstance(e, ast.Constant)]
            yield node.lineno, [v for v in values if isinstance(v, str)]


def lists_of_operators(source: str) -> list[int]:
    """Lines of the literals that list more than 12 operators of torch."""
    found = []
    for line, words in literals(ast.parse(source)):
        known = [w for w in words if w.rpartition(".")[2].strip("_") in torchs()]
        if len(known) > 12 and len(known) > 0.55 * len(words):
            found.append(line)
    return found


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.name)
def test_no_list_of_operators_stands_outside_the_table(file: Path) -> None:
    found = lists_of_operators(file.read_text())
    assert bool(found) == (file == PACKAGE / "opspec.py"), found


@pytest.mark.parametrize(
    "source",
    [
        'X = "sin cos tan asin acos atan exp log sqrt abs neg add sub"',
        'X = {"sin", "cos", "tan", "asin", "acos", "atan", "exp", "log", "sqrt", "abs", "neg", "add", "sub"}',
        'X = """'
        + "\n".join(f"{n}(input, dim)" for n in "sin cos tan asin acos atan exp log".split())
        + "\nsqrt(x)\nabs(x)\nneg(x)\nadd(x, y)\nsub(x, y)\n"
        + '"""',
    ],
)
def test_a_list_of_operators_is_found(source: str) -> None:
    assert lists_of_operators(source) == [1]
