"""A training step of a GPT under megatron1d against torch's own
tensor parallelism, on 4 gloo processes.

The same module with separate q, k and v, the same weights and batches, forward, backward and AdamW.
torch's is what its tutorials write: ColwiseParallel and RowwiseParallel with the attention's and
the MLP's input prepared once, the embedding and the loss parallel over the vocabulary; with
``SequenceParallel`` between them for "TP + SP".  Losses of the first steps must be the same.  The
wire is what a private loopback device carried (where the kernel lets a process have one; else the
machine's), CPU time what all processes used.  Contestants are interleaved; figures are medians of
each repetition's ratio.

    python -m benchmarks.tensor_parallel [--layers 4] [--width 256] [--no-update]
"""

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import shardlib as sl
from benchmarks import rig
from benchmarks.matmul import wire

VOCAB, LEARNING = 1024, 1e-3


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(width, width) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, 32)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width)
        self.ln_2, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.wpe = nn.Embedding(VOCAB, width), nn.Embedding(length, width)
        self.h = nn.ModuleList([Block(width) for _ in range(layers)])
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, 0.0, 0.02)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


Step = Callable[[Tensor, Tensor], float]


def ours(args: argparse.Namespace, sequence: bool, saving: bool) -> Step:
    mesh = sl.make_mesh(device=args.device, x=dist.get_world_size())
    with sl.use_mesh(mesh):
        model = GPT(args.layers, args.width, args.length)
        rules = sl.recipes.megatron1d(model, sequence=sequence)
        apply, params = sl.parallelize(
            model, rules, inputs={"idx": rules.tokens, "targets": rules.labels}
        )
        tx = sl.optim.adamw(LEARNING)
        held = [params, tx.init(params)]
    run = sl.value_and_grad(apply)

    def step(idx: Tensor, targets: Tensor) -> float:
        with sl.use_mesh(mesh), sl.saving() if saving else nullcontext():
            loss, grads = run(held[0], idx, targets)
            if args.update:
                updates, held[1] = tx.update(grads, held[1], held[0])
                held[0] = sl.optim.apply_updates(held[0], updates)
        return loss.item()

    return step


def torchs(args: argparse.Namespace, sequence: bool) -> Step:
    mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = GPT(args.layers, args.width, args.length).to(args.device)
    stream = Shard(1) if sequence else Replicate()
    enter = PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate())
    leave = RowwiseParallel(output_layouts=stream)
    plan: dict[str, Any] = {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "lm_head": ColwiseParallel(
            input_layouts=stream, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for i in range(args.layers):
        plan |= {
            f"h.{i}.attn": enter,
            f"h.{i}.attn.o_proj": leave,
            f"h.{i}.mlp": enter,
            f"h.{i}.mlp.fc2": leave,
        }
        plan |= {f"h.{i}.attn.{n}_proj": ColwiseParallel() for n in "qkv"} | {
            f"h.{i}.mlp.fc1": ColwiseParallel()
        }
    if sequence:
        plan |= {f"h.{i}.ln_{j}": SequenceParallel() for i in range(args.layers) for j in (1, 2)}
        plan |= {"ln_f": SequenceParallel()}
        plan |= {"wpe": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))}
    model = parallelize_module(model, mesh, plan)
    whole, parts = (
        [p for p in model.parameters() if isinstance(p, DTensor) is kind] for kind in (False, True)
    )
    groups = [{"params": params} for params in (whole, parts) if params]
    # one call to a kernel takes one kind
    update = torch.optim.AdamW(groups, lr=LEARNING, fused=True)

    def step(idx: Tensor, targets: Tensor) -> float:
        with loss_parallel():
            loss = model(idx, targets)
            loss.backward()
        for p in model.parameters():
            g = p.grad
            # the norms' with sequences
            if isinstance(g, DTensor) and any(q.is_partial() for q in g.placements):
                p.grad = g.redistribute(placements=p.placements)  # type: ignore[attr-defined]
        if args.update:
            update.step()
        update.zero_grad()
        loss = loss.detach()
        return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)

    return step


