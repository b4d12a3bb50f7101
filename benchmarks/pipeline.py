"""Steps of pipelines: against torch.distributed.pipelining, the schedules' own predictions, a step
without stages, and recipes without them behind slow links.

    python -m benchmarks.pipeline torch      the same blocks, cut and schedule, 4 gloo processes
    python -m benchmarks.pipeline torch --against python     whose products are Functions in Python
    python -m benchmarks.pipeline memory     the peak of each, in processes of their own
    python -m benchmarks.pipeline throttled  step seconds, predicted over measured, a sleep per action
    python -m benchmarks.pipeline alone      one stage against micro-batches without stages
    python -m benchmarks.pipeline cut        CPU seconds until a GPT of 32 blocks is cut
    python -m benchmarks.pipeline links      a deep GPT on 8 processes behind links of 50 Mbit/s

CPU time is what all processes used; contestants are interleaved, and figures are medians of each
repetition's ratio.
"""

import argparse
import os
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining

import shardlib as sl
from benchmarks import rig
from benchmarks.tensor_parallel import GPT, MLP, VOCAB
from shardlib.pipeline.schedules import Action, placing, schedule, timeline
from shardlib.pipeline.step import PipelineStep

RANKS, MICROS = 4, 8
Step = Callable[[Tensor, Tensor], None]


class Way(NamedTuple):
    """A schedule here and the class of torch that has the same; stages on each rank."""

    theirs: str
    per_rank: int


WAYS = {
    "gpipe": Way("ScheduleGPipe", 1),
    "1f1b": Way("Schedule1F1B", 1),
    "interleaved": Way("ScheduleInterleaved1F1B", 2),
    "zb": Way("ScheduleInterleavedZeroBubble", 2),
    "zbv": Way("ScheduleZBVZeroBubble", 2),
    "dualpipev": Way("ScheduleDualPipeV", 2),
}


