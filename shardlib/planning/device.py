"""Rates of this device, by class of kernel: products by size and dtype, attention, memory."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlib.grad import value_and_grad
from shardlib.mesh import simulate
from shardlib.placing import shard
from shardlib.planning.work import KernelClass, Meter, StepWork

_PRODUCTS = (16, 64, 256, 1024)
_LENGTHS = (64, 256, 1024)
_HEADS, _WIDTH = 8, 64


def measure_device(device: torch.device, seconds: float = 2.0) -> dict[str, Any]:
    """Return ``flops``, ``bandwidth``, ``call`` and ``kernels`` of a cluster of such devices.

    ``call`` is the time of an operator on a few numbers, ``bandwidth`` that of operators which
    compute little for each number, and ``kernels`` are the rates of products and of attention,
    forward and backward, with what these read and write.  A size that would take longer than its
    part of the time is left out.

    An accelerator runs behind the host.  On a CPU ``call`` is that of a sharded operator, forward
    and backward, with what Python takes for it, and the clock is the thread's own: the rates are
    those of a core of its own, also where others run on it.

    >>> found = measure_device(torch.device("cpu"), seconds=0.05)
    >>> sorted(found), found["flops"] > found["bandwidth"]
    (['bandwidth', 'call', 'flops', 'kernels'], True)
    """
    part = seconds / (3 + len(_dtypes(device)) * (len(_PRODUCTS) + len(_LENGTHS)))
    few = torch.ones(8, device=device)
    call = _mean(lambda: few + few, device, part)
    long = torch.randn(1 << 12, 1 << 10, device=device)
    passes = [
        (3, lambda: long + long), (2, lambda: F.gelu(long)),
        (2, lambda: F.layer_norm(long, long.shape[1:])), (2, lambda: long.softmax(-1)),
    ]  # fmt: skip
    took = sum(_mean(f, device, part / len(passes)) for _, f in passes) - len(passes) * call
    bandwidth = sum(times * long.nbytes for times, _ in passes) / max(took, 1e-12)
    kernels: dict[str, dict[int, float]] = {}
    # of each kind the seconds of an operation at the size before
    pace: dict[str, float] = {}
    for kernel, operations, calls, run in _kernels(device):
        if operations * pace.get(kernel.kind, 0.0) > 2 * part:
            continue
        took = _mean(run, device, part)
        pace[kernel.kind] = took / operations
        rate = operations / max(took - calls * call, took / 10)
        kernels.setdefault(kernel.kind, {})[kernel.size] = _digits(rate)
    flops = max(r for kind, row in kernels.items() if "matmul" in kind for r in row.values())
    if device.type == "cpu":
        call = _sharded_call(device, part)
    found = {"flops": flops, "bandwidth": _digits(bandwidth), "call": _digits(call)}
    return {**found, "kernels": kernels}


def _sharded_call(device: torch.device, seconds: float) -> float:
    """Return the seconds of an operator of a step on few numbers, each on one simulated rank."""

    def chain(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + F.layer_norm(F.gelu(F.linear(x, w)), x.shape[1:])
        return x.sum()

    with simulate(x=1):
        few, work = shard(torch.ones(2, 2, device=device), ". ."), StepWork()
        step = partial(value_and_grad(chain), few, few)
        step()
        with Meter(work):
            step()
        return _mean(step, device, seconds) / work.calls


def _digits(x: float) -> float:
    """Round to what a clock of a shared machine says."""
    return float(f"{x:.3g}")


def _dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    half = () if device.type == "cpu" else (torch.float16,)
    return torch.float32, torch.bfloat16, *half


Timed = tuple[KernelClass, float, int, Callable[[], object]]


def _kernels(device: torch.device) -> Iterator[Timed]:
    """Yield classes, and calls of them: their operations, operators, and a function."""
    for dtype in _dtypes(device):
        name = str(dtype).removeprefix("torch.")
        for n in _PRODUCTS:
            large = max(n, 512 if device.type == "cpu" else 4096)
            a, b = (torch.randn(large, n, device=device, dtype=dtype) for _ in range(2))
            c = torch.randn(large, large, device=device, dtype=dtype)

            def products(a: Tensor = a, b: Tensor = b, c: Tensor = c) -> None:
                # each dimension is the smallest once
                _, _, _ = a @ b.T, c @ a, a.T @ c

            yield KernelClass(f"matmul {name}", n), 6.0 * large * large * n, 3, products
        for n in _LENGTHS:
            shape = 4, 1, _HEADS, n, _WIDTH
            q, k, v, g = torch.randn(shape, device=device, dtype=dtype).unbind()
            qkv = [x.requires_grad_() for x in (q, k, v)]

            def attention(qkv: list[Tensor] = qkv, g: Tensor = g) -> None:
                q, k, v = qkv
                torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), qkv, g)

            # two products forward, five backward
            operations = 14.0 * _HEADS * n * n * _WIDTH
            yield KernelClass(f"attention {name}", n), operations, 2, attention


def _mean(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Return the seconds of a call on average, of those that this time allows."""
    # the first call loads what it needs
    run()
    clock = time.perf_counter
    if device.type == "cpu":
        clock = time.thread_time
    took, count, ends = 0.0, 0, time.perf_counter() + seconds
    while not count or time.perf_counter() < ends:
        began = clock()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        took += clock() - began
        count += 1
    return took / count
