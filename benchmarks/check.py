"""What check mode adds to a training step: a small GPT on 4 local processes, data=2 x=2.

Steps with and without ``sl.check()`` alternate in one run; figures are medians over the ranks, the
ratio is the median of the ratios of neighbouring steps.  CPU time is that of all ranks.

    python -m benchmarks.check [--steps 20] [--layers 5] [--batch 16]
"""

import argparse
import os
import statistics
import time
from contextlib import nullcontext

import torch

import shardlib as sl
from examples.gpt import GPT, GPTConfig

Times = list[tuple[float, float, float, float]]
"""For each pair of steps: seconds without and with check, CPU seconds without and with."""


def measure(steps: int, layers: int, batch: int) -> Times:
    """Take pairs of steps on this rank."""
    torch.manual_seed(0)
    config = GPTConfig(layers=layers)
    model = GPT(config)
    inputs = {"idx": "data .", "targets": "data ."}
    recipe = sl.recipes.megatron1d(model)
    apply, params = sl.parallelize(model, recipe, inputs=inputs)
    ids = torch.randint(config.vocab, (batch, config.ctx + 1))
    tx = sl.optim.adamw(1e-3)
    state = tx.init(params)
    loss = sl.value_and_grad(lambda p: apply(p, ids[:, :-1], targets=ids[:, 1:]))
    found: Times = []
    for step in range(steps + 3):
        took = {}
        for on in (False, True) if step % 2 else (True, False):
            sl.psum(torch.ones(1), ("data", "x"))  # all begin together
            wall, cpu = time.perf_counter(), time.process_time()
            with sl.check() if on else nullcontext():
                _, grads = loss(params)
                updates, state = tx.update(grads, state, params)
                params = sl.optim.apply_updates(params, updates)
                sl.psum(torch.ones(1), ("data", "x"))
            took[on] = time.perf_counter() - wall, time.process_time() - cpu
        found.append((took[False][0], took[True][0], took[False][1], took[True][1]))
    return found[3:]


def main() -> int:
    """Print the figures of one run."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--layers", type=int, default=5)
    p.add_argument("--batch", type=int, default=16)
    given = p.parse_args()
    ranks = sl.launch(measure, given.steps, given.layers, given.batch, data=2, x=2)
    pairs = list(zip(*ranks, strict=True))
    off = [max(r[0] for r in pair) for pair in pairs]
    on = [max(r[1] for r in pair) for pair in pairs]
    cpu = [sum(r[3] for r in pair) / sum(r[2] for r in pair) for pair in pairs]
    ratio = statistics.median(b / a for a, b in zip(off, on, strict=True))
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"step without check {1e3 * statistics.median(off):8.1f} ms")
    print(f"step with check    {1e3 * statistics.median(on):8.1f} ms   ratio {ratio:.2f}")
    print(f"CPU time of all ranks                   ratio {statistics.median(cpu):.2f}")
    print(f"load of the machine {load:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
