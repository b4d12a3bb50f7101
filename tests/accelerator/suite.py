"""Run the suite on the pretend accelerator: ``python -m tests.accelerator.suite [files]``.

What a test makes without naming a device is made there, simulated meshes among it, and the pools of
real ranks are of that device.  The library has the CPU as its default, as where people run it.

``--all`` runs every file (``make accelerator``), in pieces that each take a process, so that a crash
or a test without an end costs one test.  ``--planted`` makes sure that it finds a tensor without a
device.  Other arguments are pytest's.
"""

import argparse
import faulthandler
import json
import os
import re
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
    "tests/accelerator/tiers.py",
    "tests/ops/test_elementwise.py",
    "tests/ops/test_candidates.py",
]

_TEXTS = "reads files, or runs other programs: no tensor of its own"
_ROUNDING = (
    "the CPU's fused steps and sums, which the device runs, round by where an element lies; the "
    "library makes up for that on CPUs alone"
)
EXCUSED: dict[str, str] = {
    r"tests/test_(docs|pages|public|imports|mirror|architecture|readme|notebooks|examples|museum)\.py": _TEXTS,
    r"tests/test_(aliases|desync|rig|workers)\.py": _TEXTS,
    r"tests/command/": _TEXTS,
    r"tests/(checkpoint/test_kill|mesh/test_(failures|launch|process|store))\.py": "kills or starts "
    "processes of its own, on the CPU",
    r"test_gradients_that_are_no_numbers_are_refused_or_skipped|test_a_gradient_that_is_refused_in_one_group_changes_no_other": "a clip raises a step "
    "later there; laws.py asks the same of it",
    r"test_collectives_on_flat_vectors_are_those_that_allocate": "asks for the order of sums round "
    "our ring, and the device's group has a reduce-scatter of its own, as NCCL does",
    r"written_as_dense_ones\[.*-cpu\]": "blocks stay where the mesh computes, and leave by unshard",
    r"test_in_place_is_in_place_and_torchs_refusals|test_positions_out_of_range_are_refused": "values "
    "are looked at by the device, so that the host does not wait",
    r"test_as_module.py::test_(trainer|accelerate)": "transformers' Trainer and accelerate do not know "
    "the device, and leave batches on the CPU",
    r"test_tensor.py::test_what_needs_its_blocks_alone.*layer_norm": "kernels of cuda/ are asked at "
    "every call on a device, where the CPU's call of torch's is kept",
    r"test_an_array_that_meets_a_sharded_tensor|test_errors.py.*(an array|numpy of)": "numpy takes tensors of the host alone",
    r"optim/test_(composed|exact)\.py|test_five_more_steps_elsewhere_are_the_same_bit_for_bit": _ROUNDING,
    r"optim/test_tiered": "norms and updates of what is in host memory have the host's rounding",
    r"test_the_global_norm_of_many_fp32_elements_keeps_its_digits|test_squares_keep_their_digits": "the "
    "CPU's norm adds one square after another (3e-12 off in fp64), where an accelerator's adds in a tree",
    r"tests/kernels/": "the library launches nvcc's kernels on devices, or the host's on the host, "
    "and torch's opcheck knows CPU, CUDA and XPU; alike.py launches the host's on the device",
    r"tests/checkpoint/test_checksums\.py": "sums of the host's bytes, asked of tensors of the host",
    r"tests/checkpoint/test_dcp\.py": "torch's checkpoints do not know the device",
    r"test_threads_that_call_one_apply|test_what_one_thread_is_inside": "threads of their own, and "
    "the default device is one thread's",
    r"test_a_tensor_that_does_not_fit_is_refused_before|whoever_makes_them\[gradients\]": "an "
    "accelerator's allocator refuses by itself: the test's own tensor, and buckets of a step",
    r"test_without_a_second_pass_backward_reads_the_scope_by_no_call": "asks what Python calls in "
    "backward, which a thread of the device's runs",
    r"test_equal_ranks_print_as_one_block": "asks for the text of a tensor of the host",
    r"test_python_takes_a_value_only_where": "numpy takes tensors of the host alone",
    r"test_operators.py.*sparse": "torch has no sparse tensors there",
    r"(GRU|LSTM|Recurrent)|test_every_class_is_here": "torch asks the device for a fused recurrent "
    "cell of its own",
}
"""Regular expressions of test ids -> why they fail there; those that name a file are not run."""

