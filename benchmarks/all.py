"""Every benchmark once, short ones first, within ten minutes on two cores.

Each part prints its figures as they come.  Repetitions are few: a figure for docs/measurements.md
is taken by running its part alone, with the part's own defaults.  A part that has not ended when
its share of the time is over is stopped, and said to be.

    python -m benchmarks.all [--minutes 10]
"""

import argparse
import os
import signal
import subprocess
import sys
import time

PARTS = [  # module and arguments, what takes least first
    "overhead --repetitions 8",
    "local --repeats 3 rms_norm add",
    "checkpoint --megabytes 64 --rounds 3",
    "matmul --sizes 512 --repetitions 3",
    "attention --length 2048 --repetitions 1",
    "tensor_parallel --layers 2 --repeats 2 --length 64",
    "zero --layers 2 --repeats 2 --length 64",
    "pipeline torch --widths 32 --names 1f1b --repeats 2",
    "overlap --repeats 1 --rate 200",
    "models --modules gpt2,bert",
    "waits --models gpt2 --rows clip,ring",
    "sequence_paper --only batch",
    "family --ranks 4 --repeats 1 --rate 100",
]


def run(part: str, seconds: float) -> bool:
    """Run one part; False where it failed or was stopped, with all that it started."""
    name, *arguments = part.split()
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{name}", *arguments],
        start_new_session=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},  # for the processes that it starts, too
    )
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        print(f"stopped after {seconds:.0f} s: python -m benchmarks.{part}", flush=True)
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)  # it ends those in sessions of their own
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> int:
    """Run all parts; what one does not use of its share goes to those after it."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--minutes", type=float, default=10.0)
    end = time.monotonic() + 60 * p.parse_args().minutes - 5
    ended = 0
    for i, part in enumerate(PARTS):
        start = time.monotonic()
        print(f"\n== {part}", flush=True)
        ended += run(part, (end - start) / (len(PARTS) - i))
        print(f"== {time.monotonic() - start:.0f} s", flush=True)
    print(f"\n{ended} of {len(PARTS)} parts ended")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
