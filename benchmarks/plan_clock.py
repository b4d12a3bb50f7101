"""Seconds of plans behind limited links: predicted, and by the clock, on eight processes.

    python -m benchmarks.plan_clock [--rate 20] [--repeats 3]

The links and the kernels are measured inside the rig, on all ranks at once; since these share the
cores of one machine, the rates of the kernels are divided by the ranks of a core.  With that cluster
``sl.plan`` prices each recipe on a mesh of eight ranks, and chooses among all layouts.  The plans
then train a GPT in turn: AdamW, its whole step.  Printed are the seconds predicted and measured of
each, Kendall's tau of the two orders, and the time of the chosen plan over the least.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardlib as sl
from benchmarks import rig
from examples.gpt import GPT, GPTConfig
from shardlib.planning.joint import placed

__all__ = ["main", "tau"]

RANKS, CHOSEN = 8, "sl.plan"

BY_HAND: list[tuple[str, dict[str, int]]] = [
    ("ddp", {"data": 8}),
    ("megatron1d", {"data": 4, "x": 2}),
    ("megatron1d", {"data": 2, "x": 4}),
    ("megatron1d", {"x": 8}),
    ("optimus2d", {"data": 2, "x": 2, "y": 2}),
    ("tesseract", {"d": 2, "x": 2, "y": 2}),
    ("cube3d", {"x": 2, "y": 2, "z": 2}),
    ("ring", {"data": 4, "s": 2}),
    ("ring", {"data": 2, "s": 4}),
    ("optimus2d", {"x": 4, "y": 2}),
]


def model(given: Mapping[str, int]) -> tuple[GPT, tuple[Tensor, Tensor]]:
    """Return a GPT, and the tokens and labels of a step."""
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(ctx=given["length"], layers=given["layers"], heads=8, embed=given["width"]))
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 255, (given["rows"], given["length"] + 1), generator=draw)
    return gpt, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def loss(apply: Any, params: Any, x: Tensor, y: Tensor) -> Any:
    return apply(params, x, y)


def measured(path: str) -> None:
    """Run by every rank: write a cluster with the links of the rig, and this machine's kernels."""
    torch.set_num_threads(1)
    found = sl.planning.measured(ranks=1)
    if dist.get_rank() == 0:
        found.save(path)


def shared(found: sl.planning.Cluster, share: float) -> sl.planning.Cluster:
    """Return the cluster of ranks of which so many share a core."""
    kernels = {
        kind: {n: rate / share for n, rate in row.items()} for kind, row in found.kernels.items()
    }
    rates = {"flops": found.flops / share, "bandwidth": found.bandwidth / share}
    return replace(found, **rates, memory=8e9, call=share * found.call, kernels=kernels)


def train(
    given: Mapping[str, int], plans: Mapping[str, Mapping[str, Any]], repeats: int
) -> list[dict[str, Any]]:
    """Run by every rank: steps of each plan in turn."""
    torch.set_num_threads(1)
    runs: dict[str, Callable[[], float]] = {}
    gpt, batch = model(given)
    for name, how in plans.items():
        mesh = sl.make_mesh(device="cpu", **how["mesh"])
        with sl.use_mesh(mesh):
            rules = [tuple(rule) for rule in how["rules"]]
            remat = [tuple(rule) for rule in how["remat"]]
            apply, params = placed(gpt, how["mesh"].get("pipe", 1), rules, remat)
            tx = sl.optim.adamw(1e-3)
            if zero := how["zero"]:
                tx = sl.optim.zero(tx, tuple(zero["axis"]), zero["stage"])
            if how["mesh"].get("pipe", 1) == 1:
                ids = [sl.shard(x, text) for x, text in zip(batch, how["inputs"], strict=True)]
            else:
                ids = [*batch]
            into: dict[str, Any] = {"into": tx} if tx.sink else {}
            many = how["microbatches"]
            step = sl.value_and_grad(
                partial(loss, apply), **into, microbatches=many if many > 1 else None
            )
            held = [params, tx.init(params)]
        runs[name] = partial(_step, mesh, tx, step, held, ids)
    return [asdict(row) for row in rig.compare(runs, repeats, told=True)]


def _step(mesh: sl.Mesh, tx: Any, step: Any, held: list[Any], ids: list[Tensor]) -> float:
    with sl.use_mesh(mesh):
        value, grads = step(held[0], *ids)
        held[0], held[1], _ = sl.optim.step(tx, held[0], grads, held[1])
        return float(value)


def tau(a: list[float], b: list[float]) -> float:
    """Return Kendall's tau of two orders.

    >>> tau([1, 2, 3], [10, 20, 30]), tau([1, 2, 3], [1, 3, 2])
    (1.0, 0.3333333333333333)
    """
    signs = [(p - q) * (r - s) for (p, r), (q, s) in combinations(zip(a, b, strict=True), 2)]
    return sum((x > 0) - (x < 0) for x in signs) / len(signs)


def main() -> int:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--rate", type=float, default=20.0, help="Mbit/s of a link")
    asked.add_argument("--repeats", type=int, default=3)
    for name, least in (("layers", 4), ("width", 128), ("rows", 16), ("length", 128)):
        asked.add_argument(f"--{name}", type=int, default=least)
    given = vars(asked.parse_args())
    torch.set_num_threads(1)
    share = max(1.0, RANKS / (os.cpu_count() or 1))
    bar = 1.5
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rig.toml")
        rig.run("benchmarks.plan_clock:measured", RANKS, given["rate"], path, disturbed=bar)
        cluster = shared(sl.planning.Cluster.load(path), share)
    print(cluster.told(), flush=True)
    gpt, batch = model(given)
    how: dict[str, Any] = {"cluster": cluster, "loss": loss}
    plans = {CHOSEN: sl.plan(gpt, batch, ranks=RANKS, **how)}
    for name, mesh in BY_HAND:
        text = " ".join([name, *(f"{a}={n}" for a, n in mesh.items())])
        plans[text] = sl.plan(gpt, batch, mesh=mesh, recipes=[name], **how)
    said = {name: plan.json() for name, plan in plans.items()}
    *answers, control = rig.run(
        "benchmarks.plan_clock:train", RANKS, given["rate"], given, said, given["repeats"],
        seconds=3000, disturbed=bar,
    )  # fmt: skip
    rows = [rig.Row(**row) for row in answers[0]]
    took = {n: statistics.median(r.seconds for r in rows if r.name == n) for n in plans}
    for name, plan in plans.items():
        zero = f"zero {plan.zero['stage']}" if plan.zero else ""
        text = f"{plan.seconds:>7.2f} s predicted {took[name]:>7.2f} measured"
        print(f"{name:<32}{zero:<8}{text}  {plan.seconds / took[name]:>5.2f}")
    print(f"{CHOSEN}: {plans[CHOSEN].mesh}, {took[CHOSEN] / min(took.values()):.2f} of the least")
    hand = [n for n in plans if n != CHOSEN]
    print(f"Kendall's tau {tau([plans[n].seconds for n in hand], [took[n] for n in hand]):.2f}")
    print(f"control {control}, load {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
