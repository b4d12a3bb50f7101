"""A training step of a GPT under zero's stages against DDP, FSDP2, and FSDP2 x TP, on 4 processes.

The same module, weights and batches, forward, backward and AdamW; torch's with its fused kernel.
Losses of the first steps must be the same.  CPU time is what all processes used; contestants are
interleaved, and figures are medians of each repetition's ratio.

    python -m benchmarks.zero [--layers 6] [--width 256]     a GPT of 5 M parameters; 8 704: of 50 M
    python -m benchmarks.zero --alone       the optimizer's step by itself, in one process
    python -m benchmarks.zero --memory      the peak of each contestant, in processes of its own
    python -m benchmarks.zero --rate 100    behind links of 100 Mbit/s
    python -m benchmarks.zero --residue --layers 2 --width 128 --length 64
                                            12 clipped steps: how far each ends from one process
"""

import argparse
import csv
import os
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import shardlib as sl
from benchmarks import rig
from benchmarks.tensor_parallel import GPT, LEARNING, VOCAB

Step = Callable[[Tensor, Tensor], float]


def ours(
    args: argparse.Namespace, stage: int, x: int = 1, clip: float | None = None, **how: Any
) -> Step:
    mesh = sl.make_mesh(device=args.device, data=dist.get_world_size() // x, x=x)
    with sl.use_mesh(mesh):
        model = GPT(args.layers, args.width, args.length)
        rules = sl.recipes.megatron1d(model)
        apply, params = sl.parallelize(
            model, rules, inputs={"idx": rules.tokens, "targets": rules.labels}
        )
        del model
        inner = sl.optim.adamw(LEARNING)
        if clip is not None:
            inner = sl.optim.chain(sl.optim.clip_by_global_norm(clip), inner)
        tx = sl.optim.zero(inner, "data", stage, bucket_mb=args.bucket, **how)
        params = tx.shard(params)
        held = [params, tx.init(params)]
        del params
    run = sl.value_and_grad(apply, into=tx)

    def step(idx: Tensor, targets: Tensor) -> float:
        with sl.use_mesh(mesh):
            loss, grads = run(held[0], idx, targets)
            held[0], held[1], _ = sl.optim.step(tx, held[0], grads, held[1])
        return loss.item()

    def trained() -> dict[str, Tensor]:
        return {k: sl.unshard(p).detach() for k, p in sl.optim.state_dict(held[0]).items()}

    step.trained = trained  # type: ignore[attr-defined]
    return step


def _part(batch: Tensor, rank: int, ways: int) -> Tensor:
    return batch.chunk(ways)[rank].contiguous()


def _mean(loss: Tensor, group: Any = None) -> float:
    loss = loss.detach().clone()
    dist.all_reduce(loss, group=group)
    return float(loss) / dist.get_world_size(group)


def _stepping(model: Any, update: Any) -> Step:
    """One of torch's training steps, each rank on its part of the batch."""

    def step(idx: Tensor, targets: Tensor) -> float:
        rank, world = dist.get_rank(), dist.get_world_size()
        loss = model(_part(idx, rank, world), _part(targets, rank, world))
        loss.backward()
        update.step()
        update.zero_grad()
        return _mean(loss)

    return step


def ddp(args: argparse.Namespace) -> Step:
    model = DistributedDataParallel(
        GPT(args.layers, args.width, args.length).to(args.device), gradient_as_bucket_view=True
    )
    update = torch.optim.AdamW(model.parameters(), LEARNING, fused=True)

    return _stepping(model, update)


def fsdp2(args: argparse.Namespace) -> Step:
    mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = GPT(args.layers, args.width, args.length).to(args.device)
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    update = torch.optim.AdamW(model.parameters(), LEARNING, fused=True)

    return _stepping(model, update)


def fsdp2_tp(args: argparse.Namespace, clip: bool = False) -> Step:
    grid = (2, dist.get_world_size() // 2)
    mesh = init_device_mesh(args.device, grid, mesh_dim_names=("dp", "tp"))
    model = GPT(args.layers, args.width, args.length).to(args.device)
    stream = Replicate()
    plan: dict[str, Any] = {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "lm_head": ColwiseParallel(
            input_layouts=stream, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for i in range(args.layers):
        enter = PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate())
        leave = RowwiseParallel(output_layouts=stream)
        plan |= {f"h.{i}.attn": enter, f"h.{i}.attn.o_proj": leave}
        plan |= {f"h.{i}.mlp": enter, f"h.{i}.mlp.fc2": leave, f"h.{i}.mlp.fc1": ColwiseParallel()}
        plan |= {f"h.{i}.attn.{n}_proj": ColwiseParallel() for n in "qkv"}
    parallelize_module(model, mesh["tp"], plan)
    for block in model.h:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    kinds: dict[Any, list[Any]] = {}
    for p in model.parameters():
        kinds.setdefault(getattr(p, "device_mesh", None), []).append(p)
    update = torch.optim.AdamW([{"params": v} for v in kinds.values()], LEARNING, fused=True)
    rank, ways = mesh["dp"].get_local_rank(), mesh["dp"].size()

    def step(idx: Tensor, targets: Tensor) -> float:
        with loss_parallel():
            loss = model(_part(idx, rank, ways), _part(targets, rank, ways))
            loss.backward()
        if clip:
            _clipped([p.grad for p in model.parameters() if p.grad is not None])
        update.step()
        update.zero_grad()
        return _mean(_whole(loss.detach()), mesh["dp"].get_group())

    step.trained = lambda: {  # type: ignore[attr-defined]
        k: _whole(p.detach()) for k, p in model.named_parameters()
    }
    return step


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


CONTESTANTS: dict[str, Callable[[argparse.Namespace], Step]] = {
    "DDP": ddp,
    "zero 1": lambda args: ours(args, 1),
    "zero 2": lambda args: ours(args, 2),
    "zero 3": lambda args: ours(args, 3),
    "zero 3, kept": lambda args: ours(args, 3, keep=True),
    "FSDP2": fsdp2,
    "zero 2, x=2": lambda args: ours(args, 2, x=2),
    "zero 3, x=2": lambda args: ours(args, 3, x=2),
    "FSDP2 x TP": fsdp2_tp,
}
AGAINST = {
    "zero 1": "DDP",
    "zero 2": "DDP",
    "zero 3": "FSDP2",
    "zero 3, kept": "FSDP2",
    "zero 2, x=2": "FSDP2 x TP",
    "zero 3, x=2": "FSDP2 x TP",
}


def _batches(args: argparse.Namespace, seed: int = 1) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shape = (2, args.batch, args.length)
    return [torch.randint(0, VOCAB, shape, generator=draw).to(args.device) for _ in range(4)]


def contest(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Run by every rank."""
    args = argparse.Namespace(**given)
    torch.set_num_threads(1)
    runs = {name: CONTESTANTS[name](args) for name in args.names}
    batch = _batches(args)
    losses = {name: [run(*b) for b in batch] for name, run in runs.items()}
    first = next(iter(losses.values()))
    worst = max(abs(a / b - 1) for f in losses.values() for a, b in zip(f, first, strict=True))
    if not worst < args.agree:
        raise AssertionError(f"losses differ by {worst:.1e}: {losses}")
    rig.say(f"losses agree to {worst:.0e}")
    rows = []
    for turn in range(args.repeats):
        for name, run in list(runs.items())[:: 1 if turn % 2 else -1]:
            dist.barrier()
            cpu, began = time.process_time(), time.perf_counter()
            run(*batch[turn % 4])
            took = torch.tensor(
                [time.process_time() - cpu], dtype=torch.float64, device=args.device
            )
            dist.barrier()
            seconds = time.perf_counter() - began
            dist.all_reduce(took)
            rows.append({"name": name, "cpu": float(took), "seconds": seconds})
    return rows


CLIP, STEPS = 0.5, 12


def _clipped(grads: list[Tensor]) -> None:
    """Clip as clip_grad_norm_ does, by a norm in fp64: torch's own is off by up to 1e-3."""
    norm = sum(
        (_whole(g.double().square().sum()) for g in grads), torch.zeros((), dtype=torch.float64)
    )
    norm = norm.sqrt()
    by = ((norm + 1e-6) / CLIP).clamp(min=1.0).float()
    for g in grads:
        g.div_(by)


def trained_alone(given: dict[str, Any], draws: int) -> list[dict[str, Tensor]]:
    """Our program in one process, on a mesh of one rank: its weights after the steps, by draw."""
    args = argparse.Namespace(**given)
    torch.set_num_threads(1)
    found = []
    for draw in range(draws):
        step = ours(args, 1, clip=CLIP)
        for t in range(STEPS):
            step(*_batches(args, draw)[t % 4])
        found.append(step.trained())  # type: ignore[attr-defined]
    return found


def _trained_by_torch(args: argparse.Namespace, draw: int, model: Any, parts: bool) -> None:
    update = torch.optim.AdamW(model.parameters(), LEARNING, fused=True)
    rank, world = (dist.get_rank(), dist.get_world_size()) if parts else (0, 1)
    for t in range(STEPS):
        idx, targets = _batches(args, draw)[t % 4]
        model(_part(idx, rank, world), _part(targets, rank, world)).backward()
        _clipped([p.grad for p in model.parameters() if p.grad is not None])
        update.step()
        update.zero_grad()


def residue(given: dict[str, Any], alone: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """List by draw how far each contestant ends from one process, over what the steps moved.

    DDP's from torch's own, ours from the same program on a mesh of one rank: what the kernels of
    the two round otherwise is left out.
    """
    args = argparse.Namespace(**given)
    torch.set_num_threads(1)
    rows = []
    for draw, mine in enumerate(alone):
        one, plain = (GPT(args.layers, args.width, args.length) for _ in range(2))
        start = [p.detach().clone() for p in one.parameters()]
        _trained_by_torch(args, draw, one, parts=False)
        _trained_by_torch(args, draw, DistributedDataParallel(plain), parts=True)
        theirs: dict[str, Tensor] = dict(one.named_parameters())
        moved = sum(
            float((a - b).detach().abs().sum()) for a, b in zip(theirs.values(), start, strict=True)
        )
        found = {"DDP": (dict(plain.named_parameters()), theirs), "programs": (mine, theirs)}
        stages = {"zero 1": (1, 1), "zero 2": (2, 1), "zero 3": (3, 1), "zero 2, x=2": (2, 2)}
        runs = {name: (ours(args, *how, CLIP), mine) for name, how in stages.items()}
        runs["FSDP2 x TP"] = fsdp2_tp(args, clip=True), theirs
        for name, (step, want) in runs.items():
            for t in range(STEPS):
                step(*_batches(args, draw)[t % 4])
            found[name] = step.trained(), want  # type: ignore[attr-defined]
        rows.append(
            {
                name: sum(float((p - want[k]).detach().abs().sum()) for k, p in params.items())
                / moved
                for name, (params, want) in found.items()
            }
        )
    return rows


def report_residue(given: dict[str, Any], draws: int) -> None:
    alone = sl.launch(trained_alone, given, draws, x=1)[0]
    rows = sl.launch(residue, given, alone, x=4)[0]
    print(f"{'':<16}{'mean':>9}{'by draw':>10}     of what {STEPS} steps moved")
    for name in rows[0]:
        mine = [row[name] for row in rows]
        draws_of = " ".join(f"{x:.1e}" for x in mine)
        print(f"{name:<16}{statistics.mean(mine):>9.1e}   {draws_of}")


def peak(given: dict[str, Any], name: str) -> float:
    """MiB that a rank's training step adds to what the process held before."""
    args = argparse.Namespace(**given)
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run, batch = CONTESTANTS[name](args), _batches(args)
    for b in batch:
        run(*b)
    grown = torch.tensor(float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
    dist.all_reduce(grown, dist.ReduceOp.MAX)
    return float(grown) / 1024


def alone(repeats: int) -> None:
    """The optimizer's step by itself against torch's fused AdamW: CPU time, median of ratios.

    Of several draws of memory: where its pages lie moves a step over large tensors by a fifth,
    torch's as ours.
    """
    gpt = [tuple(p.shape) for p in GPT(4, 256, 256).parameters()]
    sets = {
        "4 of 4 MiB": [(1024, 1024)] * 4,
        "200 small": [(64,), (16, 16)] * 100,  # which fill whole vectors of a kernel
        "200 of 500": [(500,)] * 200,  # which do not
        "a GPT": gpt,
    }
    print(f"{'':<14}{'parts of buckets':>26}{'whole parameters':>26}   of torch's fused AdamW")
    for name, shapes in sets.items():
        with sl.make_mesh(device="cpu", data=1):
            found = [_ratios(shapes, repeats, draw) for draw in range(7)]
        cells = [
            f"{statistics.median(r):.2f} [{min(r):.2f}-{max(r):.2f}]"
            for r in ([f[how] for f in found] for how in ("parts", "whole"))
        ]
        print(f"{name:<14}{cells[0]:>26}{cells[1]:>26}", flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")


def _ratios(shapes: list[tuple[int, ...]], repeats: int, draw: int) -> dict[str, float]:
    """The median ratio of each form to torch's, of parameters in memory of their own."""
    drawn = torch.Generator().manual_seed(draw)
    values = {f"p{i:03}": torch.randn(s, generator=drawn) for i, s in enumerate(shapes)}

    def made(how: str) -> _Alone:
        if how != "torch":
            tx = sl.optim.zero(sl.optim.adamw(1e-6), "data", 3 if how == "parts" else 2)
            return _stepped(tx, {k: sl.shard(v.clone(), "...") for k, v in values.items()})
        theirs = [v.clone().requires_grad_() for v in values.values()]
        for p in theirs:
            p.grad = p.detach() * 0.1
        torchs = torch.optim.AdamW(theirs, 1e-6, fused=True)
        return lambda n: [torchs.step] * n

    every = ["torch", "parts", "whole"]
    steps = {how: made(how) for how in every[draw % 3 :] + every[: draw % 3]}
    ratios: dict[str, list[float]] = {how: [] for how in every}
    for turn in range(repeats + 2):
        took = {}
        for how in every[:: 1 if turn % 2 else -1]:
            runs = steps[how](5)
            began = time.process_time()
            for run in runs:
                run()
            took[how] = time.process_time() - began
        if turn >= 2:
            for how in every:
                ratios[how].append(took[how] / took["torch"])
    return {how: statistics.median(r) for how, r in ratios.items()}


_Alone = Callable[[int], list[Callable[[], object]]]
"""Makes some steps to run, each with its gradients, which a backward would have made."""


def _stepped(tx: sl.optim.Transform, params: Any) -> _Alone:
    params = tx.shard(params)
    held: list[Any] = [params, tx.init(params)]
    del params
    for _ in range(3):  # after which buckets stay where they are
        sink = None if tx.sink is None else tx.sink(held[0])
        if sink is None:
            grads = held[0].like({k: x.becomes(x.raw * 0.1) for k, x in held[0].items()})
        else:
            for i, k in enumerate(sorted(held[0])):
                sink.take(i, held[0][k].raw * 0.1)
            grads = sink.finish()
        lie = {k: (g.raw, g.place) for k, g in grads.items()}
        held[0], held[1], _ = sl.optim.step(tx, held[0], grads, held[1])
    kind, where = type(grads), (held[1].mu.index, held[1].mu.mesh)

    def step(grads: Any, leaves: list[Any]) -> None:
        # as value_and_grad does, for whose gradients they were made
        grads.leaves = list(held[0].values()), leaves
        held[0], held[1], _ = sl.optim.step(tx, held[0], grads, held[1])

    def of(n: int) -> list[Callable[[], object]]:
        made = [[sl.ShardedTensor(*at) for at in lie.values()] for _ in range(n)]
        leaves = [[sl.ShardedTensor(x.raw, x.place) for x in held[0].values()] for _ in range(n)]
        given = (kind(zip(lie, g, strict=True), *where) for g in made)
        return [partial(step, *one) for one in zip(given, leaves, strict=True)]

    return of


def _ratio(rows: list[dict[str, Any]], a: str, b: str, what: str) -> str:
    both = ([r[what] for r in rows if r["name"] == name] for name in (a, b))
    found = [x / y for x, y in zip(*both, strict=True)]
    return f"{statistics.median(found):.2f} [{min(found):.2f}-{max(found):.2f}]"


def report(rows: list[dict[str, Any]]) -> None:
    print(f"{'':<16}{'CPU ms':>8}{'ms':>8}{'CPU ratio':>20}{'time ratio':>20}   to")
    for name in dict.fromkeys(r["name"] for r in rows):
        mine = [r for r in rows if r["name"] == name]
        other = AGAINST.get(name, "")
        known = other in {r["name"] for r in rows}
        ratios = [_ratio(rows, name, other, w) if known else "" for w in ("cpu", "seconds")]
        middle = [statistics.median(r[w] for r in mine) * 1e3 for w in ("cpu", "seconds")]
        print(
            f"{name:<16}{middle[0]:>8.0f}{middle[1]:>8.0f}"
            + "".join(f"{r:>20}" for r in ratios)
            + f"   {other if known else ''}"
        )


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"layers": 6, "width": 256, "length": 128, "batch": 8, "repeats": 7}
    for name, value in sizes.items():
        p.add_argument(f"--{name}", type=int, default=value)
    p.set_defaults(device="cpu", agree=2e-6)  # benchmarks/gpu.py has others
    p.add_argument("--names", default=",".join(CONTESTANTS).replace(", ", "; "))
    p.add_argument("--alone", action="store_true")
    p.add_argument("--memory", action="store_true")
    p.add_argument("--residue", action="store_true")
    p.add_argument("--draws", type=int, default=6)
    p.add_argument("--bucket", type=float, default=None)
    p.add_argument("--rate", type=float, default=0.0)
    args = p.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if args.alone:
        alone(2 * args.repeats)
        return 0
    names = [n.replace("; ", ", ") for n in args.names.split(",")]
    given = {n: getattr(args, n) for n in (*sizes, "bucket", "device", "agree")} | {"names": names}
    print(f"{args.layers} layers of {args.width}, {args.batch} x {args.length} tokens", flush=True)
    if args.residue:
        report_residue(given, args.draws)
        return 0
    if args.memory:
        for name in names:
            print(f"{name:<16}{sl.launch(peak, given, name, x=4)[0]:>8.1f} MiB", flush=True)
        return 0
    if args.rate:
        *answers, control = rig.run("benchmarks.zero:contest", 4, args.rate, given, seconds=900)
        print(f"links of {args.rate:.0f} Mbit/s; control {control}")
        rows = answers[0]
    else:
        rows = sl.launch(contest, given, x=4)[0]
    print(f"load {os.getloadavg()[0]:.1f}")
    report(rows)
    out = Path("out")
    out.mkdir(exist_ok=True)
    with open(out / "zero.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
