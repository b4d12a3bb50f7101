"""Kernels as fractions of the device's copy bandwidth, beside eager torch and torch.compile.

Each kernel is given the bytes that it must read and write; what it takes is compared with copying as
many.  The three ways take turns, and the best of each counts.  Wants a GPU and what ``python -m
shardlib.kernels build`` made; without one it says so and ends.

    python -m benchmarks.kernels [--rounds 20] [--no-compile] [--json kernels.json]
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from shardlib._compat import fused_step
from shardlib.kernels.adamw import adamw_
from shardlib.kernels.dropout import dropout
from shardlib.kernels.loss import ce_back_, ce_loss, ce_stats
from shardlib.kernels.merge import accumulate_, merge_
from shardlib.kernels.norm import (
    norm_apply,
    norm_back,
    norm_back_sums,
    norm_columns,
    norm_settle,
    norm_stats,
)
from shardlib.kernels.pack import pack

BF16 = torch.bfloat16
DEVICE = "cuda"


class Case(NamedTuple):
    """A kernel, the eager formula that it stands for, and the bytes that must move."""

    name: str
    kernel: Callable[[], object]
    eager: Callable[[], object]
    bytes: int


def cross_entropy(rows: int, classes: int) -> Case:
    """Statistics, loss and gradient: 6 bytes a logit."""
    x = torch.randn(rows, classes, device=DEVICE, dtype=BF16)
    t = torch.randint(0, classes, (rows,), device=DEVICE)
    g = torch.full((rows,), 1 / rows, device=DEVICE)

    def kernel() -> Tensor:
        parts = ce_stats(x, t, classes, 0).unsqueeze(0)
        loss, kept = ce_loss(parts, t, -100, 0.0, classes)
        ce_back_(x, t, kept, g, classes, 0, -100, 0.0, classes)
        return loss

    def eager() -> Tensor:
        wide = x.float()
        top = wide.amax(-1, keepdim=True)
        exp = (wide - top).exp_()
        total = exp.sum(-1, keepdim=True)
        loss = total.log() + top - wide.gather(-1, t[:, None])
        soft = exp.div_(total)
        soft.scatter_add_(-1, t[:, None], torch.full_like(loss, -1.0))
        return soft.mul_(g[:, None]).to(BF16)

    return Case(f"cross entropy {rows} x {classes}", kernel, eager, 6 * rows * classes)


def norm(rows: int, cols: int, centre: bool, back: bool) -> Case:
    """Forward 6 bytes an element; back 14: sums, gradient of x, gradients of the factors."""
    x, g = (torch.randn(rows, cols, device=DEVICE, dtype=BF16) for _ in range(2))
    w = torch.ones(cols, device=DEVICE, dtype=BF16)
    b = torch.zeros(cols, device=DEVICE, dtype=BF16) if centre else None
    name = ("layer" if centre else "rms") + f" norm {'back' if back else 'forward'} {rows} x {cols}"

    def statistics_() -> tuple[Tensor, Tensor]:
        return norm_settle(norm_stats(x, centre).unsqueeze(0), centre, cols, 1e-5)

    kept = statistics_()

    def kernel() -> object:
        if not back:
            return norm_apply(x, w, b, *statistics_())
        sums = norm_back_sums(x, g, w, *kept)
        return norm_back(x, g, w, *kept, sums, cols), norm_columns(x, g, *kept)

    def eager() -> object:
        wide = x.float()
        if not back:
            mean = wide.mean(-1, keepdim=True) if centre else 0
            spread = (wide - mean).square().mean(-1, keepdim=True)
            y = (wide - mean) * (spread + 1e-5).rsqrt() * w
            return (y if b is None else y + b).to(BF16)
        mean, scale = kept
        y = ((wide - mean) if centre else wide) * scale
        gw = g.float() * w
        dx = gw - y * (gw * y).mean(-1, keepdim=True)
        dx = (dx - gw.mean(-1, keepdim=True) if centre else dx) * scale
        return dx.to(BF16), (g * y).sum(0), g.float().sum(0)

    return Case(name, kernel, eager, (14 if back else 6) * rows * cols)


def merging(rows: int, width: int) -> Case:
    """10 bytes an element: fp32 read and written, a bf16 part read."""
    shape = (1, 32, rows, width)
    out, part = torch.randn(shape, device=DEVICE), torch.randn(shape, device=DEVICE, dtype=BF16)
    lse, new = (torch.randn(shape[:-1], device=DEVICE) for _ in range(2))

    def eager() -> None:
        both = torch.logaddexp(lse, new)
        share = (new - both).exp_().nan_to_num_(0.0)
        out.mul_((lse - both).exp_().nan_to_num_(0.0).unsqueeze(-1))
        out.addcmul_(part.float(), share.unsqueeze(-1))
        lse.copy_(both)

    name = f"merge 32 heads x {rows} x {width}"
    return Case(name, lambda: merge_(out, lse, part, new), eager, 10 * out.numel())


def summing(rows: int, width: int) -> Case:
    shape = (1, 32, rows, width)
    out, part = torch.randn(shape, device=DEVICE), torch.randn(shape, device=DEVICE, dtype=BF16)
    name = f"fp32 += bf16, 32 heads x {rows} x {width}"
    return Case(name, lambda: accumulate_(out, part), lambda: out.add_(part), 10 * out.numel())


def stepping(count: int) -> Case:
    """28 bytes a parameter: bf16 gradient, fp32 master and moments, bf16 parameter out, unscaled."""
    p, m, v = (torch.rand(count, device=DEVICE) for _ in range(3))
    g, out = (torch.rand(count, device=DEVICE).to(BF16) for _ in range(2))
    scale = torch.tensor([2.0], device=DEVICE)
    fused = fused_step("adamw")
    assert fused is not None, "this torch has none"

    def eager() -> None:
        wide = g.float()
        steps = [torch.tensor(3.0, device=DEVICE)]
        fused(
            ([p], [wide], [m], [v]), steps, lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.1,
            eps=1e-8, amsgrad=False, maximize=False, grad_scale=scale[0],
        )  # fmt: skip
        out.copy_(p)

    def kernel() -> None:
        adamw_([g], [p], [m], [v], [out], scale, [1e-3, 0.9, 0.999, 1e-8, 0.1, 3])

    return Case(f"AdamW {count >> 20} Mi parameters", kernel, eager, 28 * count)


def packing(rows: int, cols: int, ways: int) -> Case:
    """Columns of a bf16 matrix in as many parts: 4 bytes an element."""
    x = torch.randn(rows, cols, device=DEVICE).to(BF16)
    n = cols // ways
    size, step = [ways, rows, n], [n, cols, 1]

    def eager() -> Tensor:
        return x.unflatten(1, (ways, n)).movedim(1, 0).contiguous()

    return Case(
        f"columns in {ways} parts, {rows} x {cols}",
        lambda: pack(x, size, [0] * 3, step, [None] * 3), eager, 4 * x.numel(),
    )  # fmt: skip


def dropping(count: int) -> Case:
    """4 bytes an element, no mask; beside torch's own dropout, whose bits are not these."""
    x = torch.randn(count, device=DEVICE).to(BF16)

    def eager() -> Tensor:
        return F.dropout(x, 0.1)

    return Case(
        f"dropout {count >> 20} Mi", lambda: dropout(x, [0], [1], [None], 7, 0.1), eager, 4 * count
    )