PLANTS = {
    "shardlib/ops/loss.py": (
        "torch.arange(x.shape[-1], device=x.device)",
        "torch.arange(x.shape[-1])",
        "tests/ops/test_padding.py -k padded_vocabulary",
    ),
    "shardlib/optim/adafactor.py": (
        "_Slab(stack.to(device), row.to(device), col.to(device),",
        "_Slab(stack, row, col,",
        "tests/optim/test_adafactor.py",
    ),
    "shardlib/modules/experts.py": (
        "own.new_full((int(stack.num_experts),), -1)",
        "torch.full((int(stack.num_experts),), -1)",
        "tests/modules/test_experts.py",
    ),
    "shardlib/collectives/simulate.py": (
        "torch.arange(mesh.size, device=table.device)",
        "torch.arange(mesh.size)",
        "tests/collectives/test_simulate.py",
    ),
}
"""File -> a line of it, the same on the default device, and tests that must then fail."""

LONGEST = 300
"""Seconds that a test may take."""


def reason() -> str:
    """Say what keeps the device from being built here, or nothing."""
    if shutil.which("g++"):
        return ""
    return "the pretend accelerator is compiled with g++, which is not here"


def pieces() -> list[list[str]]:
    """Every test file of the suite but those that are excused whole, a few together."""
    files = [f.relative_to(ROOT).as_posix() for f in sorted(ROOT.glob("tests/**/test_*.py"))]
    files = [f for f in files if not (_excuse(f) or "tests/accelerator/" in f)]
    folders = sorted({os.path.dirname(f) for f in files})
    found = [[f"tests/accelerator/{name}.py" for name in ("laws", "groups", "streams", "gpu")]]
    for folder in folders:
        inside = [f for f in files if os.path.dirname(f) == folder]
        found += [inside[i : i + 8] for i in range(0, len(inside), 8)]
    return found


def _excuse(name: str) -> str | None:
    """The first expression that a test's id, or a file's path, matches."""
    return next((word for word in EXCUSED if re.search(word, name)), None)


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
    excuse = {i: _excuse(i) for i in found}
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
        yield f"excused {met[word]:4} {word}: {why}"
        if not met[word] and word in excuse.values():
            bad.append(f"excused, and passes: {word}")
    yield from bad
    yield f"{len(bad)} at fault"


def planted() -> Iterator[str]:
    """Leave the device out of a line of each of four folders, in a copy; yield what no test met."""
    for file, (line, without, tests) in PLANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            for part in ("shardlib", "tests"):
                shutil.copytree(ROOT / part, Path(folder, part))
            shutil.copy(ROOT / "pyproject.toml", folder)
            text = Path(folder, file).read_text()
            assert line in text, f"{file} has no such line now: {line}"
            Path(folder, file).write_text(text.replace(line, without))
            ended = subprocess.run(
                [sys.executable, "-m", "tests.accelerator.suite", "-x", *tests.split()],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": folder},
                capture_output=True,
                text=True,
                check=False,
            )
        if "the same device" not in ended.stdout:
            yield f"planted in {file}, and {tests} passes: {without}\n{ended.stdout[-2000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every file, in pieces")
    parser.add_argument("--together", type=int, default=2, help="how many pieces at once")
    parser.add_argument("--planted", action="store_true", help="only the faults that must be found")
    parser.add_argument("--record", type=Path, help="where to write what came of every test")
    args, files = parser.parse_known_args()
    if args.planted:
        missed = list(planted())
        print(
            "\n".join([*missed, f"{len(PLANTS) - len(missed)} of {len(PLANTS)} plants are found"])
        )
        return int(bool(missed))
    if not args.all:
        done = set()
        if args.record is not None and args.record.exists():
            done = {json.loads(line)["id"] for line in args.record.read_text().splitlines()}
        return here(files, args.record, done)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.together) as runs:
        for one in runs.map(lambda files: apart(files, Path(folder)), pieces()):
            found |= one
    lines = list(judged(found))
    print("\n".join(lines))
    return int(not lines[-1].startswith("0 "))


if __name__ == "__main__":
    sys.exit(main())
