"""The library on the pretend accelerator, in a process of its own: the device stays in one that imported it."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

from tests.accelerator.suite import QUICK, reason

ROOT = Path(__file__).parent.parent.parent

FACTORIES = {f.__name__ for f in _device_constructors()} - {
    *("as_tensor", "asarray"),  # take the device of what they are given
}


def unplaced(source: str) -> Iterator[tuple[int, str]]:
    """The line and text of every call that makes a tensor on whichever device is the default."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of, name = node.func.value, node.func.attr
        named = {k.arg for k in node.keywords}
        ours = isinstance(of, ast.Name) and of.id == "torch" and name in FACTORIES
        if ours and not named & {"device", "out", None}:
            yield node.lineno, ast.unparse(node)


def test_every_tensor_that_the_library_makes_names_its_device() -> None:
    assert len(FACTORIES) > 20 and list(unplaced("torch.arange(3)")) == [(1, "torch.arange(3)")]
    found = [
        f"{f.relative_to(ROOT)}:{line}: {call}"
        for f in sorted((ROOT / "shardlib").rglob("*.py"))
        for line, call in unplaced(f.read_text())
    ]
    assert not found, "\n".join(["on the default device, which is the CPU's:", *found])


def test_the_quick_part_of_the_suite_passes_on_the_device() -> None:
    if why := reason():
        pytest.skip(why)
    done = subprocess.run(
        [sys.executable, "-m", "tests.accelerator.suite", *QUICK],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
