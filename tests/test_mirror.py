"""Tests mirror modules: shardlib/ops/norm.py is tested by tests/ops/test_norm.py."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ELSEWHERE = {  # tests that hold several modules to one law -> those that have no file of their own
    "accelerator/test_accelerator.py": "collectives/backends/streams",  # on a device that has some
    "test_operators.py": "ops/dims",  # torch's database
}
MOST = 2
"""How many modules may be without a test file of their own; it only falls."""

MODULES = [
    p.relative_to(ROOT / "shardlib").with_suffix("")
    for p in (ROOT / "shardlib").rglob("*.py")
    if p.stem != "__init__"
]


def own(module: Path) -> Path:
    return ROOT / "tests" / module.with_name(f"test_{module.name.removeprefix('_')}.py")


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_a_module_has_a_test_of_its_name_or_is_listed(module: Path) -> None:
    listed = [test for test, modules in ELSEWHERE.items() if module.as_posix() in modules.split()]
    assert own(module).exists() != bool(listed), (
        f"{module}: write {own(module)} or list it (once): {listed}"
    )


def test_what_is_listed_exists() -> None:
    assert all((ROOT / "tests" / test).exists() for test in ELSEWHERE)
    assert {m for modules in ELSEWHERE.values() for m in modules.split()} <= {
        m.as_posix() for m in MODULES
    }


def test_few_modules_are_without_a_file_of_their_own() -> None:
    assert sum(len(modules.split()) for modules in ELSEWHERE.values()) <= MOST
