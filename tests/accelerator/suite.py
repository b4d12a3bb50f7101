"""Run the suite on the pretend accelerator: ``python -m tests.accelerator.suite [files]``.

What a test makes without naming a device is made there, simulated meshes among it, and the pools of
real ranks are of that device.  The library has the CPU as its default, as where people run it.

``--all`` runs every file (``make accelerator``), in pieces that each take a process, so that a crash
or a test without an end costs one test.
"""

import argparse
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

QUICK = [
    "tests/accelerator/laws.py",
    "tests/accelerator/groups.py",
    "tests/accelerator/alike.py",
    "tests/accelerator/streams.py",
    "tests/ops/test_elementwise.py",
    "tests/ops/test_candidates.py",
]

EXCUSED: dict[str, str] = {}
"""What stands in a test's id -> why it fails there.  Where that is a whole file it is not run."""

LONGEST = 180
"""Seconds that a test may take."""


def reason() -> str:
    """Say what keeps the device from being built here, or nothing."""
    if shutil.which("g++"):
        return ""
    return "the pretend accelerator is compiled with g++, which is not here"


def pieces() -> list[list[str]]:
    """Every test file of the suite but those that are excused whole, a few together."""
    files = [f.relative_to(ROOT).as_posix() for f in sorted(ROOT.glob("tests/**/test_*.py"))]
    files = [f for f in files if f not in EXCUSED and "tests/accelerator/" not in f]
    folders = sorted({os.path.dirname(f) for f in files})
    found = [[f"tests/accelerator/{name}.py" for name in ("laws", "groups", "streams")]]
    for folder in folders:
        inside = [f for f in files if os.path.dirname(f) == folder]
        found += [inside[i : i + 8] for i in range(0, len(inside), 8)]
    return found


class Plugin:
    """Write what came of every test to a file, as soon as it is known; leave out ``done``."""

    def __init__(self, record: Path, done: set[str]) -> None:
        self.record, self.done = record, done

    def _write(self, **entry: Any) -> None:
        with self.record.open("a") as f:
            f.write(json.dumps(entry) + "\n")

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        out = [i for i in items if i.nodeid in self.done]
        config.hook.pytest_deselected(items=out)
        items[:] = [i for i in items if i.nodeid not in self.done]

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        real = bool({"pool", "pool8"} & set(getattr(item, "fixturenames", ())))
        self._write(id=item.nodeid, outcome="died", real=real)
        faulthandler.dump_traceback_later(LONGEST, exit=True, file=sys.__stderr__)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self._write(id=report.nodeid, outcome=report.outcome, why=report.longreprtext[-3000:])

    def pytest_runtest_logfinish(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(id=report.nodeid, outcome="failed", why=report.longreprtext[-3000:])


def here(files: Sequence[str], record: Path | None, done: set[str]) -> int:
    """Run files in this process."""
    from tests.accelerator import pretend

    pretend.default()
    plugins = [] if record is None else [Plugin(record, done)]
    return pytest.main(["-q", "--tb=short", *(files or QUICK)], plugins)


def apart(files: Sequence[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Run files in a process of their own, and in another from where one ended."""
    record = Path(tempfile.mkstemp(suffix=".jsonl", dir=folder)[1])
    found: dict[str, dict[str, Any]] = {}
    while True:
        before = len(found)
        ended = subprocess.run(
            [sys.executable, "-m", "tests.accelerator.suite", "--record", record, *files],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        for line in record.read_text().splitlines():
            entry = json.loads(line)
            found[entry["id"]] = found.get(entry["id"], {}) | entry
        died = [e for e in found.values() if e["outcome"] == "died" and "why" not in e]
        for entry in died:
            entry["why"] = ended.stderr[-3000:]
            with record.open("a") as f:
                f.write(json.dumps(entry) + "\n")
        if not died or len(found) == before:
            return found


def judged(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The table of what came of all tests; then what is at fault, a line or more each."""
    excuse = {i: next((w for w in EXCUSED if w in i), None) for i in found}
    table: Counter[tuple[str, str]] = Counter()
    bad, met = [], Counter()
    for i, entry in found.items():
        outcome, word = entry["outcome"], excuse[i]
        failed = outcome in ("failed", "died")
        if failed and word is not None:
            outcome = "excused"
            met[word] += 1
        elif failed:
            bad.append(f"{entry['outcome']} {i}\n{entry.get('why', '')}")
        table[outcome, "real" if entry.get("real") else "simulated"] += 1
    for kind in ("simulated", "real"):
        counts = ", ".join(f"{n} {o}" for (o, k), n in sorted(table.items()) if k == kind)
        yield f"{kind:10} {sum(n for (_, k), n in table.items() if k == kind)} tests: {counts}"
    for word, why in EXCUSED.items():
        if not word.endswith(".py"):
            yield f"excused {met[word]:4} {word}: {why}"
            if not met[word] and word in excuse.values():
                bad.append(f"excused, and passes: {word}")
    yield from bad
    yield f"{len(bad)} at fault"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every file, in pieces")
    parser.add_argument("--together", type=int, default=2, help="how many pieces at once")
    parser.add_argument("--record", type=Path, help="where to write what came of every test")
    parser.add_argument("files", nargs="*")
    args = parser.parse_args()
    if not args.all:
        done = set()
        if args.record is not None and args.record.exists():
            done = {json.loads(line)["id"] for line in args.record.read_text().splitlines()}
        return here(args.files, args.record, done)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.together) as runs:
        for one in runs.map(lambda files: apart(files, Path(folder)), pieces()):
            found |= one
    lines = list(judged(found))
    print("\n".join(lines))
    return int(not lines[-1].startswith("0 "))


if __name__ == "__main__":
    sys.exit(main())
