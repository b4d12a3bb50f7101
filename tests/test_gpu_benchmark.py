"""What ``make gpu`` will do on a lent GPU is tried here on small sizes, so that a slip costs it no time.

All its parts run on the pretend device in ``make accelerator`` (tests/accelerator/gpu.py).
"""

import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu


def test_parts_fit_into_nine_minutes() -> None:
    assert sum(seconds for seconds, _ in gpu.PARTS.values()) <= 9 * 60


@pytest.mark.parametrize("part", ["attention", "fit"])
def test_a_part_writes_its_table_as_it_goes(part: str, tmp_path: Path) -> None:
    args = gpu.argparse.Namespace(device="cpu", quick=True)
    table, seen = gpu.Table(tmp_path / "table.md"), []
    row = table.row

    def written(*cells: object) -> None:
        row(*cells)
        seen.append((tmp_path / "table.md").read_text().count("\n"))

    table.row = written  # type: ignore[method-assign]
    table_of = gpu.PARTS[part][1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "count", lambda device: 1)  # no processes
        table_of(args, table, 30.0)
    assert seen == sorted(set(seen)) and len(seen) > 6


def test_a_part_that_fails_ends_no_other_and_leaves_its_time_to_those_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, float]] = []

    def run(part: str, seconds: float) -> bool:
        name = part.split()[2]
        ran.append((name, seconds))
        return name != "kernels"

    monkeypatch.setattr(gpu, "run_part", run)
    out = tmp_path / "table.md"
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--out", str(out)])
    assert gpu.main() == 1
    assert [name for name, _ in ran] == list(gpu.PARTS)
    given = [seconds for _, seconds in ran]  # nothing was used: those after it share all of it
    assert given[0] < gpu.PARTS["kernels"][0] and 520 < given[-1] < 540
    assert "kernels: failed or was stopped" in out.read_text()
    assert f"{len(ran) - 1} of {len(ran)} parts ended" in capsys.readouterr().out


def test_the_sample_of_the_suite_is_there() -> None:
    root = Path(__file__).parent.parent
    assert all((root / file).exists() for file in [*gpu.SAMPLE, "tests/kernels/test_gpu.py"])


def test_what_a_test_gave_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = gpu.Counted(-1.0)
    session: Any = type("Session", (), {"shouldstop": False})()
    counted.pytest_runtest_protocol(type("Item", (), {"session": session})())
    assert session.shouldstop
    report = type("Report", (), {"when": "call", "outcome": "failed", "nodeid": "a::b"})()
    counted.pytest_runtest_logreport(report)
    assert counted.failed == ["a::b"] and counted.outcomes == {"failed": 1}
