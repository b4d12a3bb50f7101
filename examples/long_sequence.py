"""Train a GPT on sequences four times longer than one process may hold, on four processes.

    python -m examples.long_sequence                  a cap of 96 MiB per process, enforced by the system
    python -m examples.long_sequence --cap 200 --steps 20

1. The longest sequence that one process can train on under the cap is found by trying: beyond it,
   the allocator fails (RLIMIT_AS).
2. Four processes, each under the same cap, train on a sequence four times as long: the same module,
   its sequence split in zigzag order, attention round a ring.
3. At the length that one process can hold, both train the
   same steps, and their losses are compared.
"""

import argparse
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardlib as sl
from examples.corpus import batches, load
from examples.gpt import GPT, GPTConfig

GRAIN = 512  # lengths are tried in multiples of this
Step = Callable[[Tensor, Tensor], float]


def alone(c: GPTConfig, lr: float) -> Step:
    """One training step in one process: plain PyTorch."""
    model = GPT(c)
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)

    def step(ids: Tensor, targets: Tensor) -> float:
        loss = model(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def together(c: GPTConfig, lr: float) -> Step:
    """The same step with the sequence split over the mesh
    axis s; so are the position embeddings.
    """
    model = GPT(c)
    ring = sl.recipes.ring(model)
    rules: Any = [("wpe.weight", "s ."), *ring]
    apply, params = sl.parallelize(
        model, rules, inputs={"idx": ring.tokens, "targets": ring.labels}
    )
    tx = sl.optim.adamw(lr, weight_decay=0.0)
    state, gradient = (
        tx.init(params),
        sl.value_and_grad(lambda p, ids, targets: apply(p, ids, targets)),
    )
    del model

    def step(ids: Tensor, targets: Tensor) -> float:
        nonlocal params, state
        loss, grads = gradient(params, ids, targets)
        updates, state = tx.update(grads, state, params)
        params = sl.optim.apply_updates(params, updates)
        return loss.item()

    return step


def _cap(mebibytes: float | None) -> None:
    """From here on this process may map only so much more memory."""
    if mebibytes is not None:
        with open("/proc/self/statm") as statm:
            mapped = int(statm.read().split()[0]) * resource.getpagesize()
        limit = mapped + int(mebibytes * 2**20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def train(
    length: int, context: int, steps: int, cap: float | None, layers: int, embed: int
) -> list[float] | str:
    """Losses on sequences of ``length``; "out of memory" where the cap does not allow it."""
    torch.set_num_threads(1)
    split = sl.current_mesh().size > 1
    make = together if split else alone
    heads = 4
    small = make(GPTConfig(ctx=64, layers=1, heads=heads, embed=embed), 1e-3)
    for _ in range(2):
        # threads and libraries
        small(torch.zeros(1, 64, dtype=torch.int64), torch.zeros(1, 64, dtype=torch.int64))
    data = batches(load(), 1, length, seed=1)
    _cap(cap)
    losses = []
    try:
        step = make(GPTConfig(ctx=context, layers=layers, heads=heads, embed=embed), 3e-3)
        for _ in range(steps):
            losses.append(step(*next(data)))
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        if split:  # the others wait for this rank: end them too
            raise
        return "out of memory"
    return losses


def longest(cap: float, layers: int, embed: int, most: int = 1 << 16) -> int:
    """The longest multiple of GRAIN that one process can train on under the cap."""

    def fits(length: int) -> bool:
        (answer,) = sl.launch(train, length, 4 * length, 2, cap, layers, embed, s=1)
        print(
            f"  one process, {length:>6} tokens: {'fits' if isinstance(answer, list) else answer}",
            flush=True,
        )
        return isinstance(answer, list)

    low, high = 0, GRAIN
    while high < most and fits(high):
        low, high = high, 2 * high
    while high - low > GRAIN:
        middle = (low + high) // 2 // GRAIN * GRAIN
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low:
        raise SystemExit(f"a cap of {cap} MiB does not hold {GRAIN} tokens; take a larger --cap")
    return low


def main(argv: list[str] | None = None) -> dict[str, Any]:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--cap",
        type=float,
        default=96,
        help="MiB that each process may map beside what PyTorch needs",
    )
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--layers", type=int, default=2)
    p.add_argument("--embed", type=int, default=64)
    p.add_argument("--out", type=Path, default=Path("out"))
    args = p.parse_args(argv)
    # what is freed leaves
    os.environ["MALLOC_MMAP_THRESHOLD_"], os.environ["MALLOC_ARENA_MAX"] = "65536", "1"
    shape = args.layers, args.embed
    print(f"1. one process under a cap of {args.cap:g} MiB")
    n = longest(args.cap, *shape)
    long = 4 * n
    print(f"2. four processes under the same cap, {long} tokens: four times {n}")
    began = time.perf_counter()
    curve = sl.launch(train, long, long, args.steps, args.cap, *shape, s=4, timeout=1800)[0]
    seconds = (time.perf_counter() - began) / args.steps
    print(f"   loss {curve[0]:.3f} -> {curve[-1]:.3f} in {args.steps} steps, {seconds:.1f} s each")
    print(f"3. at {n} tokens, both")
    dense = sl.launch(train, n, long, args.steps, None, *shape, s=1, timeout=1800)[0]
    ring = sl.launch(train, n, long, args.steps, None, *shape, s=4, timeout=1800)[0]
    worst = max(abs(a - b) for a, b in zip(dense, ring, strict=True))
    print(
        f"   loss {dense[-1]:.5f} in one process, {ring[-1]:.5f} in four; largest difference of a "
        f"step {worst:.1e}"
    )
    _plot(args.out, curve, dense, ring, long, n)
    return {"longest": n, "curve": curve, "dense": dense, "ring": ring, "worst": worst}


def _plot(
    out: Path, curve: list[float], dense: list[float], ring: list[float], long: int, n: int
) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    out.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(dense, label=f"{n} tokens, one process", linewidth=4, alpha=0.4)
    axes.plot(ring, label=f"{n} tokens, ring of four", linestyle="--", color="black")
    axes.plot(curve, label=f"{long} tokens, ring of four under the cap")
    axes.set(
        xlabel="step", ylabel="loss", title="four times the sequence that one process can hold"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(out / "long_sequence.png", dpi=120)
    print(f"wrote {out / 'long_sequence.png'}")


if __name__ == "__main__":
    main()