PAIRS = [
    ("megatron1d", "torch TP"),
    ("megatron1d, sequence", "torch TP + SP"),
    ("megatron1d, sequence, saving", "torch TP + SP"),
]


def contest(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run by every rank."""
    torch.set_num_threads(1)
    runs: dict[str, Step] = {
        "megatron1d": ours(args, False, False),
        "torch TP": torchs(args, False),
        "megatron1d, sequence": ours(args, True, False),
        "torch TP + SP": torchs(args, True),
        "megatron1d, sequence, saving": ours(args, True, True),
    }
    draw = torch.Generator().manual_seed(1)
    batch = [
        torch.randint(0, VOCAB, (2, args.batch, args.length), generator=draw).to(args.device)
        for _ in range(4)
    ]
    losses = {name: [run(*b) for b in batch] for name, run in runs.items()}
    wanted = losses["torch TP"]
    worst = max(
        abs(a / b - 1) for found in losses.values() for a, b in zip(found, wanted, strict=True)
    )
    if not worst < args.agree:
        raise AssertionError(f"losses differ by {worst:.1e}: {losses}")
    rig.say(f"losses agree to {worst:.0e}")
    rows = []
    for turn in range(args.repeats):
        for name, run in list(runs.items())[:: 1 if turn % 2 else -1]:
            dist.barrier()
            sent, cpu, began = wire(), time.process_time(), time.perf_counter()
            run(*batch[turn % 4])
            took = torch.tensor(
                [time.process_time() - cpu], dtype=torch.float64, device=args.device
            )
            dist.barrier()
            seconds = time.perf_counter() - began
            time.sleep(0.02)  # a sender may return before its last bytes have left
            sent = wire() - sent
            dist.all_reduce(took)
            rig.say(f"turn {turn + 1} of {args.repeats}: {name:<30}{seconds * 1e3:8.0f} ms")
            rows.append(
                {
                    "name": name,
                    "wire": sent / dist.get_world_size(),
                    "cpu": float(took),
                    "seconds": seconds,
                }
            )
    return rows


def _ratio(rows: list[dict[str, Any]], a: str, b: str, what: str) -> str:
    both = ([r[what] for r in rows if r["name"] == name] for name in (a, b))
    found = [x / y for x, y in zip(*both, strict=True)]
    return f"{statistics.median(found):.2f} [{min(found):.2f}-{max(found):.2f}]"


def main() -> int:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (
        ("layers", 4),
        ("width", 256),
        ("length", 256),
        ("batch", 8),
        ("repeats", 7),
        ("ranks", 4),
    ):
        p.add_argument(f"--{name}", type=int, default=value)
    p.set_defaults(device="cpu", agree=5e-7)  # benchmarks/gpu.py has others
    p.add_argument("--no-update", dest="update", action="store_false", help="no optimizer")
    p.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if not args.inside and rig.unavailable() is None:
        return rig.private("benchmarks.tensor_parallel", [*sys.argv[1:], "--inside"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    print(
        f"{args.layers} layers of {args.width}, {args.batch} x {args.length} tokens, {args.ranks} "
        "processes",
        flush=True,
    )
    rows = sl.launch(contest, args, x=args.ranks)[0]
    print(f"{'own' if args.inside else 'shared'} loopback; load {os.getloadavg()[0]:.1f}")
    print(
        f"{'':<30}{'MiB':>8}{'CPU ms':>8}{'wire / torch':>20}{'CPU / torch':>20}{'time / torch':>20}"
    )
    for name in dict.fromkeys(r["name"] for r in rows):
        mine = [r for r in rows if r["name"] == name]
        other = dict(PAIRS).get(name, "")
        ratios = [_ratio(rows, name, other, w) if other else "" for w in ("wire", "cpu", "seconds")]
        middle = [statistics.median(r[w] for r in mine) for w in ("wire", "cpu")]
        print(
            f"{name:<30}{middle[0] / 2**20:>8.1f}{middle[1] * 1e3:>8.0f}"
            + "".join(f"{r:>20}" for r in ratios)
        )
    out = Path("out")
    out.mkdir(exist_ok=True)
    with open(out / "tensor_parallel.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
