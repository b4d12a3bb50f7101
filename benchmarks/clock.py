"""Seconds of steps on one rank: predicted from this device's measured rates, and by the clock.

    python -m benchmarks.clock [--turns 2]

Each turn measures the device anew (``sl.planning.measured``) and then runs forward and backward of
MLPs and GPTs, on one simulated rank and in plain torch: the least of several steps.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import shardlib as sl
from examples.gpt import GPT, GPTConfig

__all__: list[str] = []

Case = tuple[str, nn.Module, tuple[Tensor, ...]]


def cases() -> Iterator[Case]:
    """Yield modules and inputs: an output that is no scalar is summed."""
    for rows, width in ((512, 256), (512, 1024)):
        wide = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        yield f"MLP {width}, {rows} rows", nn.Sequential(*wide), (torch.randn(rows, width),)
    for layers, width, rows, length in ((2, 128, 8, 64), (4, 256, 4, 256)):
        gpt = GPT(GPTConfig(ctx=length, layers=layers, heads=4, embed=width))
        ids = torch.randint(0, 255, (rows, length))
        yield f"GPT {layers} x {width}, {rows} x {length}", gpt, (ids, ids)


def least(step: Callable[[], Any], seconds: float = 3.0) -> float:
    """Return the least seconds of a step."""
    step()
    best, ends = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < ends:
        began = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - began)
    return best


def timed(case: Case, cluster: sl.planning.Cluster) -> tuple[float, float, float]:
    """Return the seconds predicted, those of a simulated rank, and those of plain torch."""
    _, module, inputs = case

    def scalar(out: Any) -> Any:
        return out if out.dim() == 0 else out.sum()

    with sl.simulate(x=1):
        apply, params = sl.parallelize(module, [("*", "...")])
        given = tuple(sl.shard(x, "...") for x in inputs)
        told = sl.explain(lambda p, *x: scalar(apply(p, *x)), params, given)
        step = sl.value_and_grad(lambda p: scalar(apply(p, *given)))
        ours = least(lambda: step(params))
    dense = least(lambda: scalar(module(*inputs)).backward())
    return cluster.rates({"x": 1}).seconds(told.work), ours, dense


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--turns", type=int, default=2)
    torch.set_num_threads(1)
    for _ in range(asked.parse_args().turns):
        cluster = sl.planning.measured()
        print(cluster.told().partition(")\n")[2])
        for case in cases():
            said, ours, dense = timed(case, cluster)
            text = f"{1e3 * said:.1f} ms predicted, {1e3 * ours:.1f} on one rank, {1e3 * dense:.1f} in torch"
            print(f"{case[0]}: {text}; ratios {said / ours:.2f}, {said / dense:.2f}", flush=True)


if __name__ == "__main__":
    main()
