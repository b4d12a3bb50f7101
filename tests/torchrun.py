"""Run a program under torchrun, each rank's standard output in a file of its own."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent


def torchrun(
    ranks: int, *command: str | Path, options: str = "--standalone", env: Mapping[str, str] = {}
) -> tuple[list[str], str]:
    """Return what each rank printed (of each attempt, in order) and the errors of all.

    Ranks that share one pipe write into each other's lines, above all where the environment asks
    Python for unbuffered output: there each argument of ``print`` is a write of its own.
    """
    with tempfile.TemporaryDirectory() as logs:
        run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        done = subprocess.run(
            [*run, *options.split(), "--redirects", "1", "--log-dir", logs, *map(str, command)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **env},
        )
        written = sorted(Path(logs).glob("*/attempt_*/*/stdout.log"))
        return [path.read_text() for path in written], done.stderr
