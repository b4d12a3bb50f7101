"""Rates of this device: what they are on a clock that we set."""

import time

import pytest
import torch

from shardlib.planning.device import measure_device
from shardlib.planning.work import Meter, Rates, StepWork

KINDS = {
    "matmul float32": 4e9,
    "attention float32": 2e9,
    "matmul bfloat16": 1e9,
    "attention bfloat16": 5e8,
}


def test_a_device_of_known_rates_is_measured_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on by the seconds that these rates give to what runs."""
    rates = Rates({}, 1.0, 1e8, 1e-5, {kind: {1: rate} for kind, rate in KINDS.items()})
    with Meter(StepWork()) as meter:
        for clock in ("perf_counter", "thread_time"):
            monkeypatch.setattr(time, clock, lambda: rates.seconds(meter.work))
        found = measure_device(torch.device("cpu"), seconds=0.5)
    assert found["call"] == pytest.approx(1e-5, rel=0.1)
    assert found["bandwidth"] == pytest.approx(1e8, rel=0.05)
    assert set(found["kernels"]) == set(KINDS) and found["flops"] == pytest.approx(4e9, rel=0.05)
    for kind, row in found["kernels"].items():
        assert all(rate == pytest.approx(KINDS[kind], rel=0.05) for rate in row.values()), kind


def test_a_size_that_takes_longer_than_its_part_is_left_out() -> None:
    began = time.perf_counter()
    found = measure_device(torch.device("cpu"), seconds=0.02)["kernels"]
    assert time.perf_counter() - began < 5 and 16 in found["matmul float32"]
    assert 1024 not in found["matmul float32"]
