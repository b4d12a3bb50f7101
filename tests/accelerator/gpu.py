"""Every part of ``make gpu`` on the pretend device, at small sizes; run by ``make accelerator``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import PARTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_from_end_to_end(part: str, tmp_path: Path) -> None:
    out = tmp_path / "table.md"
    given = f"--device pretend --quick --part {part} --seconds 120 --out {out}".split()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *given],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "BENCHMARKS_DEVICE": "pretend"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert out.read_text().count("\n|") >= 3
