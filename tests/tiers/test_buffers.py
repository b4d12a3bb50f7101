"""Buffers are in the ledger while they are held, and reused when no tensor refers to them."""

import subprocess
import sys
import threading

import pytest
import torch

import shardlib as sl
from shardlib.tiers.buffers import Buffers, host_row
from shardlib.tiers.ledger import Ledger

CPU = torch.device("cpu")


def test_a_buffer_is_reused_only_when_no_tensor_refers_to_it() -> None:
    buffers = Buffers(Ledger(device=64), "device", "parameters", CPU)
    x = buffers.take((8,), torch.float32)
    view = x[2:]
    del x
    y = buffers.take((8,), torch.float32)
    assert y.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()
    with pytest.raises(sl.ShardError, match="32 bytes of parameters"):
        buffers.take((8,), torch.float32)
    del view
    assert buffers.take((2, 4), torch.float32).shape == (2, 4)


def test_buffers_of_other_sizes_make_room() -> None:
    ledger = Ledger(device=64)
    buffers = Buffers(ledger, "device", "parameters", CPU)
    x = buffers.take((16,), torch.float32)
    del x
    y = buffers.take((9,), torch.float32)
    assert ledger.held["device"].total() == 36
    del y, buffers
    assert ledger.held["device"].total() == 0


def test_a_reference_that_a_thread_drops_late_is_waited_for() -> None:
    buffers = Buffers(Ledger(device=64), "device", "gathered", CPU)
    held = [buffers.take((16,), torch.float32)]
    threading.Timer(0.2, held.clear).start()
    assert buffers.take((8,), torch.float32).shape == (8,)


def test_what_is_given_back_is_waited_for_and_not_replaced() -> None:
    ledger = Ledger(device=None)
    buffers = Buffers(ledger, "device", "gradients", CPU)
    x = buffers.take((16,), torch.float32)
    held = [x[2:]]
    threading.Timer(0.2, held.clear).start()
    buffers.give(x)
    del x
    assert buffers.unused == 64
    assert buffers.take((16,), torch.float32).numel() == 16 and ledger.peak["device"] == 64


def test_a_row_is_in_the_ledger_as_long_as_its_memory() -> None:
    ledger = Ledger(host=1000)
    row = host_row((5, 6), torch.float32, ledger, "state", CPU, 1)
    view = row.detach()[1:]
    assert row.shape == (5, 6) and ledger.held["host"]["state"] == 120
    del row
    assert ledger.held["host"]["state"] == 120
    del view
    assert ledger.held["host"]["state"] == 0


def test_host_rows_are_outside_the_limit_of_private_memory() -> None:
    """64 MiB of rows are made under a limit of 16 MiB, and 64 MiB of other memory are not."""
    script = """
import resource, torch
from shardlib.tiers.buffers import host_row
from shardlib.tiers.ledger import Ledger
like = torch.empty(1).expand(16 << 20)
used = int(open("/proc/self/statm").read().split()[5]) * 4096
resource.setrlimit(resource.RLIMIT_DATA, (used + (16 << 20),) * 2)
host_row(like.shape, like.dtype, Ledger(host=None), "state", torch.device("cpu"), 1).fill_(1.0)
try:
    torch.ones(16 << 20)
except RuntimeError:
    print("refused")
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout == "refused\n"
