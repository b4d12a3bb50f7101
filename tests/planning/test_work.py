"""Operations, bytes and memory of what runs on shapes."""

import torch

from shardlib.planning.work import Meter, StepWork, touched


def test_a_meter_counts_products_bytes_and_what_lives() -> None:
    a, b = torch.empty(8, 4, device="meta"), torch.empty(4, 2, device="meta")
    with Meter(StepWork(), [a, b]) as meter:
        c = a @ b
        d = c + 1
        del c
    assert meter.work.flops == 2 * 8 * 4 * 2
    assert meter.work.touched == 4 * (32 + 8 + 16) + 4 * (16 + 16)
    assert (meter.now, meter.peak) == (d.nbytes, 2 * d.nbytes)


def test_views_and_empty_memory_touch_nothing() -> None:
    x = torch.empty(4, 4, device="meta")
    for make in (lambda: x.view(16), lambda: x.T, lambda: torch.empty_like(x)):
        with Meter(StepWork(), [x]) as meter:
            make()
        assert meter.work.touched == 0
    assert touched(torch.ops.aten.add.Tensor, [x, x], x) == 3 * x.nbytes
