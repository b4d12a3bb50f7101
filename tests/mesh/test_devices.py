"""Devices are what torch says: its accelerator, numbered within this process, and its backend."""

from collections.abc import Iterator

import pytest
import torch

import shardlib as sl
from shardlib.errors import MeshError
from shardlib.mesh import devices


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Two accelerators of a kind that no machine has; what was taken of them."""
    taken: list[int] = []
    monkeypatch.setattr(devices, "accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: taken[-1])
    yield taken


def test_a_process_takes_the_device_of_its_number_and_numbers_begin_anew(taken: list[int]) -> None:
    for number in (0, 1, 2, 3):
        devices.take_device("xpu", number)
    devices.take_device("cpu", 1)  # of which there is one
    assert taken == [0, 1, 0, 1]
    assert devices.placed("xpu") == torch.device("xpu", 1)
    assert devices.placed("xpu:0") == torch.device("xpu", 0)
    assert sl.simulate(x=2, device="xpu").device == torch.device("xpu", 1)


def test_the_backend_is_torchs_default_for_the_device() -> None:
    named = {kind: devices.backend_of(kind, "launch") for kind in ("cpu", "cuda", "xpu")}
    assert named == {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
    with pytest.raises(MeshError, match="no backend") as e:
        devices.backend_of("vulkan", "launch")
    assert "register_backend" in e.value.fix