def cases(part: int = 1) -> list[Callable[[], Case]]:
    """Every kernel at a size of training, or at one of so many parts of it."""
    return [
        lambda: cross_entropy(8192 // part, 32768),
        lambda: cross_entropy(2048 // part, 128256),
        lambda: norm(16384 // part, 4096, True, False),
        lambda: norm(16384 // part, 4096, True, True),
        lambda: norm(16384 // part, 4096, False, False),
        lambda: norm(16384 // part, 4096, False, True),
        lambda: merging(16384 // part, 128),
        lambda: merging(16384 // part, 64),
        lambda: summing(16384 // part, 128),
        lambda: stepping((1 << 27) // part),
        lambda: packing(16384 // part, 8192, 8),
        lambda: dropping((1 << 28) // part),
    ]


def seconds(run: Callable[[], object]) -> float:
    start, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def copying(nbytes: int) -> Callable[[], object]:
    """A copy that reads and writes as many bytes together."""
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def measured(case: Case, rounds: int, compiled: bool) -> dict[str, float]:
    """Seconds of each way, the best of ``rounds`` turns."""
    ways = {"copy": copying(case.bytes), "kernel": case.kernel, "eager": case.eager}
    if compiled:
        ways["compile"] = torch.compile(case.eager)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 3):
        for name, run in ways.items():
            took = seconds(run)
            if turn >= 3:  # before: caches, compilation, clocks
                times[name].append(took)
    found = {name: min(row) for name, row in times.items()}
    found["spread"] = statistics.quantiles(times["kernel"], n=4)[2] / found["kernel"]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per kernel; 0 where there was a GPU to measure."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--rounds", type=int, default=20)
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--json", type=Path)
    given = p.parse_args(arguments)
    if not torch.cuda.is_available():
        print("torch sees no CUDA device: there is nothing to measure")
        return 0
    sl.kernels.build()
    print(
        f"{sl.kernels.info()['cuda']}\n{'':38} {'of copy':>8} {'TB/s':>6} {'x eager':>8} {'x compile':>9}"
    )
    rows = {}
    for make in cases():
        case = make()
        t = rows[case.name] = measured(case, given.rounds, not given.no_compile)
        share, rate = t["copy"] / t["kernel"], case.bytes / t["kernel"] / 1e12
        compiled = f"{t['compile'] / t['kernel']:9.2f}" if "compile" in t else ""
        print(
            f"{case.name:38} {share:8.0%} {rate:6.2f} {t['eager'] / t['kernel']:8.2f} {compiled}",
            flush=True,
        )
        del case
        torch.cuda.empty_cache()
    if given.json:
        given.json.write_text(
            json.dumps({"device": torch.cuda.get_device_name(), "seconds": rows}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