class Product(torch.autograd.Function):
    """A product in Python, as the layers of Megatron and Transformer Engine are.

    It asks which gradients are wanted, as they do: a backward for inputs alone is told both.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.addmm(b, x, w.t())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        wants = ctx.needs_input_grad
        return (
            g @ w if wants[0] else None,
            g.t() @ x if wants[1] else None,
            g.sum(0) if wants[2] else None,
        )


class Linear(nn.Linear):
    """A layer whose product is a function in Python."""

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight, self.bias)


class Residual(nn.Module):
    """A block that keeps the shape of its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Chain(nn.Module):
    """Blocks and their loss."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.h = nn.Sequential(*[Residual(width) for _ in range(blocks)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return F.mse_loss(x, y)


def _batch(width: int, rows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, MICROS * rows, width, generator=draw)
    return x, y


def ours(width: int, rows: int, name: str, blocks: int) -> Step:
    mesh = sl.make_mesh(device="cpu", pipe=dist.get_world_size())
    example = (torch.empty(MICROS * rows, width, device="meta"),) * 2
    how = sl.Stages("pipe", schedule=name, per_rank=WAYS[name].per_rank, example=example)
    with sl.use_mesh(mesh):
        apply, params = sl.parallelize(Chain(width, blocks), [("*", "...")], stages=how)
    run = sl.value_and_grad(apply, microbatches=MICROS)

    def step(x: Tensor, y: Tensor) -> None:
        with sl.use_mesh(mesh):
            step.grads = run(params, x, y)[1]  # type: ignore[attr-defined]

    return step


def torchs(width: int, rows: int, name: str, blocks: int, python: bool = False) -> Step:
    model, way = list(Chain(width, blocks).h), WAYS[name]
    for block in model if python else ():
        block.mlp.fc1.__class__ = block.mlp.fc2.__class__ = Linear
    rank, ranks = dist.get_rank(), placing(name, dist.get_world_size(), way.per_rank)
    each = blocks // len(ranks)
    parts = {
        s: nn.Sequential(*model[s * each : (s + 1) * each])
        for s, placed in enumerate(ranks)
        if placed == rank
    }
    like = torch.empty(rows, width).requires_grad_()
    here = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(part, s, len(ranks), here, like if s else like.detach(), like)
        for s, part in parts.items()
    ]
    given: Any = stages[0] if way.per_rank == 1 else stages
    made = getattr(pipelining.schedules, way.theirs)(given, MICROS, loss_fn=F.mse_loss)
    last = len(ranks) - 1 in parts

    def step(x: Tensor, y: Tensor) -> None:
        for part in parts.values():
            part.zero_grad()
        made.step(*[x] * (0 in parts), target=y if last else None, return_outputs=False)
        step.grads = {  # type: ignore[attr-defined]
            f"h.{s * each + i}.{n}": p.grad
            for s, part in parts.items()
            for i, block in enumerate(part)
            for n, p in block.named_parameters()
        }

    return step


SIDES = {"ours": ours, "torch": torchs, "python": partial(torchs, python=True)}


def interleaved(
    runs: dict[str, Callable[[], Any]], repeats: int, inner: int = 1
) -> list[dict[str, Any]]:
    """Run the contestants in turn; list name, CPU of all processes and seconds of each run."""
    rows = []
    for turn in range(repeats):
        for name, run in list(runs.items())[:: 1 if turn % 2 else -1]:
            dist.barrier()
            cpu, began = time.process_time(), time.perf_counter()
            for _ in range(inner):
                run()
            took = torch.tensor([time.process_time() - cpu], dtype=torch.float64)
            dist.barrier()
            seconds = time.perf_counter() - began
            dist.all_reduce(took)
            rows.append({"name": name, "cpu": float(took) / inner, "seconds": seconds / inner})
    return rows


def contest(given: dict[str, Any], width: int, name: str) -> list[dict[str, Any]]:
    """Run by every rank."""
    torch.set_num_threads(1)
    rows = given["rows"] or width // 4
    batch = _batch(width, rows)
    other = given["against"]
    sides: dict[str, Any] = {
        k: SIDES[k](width, rows, name, given["blocks"]) for k in ("ours", other)
    }
    for step in sides.values():
        for _ in range(2):
            step(*batch)
    mine, theirs = sides["ours"].grads, sides[other].grads
    for n, g in theirs.items():
        torch.testing.assert_close(mine[n].raw, g, rtol=1e-4, atol=1e-6)
    return interleaved({k: partial(s, *batch) for k, s in sides.items()}, given["repeats"], 5)


def peak(given: dict[str, Any], width: int, name: str, side: str) -> float:
    """MiB that a step adds, on the worst rank, to what a tiny one needed."""
    torch.set_num_threads(1)
    found = []
    for size, rows in ((16, 4), (width, given["rows"] or 4 * width)):
        step = SIDES[side](size, rows, name, given["blocks"])
        for _ in range(3):
            step(*_batch(size, rows))
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    grown = torch.tensor([float(found[1] - found[0])])
    dist.all_reduce(grown, dist.ReduceOp.MAX)
    return float(grown) / 1024


# ---------------------------------------------------------------- predicted and measured

SLEEPS = {"F": 0.04, "B": 0.08, "I": 0.04, "W": 0.04}
Costs = dict[tuple[str, int], list[float]]


@contextmanager
def throttled() -> Iterator[Costs]:
    """Let each action sleep too; give the seconds of each (kind, stage), without waits."""
    do, costs = PipelineStep._do, defaultdict(list)

    def timed(self: PipelineStep, a: Action) -> None:
        for label, _ in self.traffic.receives[a]:
            self.messages.here[label] = self.messages.take(label)
        began = time.perf_counter()
        time.sleep(SLEEPS[a.kind])
        do(self, a)
        costs[a.kind, a.stage].append(time.perf_counter() - began)

    with patch.object(PipelineStep, "_do", timed):
        yield costs


def predicted(given: dict[str, Any], name: str) -> list[dict[str, float]]:
    """Seconds and idle part of steps, predicted from the cost per action, and measured."""
    torch.set_num_threads(1)
    step, batch = ours(64, 8, name, 8), _batch(64, 8)
    step(*batch)
    table, rows = schedule(name, RANKS, MICROS, WAYS[name].per_rank), []
    for _ in range(given["repeats"]):
        with throttled() as costs:
            dist.barrier()
            began = time.perf_counter()
            step(*batch)
            seconds = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        each: list[Any] = [None] * RANKS
        dist.all_gather_object(each, {k: statistics.mean(v) for k, v in costs.items()})
        cost = {k: v for found in each for k, v in found.items()}
        line = timeline(table, lambda a, c=cost: c[a.kind, a.stage])
        ideal = timeline(table, lambda a: SLEEPS[a.kind])
        idle = 1 - sum(line.busy) / (RANKS * float(seconds))
        rows.append(
            {
                "seconds": float(seconds), "predicted": line.seconds, "sleeps": ideal.seconds,
                "idle": idle, "predicted idle": line.bubble, "idle of sleeps": ideal.bubble,
            }
        )  # fmt: skip
    return rows


# ---------------------------------------------------------------- one stage, the cut, links


def alone(given: dict[str, Any], width: int) -> list[dict[str, Any]]:
    """One stage and none: the same micro-batches, on meshes of one rank."""
    torch.set_num_threads(1)
    batch, runs = _batch(width, given["rows"] or width // 4), {}
    one = sl.Stages("pipe", example=batch)
    for name, axes, stages in (("pipe=1", {"pipe": 1}, one), ("none", {"x": 1}, None)):
        with sl.make_mesh(device="cpu", **axes):
            model = Chain(width, given["blocks"])
            apply, params = sl.parallelize(model, [("*", "...")], stages=stages)
        runs[name] = partial(sl.value_and_grad(apply, microbatches=MICROS), params, *batch)
    for run in runs.values():
        run()
    return interleaved(runs, 2 * given["repeats"], 5)


def cuts(stages: int, layers: int = 32) -> None:
    """Print the CPU seconds of ``parallelize``, and what the first step takes more than others."""
    model, tokens = GPT(layers, 64, 16), torch.zeros(2 * MICROS, 16, dtype=torch.int64)
    with sl.simulate(pipe=stages, x=2):
        took = [time.process_time()]
        rules = sl.recipes.megatron1d(model)
        how = sl.Stages("pipe", example=(tokens, tokens))
        inputs = {"idx": rules.tokens, "targets": rules.labels}
        apply, params = sl.parallelize(model, rules, inputs=inputs, stages=how)
        step = sl.value_and_grad(lambda p, i: apply(p, i, i), microbatches=2)
        took.append(time.process_time())
        for _ in range(3):
            step(params, tokens)
            took.append(time.process_time())
    first, one, *more = (b - a for a, b in pairwise(took))
    print(f"{layers} blocks, {stages:>2} stages: {first:.2f} s, first step {one - min(more):.2f} s")


LINKED: dict[str, tuple[str, dict[str, int]]] = {
    "ddp": ("ddp", {"data": 8}),
    "megatron1d": ("megatron1d", {"data": 4, "x": 2}),
    "optimus2d": ("optimus2d", {"data": 2, "x": 2, "y": 2}),
    "ring": ("ring", {"data": 4, "s": 2}),
    "fsdp": ("fsdp", {"data": 2, "x": 4}),
    "pipe=2, ddp": ("ddp", {"pipe": 2, "data": 4}),
    "pipe=4, ddp": ("ddp", {"pipe": 4, "data": 2}),
}


def linked(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Train a GPT by each recipe behind slow links."""
    torch.set_num_threads(1)
    length, runs = 64, {}
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (2 * MICROS, length + 1), generator=draw)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for name in given["names"]:
        recipe, axes = LINKED[name]
        how = sl.Stages("pipe", example=batch) if "pipe" in axes else None
        mesh = sl.make_mesh(device="cpu", **axes)
        with sl.use_mesh(mesh):
            model = GPT(given["layers"], 128, length)
            rules = getattr(sl.recipes, recipe)(model)
            inputs = {"idx": rules.tokens, "targets": rules.labels}
            apply, params = sl.parallelize(model, rules, inputs=inputs, stages=how)
            tx = sl.optim.adamw(1e-3)
            held = [params, tx.init(params)]
        parts = MICROS // axes["data"] if how else None
        runs[name] = partial(_trained, mesh, tx, held, apply, parts, batch)
    losses = {name: run() for name, run in runs.items()}
    rig.say(f"losses {losses}")
    return [asdict(row) for row in rig.compare(runs, given["repeats"], told=True)]


