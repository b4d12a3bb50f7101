"""Operations, bytes and memory of what runs on shapes."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.planning.work import Meter, Rates, StepWork, touched


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


def test_a_product_is_of_the_class_of_its_smallest_dimension() -> None:
    """Forward and backward; a convolution by its channels, attention by its length."""

    def classes(run: Callable[[], Tensor]) -> dict[str, set[int]]:
        found: dict[str, set[int]] = defaultdict(set)
        with Meter(StepWork()) as meter:
            run().sum().backward()
        for kernel, (flops, nbytes) in meter.work.kernels.items():
            assert flops > 0 and nbytes > 0
            found[kernel.kind].add(kernel.size)
        return dict(found)

    x, w = torch.empty(2, 64, 32), torch.empty(48, 32, requires_grad=True)
    bias, few = torch.empty(48), torch.empty(2, 4, 64, requires_grad=True)
    assert classes(lambda: F.linear(x, w, bias)) == {"matmul float32": {32}}
    assert classes(lambda: few.bfloat16() @ x.bfloat16()) == {"matmul bfloat16": {4}}
    image, kernel = torch.empty(2, 3, 16, 16), torch.empty(8, 3, 3, 3, requires_grad=True)
    assert classes(lambda: F.conv2d(image, kernel)) == {"matmul float32": {8}}
    q = torch.empty(2, 4, 24, 8, requires_grad=True)
    assert classes(lambda: F.scaled_dot_product_attention(q, q, q)) == {"attention float32": {24}}


def test_the_cpu_s_attention_has_the_operations_of_its_products() -> None:
    """Two products forward, five backward, as torch counts them on other devices."""
    q = torch.empty(2, 4, 24, 8, requires_grad=True)
    with Meter(StepWork()) as meter:
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    assert meter.work.flops == 7 * 2 * 2 * 4 * 24 * 24 * 8


def test_a_product_that_is_added_in_place_has_its_operations() -> None:
    """As SUMMA's are: torch counts those of a new tensor alone."""
    c, a, b = (torch.empty(2, 8, 8) for _ in range(3))
    with Meter(StepWork()) as meter:
        c.baddbmm_(a, b)
        c[0].addmm_(a[0], b[0])
    assert meter.work.flops == 3 * 2 * 8**3 and {k.size for k in meter.work.kernels} == {8}


def test_equal_rates_of_all_classes_are_one_rate() -> None:
    """What a product reads and writes is in its class's rate, and not priced again."""
    x, w = torch.empty(64, 32), torch.empty(48, 32, requires_grad=True)
    with Meter(StepWork()) as meter:
        F.gelu(F.linear(x, w)).sum().backward()
    work = meter.work
    one = Rates({}, 1e9, 1e8, 1e-6)
    many = replace(one, kernels={"matmul float32": {16: 1e9, 64: 1e9}})
    products = sum(nbytes for _, nbytes in work.kernels.values())
    assert many.seconds(work) == pytest.approx(one.seconds(work) - products / 1e8)
    assert replace(many, kernels={"matmul int8": {1: 1.0}}).seconds(work) == one.seconds(work)
    twice = StepWork()
    twice.join(work, 2)
    assert many.seconds(twice) == pytest.approx(2 * many.seconds(work))
