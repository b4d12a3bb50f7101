"""Profiles, threads, and the pool of real processes that lives as long as the test run."""

import gc
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from shardlib.mesh import Memo
from shardlib.ops import registry
from tests import fixes
from tests.workers import Pool, start_forked

torch.set_num_threads(1)

settings.register_profile(
    "default",
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile(
    "nightly", max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo processes; ``pool.run(fn, *args, x=2, y=2)`` gives the results by rank."""
    workers = Pool(4)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def pool8() -> Iterator[Pool]:
    """Eight of them, for meshes of three axes."""
    workers = Pool(8)
    yield workers
    workers.close()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """``sl.launch`` forks its processes, for tests that do not ask how processes begin.

    Each that is spawned imports torch, the library and the test's module, for three seconds.
    """
    spawning = SimpleNamespace(start_processes=start_forked)
    monkeypatch.setattr(sys.modules["shardlib.mesh.launch"], "mp", spawning)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fixes", action="store_true", help="run the fix of every error that a test catches"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fixes"):
        fixes.watch()  # before the pools are forked, so that real ranks watch too


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave examples that start a process group to tests/test_public.py, which runs them apart.

    A process that gloo has run in cannot be forked: a pool started later would hang.
    """
    apart = [
        i for i in items if "make_mesh(" in getattr(getattr(i, "dtest", None), "docstring", "")
    ]
    if apart:
        config.hook.pytest_deselected(items=apart)
        items[:] = [i for i in items if i not in apart]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave all modules and tests out of collections of garbage: with them each takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if fixes.NOTED:
        counts = ", ".join(f"{len(lines)} {what}" for what, lines in fixes.NOTED.items())
        terminalreporter.write_line(f"fix lines of this process: {counts}")
    for what, lines in fixes.NOTED.items():
        if not what.startswith("run"):
            terminalreporter.write_line("\n  ".join([f"{what}:", *lines]))


@pytest.fixture(autouse=True)
def every_fix_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """The fix of each error that a test catches is run when
    the test ends, and must do what it says.

    With ``--fixes`` (make fixes) in the whole suite, else in tests/test_errors.py: which test meets
    a fix first hangs on how tests are dealt to workers.
    """
    if not fixes.watched() and request.module.__name__ == "tests.test_errors":
        with fixes.watching():
            yield
    else:
        yield
    wrong = fixes.run()
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def untouched() -> Iterator[None]:
    """Algorithms for matmul are afterwards those that they were."""
    before = registry._ALGORITHMS["matmul"]
    yield
    registry._ALGORITHMS["matmul"] = before
    Memo.version += 1