def _trained(
    mesh: sl.Mesh, tx: sl.optim.Transform, held: list[Any], apply: Any, parts: int | None,
    batch: tuple[Tensor, Tensor],
) -> float:  # fmt: skip
    with sl.use_mesh(mesh):
        loss, grads = sl.value_and_grad(apply, microbatches=parts)(held[0], *batch)
        held[0], held[1], _ = sl.optim.step(tx, held[0], grads, held[1])
    return float(loss)


# ---------------------------------------------------------------- reports


def _ratios(rows: list[dict[str, Any]], a: str, b: str) -> str:
    """The median ratio of CPU time and of time, and the median CPU milliseconds of each."""
    of = {name: [r for r in rows if r["name"] == name] for name in (a, b)}
    cells = []
    for what in ("cpu", "seconds"):
        found = [x[what] / y[what] for x, y in zip(of[a], of[b], strict=True)]
        cells.append(f"{statistics.median(found):>6.2f} [{min(found):.2f}-{max(found):.2f}]")
    each = (statistics.median(r["cpu"] for r in of[name]) * 1e3 for name in (a, b))
    return "".join(cells) + "".join(f"{x:>9.1f}" for x in each)


def report_torch(given: dict[str, Any]) -> None:
    print(
        f"{'width':>5} {'schedule':<12}{'CPU of torch':>18}{'time of torch':>18}   CPU ms of each"
    )
    for width in given["widths"]:
        for name in given["names"] or WAYS:
            rows = sl.launch(contest, given, width, name, x=RANKS, timeout=1000.0)[0]
            print(f"{width:>5} {name:<12}{_ratios(rows, 'ours', given['against'])}", flush=True)


