"""The library on the pretend accelerator, in a process of its own: the device stays in one that imported it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator.suite import QUICK, reason

ROOT = Path(__file__).parent.parent.parent


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
