"""Run the suite on the pretend accelerator: ``python -m tests.accelerator.suite [files]``.

Whatever a test makes without naming a device is made there, simulated meshes among it: torch's
default device is the pretend one.  ``EXCUSED`` says what cannot run so, and why.
"""

import shutil
import sys

import pytest

QUICK = [
    "tests/accelerator/laws.py",
    "tests/ops/test_elementwise.py",
    "tests/ops/test_candidates.py",
]

EXCUSED: dict[str, str] = {}
"""What stands in a test's id -> why it cannot run on the device."""


def reason() -> str:
    """Say what keeps the device from being built here, or nothing."""
    if shutil.which("g++"):
        return ""
    return "the pretend accelerator is compiled with g++, which is not here"


class Plugin:
    """Leave out what starts real ranks, which are forked and know no such device, and the excused."""

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        real = {"pool", "pool8"}
        out = [
            i
            for i in items
            if real & set(getattr(i, "fixturenames", ()))
            or any(word in i.nodeid for word in EXCUSED)
        ]
        config.hook.pytest_deselected(items=out)
        items[:] = [i for i in items if i not in out]


def main(files: list[str]) -> int:
    import torch

    from tests.accelerator.pretend import DEVICE

    torch.set_default_device(DEVICE)
    return pytest.main(["-q", *(files or QUICK)], [Plugin()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