def report_memory(given: dict[str, Any]) -> None:
    # what is freed goes back at once, so that the peak is that of what is held
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    for width in given["widths"]:
        for name in given["names"] or WAYS:
            ours, theirs = (
                sl.launch(peak, given, width, name, s, x=RANKS, timeout=1000.0)[0]
                for s in ("ours", "torch")
            )
            print(
                f"{width:>5} {name:<12}{ours:>8.1f} MiB {ours / theirs:>6.2f} of torch", flush=True
            )


def report_throttled(given: dict[str, Any]) -> None:
    for name in given["names"] or WAYS:
        rows = sl.launch(predicted, given, name, x=RANKS, timeout=1000.0)[0]
        row = {k: statistics.median(r[k] for r in rows) for k in rows[0]}
        print(f"{name:<12}{row['seconds']:.3f} s, {row['seconds'] / row['predicted']:.3f} of the "
              f"prediction, {row['seconds'] / row['sleeps']:.3f} of the sleeps; idle "
              f"{row['idle']:.3f}, predicted {row['predicted idle']:.3f}, of the sleeps "
              f"{row['idle of sleeps']:.3f}", flush=True)  # fmt: skip


def report_alone(given: dict[str, Any]) -> None:
    for width in given["widths"]:
        rows = sl.launch(alone, given, width, x=1, timeout=1000.0)[0]
        print(f"{width:>5} pipe=1 of none: {_ratios(rows, 'pipe=1', 'none')}", flush=True)


def report_cut(given: dict[str, Any]) -> None:
    for stages in (4, 4, 8, 16):
        cuts(stages)


def report_links(given: dict[str, Any]) -> None:
    given = given | {"names": given["names"] or list(LINKED)}
    *answers, control = rig.run("benchmarks.pipeline:linked", 8, 50.0, given, seconds=1800)
    print(f"links of 50 Mbit/s; control {control}")
    rows = [rig.Row(**row) for row in answers[0]]
    for name in given["names"]:
        mine = [r for r in rows if r.name == name]
        seconds, sent = (
            statistics.median(getattr(r, w) for r in mine) for w in ("seconds", "sent")
        )
        print(f"{name:<14}{seconds:>8.2f} s{sent / 2**20:>8.2f} MiB sent")


PARTS = {
    "torch": report_torch,
    "memory": report_memory,
    "throttled": report_throttled,
    "alone": report_alone,
    "cut": report_cut,
    "links": report_links,
}


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("part", choices=PARTS)
    p.add_argument("--names", default="", help="schedules, or rows of links, with ; between")
    p.add_argument(
        "--against", default="torch", help="or python: its products are Functions in Python"
    )
    p.add_argument("--widths", default="32,64,256")
    p.add_argument("--rows", type=int, default=0, help="of a micro-batch; by default of the width")
    p.add_argument("--blocks", type=int, default=8)
    p.add_argument("--layers", type=int, default=24)
    p.add_argument("--repeats", type=int, default=7)
    given = vars(p.parse_args())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    given["widths"] = [int(w) for w in given["widths"].split(",")]
    given["names"] = [n.strip() for n in given["names"].split(";") if n]
    PARTS[given["part"]](given)
    print(f"load {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
