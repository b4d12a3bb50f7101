"""The device is imported by the process that runs on it, and by no other: it stays in one that did."""

import sys

if "tests.accelerator.pretend" not in sys.modules:
    collect_ignore = [
        "alike.py",
        "gpu.py",
        "groups.py",
        "laws.py",
        "pretend.py",
        "steps.py",
        "streams.py",
        "tiers.py",
    ]
