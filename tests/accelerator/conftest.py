"""The device is imported by the process that runs on it, and by no other: it stays in one that did."""

import sys

if "tests.accelerator.pretend" not in sys.modules:
    collect_ignore = ["laws.py", "pretend.py"]
